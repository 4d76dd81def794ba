"""The machine of one device: takes an event and the time, returns what is to be done. Pure.

It owns the truth: which request is where, who may have which pages. Invariants (`check`): a request is in exactly
one model's `waiting` or `running`; only a resident model steps; at most one device effect and one fetch are out;
what all models hold fits the pool; every request that arrived ends once.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from runtime.engine.base import Held
from runtime.events import (
    Abort,
    Add,
    Arrived,
    Build,
    BuildFailed,
    Built,
    Cancelled,
    Check,
    Checked,
    Close,
    Closed,
    DeviceEffect,
    Effect,
    EngineFailed,
    Event,
    Evict,
    Fetch,
    Fetched,
    FetchFailed,
    Grow,
    Lose,
    MemoryEffect,
    Ordered,
    Park,
    Parked,
    Placed,
    Refused,
    Shrink,
    Step,
    StepFailed,
    Stepped,
    Tell,
    Told,
    Withdrawn,
)
from runtime.model import Model, Phase, Wish, check_due
from runtime.pages import Pages
from runtime.policy.prefetch import bring_in, grow
from runtime.policy.turns import Turn, Turns
from runtime.request import ModelKey, Request, RequestId
from store.wire import Finish

FETCH_TRIES = 3  # in a row
_WITH_ENGINE = (Phase.STAGED, Phase.FETCHING, Phase.CHECKING, Phase.RESIDENT, Phase.PARKING)
_MOVING = (Phase.FETCHING, Phase.PARKING)
_NEVER = float("inf")


class Instance:
    """One GPU, or one CPU that plays one. `hear` everything as it comes; `decide` whenever the device is free."""

    def __init__(self, turns: Turns, pages: Pages) -> None:
        self.models: dict[ModelKey, Model] = {}  # the one that is longest without a turn first
        self.pages = pages
        self.turn: Turn | None = None
        self.switches = 0
        self.moves = 0  # times a model went from one phase to another
        self._turns = turns
        self._owners: dict[RequestId, ModelKey] = {}
        self._busy = False  # a device effect is out
        self._changed = False  # something did since the last decision, other than a step that was like the one before
        self._tick_at = _NEVER

    def next_tick(self) -> float | None:
        """When to decide again (seconds, monotone) though nothing happens."""
        return None if self._tick_at == _NEVER else self._tick_at

    # ── hearing ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def hear(self, event: Event, now: float) -> list[Effect]:
        """What `event` asks to be done for requests, in this order; of the device and its pages asks `decide`."""
        if isinstance(event, Stepped):  # the one that comes for every token
            return self._stepped(self.models[event.model], event, now)
        self._changed = True
        match event:
            case Placed(spec):
                return self._place(Model(spec, wish=Wish.AWAKE, used_at=now))
            case Withdrawn(key):
                return self._withdraw(key)
            case Arrived(request):
                return self._arrive(request, now)
            case Cancelled(requests):
                return self._cancel(requests, now)
            case Ordered(key, awake):
                return self._order(key, awake)
            case Built():
                return self._built(self.models[event.model], event, now)
            case BuildFailed(key, error):
                return self._build_failed(self.models[key], f"the model could not be loaded: {error}", now)
            case Fetched(key, took_s, held):
                return self._fetched(self.models[key], took_s, held, now)
            case FetchFailed(key, error, held):
                return self._fetch_failed(self.models[key], error, held, now)
            case Checked(key, wrong, held):
                return self._checked(self.models[key], wrong, held, now)
            case Parked(key, held):
                return self._parked(self.models[key], held)
            case Told(key, held):
                return self._told(self.models[key], held)
            case StepFailed(key, error):
                self._busy = False
                return self._break(self.models[key], f"the engine failed in a step: {error}")
            case EngineFailed(key, error):
                return self._break(self.models[key], f"the engine failed: {error}")
            case Closed(key):
                return self._closed(self.models[key])
            case Refused(request, key, error):
                return self._lose([self._take(request)], error)
            case _:
                assert_never(event)

    def _place(self, model: Model) -> list[Effect]:
        known = self.models.setdefault(model.key, model)
        if known.withdrawn or known.error:
            known.withdrawn = False
            self._want(known)
        return []

    def _withdraw(self, key: ModelKey) -> list[Effect]:
        model = self.models.get(key)
        if model is None:
            return []
        model.withdrawn, model.wish = True, Wish.NONE
        lost = self._drop_requests(model, "the deployment was removed")
        self._leave_if_withdrawn(model)
        return lost

    def _arrive(self, request: Request, now: float) -> list[Effect]:
        model = self.models.get(request.model)
        if model is None or model.withdrawn:
            return [Lose(request, "the model is not placed on this runtime")]
        if model.error:
            return [Lose(request, model.error)]
        self._owners[request.id] = model.key
        model.used_at = now
        if model.wish is Wish.ASLEEP:
            model.wish = Wish.NONE
        if model.phase is Phase.RESIDENT:
            model.running[request.id] = request
            return [Add(request)]
        model.waiting[request.id] = request
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
                model.stuck = False  # what they leave behind may suffice for the others
            model.used_at = now
        return effects

    def _order(self, key: ModelKey, awake: bool) -> list[Effect]:
        model = self.models.get(key)
        if model is None or model.withdrawn:
            return []
        if awake:
            self._want(model)
        elif not model.has_requests:
            model.wish = Wish.ASLEEP
        return []

    # ── hearing how a model comes and goes ────────────────────────────────────────────────────────────────────────────

    def _built(self, model: Model, built: Built, now: float) -> list[Effect]:
        self._busy = False
        self._enter(model, Phase.STAGED)
        model.weights_pages, model.loading_s = built.weights_pages, built.took_s
        self.pages.settle(model.key, built.held)
        least = built.weights_pages + built.kv_pages_least
        if self._leave_if_withdrawn(model) or least <= self.pages.total:
            return []
        return self._fail(
            model,
            f"the model needs {self.pages.mib(least)}, {built.weights_pages} of them for its weights and the others for"
            f" one request of {model.spec.max_model_len} tokens, and the device has {self.pages.mib(self.pages.total)}:"
            " give it more memory, or lower max_model_len",
            now,
            mends=False,
        )

    def _build_failed(self, model: Model, error: str, now: float) -> list[Effect]:
        self._busy = False
        self._enter(model, Phase.COLD)
        if self._leave_if_withdrawn(model):
            return []
        return self._fail(model, error, now)

    def _fetched(self, model: Model, took_s: float, held: Held, now: float) -> list[Effect]:
        self.pages.settle(model.key, held)
        model.fetches, model.fetch_failures = model.fetches + 1, 0
        model.fetch_ms, model.loading_s = took_s * 1e3, model.loading_s + took_s
        self._enter(model, Phase.CHECKING)
        if self._leave_if_withdrawn(model) or check_due(model.fetches):
            return []
        return self._resident(model, now)

    def _fetch_failed(self, model: Model, error: str, held: Held, now: float) -> list[Effect]:
        self.pages.settle(model.key, held)
        model.fetch_failures += 1
        self._enter(model, Phase.STAGED)
        if self._leave_if_withdrawn(model) or model.fetch_failures < FETCH_TRIES:
            return []
        return self._fail(model, f"the model could not be brought to the device: {error}", now)

    def _checked(self, model: Model, wrong: str | None, held: Held, now: float) -> list[Effect]:
        self._busy = False
        self.pages.settle(model.key, held)
        if model.phase is not Phase.CHECKING:  # withdrawn meanwhile, or its engine failed
            return []
        if wrong is not None:
            return self._fail(model, f"the model failed its check and was taken out of service: {wrong}", now)
        return self._resident(model, now)

    def _resident(self, model: Model, now: float) -> list[Effect]:
        self._enter(model, Phase.RESIDENT)
        model.failures, model.used_at = 0, now
        model.load_ms, model.loading_s = model.loading_s * 1e3, 0.0
        if model.wish is Wish.AWAKE:
            model.wish = Wish.NONE
        added: list[Effect] = [Add(request) for request in model.waiting.values()]
        model.running.update(model.waiting)
        model.waiting.clear()
        model.fresh = True
        return added

    def _parked(self, model: Model, held: Held) -> list[Effect]:
        self.pages.settle(model.key, held)
        if model.phase is Phase.PARKING:
            self._enter(model, Phase.STAGED)
            self._leave_if_withdrawn(model)
        return []

    def _told(self, model: Model, held: Held) -> list[Effect]:
        """While pages are on their way the books know more than the engine."""
        if model.phase in _MOVING:
            booked = self.pages.of(model.key)
            held = replace(held, weights=booked.weights, kv=booked.kv)
        self.pages.settle(model.key, held)
        return []

    def _closed(self, model: Model) -> list[Effect]:
        self._busy = False
        self.pages.settle(model.key, Held())
        self._enter(model, Phase.FAILED if model.error else Phase.COLD)
        self._leave_if_withdrawn(model)
        return []

    def _break(self, model: Model, error: str) -> list[Effect]:
        """Its state can't be trusted: drop the engine, build it again when somebody asks. The others go on."""
        model.wish = Wish.NONE
        if model.phase in _WITH_ENGINE:
            self._enter(model, Phase.CLOSING)
        return self._lose(self._take_all(model.running), error)

    def _fail(self, model: Model, error: str, now: float, mends: bool = True) -> list[Effect]:
        lost = self._drop_requests(model, error)
        model.fail(error, now, mends)
        self._enter(model, Phase.CLOSING if model.phase in _WITH_ENGINE else Phase.FAILED)
        return lost

    def _want(self, model: Model) -> None:
        """It is to become resident, also when it failed before."""
        model.wish = Wish.NONE if model.phase is Phase.RESIDENT else Wish.AWAKE
        model.error = ""
        if model.phase is Phase.FAILED:
            self._enter(model, Phase.COLD)

    def _leave_if_withdrawn(self, model: Model) -> bool:
        """What is under way ends first."""
        if not model.withdrawn:
            return False
        if model.phase in (Phase.COLD, Phase.FAILED):
            del self.models[model.key]
        elif model.phase in (Phase.STAGED, Phase.CHECKING, Phase.RESIDENT):
            self._enter(model, Phase.CLOSING)
        return True

    def _enter(self, model: Model, phase: Phase) -> None:
        model.phase = phase
        model.stuck = model.fresh = False
        self.moves += 1

    # ── hearing what a step made ──────────────────────────────────────────────────────────────────────────────────────

    def _stepped(self, model: Model, stepped: Stepped, now: float) -> list[Effect]:
        self._busy = False
        model.used_at, model.fresh = now, False
        if stepped.held != self.pages.of(model.key):
            self.pages.settle(model.key, stepped.held)
            self._changed = True
        effects: list[Effect] = []
        for output in stepped.outputs:
            request = model.running.get(output.request)
            if request is None:  # cancelled while the step ran
                continue
            effects.append(Tell(request, request.sent, output))
            request.sent += len(output.tokens)
            model.tokens += len(output.tokens)
            if output.finish is not None:
                self._take(request.id)
                self._changed = True
        if not stepped.busy and model.running:
            # The engine forgot requests that we still count: an engine's bug must not become a client's silence.
            effects += self._drop_requests(model, "the engine ended without finishing this request")
            self._changed = True
        if not stepped.outputs and model.running and model.short(stepped.held, self.pages.total) > 0:
            model.stuck = self._changed = True
        return effects

    # ── deciding ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def decide(self, now: float) -> list[Effect]:
        """What is to be done now that the device is free: memory effects, then at most one device effect."""
        assert not self._busy, "the device is asked for its next effect before it answered the last"
        if not self._changed and now < self._tick_at:
            return self._use(self._holder())
        self._changed = False
        effects: list[Effect] = [*self._tidy(now)]
        order = [self.models[key] for key in self._turns.order(list(self.models))]
        stepper = self._stepper(order)
        effects += self._move(bring_in(order, self.pages, stepper, stepper is not None and self._in_turn(stepper)))
        if (upkeep := self._upkeep()) is not None:
            self._busy = True
            return [*effects, upkeep]
        stepper = self._stepper(order)
        if stepper is not None:
            effects += self._move(grow(stepper, order, self.pages))
        return effects + self._use(stepper)

    def _upkeep(self) -> DeviceEffect | None:
        """What comes before any step: pages that come back, then models that are waited for."""
        for model in self.models.values():
            if model.phase is Phase.CLOSING:
                return Close(model.key)
        for model in self.models.values():
            if model.phase is Phase.CHECKING:
                return Check(model.key)
        for model in self.models.values():
            if model.phase is Phase.COLD and model.works:
                self._enter(model, Phase.BUILDING)
                return Build(model.spec)
        return None

    def _tidy(self, now: float) -> list[MemoryEffect]:
        """What time alone asks for, or an operator."""
        effects: list[MemoryEffect] = []
        self._tick_at = _NEVER
        for model in self.models.values():
            due_at = model.due_at()
            if due_at is not None and now < due_at:
                self._tick_at = min(self._tick_at, due_at)
            elif due_at is not None and model.phase is Phase.FAILED:
                self._want(model)
            elif due_at is not None:
                effects += self._move([Park(model.key)])
            elif model.phase is Phase.STAGED and model.wish is Wish.ASLEEP and self.pages.of(model.key).weights:
                effects += self._move([Evict(model.key, self.pages.of(model.key).weights)])
        return effects

    # ── turns ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _holder(self) -> Model | None:
        return self.models.get(self.turn.holder) if self.turn else None

    def _in_turn(self, model: Model) -> bool:
        """It holds the device, and nobody may take it away."""
        turn = self.turn
        return turn is not None and turn.holder == model.key and model.can_step and not self._turns.over(turn)

    def _stepper(self, order: list[Model]) -> Model | None:
        """Who steps next, as things are."""
        holder = self._holder()
        if holder is not None and self._in_turn(holder):
            return holder
        return next((model for model in order if model.can_step), None)

    def _use(self, stepper: Model | None) -> list[Effect]:
        if stepper is None or not stepper.can_step:
            if not self._owners:
                self.turn = None
            return []
        self._busy = True
        self._count_step(stepper)
        return [Step(stepper.key)]

    def _count_step(self, model: Model) -> None:
        key, turn = model.key, self.turn
        if turn is not None and turn.holder == key:
            self.turn = Turn(key, turn.steps + 1)
            # From here on others that can step go first, and it may be parked.
            self._changed |= self._turns.over(self.turn) and not self._turns.over(turn)
            return
        self.switches += turn is not None
        model.turns += 1
        self.turn = Turn(key, 1)
        self.models[key] = self.models.pop(key)  # to the end
        self._changed = True  # the order of turns is another

    # ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _move(self, effects: list[MemoryEffect]) -> list[MemoryEffect]:
        """Book what is asked for, so that nothing is promised twice."""
        for effect in effects:
            model, key = self.models[effect.model], effect.model
            match effect:
                case Park():
                    self._enter(model, Phase.PARKING)
                case Fetch(_, kv_pages):
                    held = self.pages.of(key)
                    self.pages.book(key, weights=model.weights_pages - held.weights, kv=kv_pages - held.kv)
                    self._enter(model, Phase.FETCHING)
                case Evict(_, pages):
                    self.pages.book(key, weights=-pages)
                case Shrink(_, pages):
                    self.pages.book(key, kv=-pages)
                case Grow(_, pages):
                    self.pages.book(key, kv=pages)
                    model.stuck, model.fresh = False, True
        return effects

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
            where = f"{model.key} in {model.phase.name}"
            pages = self.pages.of(model.key)
            assert not model.running or model.phase in _WITH_ENGINE, f"{where} has requests in an engine it lacks"
            assert not model.waiting or model.phase is not Phase.RESIDENT, f"{where} holds requests back"
            assert not (model.stuck or model.fresh) or model.phase is Phase.RESIDENT, f"{where} is stuck or fresh"
            assert not (model.stuck and not model.running), f"{where} is stuck without requests"
            assert model.wish is not Wish.AWAKE or model.phase is not Phase.RESIDENT, f"{where} is to become it again"
            assert model.wish is not Wish.ASLEEP or not model.has_requests, f"{where} is to sleep amid its requests"
            assert pages == Held() or model.phase in (*_WITH_ENGINE, Phase.CLOSING), f"{where} holds {pages}"
        assert sum(model.phase is Phase.FETCHING for model in self.models.values()) <= 1, "two fetches at once"
        assert set(self.pages.held) <= set(self.models), "pages are held by a model that is not there"
        self.pages.check()
