"""The machine of one device: takes an event and the time, returns what is to be done. Pure.

It owns the truth about which request is where. Invariants (`check`): a request is in exactly one model's `waiting` or
`running`; only a resident model runs any; at most one device effect is out; every request that arrived ends once.
"""

from __future__ import annotations

from typing import assert_never

from runtime.engine.base import Output
from runtime.events import (
    Abort,
    Add,
    Arrived,
    Cancelled,
    Effect,
    Event,
    Load,
    Loaded,
    LoadFailed,
    Lose,
    Ordered,
    Placed,
    Refused,
    Step,
    StepFailed,
    Stepped,
    Tell,
    Tick,
    Unload,
    Unloaded,
    Withdrawn,
)
from runtime.model import Model
from runtime.policy.turns import Turn, Turns
from runtime.request import ModelKey, Request, RequestId
from store.wire import Finish, Residency


class Instance:
    """One GPU, or one CPU that plays one."""

    def __init__(self, turns: Turns) -> None:
        self.models: dict[ModelKey, Model] = {}
        self.turn: Turn | None = None
        self.switches = 0
        self._turns = turns
        self._owners: dict[RequestId, ModelKey] = {}
        self._busy = False  # a device effect is out

    def on(self, event: Event, now: float) -> list[Effect]:
        """What `event`, heard at `now` (seconds, monotone), asks to be done, in this order."""
        effects = self.hear(event, now)
        if not self._busy and (effect := self._use_device(now)):
            self._busy = True
            effects.append(effect)
        return effects

    def next_tick(self) -> float | None:
        """When a Tick would change something though nothing else happens."""
        times = (at for model in self.models.values() for at in (model.idle_at(), model.retry_at()))
        return min((at for at in times if at is not None), default=None)

    # ── hearing ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def hear(self, event: Event, now: float) -> list[Effect]:
        """Like `on`, but leaves the device alone: for what is heard while the device may be busy."""
        match event:
            case Placed(spec):
                return self._place(Model(spec, wanted=True, used_at=now))
            case Withdrawn(key):
                return self._withdraw(key)
            case Arrived(request):
                return self._arrive(request, now)
            case Cancelled(requests):
                return self._cancel(requests, now)
            case Ordered(key, awake):
                return self._order(key, awake)
            case Loaded(key, took_s):
                return self._loaded(key, took_s, now)
            case Unloaded(key):
                return self._unloaded(key)
            case LoadFailed(key, error):
                return self._load_failed(self.models[key], f"the model could not be loaded: {error}", now)
            case Stepped(key, outputs, busy):
                return self._stepped(self.models[key], outputs, busy, now)
            case StepFailed(key, error):
                return self._step_failed(self.models[key], error)
            case Refused(request, key, error):
                return self._lose([self._take(request)], error)
            case Tick():
                return []
            case _:
                assert_never(event)

    def _place(self, model: Model) -> list[Effect]:
        known = self.models.get(model.key)
        if known is None:
            self.models[model.key] = model
        elif known.withdrawn or known.residency is Residency.FAILED:
            known.withdrawn = False
            self._want(known)
        return []

    def _withdraw(self, key: ModelKey) -> list[Effect]:
        model = self.models.get(key)
        if model is None:
            return []
        model.withdrawn, model.wanted = True, False
        lost = self._drop_requests(model, "the deployment was removed")
        if model.residency in (Residency.COLD, Residency.FAILED):
            del self.models[key]
        return lost

    def _arrive(self, request: Request, now: float) -> list[Effect]:
        model = self.models.get(request.model)
        if model is None or model.withdrawn:
            return [Lose(request, "the model is not placed on this runtime")]
        if model.residency is Residency.FAILED:
            return [Lose(request, model.error)]
        self._owners[request.id] = model.key
        model.used_at = now
        if model.residency is Residency.RESIDENT:
            model.running[request.id] = request
            return [Add(request)]
        model.waiting[request.id] = request
        model.wanted = True
        return []

    def _cancel(self, requests: list[RequestId], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for key in dict.fromkeys(self._owners[id] for id in requests if id in self._owners):
            model = self.models[key]
            running = [id for id in requests if id in model.running]
            for id in requests:
                if self._owners.get(id) == key:
                    self._take(id)
            if running:
                effects.append(Abort(key, running))
            model.used_at = now
        return effects

    def _order(self, key: ModelKey, awake: bool) -> list[Effect]:
        model = self.models.get(key)
        if model is None:
            return []
        if awake:
            self._want(model)
        else:
            model.wanted = bool(model.waiting or model.running)
        return []

    def _loaded(self, key: ModelKey, took_s: float, now: float) -> list[Effect]:
        self._busy = False
        model = self.models[key]
        model.residency, model.error, model.failures = Residency.RESIDENT, "", 0
        model.load_ms, model.used_at = took_s * 1e3, now
        added: list[Effect] = [Add(request) for request in model.waiting.values()]
        model.running.update(model.waiting)
        model.waiting.clear()
        return added

    def _unloaded(self, key: ModelKey) -> list[Effect]:
        self._busy = False
        model = self.models[key]
        model.residency = Residency.COLD
        if model.withdrawn:
            del self.models[key]
        return []

    def _stepped(self, model: Model, outputs: list[Output], busy: bool, now: float) -> list[Effect]:
        self._busy = False
        model.used_at = now
        effects: list[Effect] = []
        for output in outputs:
            request = model.running.get(output.request)
            if request is None:  # cancelled while the step ran
                continue
            effects.append(Tell(request, request.sent, output))
            request.sent += len(output.tokens)
            model.tokens += len(output.tokens)
            if output.finish is not None:
                self._take(request.id)
        if not busy and model.running:
            # The engine forgot requests that we still count: an engine's bug must not become a client's silence.
            effects += self._drop_requests(model, "the engine ended without finishing this request")
        return effects

    def _step_failed(self, model: Model, error: str) -> list[Effect]:
        """Its state can't be trusted: drop the engine, build it again when somebody asks. The others go on."""
        self._busy = False
        self._retire(model)
        return self._lose(self._take_all(model.running), f"the engine failed in a step: {error}")

    def _load_failed(self, model: Model, error: str, now: float) -> list[Effect]:
        self._busy = False
        model.residency, model.error, model.wanted = Residency.FAILED, error, False
        model.failures, model.used_at = model.failures + 1, now
        lost = self._drop_requests(model, error)
        if model.withdrawn:
            del self.models[model.key]
        return lost

    # ── deciding ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _use_device(self, now: float) -> Effect | None:
        """The one next thing for the device: make room, then fetch what is waited for, then step."""
        for model in self.models.values():
            if model.residency is Residency.RESIDENT and self._leaves(model, now):
                self._retire(model)
            if model.residency is Residency.LEAVING:
                return Unload(model.key)
        for model in self.models.values():
            if (retry_at := model.retry_at()) is not None and now >= retry_at:
                self._want(model)
            if model.wanted and model.residency is Residency.COLD:
                model.residency = Residency.LOADING
                return Load(model.spec)
        return self._next_step()

    def _leaves(self, model: Model, now: float) -> bool:
        if model.running or model.waiting:
            return False
        idle_at = model.idle_at()
        return model.withdrawn or not model.wanted or (idle_at is not None and now >= idle_at)

    def _want(self, model: Model) -> None:
        """Somebody wants it resident, also when it failed before."""
        model.wanted = True
        if model.residency is Residency.FAILED:
            model.residency = Residency.COLD

    def _retire(self, model: Model) -> None:
        """From here on requests wait until it has left and come back."""
        model.residency, model.wanted = Residency.LEAVING, False
        if self.turn is not None and self.turn.holder == model.key:
            self.turn = None

    def _next_step(self) -> Effect | None:
        ready = [model.key for model in self.models.values() if model.has_work]
        if not ready:
            self.turn = None
            return None
        key = self._turns.next(ready, self.turn)
        if self.turn is not None and self.turn.holder == key:
            self.turn = Turn(key, self.turn.steps + 1)
        else:
            self.switches += self.turn is not None
            self.models[key].turns += 1
            self.turn = Turn(key, 1)
        return Step(key)

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, id: RequestId) -> Request:
        """Remove a request from wherever it is."""
        model = self.models[self._owners.pop(id)]
        request = model.running.pop(id, None) or model.waiting.pop(id, None)
        assert request is not None, f"{id} is owned by {model.key} and not in it"
        return request

    def _take_all(self, requests: dict[RequestId, Request]) -> list[Request]:
        return [self._take(id) for id in list(requests)]

    def _drop_requests(self, model: Model, error: str) -> list[Effect]:
        running = list(model.running)
        aborts: list[Effect] = [Abort(model.key, running)] if running else []
        return aborts + self._lose(self._take_all(model.running) + self._take_all(model.waiting), error)

    def _lose(self, requests: list[Request], error: str) -> list[Effect]:
        return [Lose(request, error, Finish.ERROR) for request in requests]

    def check(self) -> None:
        """The invariants; asserted by the tests after every event, and by the device when it is idle."""
        held = [id for model in self.models.values() for id in (*model.waiting, *model.running)]
        assert len(held) == len(set(held)), "a request is held twice"
        assert set(held) == set(self._owners), "a request is owned and not held, or held and not owned"
        for model in self.models.values():
            assert not model.running or model.residency is Residency.RESIDENT, (
                f"{model.key} runs while {model.residency}"
            )
            assert not model.waiting or model.residency is not Residency.RESIDENT, f"{model.key} holds requests back"
