"""State machine of a device: takes an event and the time in seconds, returns effects to carry out in order. Pure.

The machine alone decides where each request is and how many pages each model may hold. Invariants, asserted by `check`:
a request is in exactly one place of one model; only a resident model steps; at most one device effect and one fetch
are under way; the pages held by the models fit the pool; every arrived request ends once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never

from runtime.core.device.booking import book_event, book_step
from runtime.core.device.events import (
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
    ImageOver,
    Lose,
    MemoryEffect,
    MoveStep,
    Ordered,
    Park,
    Parked,
    Placed,
    Refused,
    Shrink,
    StageImage,
    Step,
    StepFailed,
    Stepped,
    Told,
    Unfinished,
    Warmed,
    Withdrawn,
)
from runtime.core.device.model import MOVING, WITH_ENGINE, Model, Phase, Wish
from runtime.core.device.pages import Pages
from runtime.core.device.prefetch import PoolSnapshot, bring_in, expected, fitting, grow, in_turn, room_to_build
from runtime.core.device.record import Turn
from runtime.core.device.request import ModelKey, Request
from runtime.core.device.requests import Requests
from runtime.core.device.rooms import Rooms
from runtime.core.device.view import ModelView
from runtime.core.engine import AHEAD, Held, WeightSource
from runtime.core.host_room import HostRoom
from runtime.core.ledgers.costs import ModelCosts
from runtime.core.ledgers.device_time import DeviceTime
from runtime.core.ledgers.estimate import CostEstimate
from runtime.core.staging import StagingPlans
from runtime.core.turns.turn import Turns
from store.contract.wire import EngineSpec, Finish

FETCH_TRIES = 3  # in a row
LATE = 2.0  # a turn whose steps take more than twice their estimate ends early: the policy decides again
_NEVER = float("inf")
Costs = Callable[[EngineSpec], ModelCosts]


class Instance:
    """State machine of a GPU or CPU. Call `hear` for every event, and `decide` while no device effect is under way."""

    def __init__(
        self, turns: Turns, pages: Pages, costs: Costs, account: DeviceTime | None = None, by_history: bool = False
    ) -> None:
        self.models: dict[ModelKey, Model] = {}
        self.pages = pages
        self.turn: Turn | None = None
        self.switches = self.moves = 0  # changes of the turn's holder, and of a model's phase
        self.account = account  # None: the device's time is not accounted for
        self._turns, self._costs = turns, costs
        self._rooms, self._host_room = Rooms(), HostRoom()
        self.filed = self._rooms.filed  # models that may have changed; a reader of states empties the set
        self._staging = StagingPlans(self._host_room, by_history)
        self.requests = Requests(self._rooms, pages.total)
        self._fetching: ModelKey | None = None
        self._room_pages = 0.0  # pages that the last order of turns leaves to tenants over their share
        self._busy = False  # whether a device effect is under way
        self._step_due = False  # whether a step comes before the next part of a build or check
        self._changed = False  # whether anything but a step like the last step happened since the last decision
        self._turn_no, self._tick_at = 0, _NEVER

    def next_tick(self) -> float | None:
        """Time, in seconds on the monotonic clock, to call `decide` again without an event; None: wait for an event."""
        return None if self._tick_at == _NEVER else self._tick_at

    # ── hearing ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def hear(self, event: Event, now: float) -> list[Effect]:
        """Effects of an event to carry out at once, in order. Device and most memory effects come from `decide`."""
        stepped = isinstance(event, Stepped)
        self._changed = self._changed or not stepped
        if stepped or self.account is None:
            return self._heard(event, now)
        waited = len(self.requests) > 0
        book_event(self.account, event, waited, self._busy, now)
        effects = self._heard(event, now)
        if waited and not len(self.requests) and not self._busy:
            self.account.platform(now)
        return effects

    def _heard(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Stepped():  # first: the most frequent event, once for every token
                return self._stepped(self.models[event.model], event, now)
            case Arrived(request):
                return self._arrive(request, now)
            case Told(key, held):
                self.pages.told(key, held, moving=self.models[key].phase in MOVING)
                return []
            case Fetched(key, took_s, held):
                return self._fetched(self.models[key], took_s, held, now)
            case Parked(key, held):
                return self._parked(self.models[key], held)
            case Checked(key, wrong, held):
                return self._checked(self.models[key], wrong, held, now)
            case Cancelled(requests):
                return self.requests.cancel(requests, now)
            case MoveStep("prepare", key, _, tokens):
                return [*self._move(expected(self.models[key], tokens, self.pages), now)]
            case MoveStep("commit", _, id):
                self.requests.leave(id, now)
                return []
            case MoveStep("abort", _, id):
                self.requests.stay(id)
                return []
            case MoveStep(request=id):
                return self.requests.cancel([id], now, ended=False)
            case Placed():
                return self._place(event, now)
            case Withdrawn(key):
                return self._withdraw(key, now)
            case Ordered(key, awake):
                return self._order(key, awake, now)
            case Warmed(key, warm):
                self._staging.order(self.models.get(key), warm, now)
                self.filed.add(key)
                return []
            case Built():
                return self._built(self.models[event.model], event, now)
            case Unfinished(key, waits):
                return self._unfinished(self.models[key], waits)
            case ImageOver(key):
                model = self.models[key]
                self._unbuilt(model)
                self._staging.imaged(model, now)
                return []
            case BuildFailed():
                return self._build_failed(self.models[event.model], event, now)
            case FetchFailed():
                return self._fetch_failed(self.models[event.model], event, now)
            case StepFailed(key, error):
                self._busy = False
                return self._break(self.models[key], f"the engine failed in a step: {error}", now)
            case EngineFailed(key, error):
                return self._break(self.models[key], f"the engine failed: {error}", now)
            case Closed(key):
                return self._closed(self.models[key], now)
            case Refused(request, _, error):
                return self.requests.lose([request], error, now, Finish.ERROR)
            case _:
                assert_never(event)

    def _place(self, placed: Placed, now: float) -> list[Effect]:
        spec, key = placed.spec, ModelKey(placed.spec.key)
        known = self.models.get(key)
        if known is None:
            costs, shares = CostEstimate(self._costs(spec)), self.requests.shares
            model = self.models[key] = Model(spec, costs, self.pages.page_bytes, used_at=now, shares=shares)
            model.wish = Wish.AWAKE if placed.prove else Wish.NONE
            model.loads.placed(placed.prove, placed.noted)
            model.demand.build_pages = placed.build_pages or 0
            self._staging.placed(model)
            self._rooms.file(model)
        elif known.withdrawn or known.failures.error:
            known.withdrawn, known.used_at = False, now
            self._want(known)
        return []

    def _withdraw(self, key: ModelKey, now: float) -> list[Effect]:
        model = self.models.get(key)
        if model is None:
            return []
        model.withdrawn, model.wish = True, Wish.NONE
        lost = self.requests.drop(model, "the deployment was removed", now, Finish.ERROR)
        self._rooms.file(model)
        self._leave_if_withdrawn(model)
        return lost

    def _arrive(self, request: Request, now: float) -> list[Effect]:
        model = self.models.get(request.model)
        if model is None or model.withdrawn:
            return [Lose(request, "the model is not placed on this runtime")]
        if model.failures.error:
            return [Lose(request, model.failures.error)]
        model.used_at = now
        self._staging.asked(model)
        if model.wish is Wish.ASLEEP:
            model.wish = Wish.NONE
        self.requests.arrive(request, model, now)
        self._turns.arrived(request, now)
        return []

    def _order(self, key: ModelKey, awake: bool, now: float) -> list[Effect]:
        model = self.models.get(key)
        if model is None or model.withdrawn:
            return []
        if awake:
            model.used_at = now
            self._staging.asked(model)
            self._want(model)
        elif not model.has_requests:
            model.wish = Wish.ASLEEP
            self._rooms.file(model)
        return []

    # ── hearing how a model comes and goes ────────────────────────────────────────────────────────────────────────────

    def _built(self, model: Model, built: Built, now: float) -> list[Effect]:
        self._busy = False
        self._enter(model, Phase.STAGED)
        model.demand.weights_pages, model.sequential = built.weights_pages, built.sequential
        self._staging.built(model, now)
        model.loads.built(built.took_s, built.source is WeightSource.HOST)
        self.pages.settle(model.key, built.held)
        least = built.weights_pages + built.kv_pages_least
        if self._leave_if_withdrawn(model) or least <= self.pages.total:
            return []
        error = self.pages.too_few(built.weights_pages, least, model.spec.max_model_len)
        return self._fail(model, error, now, mends=False)

    def _unfinished(self, model: Model, waits: bool) -> list[Effect]:
        self._busy, self._step_due, model.loads.image_due = False, True, waits
        self._rooms.file(model)
        return []

    def _unbuilt(self, model: Model) -> bool:
        """Note that a build is over without an engine. Returns whether the model leaves, being withdrawn."""
        self._busy = self._busy and model.loads.image_due  # a wait for an image is no device effect
        model.loads.image_due = False
        self.pages.settle(model.key, Held())
        self._enter(model, Phase.COLD)
        return self._leave_if_withdrawn(model)

    def _build_failed(self, model: Model, failed: BuildFailed, now: float) -> list[Effect]:
        error = f"the model could not be loaded: {failed.error}"
        harmless = bool(failed.lacks_bytes) or (model.stages and model.staging.later is not None)
        harmless = self._unbuilt(model) or harmless
        for going in self._staging.failed(model, failed, self.models.values(), now):
            self._enter(going, Phase.CLOSING)
        if not harmless:
            return self._fail(model, error, now)
        if model.works:
            self._host_room.lack(model, failed.lacks_bytes, failed.kept, error, now)
            self._rooms.wait_for_host(model, True)
        return []

    def _fetched(self, model: Model, took_s: float, held: Held, now: float) -> list[Effect]:
        self.pages.settle(model.key, held)
        model.loads.fetched(took_s)
        model.failures.fetches = 0
        if model.loads.from_host:  # else the disk may have been slower than the link to the device
            model.costs.observe_load(model.demand.missing_bytes, took_s)
        model.loads.load_s = model.costs.load(model.spec.weight_bytes)
        self._enter(model, Phase.CHECKING)
        if self._leave_if_withdrawn(model) or model.loads.check_due:
            return []
        return self._resident(model, now)

    def _fetch_failed(self, model: Model, failed: FetchFailed, now: float) -> list[Effect]:
        self.pages.settle(model.key, failed.held)
        model.failures.fetches += 1
        self._enter(model, Phase.CLOSING if failed.lost else Phase.STAGED)
        if not self._leave_if_withdrawn(model) and model.failures.fetches >= FETCH_TRIES:
            return self._fail(model, f"the model could not be brought to the device: {failed.error}", now)
        if not failed.lost:
            return []
        return self.requests.lose([*model.queues.running, *model.queues.leaving], failed.error, now)

    def _checked(self, model: Model, wrong: str | None, held: Held, now: float) -> list[Effect]:
        self._busy = False
        self.pages.settle(model.key, held)
        if model.phase is not Phase.CHECKING:  # the model was withdrawn meanwhile, or the engine failed
            return []
        if wrong is not None:
            return self._fail(model, f"the model failed its check and was taken out of service: {wrong}", now)
        return self._resident(model, now)

    def _resident(self, model: Model, now: float) -> list[Effect]:
        model.failures.count, model.used_at = 0, now
        if model.loads.proving:
            self._rooms.put_off_proofs(now)
        if not (model.loads.from_host or model.loads.staged):
            self._host_room.came(model.loads.loading_s, now)
        model.loads.came(now)
        if model.wish is Wish.AWAKE:
            model.wish = Wish.NONE
            model.deadlines.changed()
        self._enter(model, Phase.RESIDENT)
        model.demand.fresh = model.has_requests
        return []

    def _parked(self, model: Model, held: Held) -> list[Effect]:
        self.pages.settle(model.key, held)
        if model.phase is Phase.PARKING:
            self._enter(model, Phase.STAGED)
            self._leave_if_withdrawn(model)
        return []

    def _closed(self, model: Model, now: float) -> list[Effect]:
        self._busy = False
        self.pages.settle(model.key, Held())
        if model.demand.retires:  # the model whose image lacked room is built first
            self._rooms.upkeep.pop(model.key, None)
            model.demand.retires = False
        self._enter(model, Phase.FAILED if model.failures.error else Phase.COLD)
        self._staging.closed(model, now)
        self._leave_if_withdrawn(model)
        return []

    def _break(self, model: Model, error: str, now: float) -> list[Effect]:
        """Drop an engine with untrusted state; the next request builds the engine again. Other models go on."""
        model.wish = Wish.NONE
        if model.phase in WITH_ENGINE:
            self._enter(model, Phase.CLOSING)
        self._rooms.file(model)
        lost = self.requests.lose(model.queues.running, error, now, suspect=True)
        return lost + self.requests.lose(model.queues.leaving, error, now)

    def _fail(self, model: Model, error: str, now: float, mends: bool = True) -> list[Effect]:
        lost = self.requests.drop(model, error, now)
        model.fail(error, now, mends)
        self._enter(model, Phase.CLOSING if model.phase in WITH_ENGINE else Phase.FAILED)
        return lost

    def _want(self, model: Model) -> None:
        """Note a wish to wake the model, even if the model failed before."""
        model.wish = Wish.NONE if model.phase is Phase.RESIDENT else Wish.AWAKE
        model.failures.error = ""
        model.deadlines.changed()
        if model.phase is Phase.FAILED:
            self._enter(model, Phase.COLD)
        self._rooms.file(model)

    def _leave_if_withdrawn(self, model: Model) -> bool:
        """Whether the model is withdrawn: then remove or close the model, once a build, fetch or park has ended."""
        if not model.withdrawn:
            return False
        if model.phase in (Phase.COLD, Phase.FAILED):
            del self.models[model.key]
            self._rooms.remove(model.key)
        elif model.phase in (Phase.STAGED, Phase.CHECKING, Phase.RESIDENT):
            self._enter(model, Phase.CLOSING)
        return True

    def _enter(self, model: Model, phase: Phase) -> None:
        if model.phase is Phase.FETCHING:
            self._fetching = None
        model.phase = phase
        model.demand.moved()
        self.moves += 1
        self._rooms.file(model)

    # ── hearing what a step made ──────────────────────────────────────────────────────────────────────────────────────

    def _stepped(self, model: Model, stepped: Stepped, now: float) -> list[Effect]:
        self._busy = False
        turn, steps, step_s, running = self.turn, stepped.steps, stepped.step_s, model.queues.running
        began = now - steps * step_s
        if self.account is not None:
            book_step(self.account, model, turn, began, now)
        assert turn is not None and turn.holder == model.key, f"{model.key} stepped out of turn"
        turn.steps, turn.left, turn.ahead = turn.steps + steps, turn.left - steps, stepped.ahead
        model.observe(stepped.outputs, stepped.step_s)
        model.used_at, model.loads.came_at, model.demand.fresh = now, -_NEVER, False
        if stepped.held != self.pages.of(model.key):
            self.pages.settle(model.key, stepped.held)
            self._changed = True
        effects, ended = self.requests.deliver(model, stepped, now)
        self._changed = self._changed or ended
        if not stepped.busy and running:
            # The engine forgot requests still counted as running: a bug of an engine must not silence a client.
            effects += self.requests.lose(running, "the engine ended without this request", now, suspect=True)
            self._changed = True
        if not stepped.outputs and running and model.short(stepped.held, self.pages.total, self._room_pages) > 0:
            model.demand.stuck = self._changed = True
        return effects

    # ── deciding ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def decide(self, now: float) -> list[Effect]:
        """Effects to carry out now that the device is free: memory effects, then at most one device effect."""
        assert not self._busy, "the device is asked for its next effect before it answered the last"
        turn = self.turn
        goes_on = turn is None or (turn.left > 0 and now < turn.until and not self._rooms.upkeep)
        if not self._changed and now < self._tick_at and goes_on:
            return [] if turn is None else self._step(self.models[turn.holder], turn.left)
        if turn is not None and turn.ahead:  # decisions know every token made: the step under way ends first
            turn.ahead = False
            if self.models[turn.holder].phase is Phase.RESIDENT:
                return self._step(self.models[turn.holder], 1)
        self._changed = False
        had_us = {} if self.account is None else self.account.take()
        if self._turns.shares:
            self.requests.settle(had_us)
        effects = self._tidy(now)
        ordered = self._turns.order(self._rooms.working.values(), now)
        order, self._room_pages = ordered.models, ordered.room_pages
        chosen = self._turns.next(order, turn, now)
        if self._rooms.unbuilt:
            effects += self._room_to_build(next(iter(self._rooms.unbuilt.values())), order, chosen, now)
        effects += self._bring_in(order, chosen, now)
        if self._rooms.upkeep and not (self._step_due and chosen and self._rooms.upkeep_waits(order, chosen[0])):
            if self.account is not None and not len(self.requests):
                self.account.idle(now)
            self._busy = True
            return [*effects, self._keep_up()]
        if chosen is not None and not chosen[0].can_step:  # the model was parked for another model
            chosen = self._turns.next(order, turn, now)
        if chosen is None:
            self.turn = None if not len(self.requests) else turn
            if self.turn is not None:
                self.turn.left = 0
            return effects
        model, steps = self.models[chosen[0].key], chosen[1]
        effects += self._make_ready(model, order, now)
        if effects and isinstance(effects[-1], Add):  # the engine will tell the pages that the added requests need
            return effects
        if not model.queues.running:  # no request's prompt fits: the model waits for pages
            model.demand.stuck, model.demand.fresh, self._changed = True, False, True
            return effects + self.decide(now)
        self._begin(model, steps, now)
        return effects + self._step(model, steps)

    def _keep_up(self) -> DeviceEffect:
        model = self._rooms.first_upkeep()
        if model.phase is Phase.CLOSING:
            return Close(model.key)
        if model.phase is Phase.CHECKING:
            return Check(model.key)
        if model.phase is Phase.COLD:
            self._enter(model, Phase.BUILDING)
        return StageImage(model.spec, model.staging.later) if model.stages else Build(model.spec)

    def _tidy(self, now: float) -> list[Effect]:
        """Retry failed models, park idle models, evict sleeping models, fail impossible builds; set the next tick."""
        effects: list[Effect] = []
        self._tick_at = _NEVER
        for model in list(self._rooms.resting.values()):
            due_at = model.due_at()
            if due_at is not None and now < due_at:
                self._tick_at = min(self._tick_at, due_at)
            elif due_at is not None and model.phase is Phase.FAILED:
                self._want(model)
            elif due_at is not None:
                effects += self._move([Park(model.key)], now)
            elif model.phase is Phase.STAGED and model.wish is Wish.ASLEEP and self.pages.of(model.key).weights:
                effects += self._move([Evict(model.key, self.pages.of(model.key).weights)], now)
        for model in [one for one in self._rooms.unbuilt.values() if one.demand.build_pages > self.pages.total]:
            effects += self._fail(model, self.pages.too_few_to_build(model.demand.build_pages), now, mends=False)
        return effects + self._make_host_room(now)

    def _make_host_room(self, now: float) -> list[Effect]:
        """Close the engines whose images make room for an image that lacks room, then try the build again."""
        if (step := self._host_room.decide(self.models.values(), now)) is None:
            return self._stage(now)
        self._tick_at = min(self._tick_at, step.tick_at)
        for model in step.going:
            self._enter(model, Phase.CLOSING)
        if step.fails:
            return self._fail(step.model, step.error, now)
        if step.retries:
            self._rooms.wait_for_host(step.model, False)
        return []

    def _stage(self, now: float) -> list[Effect]:
        """Begin to stage a model, if a model is due and no other model comes up."""
        quiet = self._fetching is None and not (self._rooms.upkeep or self._rooms.unbuilt)
        if quiet and (model := self._staging.due(self.models.values(), self.pages.free, now)) is not None:
            self.pages.book(model.key, weights=model.demand.build_pages)
            self._enter(model, Phase.BUILDING)
        self._tick_at = min(self._tick_at, self._staging.next_at(now))
        return []

    # ── turns ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, model: Model, steps: int, now: float) -> None:
        """Allow the model `steps` more steps of its turn. If another model holds the turn, begin a new turn."""
        turn = self.turn
        if turn is None or turn.holder != model.key:
            self.switches, self._turn_no = self.switches + (turn is not None), self._turn_no + 1
            model.record.turns, model.record.turn_no = model.record.turns + 1, self._turn_no
            turn = self.turn = Turn(model.key, now)
            self._changed = True  # the order of turns has changed
        queues = model.queues
        turn.left, turn.until = steps, now + LATE * steps * model.costs.step(len(queues.running), queues.context)

    def _step(self, model: Model, steps: int) -> list[Effect]:
        self._busy, self._step_due = True, False
        return [Step(model.key, 1 if self._rooms.upkeep else steps)]

    def _make_ready(self, model: Model, order: Sequence[ModelView], now: float) -> list[Effect]:
        """Get pages for the model's next step, and add admitted requests that fit: a join never overflows the cache."""
        held, most = self.pages.of(model.key), self.pages.total - model.demand.weights_pages
        admitted = self._turns.admit(model, now) if model.queues.waiting and not model.demand.retires else ()
        wanted = held.kv_wanted
        if admitted:
            wanted = model.kv_joined(held, model.kv.each([request.context + 1 for request in admitted]))
        effects: list[Effect] = []
        needed, model.demand.cramped = min(wanted, most), False
        if needed > held.kv:
            # More pages than the next step needs: the model asks less often.
            ahead = AHEAD * (len(model.queues.running) + len(admitted))
            wanted = min(wanted + model.kv_pages(ahead * model.kv.growth(0)), most)
            effects += self._move(grow(model, wanted - held.kv, self._pool(order, None, now)), now)
            model.demand.cramped = self.pages.of(model.key).kv < needed
        for request in fitting(model, admitted, held, self.pages.of(model.key).kv, most):
            self.requests.join(model, request)
            effects.append(Add(request))
        return effects

    # ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _pool(self, order: Sequence[ModelView], chosen: tuple[ModelView, int] | None, now: float) -> PoolSnapshot:
        """What a choice of pages is made from; `chosen`: the model that steps meanwhile, if any."""
        idle = [self.models[key] for key in self.pages.held if key not in self._rooms.working]
        yields = partial(self._turns.yields, turn=self.turn, now=now)
        return PoolSnapshot(order, idle, self.pages, self._room_pages, chosen and chosen[0], yields, now)

    def _bring_in(
        self, order: Sequence[ModelView], chosen: tuple[ModelView, int] | None, now: float
    ) -> list[MemoryEffect]:
        for needy in in_turn(order, self._turns.relieves):
            if self._fetching is not None and needy.phase is Phase.STAGED:
                break
            taken = bring_in(needy, self._pool(order, chosen, now))
            if taken is not None:
                return self._move(taken, now)
        return []

    def _room_to_build(
        self, model: Model, order: Sequence[ModelView], chosen: tuple[ModelView, int] | None, now: float
    ) -> list[Effect]:
        """Make room in the pool for a build that takes pages. Once there is room, the build begins, with the pages."""
        wanted = model.demand.build_pages
        made = room_to_build(model, wanted, self._pool(order, chosen, now))
        effects: list[Effect] = [*self._move([*made], now)]
        if wanted <= self.pages.free:
            self.pages.book(model.key, weights=wanted)
            self._enter(model, Phase.BUILDING)
        return effects

    def _move(self, effects: list[MemoryEffect], now: float) -> list[MemoryEffect]:
        """Book the pages of the effects, so that no page is promised twice, and return the effects."""
        for effect in effects:
            model, key = self.models[effect.model], effect.model
            match effect:
                case Park():
                    self._enter(model, Phase.PARKING)
                    model.loads.left_at = now
                case Fetch(_, kv_pages):
                    held = self.pages.of(key)
                    missing = model.demand.weights_pages - held.weights
                    self.pages.book(key, weights=missing, kv=kv_pages - held.kv)
                    self._enter(model, Phase.FETCHING)
                    self._fetching, model.demand.missing_bytes = key, missing * self.pages.page_bytes
                case Evict(_, pages):
                    self.pages.book(key, weights=-pages)
                case Shrink(_, pages):
                    self.pages.book(key, kv=-pages)
                case Grow(_, pages):
                    self.pages.book(key, kv=pages)
                    model.demand.stuck, model.demand.cramped, model.demand.fresh = False, False, True
        return effects

    def check(self) -> None:
        """Assert the invariants. Tests call `check` after every event, the device process when the device is idle."""
        self.requests.check(self.models.values())
        if self.account is not None:
            self.account.check()
        self._rooms.check(self.models.values(), self.pages, self._fetching)
        assert set(self.pages.held) <= set(self.models), "pages are held by a model that is not there"
        self.pages.check()
