"""Policies that switch between requests or not at all: `request`, `dedicated` and `resident`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil

from runtime.core.device.deadlines import STARVED_S
from runtime.core.device.request import ModelKey, Request
from runtime.core.device.view import ModelView, TurnView
from runtime.core.turns.quota import STEPS_MOST
from runtime.core.turns.turn import TurnOrder

PROMPTS_MOST = 8  # prompts in a row
SWITCHES_MOST = 0.1  # part of the time spent on switches where models take turns step by step
STARVED_PER_TTFT = 3.0


class RequestLevel:
    """A model keeps the device until its running requests are done; then the model with the oldest request begins.

    No request is interrupted (ServerlessLLM, §5). New requests join the running model, but not once a request of a
    second model has waited longer than `patience_s`. With infinite patience a model keeps the device as long as
    requests come: then each model needs a device to itself."""

    shares = False
    relieves = False

    def __init__(self, patience_s: float = STARVED_S) -> None:
        self._patience_s = patience_s
        self._holder: ModelKey | None = None
        self._working: list[ModelView] = []

    def arrived(self, request: Request, now: float) -> None:
        pass

    def order(self, working: Iterable[ModelView], now: float) -> TurnOrder:
        self._working = sorted(working, key=lambda model: (not model.queues.running, _oldest(model), model.key))
        return TurnOrder(self._working)

    def next(self, order: Sequence[ModelView], turn: TurnView | None, now: float) -> tuple[ModelView, int] | None:
        able = [model for model in order if model.can_step]
        holder = next((model for model in able if model.key == self._holder and model.queues.running), None)
        holder = holder or next(iter(able), None)
        if holder is None:
            return None
        self._holder = holder.key
        return holder, STEPS_MOST

    def admit(self, model: ModelView, now: float) -> Sequence[Request]:
        others = [other for other in self._working if other is not model and other.queues.waiting]
        if model.queues.running and any(now - _oldest(other) > self._patience_s for other in others):
            return ()
        return list(model.queues.waiting.values())

    def yields(self, model: ModelView, needy: ModelView, turn: TurnView | None, now: float) -> bool:
        return not model.queues.running or not model.can_step


class Resident:
    """Resident models with work stay on the device and take turns step by step.

    Prompts go before decode steps: single prompts, first come first served, up to PROMPTS_MOST in a row. A model able
    to step is parked only for a model with a request that got no token for STARVED_PER_TTFT times the TTFT."""

    shares = False
    relieves = False

    def __init__(self) -> None:
        self.prompts = 0  # prompts given to engines so far
        self._in_a_row = 0
        self._chosen: Request | None = None  # request whose prompt the next step is for
        self._offered: Request | None = None  # request offered to an engine, answer not yet looked at
        self._full: set[ModelKey] = set()  # models without room for a prompt: offered in own decode turns only

    def arrived(self, request: Request, now: float) -> None:
        pass

    def order(self, working: Iterable[ModelView], now: float) -> TurnOrder:
        return TurnOrder(sorted(working, key=lambda model: (_oldest(model), model.key)))

    def next(self, order: Sequence[ModelView], turn: TurnView | None, now: float) -> tuple[ModelView, int] | None:
        able = {model.key: model for model in order if model.can_step}
        self._look_at_offer(able)
        for model in able.values():
            if model.queues.prompts:
                return model, 1
        decoding = [model for model in able.values() if model.queues.running]
        if not decoding or self._in_a_row < PROMPTS_MOST:
            self._chosen = self.first([model for model in able.values() if not self._is_full(model)], now)
            if self._chosen is not None:
                return able[self._chosen.model], 1
        if not decoding:
            return None
        chosen = _interleave(decoding, turn if self._in_a_row < PROMPTS_MOST else None)
        self._in_a_row = 0
        return chosen

    def admit(self, model: ModelView, now: float) -> Sequence[Request]:
        if model.queues.prompts:
            return ()
        chosen = self._chosen
        self._offered = chosen if chosen is not None and chosen.id in model.queues.waiting else self.first([model], now)
        return [self._offered] if self._offered is not None else ()

    def yields(self, model: ModelView, needy: ModelView, turn: TurnView | None, now: float) -> bool:
        return not model.can_step or _starves(needy, now)

    def first(self, models: Sequence[ModelView], now: float) -> Request | None:
        """Request of `models` whose prompt comes next: the oldest waiting request; None if no request waits."""
        waiting = (request for model in models for request in model.queues.waiting.values())
        return min(waiting, key=lambda request: (request.arrived_at, request.id), default=None)

    def _is_full(self, model: ModelView) -> bool:
        return model.key in self._full and bool(model.queues.running)

    def _look_at_offer(self, able: Mapping[ModelKey, ModelView]) -> None:
        """Notes whether the engine took the offered prompt. If the request still waits, its model is full."""
        offered, self._offered = self._offered, None
        if offered is None:
            return
        if offered.model in able and offered.id in able[offered.model].queues.waiting:
            self._full.add(offered.model)
        else:
            self._full.discard(offered.model)
            self.prompts += 1
            self._in_a_row += 1


def _interleave(models: Sequence[ModelView], turn: TurnView | None) -> tuple[ModelView, int]:
    """Model to decode next and its steps: a single step, or enough steps to keep switches below SWITCHES_MOST."""
    for model in models:
        if turn is not None and turn.holder == model.key and turn.steps < _steps(model):
            return model, _steps(model) - turn.steps
    model = min(models, key=lambda model: model.record.turn_no)
    return model, _steps(model)


def _steps(model: ModelView) -> int:
    step_s = model.costs.step(len(model.queues.running), model.queues.context)
    return max(1, ceil(model.costs.switch_s * (1.0 / SWITCHES_MOST - 1.0) / step_s))


def _oldest(model: ModelView) -> float:
    """Arrival of the model's oldest request; the model keeps requests in the order of arrival."""
    requests = [next(iter(requests.values())) for requests in (model.queues.running, model.queues.waiting) if requests]
    return min((request.arrived_at for request in requests), default=model.used_at)


def _starves(model: ModelView, now: float) -> bool:
    requests = (*model.queues.running.values(), *model.queues.waiting.values())
    if not requests:
        return now - model.used_at > STARVED_S
    return any(now - request.progress.last_at > STARVED_PER_TTFT * request.objective.ttft_s for request in requests)
