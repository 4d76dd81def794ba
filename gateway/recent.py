"""The requests that this gateway answered lately, and where their time went: numbers and names of things, no text.

They are in memory alone, the newest of each tenant, and gone with the process: what must last is in the usage.
"""

from __future__ import annotations

from collections import OrderedDict

from starlette.responses import Response

from gateway.api import OF_TENANT, Call, Operation, Shown, answered
from gateway.errors import not_found
from gateway.timing import Breakdown

TENANT_MOST, MOST = 200, 20_000


class Seen(Shown, frozen=True, kw_only=True):
    """A request that ended. `id` is also the id of its trace."""

    id: str
    deployment_id: str
    revision: int
    started_at: float  # UNIX seconds
    cold: str  # none | host | disk: where its model was when it came
    finish: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    breakdown: Breakdown | None  # None: no runtime was asked


class Recent:
    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[str, Seen]] = OrderedDict()  # who had one last comes last
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


@Operation(Seen, query=(OF_TENANT,))
async def get(call: Call, recent: Recent) -> Response:
    """Show where the time of a request went, if this gateway answered it lately."""
    id = call.path("request")
    seen = recent.find(await call.tenant_id(), id)
    if seen is None:
        raise not_found("request", id)
    return answered(seen)
