"""Costs of a stream at a runtime: where the time went, and the resources used. Pure."""

from __future__ import annotations

from operator import add

import msgspec
from msgspec.structs import astuple


class Course(msgspec.Struct, frozen=True, array_like=True):
    """Breakdown of a stream's time at a runtime so far, in microseconds: see runtime/core/ledgers/latency.py."""

    queue_us: int = 0
    wake_us: int = 0
    switch_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    wait_us: int = 0


class Spent(msgspec.Struct, frozen=True, array_like=True):
    """Resources of a device and the host used by a stream so far: see runtime/core/ledgers/device_time.py."""

    gpu_us: int = 0
    switch_us: int = 0
    kv_byte_s: int = 0
    cache_byte_s: int = 0

    def plus(self, other: Spent) -> Spent:
        return Spent(*map(add, astuple(self), astuple(other)))

    def most(self, other: Spent) -> Spent:
        """Return the greater value of each field."""
        return Spent(*map(max, astuple(self), astuple(other)))


NOTHING_SPENT = Spent()
