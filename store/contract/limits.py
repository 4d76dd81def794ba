"""Limits of a tenant, as an operator sets them; the account of the rest of the limits in the bucket of quotas, and the
slices that gateways have taken. Pure."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from msgspec import Meta, Struct

from store.contract.wire import Message


class Budget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budget for the requests that begin in a calendar month, UTC."""

    amount: Annotated[
        str, Meta(pattern=r"^\d{1,12}(\.\d{1,12})?$", description="an amount of money as a text, as 25.50")
    ]  # whole units of the currency
    currency: Annotated[str, Meta(pattern=r"^[A-Z]{3}$", description="a currency in three capital letters, as USD")] = (
        "USD"
    )

    @property
    def pico(self) -> int:
        whole, _, rest = self.amount.partition(".")
        return int(whole) * 10**12 + int(rest.ljust(12, "0"))


_Count = Annotated[int, Meta(ge=1, le=10**9)]


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits over all requests of a tenant together; `max_output_tokens` limits each request. None: no limit."""

    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None  # prompt and output
    concurrent_streams: _Count | None = None  # requests being answered, streamed or not
    max_output_tokens: _Count | None = None
    monthly_budget: Budget | None = None
    storage_bytes: Annotated[int, Meta(ge=0, le=2**53)] | None = None  # size of the models that the tenant imports

    @property
    def shared(self) -> bool:
        """Whether a limit holds over all gateways together."""
        ours = (self.requests_per_minute, self.tokens_per_minute, self.concurrent_streams, self.monthly_budget)
        return any(limit is not None for limit in ours)


NO_LIMITS = Limits()


# ── the account ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Level(Struct, frozen=True, array_like=True):
    """Rest of a rate: a bucket that fills as time goes by. gateway/core/allowance.py explains the units."""

    left: int = 0
    at_us: int = 0  # UNIX microseconds at which `left` was counted; 0: long ago, so the bucket is full


class Slice(Struct, frozen=True, array_like=True):
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
