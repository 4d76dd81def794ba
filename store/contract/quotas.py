"""The account of a tenant's limits in the bucket of quotas, and the slices that gateways have taken. Pure."""

from __future__ import annotations

from decimal import Decimal

import msgspec

from store.contract.wire import Message


class Level(msgspec.Struct, frozen=True, array_like=True):
    """Rest of a rate: a bucket that fills as time goes by. gateway/core/allowance.py explains the units."""

    left: int = 0
    at_us: int = 0  # UNIX microseconds at which `left` was counted; 0: long ago, so the bucket is full


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Part of an account taken by one gateway, besides the gateway's part of the rates."""

    beat: int  # rises whenever the gateway writes: a gateway whose beat stands still is dead
    streams: int
    money: Decimal  # pico, taken and not reported as spent
    spent: Decimal  # pico, of this month, counted since the gateway began


class Account(Message, frozen=True, kw_only=True, tag="Account"):
    """Rest of a tenant's limits, and the part that each gateway has taken. Money is Decimal: money outgrows 64 bits."""

    requests: Level = Level()
    tokens: Level = Level()
    month: str = ""  # YYYY-MM of `spent` and of the slices' money
    spent: Decimal = Decimal(0)  # pico
    slices: dict[str, Slice] = {}  # by gateway
