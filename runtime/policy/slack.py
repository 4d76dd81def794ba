"""The turn policy that orders by slack: the time until the next token that somebody waits for is due. Pure.

Streams are read slower than they are made, so a model that was stepped for a while has a lead, and what it has of the
device is free for others until the lead is used up. Three things follow. Models with a lead wait, and while they wait
their requests gather, so that their next burst is a larger batch for nearly the same time. The next model comes into
pages that nobody needs soon while the present one steps. And a burst, once begun, goes on until its lead is worth it
or somebody else is about to be late.

While that is not enough, who is late is not left to the order, or one after the other would be. A model whose first
tokens will be late however soon it comes in lets others come in before. And while the device has not the time to keep
everybody at their pace, those models wait of which the fewest requests (weighed by their patience, and without those
whose tokens are lost already) share what their steps take. Their requests ride along when more come, or when there is
time again.

Nothing is known here of what is still to come, neither arrivals nor lengths: only deadlines, tokens made, and costs.

Requests of tenants that are over their share (`runtime/shares.py`) take what time the others leave. Until somebody is
over, nothing is different. Where one of the others is near to being late it goes first, however late those are. Their
prompts begin only while there is time for them, and they get pages at the expense of others only if these can be back
in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from runtime.model import STARVED_S, Model, Phase
from runtime.policy.turns import Turn
from runtime.request import Request

LEAD_S, LEAD_PER_TTFT = 8.0, 6.0  # a burst may go on up to here, less of it if who waits has a short TTFT
GUARD_S = 0.3  # who is nearer to being late than this goes first
GUARD_BAND_S = 0.2  # on top, before a burst goes on: else two that are both near would take turns with every decision
BURST_S = 0.25  # a burst is not broken off sooner, but for one that is nearer than the guard
PER_TTFT = 0.15  # neither of these two is longer than this part of the TTFT of who waits
STEPS_LEAST, STEPS_MOST = 8, 32  # between two questions, when nothing changes
SHARE_S_LEAST = 0.05  # of a burst beside others, however near they are
NEAR_S = 1.0  # who is nearer to being late than this goes before tenants that are over their share
TURN_S = 1.0  # of theirs, at least, if somebody else is parked for it
PROMPTS_S = 0.3  # of theirs, at once: the others have so much time, and the next of these does not wait for longer
YIELD_S, YIELD_PER_TTFT = 4.0, 0.6  # who is parked for another has so much more slack, or time for both to move; and by
# as much who can't be in time is set back

_urgency = attrgetter("urgency")
_NEVER = float("inf")
_RESIDENT = Phase.RESIDENT  # looked up for every model


class Slack:
    """`working` models by when their next token is due; one that must be loaded has to begin sooner."""

    shares = True
    relieves = True

    def __init__(self) -> None:
        self._spare_s = _NEVER  # that there is for prompts of those over their share
        self._calm_s = _NEVER  # until others have to go before them
        self._park_s = 0.0  # that it takes at most to get one out of the device; whoever is in, or else two take turns

    def arrived(self, request: Request, now: float) -> None:
        pass

    def order(self, working: Iterable[Model], now: float) -> list[Model]:
        order = list(working)
        for model in order:
            model.urgency = model.next_due(now)
            if model.phase is not _RESIDENT:
                model.urgency -= model.load_s
                if model.urgency < now and model.waiting:  # their first tokens will be late however soon it comes in
                    dues = model.dues
                    model.urgency = min(now + _behind_s(model), dues.running_at - model.load_s, dues.starves_at)
        self._spare_s = self._calm_s = _NEVER
        over = order and order[0].shares.over
        if not over:
            _give_up(order, now)
        order.sort(key=_urgency)
        return self._with_shares(order, now) if over else order

    def next(self, order: Sequence[Model], turn: Turn | None, now: float) -> tuple[Model, int] | None:
        ready = [model for model in order if model.phase is _RESIDENT and model.can_step]
        if not ready:
            return None
        pick = ready[0]
        if turn is not None and pick.key != turn.holder:
            for model in ready:
                if model.key == turn.holder and self._goes_on(model, pick, turn, now):
                    pick = model
        if pick.prompts or (pick.waiting and self._admits(pick)):
            return pick, 1
        return pick, self._steps(pick, ready, now)

    def _goes_on(self, holder: Model, first: Model, turn: Turn, now: float) -> bool:
        """Its burst, though another would be the first."""
        least_s, guard_s = first.urgency - now, _guard_s(first)
        lead_s = min(LEAD_S, LEAD_PER_TTFT * first.ttft_s)
        goes_on = holder.urgency - now < lead_s and least_s > guard_s + GUARD_BAND_S
        begins = now - turn.began_at < min(BURST_S, PER_TTFT * first.ttft_s) and least_s > guard_s
        return goes_on or begins

    def _steps(self, pick: Model, ready: list[Model], now: float) -> int:
        share_s = self._calm_s
        if len(ready) > 1:
            other = ready[0] if ready[0] is not pick else ready[1]
            share_s = min(share_s, other.urgency - now - _guard_s(other))
        if share_s == _NEVER:
            return STEPS_MOST
        step_s = pick.costs.step(len(pick.running), pick.context)
        share_s = max(SHARE_S_LEAST, share_s)
        return max(STEPS_LEAST, int(min(STEPS_MOST, share_s / step_s)))

    def admit(self, model: Model, now: float) -> Sequence[Request]:
        """Who starves; then who is still to be on time, soonest first; then those whose first token is lost."""
        waiting = list(model.waiting.values())
        if len(waiting) > 1:
            waiting.sort(key=lambda request: _standing(request, now))
        if model.shares.over:
            return self._admit_by_shares(model, waiting)
        return waiting

    def yields(self, model: Model, needy: Model, turn: Turn | None, now: float) -> bool:
        if not model.can_step:  # who is stuck can't use its pages
            return True
        slack_s, needy_s = model.next_due(now) - now, needy.next_due(now) - now
        if model.shares.over:
            within_s, needy_within_s = model.next_due_within(now) - now, needy.next_due_within(now) - now
            if needy_within_s < self._near_s(needy):
                slack_s, needy_s = within_s, needy_within_s
            elif within_s < _NEVER:
                return within_s >= _move_s(needy) + TURN_S + _copy_s(needy) + self._back_s(model)
        gain_s = slack_s - needy_s
        if needy_s < needy.load_s:  # it will be late whoever gives way
            return gain_s >= YIELD_S
        return gain_s >= max(model.load_s + needy.load_s, _behind_s(needy))

    # ── tenants over their share ──────────────────────────────────────────────────────────────────────────────────────

    def _with_shares(self, order: list[Model], now: float) -> list[Model]:
        """Where others are near to being late, they come first."""
        first, others = [], []
        shares = order[0].shares
        shares.room_pages = shares.part_over() * order[0].pool_pages
        self._park_s = max([_copy_s(model) for model in order])
        for model in order:
            shares.room_pages = max(0.0, shares.room_pages - _pages_over(model))
            within_s = model.next_due_within(now) - now
            way_s = 0.0 if model.phase is _RESIDENT else model.load_s
            self._spare_s = min(self._spare_s, within_s - way_s - _guard_s(model))
            calm_s = within_s - self._near_s(model)
            if calm_s < 0:
                model.urgency = now + within_s - way_s
                first.append(model)
            else:
                model.urgency = max(model.urgency, now + min(NEAR_S, PER_TTFT * model.ttft_s))
                others.append(model)
                self._calm_s = min(self._calm_s, calm_s)
        first.sort(key=_urgency)
        return first + others

    def _near_s(self, model: Model) -> float:
        return NEAR_S if model.can_step else self._back_s(model)

    def _back_s(self, model: Model) -> float:
        """So long before it is late it has to be on its way, in case another one comes in first."""
        return NEAR_S + 2 * _move_s(model) + self._park_s

    def _admits(self, model: Model) -> bool:
        """Whether any of those who wait for it may begin."""
        over = model.shares.over
        if not over or not model.running or self._spare_s >= PROMPTS_S:
            return True
        return any([request.tenant not in over for request in model.waiting.values()])

    def _admit_by_shares(self, model: Model, waiting: list[Request]) -> list[Request]:
        """The others; if there are none, and time, as many of those over their share as it and their room allow."""
        within = [request for request in waiting if request.tenant not in model.shares.over]
        if within or model.prompts or not self._admits(model):
            return within
        admitted: list[Request] = []
        spare_s, room = PROMPTS_S, model.room_over()
        for request in waiting:
            spare_s -= model.costs.prefill(request.to_compute)
            room -= request.context + 1
            if (admitted and spare_s < 0) or (room < 0 and (admitted or model.running)):
                break
            admitted.append(request)
        return admitted


def _give_up(order: Sequence[Model], now: float) -> None:
    """While the device has not the time to keep everybody at their pace, those wait who have the least at stake for
    what they take of it: else the order by slack makes all of them late, one after the other."""
    taken = 0.0
    for model in order:
        model.share = _share(model)
        taken += model.share
    if taken <= 1.0:
        return
    for model in sorted(order, key=_worth):
        if model.share:
            model.urgency = max(model.urgency, min(now + _behind_s(model), model.dues.starves_at))
            taken -= model.share
            if taken <= 1.0:
                return


def _behind_s(model: Model) -> float:
    return min(YIELD_S, YIELD_PER_TTFT * model.ttft_s)


def _share(model: Model) -> float:
    """Of the device's time, to keep those at their pace who are not lost."""
    if not model.dues.hopeful:
        return 0.0
    context = model.context * model.dues.hopeful // (len(model.running) + len(model.waiting))
    return model.costs.step(model.dues.hopeful, context) / model.dues.pace_s


def _worth(model: Model) -> float:
    return model.dues.stake_s / model.share if model.share else _NEVER


def _guard_s(model: Model) -> float:
    return min(GUARD_S, PER_TTFT * model.ttft_s)


def _standing(request: Request, now: float) -> tuple[int, float]:
    """Those that were lost wait behind the others, but not for ever."""
    progress = request.progress
    if progress.due_at + request.objective.patience_s >= now:
        return 1, progress.due_at
    return (0 if progress.last_at + STARVED_S < now else 2), progress.due_at


def _copy_s(model: Model) -> float:
    """Its requests' keys and values, to the host or back."""
    return model.costs.copy(model.context * model.spec.kv_bytes_per_token)


def _move_s(model: Model) -> float:
    """Its way to the device."""
    return model.load_s + _copy_s(model)


def _pages_over(model: Model) -> int:
    """That the requests in it of those over their share have, here or parked."""
    over = model.shares.over
    return model.kv_pages(sum([request.context for request in model.running.values() if request.tenant in over]))
