"""Tenants with more than their share of a device's time. Pure.

A tenant's share is its weight over the sum of weights of the tenants with requests on the device: active tenants divide
the time that idle tenants leave. A tenant's *balance* is its share of the time of steps less the time it had. Time
counts, not tokens: a token of a large model may cost as much as a hundred of a small model. `device_time.py` divides a
step among the tenants of its batch.

As in VTC, a tenant does not gain by being away: a balance changes only while the tenant has requests or is served. Once
the device has no requests, balances of tenants are forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OVER_S = 0.5  # time beyond its share that a tenant may have before giving way
BALANCE_S_MOST = 20.0  # bound on credit and debt: a tenant gives way no longer than it takes to make up this time
AWAY_MOST = 1024  # tenants without requests whose balance is kept; of more, the first to leave lose their balance


@dataclass(slots=True)
class TenantShare:
    """Weight, requests and balance of a tenant on a device."""

    weight: float
    requests: int = 0  # present on the device
    balance_us: float = 0.0
    over: bool = False  # set until the whole debt is made up: else the tenant would give way on and off

    def settle(self, us: float) -> None:
        self.balance_us = min(BALANCE_S_MOST * 1e6, max(-BALANCE_S_MOST * 1e6, self.balance_us + us))
        self.over = self.balance_us < (0.0 if self.over else -OVER_S * 1e6)


class FairShares:
    """Shares of the tenants of a device."""

    def __init__(self, pool_pages: int = 0) -> None:
        self.pool_pages = pool_pages  # pages of the device pool
        self.there: dict[str, TenantShare] = {}  # tenants with requests
        self.away: dict[str, TenantShare] = {}  # tenants without
        self.over: set[str] = set()  # tenants with requests and over their share, which give way
        self._changed = False

    def arrive(self, tenant: str, weight: float) -> None:
        """Adds a request of a tenant; the newest request sets the tenant's weight."""
        share = self.there.get(tenant)
        if share is None:
            share = self.there[tenant] = self.away.pop(tenant) if tenant in self.away else TenantShare(weight)
            self._look()
        share.weight = weight
        share.requests += 1

    def leave(self, tenant: str) -> None:
        share = self.there[tenant]
        share.requests -= 1
        if share.requests:
            return
        self.away[tenant] = self.there.pop(tenant)
        if not self.there:
            self.away.clear()
        elif len(self.away) > AWAY_MOST:
            del self.away[next(iter(self.away))]
        self._look()

    def settle(self, had_us: Mapping[str, int]) -> bool:
        """Settles balances. `had_us`: microseconds of steps by tenant since the last call.

        Returns whether the set of tenants over their share changed since the last call."""
        if len(self.there) + len(self.away) > 1:
            self._settle(had_us)
        changed, self._changed = self._changed, False
        return changed

    def _settle(self, had_us: Mapping[str, int]) -> None:
        """Settles balances of present tenants, and of tenants that had time in `had_us` but left since."""
        left = {name: self.away[name] for name in had_us if name in self.away}
        shares = {**self.there, **left} if left else self.there
        weights = sum([share.weight for share in shares.values()])
        us = sum([had for name, had in had_us.items() if name in shares])
        for name, share in shares.items():
            share.settle(us * share.weight / weights - had_us.get(name, 0))
        self._look()

    def _look(self) -> None:
        over = {name for name, share in self.there.items() if share.over}
        if len(over) == len(self.there):  # no tenant is left to give way to
            over.clear()
        if over != self.over:
            self.over, self._changed = over, True

    def part_over(self) -> float:
        """Share of the device, 0 to 1, that tenants over their share have together by weight."""
        weights = sum([share.weight for share in self.there.values()])
        return sum([self.there[name].weight for name in self.over]) / weights


def may_take(own: int, free: int) -> bool:
    """Whether a user with `own` units of a shared pool may take one more of its `free` units.

    A user may have at most four times the free units, so that a newcomer finds some (the dynamic threshold by which
    network switches share buffers)."""
    return own < 4 * free
