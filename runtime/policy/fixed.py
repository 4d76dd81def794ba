"""Policies that switch between requests or not at all: `request`, `dedicated` and `resident`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil

from runtime.model import STARVED_S, Model
from runtime.policy.quota import STEPS_MOST
from runtime.policy.turns import Turn
from runtime.request import ModelKey, Request

PROMPTS_MOST = 8
SWITCHES_MOST = 0.1  # of the time, where models take turns step by step
STARVED_PER_TTFT = 3.0


class RequestLevel:
    """A model that has begun keeps the device until its requests are done; then the oldest request's model begins.

    So no request is interrupted (ServerlessLLM, §5). New ones join, but not once another model's request has waited for
    `patience_s`. With infinite patience a model keeps the device for as long as it is asked for: then each model needs
    a device of its own."""

    shares = False
    relieves = False

    def __init__(self, patience_s: float = STARVED_S) -> None:
        self._patience_s = patience_s
        self._holder: ModelKey | None = None
        self._working: list[Model] = []

    def arrived(self, request: Request, now: float) -> None:
        pass

    def order(self, working: Iterable[Model], now: float) -> list[Model]:
        self._working = sorted(working, key=lambda model: (not model.running, _oldest(model), model.key))
        return self._working

    def next(self, order: Sequence[Model], turn: Turn | None, now: float) -> tuple[Model, int] | None:
        able = [model for model in order if model.can_step]
        holder = next((model for model in able if model.key == self._holder and model.running), None)
        holder = holder or next(iter(able), None)
        if holder is None:
            return None
        self._holder = holder.key
        return holder, STEPS_MOST

    def admit(self, model: Model, now: float) -> Sequence[Request]:
        others = [other for other in self._working if other is not model and other.waiting]
        if model.running and any(now - _oldest(other) > self._patience_s for other in others):
            return ()
        return list(model.waiting.values())

    def yields(self, model: Model, needy: Model, turn: Turn | None, now: float) -> bool:
        return not model.running or not model.can_step


class Resident:
    """Who is on the device stays there while it has work, and all of these take turns step by step. Prompts go before
    other steps, up to PROMPTS_MOST in a row, one at a time and first come first served.

    Who has work is parked only for a model with a request that got no token for STARVED_PER_TTFT times its TTFT."""

    shares = False
    relieves = False

    def __init__(self) -> None:
        self.prompts = 0  # given to engines so far
        self._in_a_row = 0
        self._chosen: Request | None = None  # whose prompt the next step is for
        self._offered: Request | None = None  # to an engine, and not looked at since
        self._full: set[ModelKey] = set()  # without room for their next prompt: it is offered in their own turns alone

    def arrived(self, request: Request, now: float) -> None:
        pass

    def order(self, working: Iterable[Model], now: float) -> list[Model]:
        return sorted(working, key=lambda model: (_oldest(model), model.key))

    def next(self, order: Sequence[Model], turn: Turn | None, now: float) -> tuple[Model, int] | None:
        able = {model.key: model for model in order if model.can_step}
        self._look_at_offer(able)
        for model in able.values():
            if model.prompts:
                return model, 1
        decoding = [model for model in able.values() if model.running]
        if not decoding or self._in_a_row < PROMPTS_MOST:
            self._chosen = self.first([model for model in able.values() if not self._is_full(model)], now)
            if self._chosen is not None:
                return able[self._chosen.model], 1
        if not decoding:
            return None
        chosen = _interleave(decoding, turn if self._in_a_row < PROMPTS_MOST else None)
        self._in_a_row = 0
        return chosen

    def admit(self, model: Model, now: float) -> Sequence[Request]:
        if model.prompts:
            return ()
        chosen = self._chosen
        self._offered = chosen if chosen is not None and chosen.id in model.waiting else self.first([model], now)
        return [self._offered] if self._offered is not None else ()

    def yields(self, model: Model, needy: Model, turn: Turn | None, now: float) -> bool:
        return not model.can_step or _starves(needy, now)

    def first(self, models: Sequence[Model], now: float) -> Request | None:
        """Of those that wait for these models, whose prompt comes next."""
        waiting = (request for model in models for request in model.waiting.values())
        return min(waiting, key=lambda request: (request.arrived_at, request.id), default=None)

    def _is_full(self, model: Model) -> bool:
        return model.key in self._full and bool(model.running)

    def _look_at_offer(self, able: Mapping[ModelKey, Model]) -> None:
        """What became of the prompt that was offered to an engine."""
        offered, self._offered = self._offered, None
        if offered is None:
            return
        if offered.model in able and offered.id in able[offered.model].waiting:
            self._full.add(offered.model)
        else:
            self._full.discard(offered.model)
            self.prompts += 1
            self._in_a_row += 1


def _interleave(models: Sequence[Model], turn: Turn | None) -> tuple[Model, int]:
    """Whose decode step comes next: one step each, or as many as it takes to make up for the switch."""
    for model in models:
        if turn is not None and turn.holder == model.key and turn.steps < _steps(model):
            return model, _steps(model) - turn.steps
    model = min(models, key=lambda model: model.turn_no)
    return model, _steps(model)


def _steps(model: Model) -> int:
    step_s = model.costs.step(len(model.running), model.context)
    return max(1, ceil(model.costs.switch_s * (1.0 / SWITCHES_MOST - 1.0) / step_s))


def _oldest(model: Model) -> float:
    """When the first of its requests came; they are kept in this order."""
    requests = [next(iter(requests.values())) for requests in (model.running, model.waiting) if requests]
    return min((request.arrived_at for request in requests), default=model.used_at)


def _starves(model: Model, now: float) -> bool:
    requests = (*model.running.values(), *model.waiting.values())
    if not requests:
        return now - model.used_at > STARVED_S
    return any(now - request.progress.last_at > STARVED_PER_TTFT * request.objective.ttft_s for request in requests)
