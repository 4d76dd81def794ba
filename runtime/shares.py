"""Which tenants have had more than their share of one device's time. Pure.

A tenant's share is its weight over the weights of all who have requests here: what an idle one leaves is the others'.
Its *balance* is what its share of the steps' time would have been, less what it had. Time is counted, not tokens: a
token of one model costs as much as a hundred of another's. `account.py` says who of a batch had which part of a step.

As in VTC nobody gains by being away: balances change only while their tenants have requests, or are served. What nobody
waited for is not counted, so a device that was empty has forgotten everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OVER_S = 0.5  # so much more than its share a tenant may have had before it gives way
BALANCE_S_MOST = 20.0  # no credit and no debt is larger, so nobody gives way for longer than it takes to make that up
AWAY_MOST = 1024  # tenants without requests whose balance is known; of more, those that left first had none


@dataclass(slots=True)
class Share:
    """Of one tenant."""

    weight: float
    requests: int = 0  # that it has here
    balance_us: float = 0.0
    over: bool = False  # until it has made up for all of it: else it would give way and not by turns

    def settle(self, us: float) -> None:
        self.balance_us = min(BALANCE_S_MOST * 1e6, max(-BALANCE_S_MOST * 1e6, self.balance_us + us))
        self.over = self.balance_us < (0.0 if self.over else -OVER_S * 1e6)


class Shares:
    """Of one device."""

    def __init__(self) -> None:
        self.there: dict[str, Share] = {}  # tenants with requests
        self.away: dict[str, Share] = {}
        self.over: set[str] = set()  # of those there, who gives way to others
        self.room_pages = 0.0  # of the pool, for more requests of theirs
        self._changed = False

    def arrive(self, tenant: str, weight: float) -> None:
        """A request of its; the last one says what the tenant weighs."""
        share = self.there.get(tenant)
        if share is None:
            share = self.there[tenant] = self.away.pop(tenant) if tenant in self.away else Share(weight)
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
        """What each had since the last call, in microseconds; whether others are over than at the last call."""
        if len(self.there) + len(self.away) > 1:
            self._settle(had_us)
        changed, self._changed = self._changed, False
        return changed

    def _settle(self, had_us: Mapping[str, int]) -> None:
        """Who left since then had its part, too."""
        left = {name: self.away[name] for name in had_us if name in self.away}
        shares = {**self.there, **left} if left else self.there
        weights = sum([share.weight for share in shares.values()])
        us = sum([had for name, had in had_us.items() if name in shares])
        for name, share in shares.items():
            share.settle(us * share.weight / weights - had_us.get(name, 0))
        self._look()

    def _look(self) -> None:
        over = {name for name, share in self.there.items() if share.over}
        if len(over) == len(self.there):  # there is nobody to give way to
            over.clear()
        if over != self.over:
            self.over, self._changed = over, True

    def part_over(self) -> float:
        """The share of those that are over, together: of what there is of the device."""
        weights = sum([share.weight for share in self.there.values()])
        return sum([self.there[name].weight for name in self.over]) / weights


def may_take(own: int, free: int) -> bool:
    """Whether who has `own` of what all share may take one more of the `free` ones: at most four times what it leaves,
    so that a newcomer always finds some (a dynamic threshold, as switches share their buffers by)."""
    return own < 4 * free
