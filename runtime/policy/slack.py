"""The turn policy that orders by slack: the time until the next token that somebody waits for is due. Pure.

Streams are read slower than they are made, so a model that was stepped for a while has a lead, and what it has of the
device is free for others until the lead is used up. Three things follow. Models with a lead wait, and while they wait
their requests gather, so that their next burst is a larger batch for nearly the same time. The next model comes into
pages that nobody needs soon while the present one steps. And a burst, once begun, goes on until its lead is worth it
or somebody else is about to be late.

Nothing is known here of what is still to come, neither arrivals nor lengths: only deadlines, tokens made, and costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from runtime.model import STARVED_S, Model, Phase
from runtime.policy.turns import Turn
from runtime.request import Request

LEAD_S = 8.0  # a burst may go on up to here
GUARD_S = 0.3  # who is nearer to being late than this goes first
GUARD_BAND_S = 0.2  # on top, before a burst goes on: else two that are both near would take turns with every decision
BURST_S = 0.25  # a burst is not broken off sooner, but for one that is nearer than the guard
PER_TTFT = 0.15  # neither of these two is longer than this part of the TTFT of who waits
STEPS_LEAST, STEPS_MOST = 8, 32  # between two questions, when nothing changes
SHARE_S_LEAST = 0.05  # of a burst beside others, however near they are
YIELD_S, YIELD_PER_TTFT = 4.0, 0.4  # who is parked for another has so much more slack, or time for both to move

_urgency = attrgetter("urgency")
_RESIDENT = Phase.RESIDENT  # looked up for every model


class Slack:
    """`working` models by when their next token is due; one that must be loaded has to begin sooner."""

    def arrived(self, request: Request, now: float) -> None:
        pass

    def order(self, working: Iterable[Model], now: float) -> list[Model]:
        order = list(working)
        for model in order:
            due_at = model.next_due(now)
            model.urgency = due_at if model.phase is _RESIDENT else due_at - model.load_s
        order.sort(key=_urgency)
        return order

    def next(self, order: Sequence[Model], turn: Turn | None, now: float) -> tuple[Model, int] | None:
        ready = [model for model in order if model.phase is _RESIDENT and model.can_step]
        if not ready:
            return None
        pick = ready[0]
        if turn is not None and pick.key != turn.holder:
            for model in ready:
                if model.key == turn.holder and self._goes_on(model, pick, turn, now):
                    pick = model
        if pick.waiting or pick.prompts:
            return pick, 1
        return pick, self._steps(pick, ready, now)

    def _goes_on(self, holder: Model, first: Model, turn: Turn, now: float) -> bool:
        """Its burst, though another would be the first."""
        least_s, guard_s = first.urgency - now, _guard_s(first)
        goes_on = holder.urgency - now < LEAD_S and least_s > guard_s + GUARD_BAND_S
        begins = now - turn.began_at < min(BURST_S, PER_TTFT * first.ttft_s) and least_s > guard_s
        return goes_on or begins

    def _steps(self, pick: Model, ready: list[Model], now: float) -> int:
        if len(ready) == 1:
            return STEPS_MOST
        other = ready[0] if ready[0] is not pick else ready[1]
        if other.urgency == _NEVER:
            return STEPS_MOST
        step_s = pick.costs.step(len(pick.running), pick.context)
        share_s = max(SHARE_S_LEAST, other.urgency - now - _guard_s(other))
        return max(STEPS_LEAST, int(min(STEPS_MOST, share_s / step_s)))

    def admit(self, model: Model, now: float) -> Sequence[Request]:
        """Who starves; then who is still to be on time, soonest first; then those whose first token is lost."""
        waiting = list(model.waiting.values())
        if len(waiting) > 1:
            waiting.sort(key=lambda request: _standing(request, now))
        return waiting

    def yields(self, model: Model, needy: Model, turn: Turn | None, now: float) -> bool:
        if not model.can_step:  # who is stuck can't use its pages
            return True
        slack_s, needy_s = model.next_due(now) - now, needy.next_due(now) - now
        gain_s = slack_s - needy_s
        if needy_s < needy.load_s:  # it will be late whoever gives way
            return gain_s >= YIELD_S
        return gain_s >= max(model.load_s + needy.load_s, min(YIELD_S, YIELD_PER_TTFT * needy.ttft_s))


def _guard_s(model: Model) -> float:
    return min(GUARD_S, PER_TTFT * model.ttft_s)


def _standing(request: Request, now: float) -> tuple[int, float]:
    """Those that were lost wait behind the others, but not for ever."""
    progress = request.progress
    if progress.due_at + request.objective.patience_s >= now:
        return 1, progress.due_at
    return (0 if progress.last_at + STARVED_S < now else 2), progress.due_at


_NEVER = float("inf")
