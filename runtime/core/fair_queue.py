"""A queue fair to tenants: tenants take turns, and a tenant has at most one piece of work under way. Pure."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Work = TypeVar("Work")


class FairQueue(Generic[Work]):
    """Waiting work, by tenant.

    A tenant with work under way waits until `done`. Slow work of a tenant therefore delays other tenants only by the
    place that the slow work occupies."""

    def __init__(self, tenant_max: int) -> None:
        """`tenant_max`: pieces of work that may wait for a tenant."""
        self._tenant_max = tenant_max
        self._waiting: dict[str, deque[Work]] = {}  # in the order of turns
        self._under_way: set[str] = set()  # tenants

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, tenant: str, work: Work) -> bool:
        """Add the work behind the tenant's earlier work. Returns False, without adding, if `tenant_max` pieces wait."""
        waiting = self._waiting.get(tenant, ())
        if len(waiting) >= self._tenant_max:
            return False
        self._waiting.setdefault(tenant, deque()).append(work)
        return True

    def take(self) -> tuple[str, Work] | None:
        """Remove and return the next tenant's first work; None if no work may begin. The caller must call `done`."""
        tenant = next((tenant for tenant in self._waiting if tenant not in self._under_way), None)
        if tenant is None:
            return None
        waiting = self._waiting.pop(tenant)
        work = waiting.popleft()
        if waiting:
            self._waiting[tenant] = waiting  # at the back: tenants take turns
        self._under_way.add(tenant)
        return tenant, work

    def done(self, tenant: str) -> None:
        """End the work returned by `take` for `tenant`: the tenant may have a turn again."""
        self._under_way.remove(tenant)

    def remove(self, tenant: str, work: Work) -> None:
        """Forget the work of `tenant` if the work is still waiting."""
        waiting = self._waiting.get(tenant)
        if waiting is not None and work in waiting:
            waiting.remove(work)
            if not waiting:
                del self._waiting[tenant]
