"""Turn policy that orders models by slack: the time until the next awaited token is due. Pure.

Clients read streams slower than models make them. A model stepped for a while has a lead, and its part of the device
is free for other models until the lead is used up. Three things follow. Models with a lead wait, and meanwhile their
requests gather, so that the next burst is a larger batch for nearly the same time. While the present model steps, the
next model comes into pages not needed soon. And a burst, once begun, goes on until its lead is worth the turn or until
a waiting model is about to be late.

If the device is overloaded, the order by slack alone would make every model late in turn. The policy chooses the late
models instead. A model whose first tokens will be late however soon the model comes in lets other models come in
before. And if the device lacks the time to keep every request at its pace, models wait whose steps take much time for
few requests (requests weighed by their patience, requests with lost tokens left out). The requests of a waiting model
ride along when more requests come for the model, or when the device has time again.

The policy knows deadlines, tokens made, and costs, and nothing of the future: neither arrivals nor lengths.

Requests of tenants over their share (`runtime/core/ledgers/fair_share.py`) take the time left by other tenants. Until a
tenant is over its share, shares change nothing. A nearly late request of another tenant goes first, however late the
requests over their share are. Prompts over a share begin only while the device has time for them, and take pages of
other models only if the pages can be back in time.

Requests of high priority have a head start: a model goes first, and takes pages of other models, while the next token
of a request of high priority is due within HEAD_S. If the device lacks the time, models without such requests wait
first. Neither shares nor the bound on starvation change: a tenant over its share gets no head start, and a model that
starves goes first as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from runtime.core.device.deadlines import STARVED_S
from runtime.core.device.model import Phase
from runtime.core.device.request import ModelKey, Request
from runtime.core.device.view import ModelView, TurnView
from runtime.core.turns.turn import TurnOrder

# Lead up to which a burst goes on: LEAD_S, or LEAD_PER_TTFT times the TTFT of the waiting model, if less.
LEAD_S, LEAD_PER_TTFT = 8.0, 6.0
GUARD_S = 0.3  # a model nearer to its deadline than this goes first
GUARD_BAND_S = 0.2  # added to the guard before a burst goes on: else two near models would alternate at every decision
BURST_S = 0.25  # a shorter burst is broken off only for a model nearer to its deadline than the guard
PER_TTFT = 0.15  # guard and burst are at most this part of the waiting model's TTFT
STEPS_LEAST, STEPS_MOST = 8, 32  # steps between two decisions if nothing changes
SHARE_S_LEAST = 0.05  # least time of a burst beside other ready models, however near their deadlines are
NEAR_S = 1.0  # a model nearer to its deadline than this goes before tenants over their share
TURN_S = 1.0  # least turn of a tenant over its share if another model is parked for the turn
# Prefill time of tenants over their share begun at once. The requests of other tenants have as much time to spare, and
# the next request of another tenant waits no longer, unless a single prompt takes longer.
PROMPTS_S = 0.3
# Slack that a model must have beyond a needy model to be parked for it: YIELD_S, or YIELD_PER_TTFT times the TTFT if
# less, but at least the load time of both models. A model late whatever happens is set back by as much.
YIELD_S, YIELD_PER_TTFT = 4.0, 0.6
# A model goes before other models once a token of a request of high priority is due within HEAD_S, or HEAD_PER_TTFT
# times the TTFT if less. Simulated with 1.2 times the models that a fleet bears, and high priority for 10 % of the
# requests: of their tokens, 0.996, 0.998, 0.999 and 1.000 were on time with a head start of 0.3, 0.7, 1.5 and 3 s; of
# all tokens 0.798, 0.806, 0.800 and 0.793.
HEAD_S, HEAD_PER_TTFT = 1.5, 0.3

_NEVER = float("inf")
_NO_MODELS: frozenset[ModelKey] = frozenset()
_RESIDENT = Phase.RESIDENT  # bound once: `order` compares every model with it


class Slack:
    """Orders working models by when the next token is due; for a model to be loaded, earlier by the load time."""

    shares = True
    relieves = True

    def __init__(self) -> None:
        self._urgency: dict[ModelKey, float] = {}  # sort key of each model in the last order
        self._ahead: set[ModelKey] = set()  # models put first by priority in the last order
        self._room_pages = 0.0  # pages left to tenants over their share; kept while no tenant is over its share
        self._spare_s = _NEVER  # time left for prompts of tenants over their share
        self._calm_s = _NEVER  # time until other tenants must go before tenants over their share
        # Upper bound on copying the KV cache of a model out of the device. The maximum over all models, whichever is
        # resident, so that two models do not alternate.
        self._park_s = 0.0

    def arrived(self, request: Request, now: float) -> None:
        pass

    def order(self, working: Iterable[ModelView], now: float) -> TurnOrder:
        models, urgency = {model.key: model for model in working}, self._urgency
        urgency.clear()
        self._ahead.clear()
        behind: Set[ModelKey] = _NO_MODELS
        high = False
        for key, model in models.items():
            at = model.next_due(now)
            high = high or model.deadlines.within.high_at < _NEVER
            if model.phase is not _RESIDENT:
                load_s = model.loads.load_s
                at -= load_s
                if at < now and model.queues.waiting:  # first tokens will be late however soon the model comes in
                    dues = model.deadlines.dues
                    at = min(now + _behind_s(model), dues.running_at - load_s, dues.starves_at)
            urgency[key] = at
        self._spare_s = self._calm_s = _NEVER
        over = len(models) > 0 and bool(next(iter(models.values())).shares.over)
        if not over:
            behind = _give_up(models.values(), urgency, now)
        order = [models[key] for key in sorted(urgency, key=urgency.__getitem__)]
        if over:
            order = self._with_shares(order, now)
        return TurnOrder(self._with_priorities(order, behind, now) if high else order, self._room_pages)

    def next(self, order: Sequence[ModelView], turn: TurnView | None, now: float) -> tuple[ModelView, int] | None:
        ready = [model for model in order if model.phase is _RESIDENT and model.can_step]
        if not ready:
            return None
        pick = ready[0]
        if turn is not None and pick.key != turn.holder:
            for model in ready:
                if model.key == turn.holder and self._goes_on(model, pick, turn, now):
                    pick = model
        if pick.queues.prompts or (pick.queues.waiting and self._admits(pick)):
            return pick, 1
        return pick, self._steps(pick, ready, now)

    def _goes_on(self, holder: ModelView, first: ModelView, turn: TurnView, now: float) -> bool:
        """Whether the holder's burst goes on although `first` is ahead in the order."""
        if first.key in self._ahead and holder.key not in self._ahead:
            return False
        least_s, guard_s = self._urgency[first.key] - now, _guard_s(first)
        lead_s = min(LEAD_S, LEAD_PER_TTFT * first.queues.ttft_s)
        goes_on = self._urgency[holder.key] - now < lead_s and least_s > guard_s + GUARD_BAND_S
        begins = now - turn.began_at < min(BURST_S, PER_TTFT * first.queues.ttft_s) and least_s > guard_s
        return goes_on or begins

    def _steps(self, pick: ModelView, ready: list[ModelView], now: float) -> int:
        share_s = self._calm_s
        if len(ready) > 1:
            other = ready[0] if ready[0] is not pick else ready[1]
            share_s = min(share_s, self._urgency[other.key] - now - _guard_s(other))
        if share_s == _NEVER:
            return STEPS_MOST
        step_s = pick.costs.step(len(pick.queues.running), pick.queues.context)
        share_s = max(SHARE_S_LEAST, share_s)
        return max(STEPS_LEAST, int(min(STEPS_MOST, share_s / step_s)))

    def admit(self, model: ModelView, now: float) -> Sequence[Request]:
        """Waiting requests for the next step: starving requests, then requests still on time, then requests with a lost
        first token; soonest due first within each group. If tenants are over their share, `_admit_by_shares` decides.
        """
        waiting = list(model.queues.waiting.values())
        if len(waiting) > 1:
            waiting.sort(key=lambda request: _standing(request, now))
        if model.shares.over:
            return self._admit_by_shares(model, waiting)
        return waiting

    def yields(self, model: ModelView, needy: ModelView, turn: TurnView | None, now: float) -> bool:
        if not model.can_step:  # a stuck model can't use its pages
            return True
        slack_s, needy_s = model.next_due(now) - now, needy.next_due(now) - now
        gives_way = self._gives_way(model, needy, now)
        if gives_way is not None:
            return gives_way
        if model.shares.over:
            within_s, needy_within_s = model.next_due_within(now) - now, needy.next_due_within(now) - now
            if needy_within_s < self._near_s(needy):
                slack_s, needy_s = within_s, needy_within_s
            elif within_s < _NEVER:
                return within_s >= _move_s(needy) + TURN_S + _copy_s(needy) + self._back_s(model)
        gain_s = slack_s - needy_s
        if needy_s < needy.loads.load_s:  # the needy model will be late whichever model gives way
            return gain_s >= YIELD_S
        return gain_s >= max(model.loads.load_s + needy.loads.load_s, _behind_s(needy))

    # ── requests of high priority ─────────────────────────────────────────────────────────────────────────────────────

    def _with_priorities(self, order: list[ModelView], behind: Set[ModelKey], now: float) -> list[ModelView]:
        """Puts models first that have a nearly due token of a request of high priority, and starving models.

        Models in `behind` are set back, and stay where they are. Also sets `_ahead`, and changes urgencies of the
        models put first."""
        first: list[ModelView] = []
        others: list[ModelView] = []
        for model in order:
            within = model.deadlines.within
            at = within.high_at - (0.0 if model.phase is _RESIDENT else model.loads.load_s)
            starves = within.starves_at < now
            if starves or (at < now + _head_s(model) and model.key not in behind):
                if not starves and at >= now:  # else the urgency is right: a late model lets models on time go before
                    self._urgency[model.key] = at
                self._ahead.add(model.key)
                first.append(model)
            else:
                others.append(model)
        first.sort(key=lambda model: self._urgency[model.key])
        return first + others

    def _gives_way(self, model: ModelView, needy: ModelView, now: float) -> bool | None:
        """Whether `model` may be parked for `needy` by the priorities of both; None if priorities do not decide.

        A model with a request of high priority gives way only if the model can be back before the model goes first
        again, or to a model that starves."""
        if needy.deadlines.within.starves_at < now:
            return None
        back_s = _move_s(needy) + _move_s(model) + _head_s(model)
        high_s = model.deadlines.within.high_at - now
        if needy.key not in self._ahead:
            return False if high_s < back_s + TURN_S else None
        return None if model.key in self._ahead else high_s >= back_s

    # ── tenants over their share ──────────────────────────────────────────────────────────────────────────────────────

    def _with_shares(self, order: list[ModelView], now: float) -> list[ModelView]:
        """Puts models first whose requests of tenants within their share are nearly late.

        Also sets `_room_pages`, `_spare_s`, `_calm_s` and `_park_s`, and changes urgencies."""
        first: list[ModelView] = []
        others: list[ModelView] = []
        shares, urgency = order[0].shares, self._urgency
        room_pages = shares.part_over() * shares.pool_pages
        self._park_s = max([_copy_s(model) for model in order])
        for model in order:
            room_pages = max(0.0, room_pages - _pages_over(model))
            within_s = model.next_due_within(now) - now
            way_s = 0.0 if model.phase is _RESIDENT else model.loads.load_s
            self._spare_s = min(self._spare_s, within_s - way_s - _guard_s(model))
            calm_s = within_s - self._near_s(model)
            if calm_s < 0:
                urgency[model.key] = now + within_s - way_s
                first.append(model)
            else:
                urgency[model.key] = max(urgency[model.key], now + min(NEAR_S, PER_TTFT * model.queues.ttft_s))
                others.append(model)
                self._calm_s = min(self._calm_s, calm_s)
        self._room_pages = room_pages
        first.sort(key=lambda model: urgency[model.key])
        return first + others

    def _near_s(self, model: ModelView) -> float:
        return NEAR_S if model.can_step else self._back_s(model)

    def _back_s(self, model: ModelView) -> float:
        """Time before the deadline by which a model must be on the way, in case a second model comes in first."""
        return NEAR_S + 2 * _move_s(model) + self._park_s

    def _admits(self, model: ModelView) -> bool:
        """Whether any waiting request of the model may begin."""
        over = model.shares.over
        if not over or not model.queues.running or self._spare_s >= PROMPTS_S:
            return True
        return any([request.tenant not in over for request in model.queues.waiting.values()])

    def _admit_by_shares(self, model: ModelView, waiting: list[Request]) -> list[Request]:
        """Waiting requests of tenants within their share. If none waits and the device has time, requests of tenants
        over their share, as many as PROMPTS_S of prefill and their room allow."""
        within = [request for request in waiting if request.tenant not in model.shares.over]
        if within or model.queues.prompts or not self._admits(model):
            return within
        admitted: list[Request] = []
        spare_s, room = PROMPTS_S, model.room_over(self._room_pages)
        for request in waiting:
            spare_s -= model.costs.prefill(request.to_compute)
            room -= model.kv.bytes(request.context + 1)
            if (admitted and spare_s < 0) or (room < 0 and (admitted or model.queues.running)):
                break
            admitted.append(request)
        return admitted


def _give_up(models: Iterable[ModelView], urgency: dict[ModelKey, float], now: float) -> Set[ModelKey]:
    """Sets back models with the least at stake per share of the device's time, until the remaining models fit.

    If an overloaded device followed slack alone, every model would be late, one after another. Models with hopeful
    requests of high priority are set back last. Later urgencies of the models set back are put into `urgency`. Returns
    the models set back."""
    shares = [(_share(model), model) for model in models]
    taken = 0.0
    for share, _ in shares:
        taken += share
    if taken <= 1.0:
        return _NO_MODELS
    behind: set[ModelKey] = set()
    wanting = [
        (model.deadlines.dues.high_at < _NEVER, model.deadlines.dues.stake_s / share, share, model)
        for share, model in shares
        if share
    ]
    wanting.sort(key=lambda each: each[:2])
    for _, _, share, model in wanting:
        urgency[model.key] = max(urgency[model.key], min(now + _behind_s(model), model.deadlines.dues.starves_at))
        behind.add(model.key)
        taken -= share
        if taken <= 1.0:
            break
    return behind


def _behind_s(model: ModelView) -> float:
    return min(YIELD_S, YIELD_PER_TTFT * model.queues.ttft_s)


def _head_s(model: ModelView) -> float:
    return min(HEAD_S, HEAD_PER_TTFT * model.queues.ttft_s)


def _share(model: ModelView) -> float:
    """Share of the device's time that keeps the model's hopeful requests at their pace; 0 without hopeful requests."""
    dues, queues = model.deadlines.dues, model.queues
    if not dues.hopeful:
        return 0.0
    context = queues.context * dues.hopeful // (len(queues.running) + len(queues.waiting))
    return model.costs.step(dues.hopeful, context) / dues.pace_s


def _guard_s(model: ModelView) -> float:
    return min(GUARD_S, PER_TTFT * model.queues.ttft_s)


def _standing(request: Request, now: float) -> tuple[int, float]:
    """Rank and due time of a waiting request: 0 lost and starving, 1 on time of high priority, 2 on time, 3 lost.

    Lost requests wait behind requests on time until STARVED_S have passed without a token."""
    progress = request.progress
    if progress.due_at + request.objective.patience_s >= now:
        return (1 if request.objective.high else 2), progress.due_at
    return (0 if progress.last_at + STARVED_S < now else 3), progress.due_at


def _copy_s(model: ModelView) -> float:
    """Time to copy the KV cache of a model's running requests to the host or back."""
    return model.costs.copy(model.kv.bytes(model.queues.context, len(model.queues.running)))


def _move_s(model: ModelView) -> float:
    """Time to bring a model to the device: loading weights and copying the KV cache."""
    return model.loads.load_s + _copy_s(model)


def _pages_over(model: ModelView) -> int:
    """KV pages held, on the device or parked, by a model's running requests of tenants over their share."""
    over = model.shares.over
    running = model.queues.running.values()
    return model.kv_pages(model.kv.each([request.context for request in running if request.tenant in over]))
