"""Requests that the gateway answered lately, and where the time of each went: numbers and names, no text.

The newest requests of each tenant are kept in memory. A request is found at once, before the ledger has written the
request into the database (store/db/requests.py).
"""

from __future__ import annotations

from collections import OrderedDict

from gateway.http.api import Shown
from gateway.inference.timing import Breakdown

TENANT_MOST, MOST = 200, 20_000


class Seen(Shown, frozen=True, kw_only=True):
    """A request that ended. `id` is also the id of the request's trace."""

    id: str
    deployment_id: str
    revision: int
    started_at: float  # UNIX seconds
    cold: str  # none | host | disk: where the model was when the request came
    finish: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    breakdown: Breakdown | None  # None: no runtime was asked


class Recent:
    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[str, Seen]] = OrderedDict()  # by tenant, newest request last
        self._count = 0

    def add(self, tenant_id: str, seen: Seen) -> None:
        own = self._tenants.setdefault(tenant_id, OrderedDict())
        self._tenants.move_to_end(tenant_id)
        own[seen.id] = seen
        self._count += 1
        if len(own) > TENANT_MOST:
            own.popitem(last=False)
            self._count -= 1
        while self._count > MOST:
            self._count -= len(self._tenants.popitem(last=False)[1])

    def find(self, tenant_id: str | None, id: str) -> Seen | None:
        tenants = self._tenants.values() if tenant_id is None else [self._tenants.get(tenant_id, OrderedDict())]
        return next((own[id] for own in tenants if id in own), None)
