"""The device process: carries out the decisions of the Instance machine, one step at a time, on one thread.

The process waits only for work. Between two steps the process reads commands and looks at transfers under way. Tokens
of a step go to the node process through the pipe, which buffers bytes that the kernel does not take at once.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog
from msgspec import structs

from runtime.core.device.events import (
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
    Effect,
    EngineFailed,
    Event,
    Evict,
    Fetch,
    Fetched,
    FetchFailed,
    Grow,
    Lose,
    MoveStep,
    Ordered,
    Park,
    Parked,
    Shrink,
    StageImage,
    Step,
    StepFailed,
    Stepped,
    Tell,
    Unfinished,
    Warmed,
    Withdrawn,
)
from runtime.core.device.instance import Instance
from runtime.core.device.model import Phase
from runtime.core.device.pages import Pages
from runtime.core.device.request import ModelKey, Request, RequestId, request_id
from runtime.core.engine import Engine, ImageLost
from runtime.core.engine import EngineBuilder as Builder
from runtime.core.ledgers.costs import ModelCosts, load_profile, model_size, unknown
from runtime.core.ledgers.device_time import DeviceTime
from runtime.core.ledgers.latency import Clocks
from runtime.core.ledgers.timeline import joined
from runtime.core.turns.registry import POLICIES
from runtime.core.turns.turn import Turns
from runtime.device import asks
from runtime.device.arrivals import departed, request_of
from runtime.device.building import Builds, Checks, ImageOrders, reason
from runtime.device.journal import BeginRecord as JournalBegan
from runtime.device.journal import DecisionJournal, Recorded
from runtime.device.proofs import Proofs
from runtime.device.reading import Readings
from runtime.device.states import ModelStates
from runtime.device.stepping import Stepping
from runtime.group.group import GroupBuild, Others
from runtime.ipc import (
    Began,
    DeviceEnd,
    DeviceReady,
    Forget,
    Formed,
    ImageMade,
    Made,
    Mapped,
    Order,
    Passed,
    Place,
    Quit,
    ShowDevicePages,
    Start,
    State,
    Stop,
    ToDevice,
    Warm,
    Withdraw,
)
from runtime.migration.handover import Handover
from store.contract.views import Stage, Use
from store.contract.wire import Course, Delta, EngineSpec, Residency
from store.files.records import appended
from store.telemetry import observe

log = structlog.get_logger()

STATE_PERIOD_S = 1.0
IMAGE_LOOKS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # pauses of an idle device between looks for images on the disk
STATE_PAUSE_S = 0.05  # least pause between two states while steps are made: models may come and go with every turn
TRANSFER_WAIT_S = 1e-3  # longest wait for a transfer at a time, while the device has no other work
BACKLOG_MOST = 64 << 20  # bytes: if the node does not read, steps stop before the machine's memory is full

Ask = Callable[[Engine], Event | None]


class Device:
    """The loop of the device process.

    `turns` decides the models' turns; `clock` is monotonic, in seconds. Without `costs`, costs are guessed by size.
    `has_image`: whether the host cache has a model's image; None: this process makes the images. `build_pages`: number
    of pages of the pool that a model's build takes. `by_history`: whether images come up from disk before requests
    ask for the models."""

    def __init__(
        self,
        pipe: DeviceEnd,
        turns: Turns,
        build: Builder,
        clock: Callable[[], float],
        stepping: Stepping | None = None,
        costs: Callable[[EngineSpec], ModelCosts] | None = None,
        journal: DecisionJournal | None = None,
        has_image: Callable[[EngineSpec], bool] | None = None,
        build_pages: Callable[[EngineSpec], int] | None = None,
        by_history: bool = False,
    ) -> None:
        costs = costs or _unknown
        pages = Pages(build.pages_total, build.page_bytes)
        self.account = DeviceTime.open(clock())
        self._clocks = Clocks(clock())
        noted = costs if journal is None else journal.noting(costs)
        self.instance = Instance(turns, pages, noted, self.account, by_history)
        self._machine = self.instance if journal is None else Recorded(self.instance, journal)
        self._pipe, self._build, self._clock = pipe, build, clock
        self._stepping = stepping or Stepping(Stepping.create())
        orders = ImageOrders(has_image, self._wanted, pipe.send) if has_image else None
        self._builds = Builds(build, self._stepping, clock, orders, self._irretrievable)
        self._checks = Checks()
        self._proofs = Proofs(build, build_pages)
        self._engines: dict[ModelKey, Engine] = {}
        self._unfit: set[ModelKey] = set()  # models with a failed engine: nothing is asked of the engine but to close
        self._readings = Readings(self._engines)
        self._states = ModelStates(self.instance, self._engines, build.on_disk, clock)
        self._transfers: dict[ModelKey, Ask] = {}  # by model, a call that looks whether the transfer is over
        self._made: dict[str, list[Delta]] = {}
        self._state: State | None = None  # the last state sent
        self._looks = 0  # looks for images on the disk since the last state
        self._state_at, self._moves = 0.0, 0  # time of the last state, and the instance's count of moves then
        self._told_us = self.account.at_us  # the node knows the use of the device's time up to here
        self._stages: list[Stage] = []  # stages of models' ways that the node was not told of yet
        self._quit = False
        self._handover = Handover(
            self.instance,
            self._engines,
            build.hold,
            self._ask,
            self._hear,
            pipe.send,
            self._send_made,
            partial(departed, clock),
        )

    def run(self) -> None:
        self._pipe.send(DeviceReady(self._build.version, self._build.life))
        while not (self._quit or self._pipe.closed):
            for read in self._readings.read():
                self._command(read)
            for command in self._pipe.receive():
                if not self._readings.hold(command):
                    self._command(command)
            self._look_at_transfers()
            self._handover.look()
            effects = self._machine.decide(self._clock())
            if not (effects and isinstance(effects[-1], Step)):
                self._clocks.nobody(self._clock())
            self._report()  # tokens made must not wait for the device
            self._carry_out(effects)
            if not effects and not self._quit:
                self._rest()
            while self._pipe.backlog > BACKLOG_MOST and not self._pipe.closed:
                self._pipe.wait(STATE_PERIOD_S)

    def _command(self, command: ToDevice) -> None:
        match command:
            case Place():
                event: Event = self._proofs.placed(command)
            case Withdraw(model):
                event = Withdrawn(ModelKey(model))
                self._builds.withdraw(ModelKey(model))
            case ImageMade():
                event = self._builds.image_made(command)
            case Start(run, grammar):
                id = request_id(run.gateway, run.stream)
                model = ModelKey(run.model)
                event = Arrived(dataclasses.replace(request_of(run, id, model, self._clock()), grammar=grammar))
            case Stop(gateway, streams):
                event = Cancelled([request_id(gateway, stream) for stream in streams])
                said = self._readings.drop(gateway, streams)
                if said := said + self.instance.requests.last_words(event.requests, self._course):
                    self._made.setdefault(gateway, []).extend(said)
            case Order(model, awake):
                event = Ordered(ModelKey(model), awake)
            case Warm(model, warm):
                event = Warmed(ModelKey(model), warm)
            case Forget(model, salt):
                for key in [key for key in self._engines if model in ("", key)]:
                    self._ask(key, partial(asks.forget, salt))
                return
            case ShowDevicePages():
                self._send_pages()
                return
            case Quit():
                self._quit = True
                return
            case _:
                self._readings.abort(command)
                self._handover.command(command)
                return
        self._hear(event)

    def _wanted(self, model: ModelKey) -> bool:
        return model in self.instance.models and self.instance.models[model].has_requests

    def _course(self, id: RequestId) -> Course | None:
        """Use of a request's time up to now; None if the request is unknown to the clocks."""
        return self._clocks.so_far(id, self._clock())

    def _hear(self, event: Event) -> None:
        now = self._clock()
        effects = self._machine.hear(event, now)
        if not isinstance(event, Stepped):  # Stepped comes for every token, and tells the clocks nothing
            self._follow(event, now)
        self._carry_out(effects)

    def _follow(self, event: Event, now: float) -> None:
        """Tell the clocks of requests and models about an event; a leaving request's last delta is made here."""
        clocks = self._clocks
        match event:
            case Arrived(request):
                clocks.arrived(request, now)
            case Cancelled(requests):
                for id in requests:
                    clocks.ended(id, now)
            case MoveStep("release", _, id):
                clocks.ended(id, now)
            case MoveStep("commit", _, id):
                if (model := self.instance.requests.owner(id)) and (course := clocks.so_far(id, now)):
                    request = model.queues.leaving[id]
                    delta = structs.replace(_billed(Delta(request.stream, [], request.sent), request), course=course)
                    self._made.setdefault(request.gateway, []).append(delta)
            case Withdrawn(key):
                clocks.forget(key)
            case Fetched(key) | Checked(key):
                model = self.instance.models.get(key)
                if model and isinstance(event, Checked):
                    self._proofs.checked(model, event)
                if model and model.phase is Phase.RESIDENT:
                    clocks.is_in(key, model.loads.load_ms / 1e3, now)
                elif not (model and model.phase is Phase.CHECKING):
                    clocks.pauses(key, now)
            case Built() | BuildFailed() | FetchFailed() | EngineFailed() | Closed():
                clocks.pauses(event.model, now)

    # ── carrying out ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, effects: list[Effect]) -> None:
        """Carry out effects in order; the machine hears of each result at once."""
        for effect in effects:
            match effect:
                case Tell():
                    self._tell(effect)
                case Lose(request, error, finish, suspect):
                    course = self._clocks.ended(request.id, self._clock())
                    lost = Delta(request.stream, [], request.sent, finish, error=error, suspect=suspect, course=course)
                    self._made.setdefault(request.gateway, []).append(_billed(lost, request))
                case Step(model, steps):
                    self._hear(self._step(model, steps > 1))
                case Check(model):
                    self._hear(self._check(model))
                case Build(spec):
                    self._clocks.wakes_up(ModelKey(spec.key), self._clock(), built=True)
                    self._hear(self._make(spec))
                case StageImage(spec, later):
                    self._hear(self._make(spec, later))
                case Close(model):
                    self._hear(self._close(model))
                case Add(request):
                    self._clocks.joined(request, self._clock())
                    add = self._handover.add if self._handover.brings(request.id) else asks.add
                    self._ask(request.model, partial(add, request))
                case Abort(model, requests):
                    self._ask(model, partial(asks.abort, model, requests))
                case Fetch(model):
                    self._clocks.wakes_up(model, self._clock())
                    self._ask(model, partial(self._fetch, effect))
                case Park(model):
                    self._ask(model, partial(self._park, model))
                case Evict(model) | Grow(model) | Shrink(model):
                    self._ask(model, partial(asks.resize, effect))

    def _ask(self, model: ModelKey, act: Ask) -> None:
        """Let the model's engine `act`, and hear the resulting event.

        If the engine raises, nothing is asked of the engine from now on but to close."""
        if model in self._unfit:
            return
        try:
            event = act(self._engines[model])
        except Exception as error:
            self._unfit.add(model)
            self._transfers.pop(model, None)
            event = EngineFailed(model, reason("device.engine_failed", model, error))
        if event is not None:
            self._hear(event)

    def _tell(self, tell: Tell) -> None:
        request, made = tell.request, tell.output
        cached, logprobs = made.cached_tokens, made.logprobs
        if made.finish is not None:
            course = self._clocks.ended(request.id, self._clock())
        else:
            course = self._clocks.made(request.id, self._clock) if made.tokens else None
        delta = Delta(
            *(request.stream, made.tokens, tell.at, made.finish, made.stop_reason, logprobs, cached),
            spent=request.spent.shown(),
            course=course,
            written_tokens=made.written_tokens,
        )
        deltas = self._made.get(request.gateway)
        if deltas is None:
            deltas = self._made[request.gateway] = []
        deltas.append(delta)

    # ── carrying out what uses the device ─────────────────────────────────────────────────────────────────────────────

    def _step(self, model: ModelKey, ahead: bool) -> Event:
        if model in self._unfit:
            return StepFailed(model, "it failed before")
        engine = self._engines[model]
        try:
            began = self._clock()
            self._stepping.begin(model, began)
            self._clocks.turn(model, began)
            outputs = engine.step(ahead)
            held, ahead = engine.held(), engine.ahead
            return Stepped(model, outputs, engine.busy(), held, self._clock() - began, ahead=ahead)
        except Exception as error:
            self._unfit.add(model)
            return StepFailed(model, reason("device.step_failed", model, error))
        finally:
            self._stepping.end()

    def _check(self, model: ModelKey) -> Event:
        engine, began = self._engines[model], self._clock()
        try:
            self._stepping.begin(model, began)
            if model in self._unfit:
                return Checked(model, "it failed before", engine.held())
            return self._checks.go_on(model, engine)
        except Exception as error:
            self._unfit.add(model)
            return Checked(model, reason("device.check_failed", model, error), self.instance.pages.of(model))
        finally:
            self._stepping.end()
            self._note("check", model, began)

    def _make(self, spec: EngineSpec, later: tuple[ModelKey, ...] | None = None) -> Event:
        if spec.key not in self._builds:
            self._send_state(Use.PLATFORM)  # a build may take long: tell the node of the beginning
        models = self.instance.models
        spared = None if later is None else [models[key].spec for key in later if key in models]
        event, engine = self._builds.go_on(spec, spared)
        if not isinstance(event, Unfinished):
            self._note("build", event.model, self._builds.ended(event.model))
        if engine is not None:
            self._engines[event.model] = engine
            self._pipe.send(Formed(event.model, engine.kv_form))
        return event

    def _irretrievable(self) -> tuple[ModelKey, ...]:
        """Models whose weights are neither on disk nor in the models' own folders: their images must stay."""
        specs = [model.spec for model in self.instance.models.values() if model.key in self._engines]
        return tuple(ModelKey(s.key) for s in specs if not (os.path.isdir(s.path) or self._build.on_disk(s)))

    def _close(self, model: ModelKey) -> Event:
        """Close an engine. An engine that raises counts as closed; `_rest` finds pages that were not given back."""
        self._unfit.discard(model)
        try:
            self._checks.drop(model)
            self._engines.pop(model).close()
        except Exception as error:
            reason("device.close_failed", model, error)
        return Closed(model)

    # ── transfers ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fetch(self, fetch: Fetch, engine: Engine) -> Event | None:
        began = self._clock()
        try:
            engine.fetch(fetch.kv_pages)
        except Exception as error:
            return _fetch_failed(fetch.model, error, engine)
        self._transfers[fetch.model] = partial(self._arrived, fetch.model, began)
        return None

    def _park(self, model: ModelKey, engine: Engine) -> None:
        engine.park()
        self._transfers[model] = partial(self._parked, model)

    def _look_at_transfers(self) -> None:
        for model, look in list(self._transfers.items()):
            self._ask(model, look)

    def _arrived(self, model: ModelKey, began: float, engine: Engine) -> Event | None:
        try:
            if not engine.arrived():
                return None
        except Exception as error:
            del self._transfers[model]
            return _fetch_failed(model, error, engine)
        del self._transfers[model]
        self._note("fetch", model, began)
        return Fetched(model, self._clock() - began, engine.held())

    def _parked(self, model: ModelKey, engine: Engine) -> Event | None:
        if not engine.parked():
            return None
        del self._transfers[model]
        return Parked(model, engine.held())

    # ── reporting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _report(self) -> None:
        self._send_made()
        since_s = self._clock() - self._state_at
        moved = self.instance.moves != self._moves
        if since_s >= STATE_PERIOD_S or (moved and since_s >= STATE_PAUSE_S):
            self._send_state()

    def _send_made(self) -> None:
        if self._made:
            self._pipe.send(Made(self._made))
            self._made = {}

    def _send_state(self, now: Use | None = None) -> None:
        """Tell the node how the device's time was used, and the device's state if the state has changed.

        `now`: the use of the device that begins now; None: open if there are requests, else idle."""
        self._send_passed(now or (Use.OPEN if len(self.instance.requests) else Use.IDLE))
        self._state_at, self._moves = self._clock(), self.instance.moves
        self._proofs.look(self._state_at)
        pages, turn = self.instance.pages, self.instance.turn
        state = State(
            holder=turn.holder if turn else "",
            switches=self.instance.switches,
            page_bytes=pages.page_bytes,
            pages_total=pages.total,
            pages_used=pages.used,
            device_bytes=self._build.device_bytes(),
            block_tokens=self._build.block_tokens,
            models=self._builds.queued(self.instance.models, self._states.all()),
            attainment=dict(self.instance.requests.attainment.totals),
            accounts=self.account.shown(self._clock(), len(self.instance.requests) > 0),
            wakes={source: times.shown() for source, times in self._clocks.wakes.items()},
            switch_times=self._clocks.switches.shown(),
        )
        if state != self._state:
            self._state, self._looks = state, 0
            self._pipe.send(state)

    def _note(self, stage: str, model: ModelKey, began: float) -> None:
        """Note a stage of a model's way, from `began` (seconds of the clock) until now."""
        self._stages.append(Stage(_us(began), _us(self._clock()) - _us(began), model, stage))

    def _send_passed(self, now: Use) -> None:
        spans = joined(self._told_us, self.account.marks)
        self._pipe.send(Passed(spans, self._stages, now))
        self.account.marks.clear()
        self._told_us, self._stages = self.account.at_us, []

    def _send_pages(self) -> None:
        models = {engine.owners[0]: str(key) for key, engine in self._engines.items()}
        caches = {engine.owners[1]: str(key) for key, engine in self._engines.items()}
        self._pipe.send(Mapped(self._build.page_map(models, caches)))

    def _rest(self) -> None:
        """Sleep until a command comes, a transfer is over or a model's idle time is up: the device has no work."""
        if self._transfers:
            model = next(iter(self._transfers))  # looking again and again would slow down the copies
            self._ask(model, partial(asks.wait, TRANSFER_WAIT_S))
            return
        if self._handover.copying or self._readings:
            self._pipe.wait(TRANSFER_WAIT_S)
            return
        self.instance.check()
        used, booked = self._build.pages_used(), self.instance.pages.used
        assert used == booked, f"the pool counts {used} pages in use, and the models hold {booked}"
        self._send_state()
        wait_s = None if (tick_at := self.instance.next_tick()) is None else tick_at - self._clock()
        if len(self.instance.requests):  # requests wait: the node wants signs that the process lives
            wait_s = _earlier(wait_s, STATE_PERIOD_S)
        if self._looks < len(IMAGE_LOOKS_S) and (self._proofs.due or self._lacks_images()):
            wait_s, self._looks = _earlier(wait_s, IMAGE_LOOKS_S[self._looks]), self._looks + 1
        self._builds.tidy(waited_for=len(self.instance.requests) > 0)
        self._pipe.wait(wait_s)

    def _lacks_images(self) -> bool:
        """Whether the last state has a model outside memory without an image on disk: another process may be writing
        the image."""
        return self._state is not None and any(
            state.residency is Residency.COLD and state.on_disk is not True for state in self._state.models.values()
        )


def _earlier(wait_s: float | None, most_s: float) -> float:
    return most_s if wait_s is None else min(wait_s, most_s)


def _unknown(spec: EngineSpec) -> ModelCosts:
    return unknown(model_size(spec))


def _fetch_failed(model: ModelKey, error: Exception, engine: Engine) -> FetchFailed:
    lost = isinstance(error, ImageLost)
    return FetchFailed(model, reason("device.fetch_failed", model, error), engine.held(), lost)


def _billed(delta: Delta, request: Request) -> Delta:
    return structs.replace(delta, spent=request.spent.shown())


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def main() -> None:
    """`python -m runtime.device BEGAN`, started by the node."""
    began = Began.of(sys.argv[1])
    observe.configure_logs("device")
    from runtime.memory.native import check_library

    check_library()  # a missing library is reported before imports that take seconds
    others = Others(began) if began.tensor_parallel > 1 else None
    from runtime.engine.builder import Builder  # takes seconds, so only this process imports the builder
    from runtime.engine.selfcheck import prepare

    end = DeviceEnd(socket.socket(fileno=began.pipe_fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node decides when this process ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if others:
        others.meet()
    builder = Builder(**began.builder)
    prepare(builder)
    build = GroupBuild(builder, others) if others else builder
    journal, by_history = None, began.disk_bytes > 0
    if began.journal:
        head = JournalBegan(began.policy, build.pages_total, build.page_bytes, by_history=by_history)
        journal = DecisionJournal(appended(Path(began.journal)), head)
    beside = began.images_beside and builder.makes_images_beside
    has_image = builder.has_image if beside else None
    turns, stepping = POLICIES[began.policy](), Stepping(began.stepping_fd) if began.stepping_fd >= 0 else None
    build_pages = builder.build_pages if builder.builds_in_pool else None
    costs = _costs(began)
    Device(end, turns, build, time.monotonic, stepping, costs, journal, has_image, build_pages, by_history).run()
    os._exit(0)  # skips vLLM's exit handlers: the process's end tears down everything anyway


def _costs(began: Began) -> Callable[[EngineSpec], ModelCosts]:
    """Costs of models: by the profile if the profile covers the model, else a guess; steps correct the costs later."""
    if not began.profile:
        return _unknown
    profile = load_profile(Path(began.profile).read_bytes(), began.profile)

    def costs(spec: EngineSpec) -> ModelCosts:
        try:
            return profile.costs(model_size(spec))
        except ValueError:
            return _unknown(spec)

    return costs
