"""Simulated device: the production `Instance` decides, and its effects take the time of a profile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from runtime.core.device.events import (
    Abort,
    Add,
    Arrived,
    Build,
    BuildFailed,
    Built,
    Check,
    Checked,
    Close,
    Closed,
    Effect,
    Event,
    Evict,
    Fetch,
    Fetched,
    Grow,
    Lose,
    Ordered,
    Park,
    Parked,
    Placed,
    Shrink,
    StageImage,
    Step,
    Stepped,
    Tell,
    Told,
)
from runtime.core.device.instance import Instance
from runtime.core.device.model import Model, Phase
from runtime.core.device.pages import Pages
from runtime.core.device.request import ModelKey, Request, RequestId
from runtime.core.engine import WeightSource
from runtime.core.fleet.rebalance import LackingModel, Load, RequestMemory, load_of
from runtime.core.fleet.roles import RoleView
from runtime.core.ledgers.device_time import DeviceTime
from runtime.core.turns.turn import Turns
from runtime.sim.engine import SimulatedEngine
from runtime.sim.report import LaneSpan
from runtime.sim.simulation import Simulation

CHECK_STEPS = 8  # tokens of the golden question


class StepSegment:
    """Consecutive steps of a batch, of equal length."""

    __slots__ = ("model", "began", "steps", "step_s")

    def __init__(self, model: ModelKey, began: float, steps: int, step_s: float) -> None:
        self.model, self.began, self.steps, self.step_s = model, began, steps, step_s


class SimulatedDevice:
    """A device of the simulated world: the `Instance`, its engines, and effects under way."""

    def __init__(self, world: Simulation, number: int, turns: Turns) -> None:
        profile = world.profile_of(number)
        self.world, self.number = world, number
        self.profile, self.costs = profile, world.costs_on(number)
        pages = Pages(profile.memory_bytes // profile.page_bytes, profile.page_bytes)
        account = DeviceTime.open(world.now) if len(world.workload.tenants) > 1 else None
        by_history = profile.tiers is not None and profile.tiers.by_history
        self.instance = Instance(turns, pages, lambda spec: self.costs[ModelKey(spec.key)], account, by_history)
        self.engines: dict[ModelKey, SimulatedEngine] = {}
        self._batched_tokens = profile.batched_tokens
        self.busy_s = self.switching_s = self.loading_s = 0.0
        self.prompt_s = 0.0  # time that the prompts of the requests that came take
        self.fetches = 0
        self._in_host_cache: dict[ModelKey, int] = {}  # bytes of each image, if the profile has tiers
        self._read_at: dict[ModelKey, float] = {}  # when the reading of a model's image from disk ends, until a fetch
        self._new: set[ModelKey] = set()  # engines that no check has asked yet
        self.disk_loads = 0  # images that came from disk
        self._disk_at = 0.0  # when the disk has read everything asked for so far
        self._segment: StepSegment | None = None
        self._occupied = False
        self._last: ModelKey | None = None  # model of the last step
        self._tick_at = math.inf
        self.gone = False  # the device died, hangs or retired: no steps, no events
        self._unheard: list[Request] = []  # requests that came after the device was gone
        self._between: list[tuple[Callable[..., None], Any]] = []  # to be done after the step under way
        self._began = world.now

    def arrive(self, request: Request) -> None:
        if self.gone:
            self._unheard.append(request)
            return
        if request.model not in self.instance.models:
            self._place(request.model)
        if not request.handed:
            self.prompt_s += self.costs[request.model].prefill(request.context)
        self.happen(Arrived(request))

    def _place(self, model: ModelKey) -> None:
        """Places a model with an engine ready, as engines are built only once; the weights are not on the device."""
        world = self.world
        self.engines[model] = SimulatedEngine(self.costs[model], self.profile.page_bytes, self.profile.block_tokens)
        self.instance.hear(Placed(world.specs[model], prove=False), world.now)
        tiers, loads = self.profile.tiers, self.instance.models[model].loads
        if tiers is not None and tiers.fetched is not None:
            loads.proved, loads.fetches = False, tiers.fetched

    # ── the fleet's ───────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self) -> Load:
        """Load that the device reports to the cluster."""
        world, weights, shares = self.world, 0, {}
        for model in self.instance.models.values():
            if not model.has_requests:
                continue
            costs = self.costs[model.key]
            shares[model.key] = costs.step(
                len(model.queues.running) + len(model.queues.waiting), model.queues.context
            ) / _tbt_s(model)
            weights += costs.weight_bytes if model.phase is Phase.RESIDENT else 0
        kv_bytes = float(self.profile.memory_bytes - weights)
        usages = self.usages()
        load = load_of(self.number, world.now, kv_bytes, usages, shares)
        if world.cluster.rules.roles is not None:
            load = msgspec.structs.replace(load, roles=self._role_view(shares))
        if load.used_bytes + load.queued_bytes <= kv_bytes:
            return load
        return msgspec.structs.replace(load, lacking=self._lacking(usages))

    def _role_view(self, shares: dict[ModelKey, float]) -> RoleView:
        tokens = on_time = 0
        for total in self.instance.requests.attainment.totals.values():
            tokens += total.tokens
            on_time += total.on_time
        return RoleView(
            device=self.number,
            at=self.world.now,
            role=self.world.cluster.devices[self.number].role,
            memory_bytes=self.profile.memory_bytes,
            prompt_s=self.prompt_s,
            tokens=tokens,
            late=tokens - on_time,
            busy=sum(shares.values()),
            weights={model: self.costs[model].weight_bytes for model in shares},
            given=True,
        )

    def _lacking(self, usages: list[RequestMemory]) -> dict[ModelKey, LackingModel]:
        counts, needed = dict[ModelKey, int](), dict[ModelKey, float]()
        for usage in usages:
            counts[usage.model] = counts.get(usage.model, 0) + 1
            needed[usage.model] = needed.get(usage.model, 0.0) + usage.kv_bytes
        weights = {model: self.costs[model].weight_bytes for model in counts}
        return {
            model: LackingModel(counts[model], kv_bytes, weights[model])
            for model, kv_bytes in needed.items()
            if kv_bytes > self.profile.memory_bytes - weights[model]
        }

    def held_bytes(self) -> float:
        """Bytes of keys and values of running requests on the device."""
        return sum([usage.kv_bytes for usage in self.usages() if not usage.waits])

    def usages(self) -> list[RequestMemory]:
        """Memory use of each request on the device. Requests of a parked model use no memory."""
        moving, found = self.world.moving, []
        for model in self.instance.models.values():
            if not model.has_requests:
                continue
            kv, there = self.costs[model.key].kv, model.phase is Phase.RESIDENT
            for request in model.queues.running.values():
                rank, moves = request.objective.priority, request.id in moving
                holds = kv.bytes(request.context) if there else 0.0
                grows = kv.growth(request.context) if there else 0.0
                found.append(RequestMemory(request.id, model.key, rank, holds, grows, moves=moves))
            for request in sorted(model.queues.waiting.values(), key=_came):
                rank, moves, needs = request.objective.priority, request.id in moving, kv.bytes(request.context + 1)
                found.append(RequestMemory(request.id, model.key, rank, needs, kv.growth(request.context), True, moves))
        return found

    def request(self, key: ModelKey, id: RequestId) -> Request:
        model = self.instance.models[key]
        return model.queues.running.get(id) or model.queues.waiting[id]

    def has(self, request: Request) -> bool:
        model = self.instance.models[request.model]
        return request.id in model.queues.running or request.id in model.queues.waiting

    def wake(self, key: ModelKey) -> None:
        if key not in self.instance.models:
            self._place(key)
        if self.instance.models[key].phase is not Phase.RESIDENT:
            self.happen(Ordered(key, awake=True))

    def between_steps(self, key: ModelKey, act: Callable[..., None], what: Any) -> None:
        if self._segment is None or self._segment.model != key:
            act(what)
        else:
            self._between.append((act, what))
            self._cut(self._segment)

    def stop(self) -> None:
        """Stops the device at once. Only completed steps of the batch under way count."""
        segment, self._segment, self._tick_at = self._segment, None, math.inf
        if segment is not None and segment.steps:
            done = min(segment.steps, int((self.world.now - segment.began) / segment.step_s + 1e-6))
            if done > 0:
                self._make(StepSegment(segment.model, segment.began, done, segment.step_s))
        self.gone = True
        self._do_between()

    def left_behind(self) -> list[Request]:
        """Requests not ended yet, those that came after the loss of the device included."""
        models = self.instance.models.values()
        return [
            *(each for model in models for each in (*model.queues.running.values(), *model.queues.waiting.values())),
            *self._unheard,
        ]

    def _do_between(self) -> None:
        between, self._between = self._between, []
        for act, what in between:
            act(what)

    # ── what happens ──────────────────────────────────────────────────────────────────────────────────────────────────

    def happen(self, event: Event) -> None:
        """Hears an event at once. Decisions follow when the device is free, at the latest after the step under way."""
        self._carry_out(self.instance.hear(event, self.world.now))
        if self._segment is not None:
            self._cut(self._segment)
        elif not self._occupied:
            self._go()

    def _cut(self, segment: StepSegment) -> None:
        """Shortens a segment to end with the step under way; the device decides then."""
        done = max(1, math.ceil((self.world.now - segment.began) / segment.step_s - 1e-6))
        if done < segment.steps:
            self._segment = StepSegment(segment.model, segment.began, done, segment.step_s)
            self.world.at(segment.began + done * segment.step_s, self._stepped, self._segment)

    def _stepped(self, segment: StepSegment) -> None:
        if segment is not self._segment:  # the segment was cut
            return
        self._segment, self._occupied = None, False
        self._make(segment)
        if self._between:
            self._do_between()
        self._go()

    def _make(self, segment: StepSegment) -> None:
        """Makes the steps of a segment and has the `Instance` hear the outputs."""
        model, steps = segment.model, segment.steps
        engine = self.engines[model]
        self.busy_s += steps * segment.step_s
        outputs = engine.run(steps, self._batched_tokens)
        if self.world.spans is not None:
            self._show("compute", model, "steps", segment.began)
        stepped = Stepped(model, outputs, bool(engine.streams), engine.held, segment.step_s, steps or 1)
        self._carry_out(self.instance.hear(stepped, self.world.now))

    def _tick(self, when: float) -> None:
        if when == self._tick_at and not self._occupied:
            self._tick_at = math.inf
            self._go()

    def _go(self) -> None:
        """Has the `Instance` decide while the device is free."""
        if self.gone:
            return
        instance, now = self.instance, self.world.now
        while not self._occupied:
            effects = instance.decide(now)
            if not effects:
                tick_at = instance.next_tick()
                if tick_at is not None and tick_at != self._tick_at:
                    self._tick_at = tick_at
                    self.world.at(tick_at, self._tick, tick_at)
                return
            self._carry_out(effects)
        if self.world.checks:
            self.check()

    # ── carrying out ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Tell):  # the most frequent effect: for every stream and segment
                if effect.output.finish is not None:
                    self.world.ended(effect.request, self.number)
                continue
            match effect:  # the most frequent effects first
                case Step(model, steps):
                    self._step(model, steps)
                case Evict(model, pages):
                    engine = self.engines[model]
                    if engine.weights == engine.weights_pages:
                        self.world.cluster.left(self.number, model)
                    engine.weights -= pages
                    engine.tell()
                case Add(request):
                    engine = self.engines[request.model]
                    engine.add(request, request.max_tokens)
                    self._hear(Told(request.model, engine.tell()))
                case Park(model):
                    engine = self.engines[model]
                    engine.here = False
                    self._later(engine.kv_bytes * engine.costs.copy_s_per_byte, self._parked, model)
                case Fetch():
                    self._fetch(effect)
                case Shrink(model, pages):
                    engine = self.engines[model]
                    engine.kv -= pages
                    engine.tell()
                case Grow(model, pages):
                    engine = self.engines[model]
                    engine.kv += pages
                    self._hear(Told(model, engine.tell()))
                case Abort(model, ids):
                    engine = self.engines[model]
                    for id in ids:
                        engine.abort(id)
                    self._hear(Told(model, engine.tell()))
                case Check(model):
                    engine = self.engines[model]
                    took_s = engine.costs.prefill(16) + CHECK_STEPS * engine.costs.step(1, 24)
                    if model in self._new:  # a new engine is asked at its last positions, too
                        self._new.remove(model)
                        took_s *= 2
                    self._occupied = True
                    self._later(took_s, self._checked, (model, took_s))
                case Build(spec):
                    self._build(ModelKey(spec.key))
                case StageImage(spec):
                    self._build(ModelKey(spec.key))
                case Close(model):
                    self._close(model)
                case Lose(request):
                    self.world.ended(request, self.number)

    def _hear(self, event: Event) -> None:
        self._carry_out(self.instance.hear(event, self.world.now))

    def _later(self, after_s: float, act: Callable[..., None], what: Any) -> None:
        self.world.at(self.world.now + after_s, self._then, (act, what))

    def _then(self, what: tuple[Callable[..., None], Any]) -> None:
        if not self.gone:
            what[0](what[1])

    def _step(self, model: ModelKey, most: int) -> None:
        engine, began = self.engines[model], self.world.now
        assert engine.here, f"{model} steps and is not there"
        if model != self._last:
            began += engine.costs.switch_s
            self.switching_s += engine.costs.switch_s
            self._last = model
        steps, step_s = engine.plan(most, self._batched_tokens)
        self._occupied = True
        self._segment = StepSegment(model, began, steps, step_s)
        self.world.at(began + (steps or 1) * step_s, self._stepped, self._segment)

    def _build(self, model: ModelKey) -> None:
        """Makes the engine around the model's image; the image comes from disk unless all images fit the host cache."""
        engine, tiers = self.engines[model], self.profile.tiers
        if tiers is None:
            self._hear(Built(model, 0.0, engine.weights_pages, 1, engine.tell()))
            return
        size = engine.weights_pages * self.profile.page_bytes
        lacks = size + sum(self._in_host_cache.values()) - tiers.host_cache_bytes
        if lacks > 0:
            self._hear(BuildFailed(model, "the host cache has no room", lacks if self._in_host_cache else 0))
            return
        self._in_host_cache[model] = size
        self.disk_loads += 1
        self._disk_at = max(self._disk_at, self.world.now) + size / tiers.disk_bytes_per_s
        self._read_at[model] = self._disk_at
        self._occupied = True
        self._later(tiers.build_s, self._built, model)

    def _close(self, model: ModelKey) -> None:
        tiers = self.profile.tiers
        if tiers is None or not tiers.close_s:
            self._hear(self._dropped(model))
            return
        self._occupied = True
        self._later(tiers.close_s, self._closed, model)

    def _closed(self, model: ModelKey) -> None:
        self._occupied = False
        self.happen(self._dropped(model))

    def _dropped(self, model: ModelKey) -> Closed:
        """Drops the engine of a model; the image leaves the host cache."""
        engine = self.engines[model]
        if engine.weights == engine.weights_pages:
            self.world.cluster.left(self.number, model)
        engine.weights = engine.kv = 0
        engine.here = False
        engine.tell()
        self._in_host_cache.pop(model, None)
        self._read_at.pop(model, None)
        self._new.discard(model)
        return Closed(model)

    def _built(self, model: ModelKey) -> None:
        assert self.profile.tiers is not None
        engine, took_s = self.engines[model], self.profile.tiers.build_s
        self._occupied = False
        self._new.add(model)
        self.happen(Built(model, took_s, engine.weights_pages, 1, engine.tell(), source=WeightSource.DISK))

    def _fetch(self, fetch: Fetch) -> None:
        engine = self.engines[fetch.model]
        missing = (engine.weights_pages - engine.weights) * self.profile.page_bytes
        engine.weights, engine.kv = engine.weights_pages, fetch.kv_pages
        took_s = engine.costs.load(missing) + engine.kv_bytes * engine.costs.copy_s_per_byte
        if (read_at := self._read_at.pop(fetch.model, None)) is not None:  # the copy follows the reading
            took_s = max(took_s, read_at - self.world.now)
        self.fetches += 1
        self.loading_s += took_s
        self.world.cluster.loads(self.number, fetch.model)
        self._later(took_s, self._fetched, (fetch.model, self.world.now))

    def _fetched(self, what: tuple[ModelKey, float]) -> None:
        model, began = what
        engine = self.engines[model]
        engine.here = True
        self.world.cluster.loaded(self.number)
        self._show("copy", model, "load", began)
        self.happen(Fetched(model, self.world.now - began, engine.tell()))

    def _parked(self, model: ModelKey) -> None:
        engine = self.engines[model]
        engine.kv = 0
        self.happen(Parked(model, engine.tell()))

    def _checked(self, what: tuple[ModelKey, float]) -> None:
        model, took_s = what
        self._occupied = False
        self.busy_s += took_s
        self.happen(Checked(model, None, self.engines[model].tell()))

    def _show(self, lane: Literal["compute", "copy"], model: ModelKey, what: str, began: float) -> None:
        if self.world.spans is not None:
            self.world.spans.append(LaneSpan(self.number, lane, model, what, began, self.world.now))

    def check(self) -> None:
        """Asserts invariants that hold between events: page books, and no more time used than passed."""
        self.instance.check()
        assert self.busy_s + self.switching_s <= self.world.now - self._began + 1e-6, (
            "more time was used than there was"
        )
        for model, engine in self.engines.items():
            booked = self.instance.pages.of(model)
            assert (booked.weights, booked.kv) == (engine.weights, engine.kv), f"the books are wrong about {model}"


def _came(request: Request) -> tuple[float, RequestId]:
    return request.arrived_at, request.id


def _tbt_s(model: Model) -> float:
    """TBT of the model's requests, equal for each request in a simulation."""
    request = next(iter(model.queues.running.values()), None) or next(iter(model.queues.waiting.values()))
    return request.objective.tbt_s
