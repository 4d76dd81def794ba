"""The parts of a request's time, as told by the request's last usage message, and the costs of a stream at a runtime.

Numbers and a word, no text of clients. Pure. The gateway measures the parts (gateway/inference/timing.py), and the
ledger keeps the parts for some days (store/db/requests.py).
"""

from __future__ import annotations

from operator import add

import msgspec
from msgspec.structs import astuple

KEPT_DAYS = 7.0  # unless STACCATO_REQUEST_DAYS says otherwise


class Elapsed(msgspec.Struct, frozen=True, array_like=True):
    """Microseconds of a request. `parts_us`: parts in store/contract/series.py above 0; their sum is `total_us`."""

    cold: str  # none | host | disk: where the model was when the request came
    total_us: int
    first_token_us: int | None  # None: no token came
    parts_us: dict[str, int]


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
        if (
            other.gpu_us >= self.gpu_us
            and other.switch_us >= self.switch_us
            and other.kv_byte_s >= self.kv_byte_s
            and other.cache_byte_s >= self.cache_byte_s
        ):
            return other  # nearly always: a sum grows
        return Spent(*map(max, astuple(self), astuple(other)))


NOTHING_SPENT = Spent()
