"""Token-level scheduling as in Aegaeon (§4): grouped first-come prefill, weighted round robin for decode. Pure.

Aegaeon has separate devices for prefill and for decode. Here a device plays the role that the requests ask for. If
requests end with the first token, the device only serves groups. If requests come with tokens made elsewhere, the
device only decodes. With both kinds of requests, prefill groups and decode turns alternate: a group waits for at most
one decode turn, and a decode turn for at most one group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest

from runtime.core.device.model import Phase
from runtime.core.device.request import ModelKey, Request
from runtime.core.device.view import ModelView, TurnView
from runtime.core.turns.groups import Prefill, Queue
from runtime.core.turns.quota import STEPS_LEAST, STEPS_MOST, Batch, Round, once_around, paper_round, plan_round
from runtime.core.turns.turn import TurnOrder

GROUP_PER_TTFT = 0.5  # part of the TTFT that prefill groups ahead in the queue may take


class Aegaeon:
    """The policies `aegaeon` and `aegaeon-paper`.

    With `quota_s_most` (seconds; 4 as published), decode quotas are the paper's. Without, quotas need no tuning."""

    shares = False
    relieves = False

    def __init__(self, quota_s_most: float | None = None) -> None:
        self.queue = Queue()
        self._quota_s_most = quota_s_most
        self._arrived: list[Request] = []  # requests not yet in the queue
        self._working: dict[ModelKey, ModelView] = {}
        self._round: dict[ModelKey, int] = {}  # models with a decode turn to come in this round → steps of the turn
        self._holder: ModelKey | None = None
        self._next: ModelKey | None = None  # model with the turn after the holder's
        self._until = 0  # steps at which the holder's turn ends
        self._prefills = False  # the present or last turn is a prefill group's

    def arrived(self, request: Request, now: float) -> None:
        if not request.computed:
            self._arrived.append(request)

    def order(self, working: Iterable[ModelView], now: float) -> TurnOrder:
        models = self._working = {model.key: model for model in working}
        self._queue_up()
        if self._until >= STEPS_MOST and len(models) > 1:  # the holder was the only model and no longer is
            self._until = 0
        if not any(key in models and _decodes(models[key]) for key in self._round):
            self._round = self._plan()
        groups, decodes = [group.model for group in self.queue.groups], list(self._round)
        first, second = (decodes, groups) if self._prefills else (groups, decodes)
        coming = chain.from_iterable(zip_longest(first, second))
        self._next = next((key for key in coming if key in models and key != self._holder), None)
        recent = sorted(models.values(), key=_recency)
        keys = chain([self._holder, self._next], (model.key for model in recent))
        return TurnOrder([models[key] for key in dict.fromkeys(keys) if key in models])

    def next(self, order: Sequence[ModelView], turn: TurnView | None, now: float) -> tuple[ModelView, int] | None:
        able = {model.key: model for model in order if model.can_step}
        holder = able.get(self._holder) if self._holder else None
        if holder is None or not self._in_turn(holder, turn):
            holder = self._give_turn(able, turn)
        if holder is None:
            return None
        # A group's turn is asked for step by step: between two steps the next request of the group is admitted.
        return holder, 1 if self._prefills else self._until - _made(holder, turn)

    def admit(self, model: ModelView, now: float) -> Sequence[Request]:
        admitted = [request for request in model.queues.waiting.values() if request.computed]
        if model.key != self._holder or not self._prefills or model.queues.prompts:
            return admitted
        group = self.queue.next(self._waits, lambda key: key == model.key)
        if group is not None:
            self.queue.begin(group, now)
            admitted.append(model.queues.waiting[group.waiting[0].request])
        return admitted

    def yields(self, model: ModelView, needy: ModelView, turn: TurnView | None, now: float) -> bool:
        """Models able to step are parked only for the holder or the next model, least recently used first (§5.2)."""
        if needy.key != self._next and needy.key != self._holder:
            return not model.can_step
        return model.key != self._holder or not model.can_step or not self._in_turn(model, turn)

    # ── turns ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _in_turn(self, holder: ModelView, turn: TurnView | None) -> bool:
        if self._prefills:
            return holder.queues.prompts > 0 or _made(holder, turn) < self._until
        return _decodes(holder) and _made(holder, turn) < self._until

    def _give_turn(self, able: Mapping[ModelKey, ModelView], turn: TurnView | None) -> ModelView | None:
        group = self.queue.next(self._waits, able.__contains__)
        # A model able to decode whose turn is later or unplanned goes before models that can't step.
        planned = next((key for key in self._round if key in able and _decodes(able[key])), None)
        decodes = planned or next((key for key in able if _decodes(able[key])), None)
        self._prefills = group is not None and (decodes is None or not self._prefills)
        if group is not None and self._prefills:
            self._holder, steps = group.model, len(group.waiting)
        elif decodes is not None:
            self._holder, steps = decodes, self._round.pop(decodes, STEPS_LEAST)
        else:
            return None
        holder = able[self._holder]
        self._until = _made(holder, turn) + steps
        return holder

    def _plan(self) -> dict[ModelKey, int]:
        """Plans a round, model → steps: the holder first, then the model longest without a turn."""
        models = sorted(
            (model for model in self._working.values() if _decodes(model)), key=lambda model: model.record.turn_no
        )
        models = [models[place] for place in once_around([model.key for model in models], self._holder)]
        if not models:
            return {}
        return dict(zip((model.key for model in models), self._quotas(models).steps, strict=True))

    def _quotas(self, models: Sequence[ModelView]) -> Round:
        """Quotas of the models that decode. Switches to prefill groups between the decode turns count as overhead."""
        batches = [_batch(model) for model in models]
        switching = [model for model in self._working.values() if model.has_requests]
        switch_s = max(model.costs.switch_s for model in switching)
        stay = all(model.phase is Phase.RESIDENT for model in switching)
        loads_s = [0.0 if stay else _load_s(model) for model in switching]
        if self._quota_s_most is not None:
            return paper_round(batches, sum(loads_s) + switch_s * len(switching), self._quota_s_most)
        ttft_s = min(request.objective.ttft_s for model in models for request in _decoding(model))
        if self.queue.current is not None:  # the device prefills too: a new request waits for a group's turn first
            ttft_s *= 1.0 - GROUP_PER_TTFT
        return plan_round(batches, loads_s, switch_s, prefetch=True, ttft_s=ttft_s)

    # ── groups ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _queue_up(self) -> None:
        if not self._arrived:
            return
        waiting = [request for model in self._working.values() for request in model.queues.waiting.values()]
        ttft_s = min((request.objective.ttft_s for request in waiting), default=0.0)
        self.queue.group_s_most = GROUP_PER_TTFT * ttft_s
        for request in self._arrived:
            model = self._working.get(request.model)
            if model is not None and request.id in model.queues.waiting:
                work_s = model.costs.prefill(request.to_compute)
                self.queue.add(Prefill(request.id, request.model, work_s, _load_s(model)))
        self._arrived.clear()

    def _waits(self, prefill: Prefill) -> bool:
        return prefill.model in self._working and prefill.request in self._working[prefill.model].queues.waiting


def _recency(model: ModelView) -> int:
    return -model.record.turn_no


def _made(model: ModelView, turn: TurnView | None) -> int:
    return turn.steps if turn is not None and turn.holder == model.key else 0


def _decodes(model: ModelView) -> bool:
    return bool(model.queues.running) or any(request.computed for request in model.queues.waiting.values())


def _decoding(model: ModelView) -> list[Request]:
    return [*model.queues.running.values(), *(request for request in model.queues.waiting.values() if request.computed)]


def _batch(model: ModelView) -> Batch:
    requests = _decoding(model)
    step_s = model.costs.step(len(requests), sum(request.context for request in requests))
    return Batch(step_s, min(request.objective.tbt_s for request in requests))


def _load_s(model: ModelView) -> float:
    """Time to load all of a model's weights and copy the KV cache of its running requests."""
    kv_bytes = model.kv.bytes(model.queues.context, len(model.queues.running))
    return model.costs.load(model.demand.weights_pages * model.page_bytes) + model.costs.copy(kv_bytes)
