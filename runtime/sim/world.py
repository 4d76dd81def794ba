"""The world in virtual time: devices that take as long as a profile says, driven by the machines of production."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from runtime.cluster import Cluster
from runtime.costs import ModelCosts, Profile
from runtime.events import (
    Abort,
    Add,
    Arrived,
    Build,
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
    Park,
    Parked,
    Placed,
    Shrink,
    Step,
    Stepped,
    Tell,
    Told,
)
from runtime.instance import Instance
from runtime.pages import Pages
from runtime.policy.dispatch import Assigned, Dispatch
from runtime.policy.turns import Turns
from runtime.request import ModelKey, Objective, Request, request_id
from runtime.sim.engine import Engine
from runtime.sim.report import Span
from runtime.sim.workload import Workload
from store.wire import EngineSpec

CHECK_STEPS = 8  # tokens of the golden question
_MOMENT_S = 1e-9  # what rounding makes of one


class Result(msgspec.Struct, frozen=True):
    """Of the requests that came after the warm-up."""

    token_attainment: float
    first_token_attainment: float
    min: float
    ttft_p50_s: float
    ttft_p99_s: float
    requests: int
    finished: float  # share of all
    events: int
    busy: float  # share of the devices' time in which they stepped
    loading: float  # in which weights were on their way
    fetches_per_s: float  # and device


class World:
    """Some devices, a workload, and the time."""

    def __init__(
        self,
        workload: Workload,
        profile: Profile,
        turns: Callable[[], Turns],
        dispatch: Dispatch,
        devices: int,
        objective: Objective,
        spans: list[Span] | None = None,
        checks: bool = False,
    ) -> None:
        self.now = 0.0
        self.events = 0
        self.workload, self.profile, self.checks, self.spans = workload, profile, checks, spans
        self.costs = {ModelKey(size.name): profile.costs(size) for size in workload.models}
        self.specs = {ModelKey(size.name): _spec(size.name, profile.costs(size)) for size in workload.models}
        self.cluster = Cluster(devices, self.costs)
        self.devices = [Device(self, number, turns()) for number in range(devices)]
        self.dispatch, self._objective = dispatch, objective
        self.requests: list[Request] = []
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._count = 0

    def at(self, when: float, act: Callable[..., None], what: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, act, what))

    def run(self, drain_s: float) -> None:
        """All requests, and so long after the last came."""
        times = self.workload.at_s.tolist()
        columns = (self.workload.model, self.workload.prompt_tokens, self.workload.output_tokens)
        rows = zip(times, *(column.tolist() for column in columns), strict=True)
        names = [ModelKey(size.name) for size in self.workload.models]
        heap, pop, end = self._heap, heapq.heappop, (times[-1] if times else 0.0) + drain_s
        for stream, (at, model, prompt, output) in enumerate(rows):
            while heap and heap[0][0] <= at:
                self.now, _, act, what = pop(heap)
                self.events += 1
                act(what)
            self.now = at
            self.events += 1
            self._arrive(stream, names[model], prompt, output)
        while heap and heap[0][0] <= end:
            self.now, _, act, what = pop(heap)
            self.events += 1
            act(what)
        self.now = end

    def _arrive(self, stream: int, model: ModelKey, prompt: int, output: int) -> None:
        request = Request(
            request_id("", stream), "", stream, model, b"", self.now, prompt, output, self._objective, model
        )
        self.requests.append(request)
        self._assign(self.dispatch.arrived(request, self.cluster, self.now))

    def _assign(self, all_assigned: Sequence[Assigned]) -> None:
        for request, number in all_assigned:
            self.cluster.assigned(request, number)
        for request, number in all_assigned:
            self.devices[number].arrive(request)

    def ended(self, request: Request, number: int) -> None:
        """A device has done its part of it, or lost it."""
        self.cluster.ended(request, number)
        more = self.dispatch.ended(Assigned(request, number), self.cluster, self.now)
        if more:  # the device is in the middle of hearing what it made
            self.at(self.now, self._assign, more)

    def result(self, warm_s: float) -> Result:
        counted = [request for request in self.requests if request.arrived_at >= warm_s]
        owed = sum(request.max_tokens for request in counted)
        kept = sum(request.progress.sent - request.progress.late for request in counted)
        on_time = [request.sent > 0 and not request.progress.first_late for request in counted]
        ttfts = sorted(request.progress.first_at - request.arrived_at for request in counted)
        token, first = kept / max(1, owed), sum(on_time) / max(1, len(counted))
        count = len(self.devices)
        return Result(
            token_attainment=token,
            first_token_attainment=first,
            min=min(token, first),
            ttft_p50_s=_quantile(ttfts, 0.5),
            ttft_p99_s=_quantile(ttfts, 0.99),
            requests=len(counted),
            finished=sum(request.sent >= request.max_tokens for request in self.requests) / max(1, len(self.requests)),
            events=self.events,
            busy=sum(device.busy_s for device in self.devices) / count / self.now,
            loading=sum(device.loading_s for device in self.devices) / count / self.now,
            fetches_per_s=sum(device.fetches for device in self.devices) / count / self.now,
        )


class Segment:
    """Steps of one batch, one after the other."""

    __slots__ = ("model", "began", "steps", "step_s")

    def __init__(self, model: ModelKey, began: float, steps: int, step_s: float) -> None:
        self.model, self.began, self.steps, self.step_s = model, began, steps, step_s


class Device:
    """One device: the machine, and what it asked for."""

    def __init__(self, world: World, number: int, turns: Turns) -> None:
        profile = world.profile
        self.world, self.number = world, number
        pages = Pages(profile.memory_bytes // profile.page_bytes, profile.page_bytes)
        self.instance = Instance(turns, pages, lambda spec: world.costs[ModelKey(spec.key)])
        self.engines: dict[ModelKey, Engine] = {}
        self._batched_tokens = profile.batched_tokens
        self.busy_s = self.switching_s = self.loading_s = 0.0
        self.fetches = 0
        self._segment: Segment | None = None
        self._occupied = False
        self._last: ModelKey | None = None  # that stepped
        self._tick_at = math.inf

    def arrive(self, request: Request) -> None:
        if request.model not in self.instance.models:
            self._place(request.model)
        self._happen(Arrived(request))

    def _place(self, model: ModelKey) -> None:
        """Its engine stands ready on every device, as engines are built once; only its weights are away."""
        world = self.world
        self.engines[model] = Engine(world.costs[model], world.profile.page_bytes)
        self.instance.hear(Placed(world.specs[model], prove=False), world.now)

    # ── what happens ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _happen(self, event: Event) -> None:
        """Heard at once; decided on when the device is free, between two steps at the latest."""
        self._carry_out(self.instance.hear(event, self.world.now))
        if self._segment is not None:
            self._cut(self._segment)
        elif not self._occupied:
            self._go()

    def _cut(self, segment: Segment) -> None:
        """After the step that is under way there is something to decide."""
        done = max(1, math.ceil((self.world.now - segment.began) / segment.step_s - 1e-6))
        if done < segment.steps:
            self._segment = Segment(segment.model, segment.began, done, segment.step_s)
            self.world.at(segment.began + done * segment.step_s, self._stepped, self._segment)

    def _stepped(self, segment: Segment) -> None:
        if segment is not self._segment:  # it was cut
            return
        self._segment, self._occupied = None, False
        model, steps = segment.model, segment.steps
        engine = self.engines[model]
        self.busy_s += steps * segment.step_s
        outputs = engine.run(steps, self._batched_tokens)
        if self.world.spans is not None:
            self._show("compute", model, "steps", segment.began)
        stepped = Stepped(model, outputs, bool(engine.streams), engine.held, segment.step_s, steps or 1)
        self._carry_out(self.instance.hear(stepped, self.world.now))
        self._go()

    def _tick(self, when: float) -> None:
        if when == self._tick_at and not self._occupied:
            self._tick_at = math.inf
            self._go()

    def _go(self) -> None:
        """The device is free."""
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
            if isinstance(effect, Tell):  # the one that comes for every stream and segment
                if effect.output.finish is not None:
                    self.world.ended(effect.request, self.number)
                continue
            match effect:  # in the order of how often they come
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
                    self._occupied = True
                    self.busy_s += took_s
                    self._later(took_s, self._checked, model)
                case Build(spec):
                    engine = self.engines[ModelKey(spec.key)]
                    self._hear(Built(ModelKey(spec.key), 0.0, engine.weights_pages, 1, engine.tell()))
                case Close(model):
                    self._hear(Closed(model))
                case Lose(request):
                    self.world.ended(request, self.number)

    def _hear(self, event: Event) -> None:
        self._carry_out(self.instance.hear(event, self.world.now))

    def _later(self, after_s: float, act: Callable[..., None], what: Any) -> None:
        self.world.at(self.world.now + after_s, act, what)

    def _step(self, model: ModelKey, most: int) -> None:
        engine, began = self.engines[model], self.world.now
        assert engine.here, f"{model} steps and is not there"
        if model != self._last:
            began += engine.costs.switch_s
            self.switching_s += engine.costs.switch_s
            self._last = model
        steps, step_s = engine.plan(most, self._batched_tokens)
        self._occupied = True
        self._segment = Segment(model, began, steps, step_s)
        self.world.at(began + (steps or 1) * step_s, self._stepped, self._segment)

    def _fetch(self, fetch: Fetch) -> None:
        engine = self.engines[fetch.model]
        missing = (engine.weights_pages - engine.weights) * self.world.profile.page_bytes
        engine.weights, engine.kv = engine.weights_pages, fetch.kv_pages
        took_s = engine.costs.load(missing) + engine.kv_bytes * engine.costs.copy_s_per_byte
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
        self._happen(Fetched(model, self.world.now - began, engine.tell()))

    def _parked(self, model: ModelKey) -> None:
        engine = self.engines[model]
        engine.kv = 0
        self._happen(Parked(model, engine.tell()))

    def _checked(self, model: ModelKey) -> None:
        self._occupied = False
        self._happen(Checked(model, None, self.engines[model].tell()))

    def _show(self, lane: Literal["compute", "copy"], model: ModelKey, what: str, began: float) -> None:
        if self.world.spans is not None:
            self.world.spans.append(Span(self.number, lane, model, what, began, self.world.now))

    def check(self) -> None:
        """What holds between any two events."""
        self.instance.check()
        assert self.busy_s + self.switching_s <= self.world.now + 1e-6, "more time was used than there was"
        for model, engine in self.engines.items():
            booked = self.instance.pages.of(model)
            assert (booked.weights, booked.kv) == (engine.weights, engine.kv), f"the books are wrong about {model}"


def _spec(name: str, costs: ModelCosts) -> EngineSpec:
    return EngineSpec(
        key=name,
        path=name,
        digest="",
        architecture="",
        dtype="bfloat16",
        max_model_len=1 << 20,
        weight_bytes=costs.weight_bytes,
        kv_bytes_per_token=round(costs.kv_bytes_per_token),
    )


def _quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0
