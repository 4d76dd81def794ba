"""Times at which the next tokens of a model are due, and the requests at stake. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from runtime.core.device.queues import Queues
from runtime.core.device.request import Request
from runtime.core.ledgers.estimate import CostEstimate

LATER_PATIENCE = 0.2  # share of a request's patience for tokens after the first: a late request must catch up first
STARVED_S = 60.0  # a request whose tokens are lost counts again, and makes models wait, after 60 s without a token
_NEVER = float("inf")
_NOBODY: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class Dues:
    """When the next token of a model is due, and what is at stake: sums over the model's requests.

    A request is lost once its next token is later than its patience; else the request is hopeful. Times are seconds on
    the device's clock."""

    until: float = -_NEVER  # the sums are valid up to this time
    at: float = _NEVER  # earliest due time of a token
    running_at: float = _NEVER  # earliest due time among running requests
    hopeful: int = 0  # hopeful requests
    stake_s: float = 0.0  # sum of the patience of hopeful requests
    pace_s: float = _NEVER  # shortest TBT of hopeful requests
    high_at: float = _NEVER  # earliest due time among hopeful requests of high priority
    starves_at: float = _NEVER  # when a lost request will have had no token for STARVED_S

    def add(self, request: Request, due_at: float, lost_at: float, now: float) -> None:
        if lost_at < now:
            due_at = request.progress.last_at + STARVED_S
            self.starves_at = min(self.starves_at, due_at)
        else:
            self.until = min(self.until, lost_at)
            self.hopeful += 1
            self.stake_s += request.objective.patience_s
            self.pace_s = min(self.pace_s, request.objective.tbt_s)
            if request.objective.high:
                self.high_at = min(self.high_at, due_at)
        self.at = min(self.at, due_at)


@dataclass(slots=True, eq=False)
class Deadlines:
    """Dues of a model, as of the last `look`."""

    dues: Dues = field(default_factory=Dues)
    within: Dues = field(default_factory=Dues)  # without tenants over their share

    def look(self, queues: Queues, costs: CostEstimate, over: Set[str], wake_at: float, now: float) -> None:
        """Sum up the dues again. `over`: tenants over their share. `wake_at`: when the model itself is due."""
        self.dues = _sum(queues, costs, _NOBODY, wake_at, now)
        self.within = _sum(queues, costs, over, wake_at, now) if over else self.dues

    def changed(self) -> None:
        """Note that requests came, went or made tokens: the sums are no longer valid."""
        self.dues.until = -_NEVER


def _sum(queues: Queues, costs: CostEstimate, but: Set[str], wake_at: float, now: float) -> Dues:
    """Sum up the dues of requests, leaving out the tenants in `but`."""
    dues = Dues(_NEVER)
    for request in queues.running.values():
        if request.tenant not in but:
            due = request.progress.due_at
            dues.add(request, due, due + LATER_PATIENCE * request.objective.patience_s, now)
    dues.running_at = dues.at
    for request in queues.waiting.values():
        if request.tenant not in but:
            due = request.progress.due_at - costs.prefill(request.to_compute)
            dues.add(request, due, due + request.objective.patience_s, now)
    if wake_at < dues.at:
        dues.at = wake_at
    return dues
