"""The parts of a request's time, as told by the request's last usage message: numbers and a word, no text of clients.

Pure. The gateway measures the parts (gateway/inference/timing.py), and the ledger keeps the parts for some days
(store/db/requests.py).
"""

from __future__ import annotations

import msgspec

KEPT_DAYS = 7.0  # unless STACCATO_REQUEST_DAYS says otherwise


class Elapsed(msgspec.Struct, frozen=True, array_like=True):
    """Microseconds of a request. `parts_us`: parts in store/contract/series.py above 0; their sum is `total_us`."""

    cold: str  # none | host | disk: where the model was when the request came
    total_us: int
    first_token_us: int | None  # None: no token came
    parts_us: dict[str, int]
