"""The process that holds the device: carries out what the Instance machine decides, one step at a time, on one thread.

Nothing here waits but for work. Between two steps commands are read and transfers under way are looked at; what a step
made is handed to the node process through the pipe, which keeps what the kernel does not take at once.
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

from runtime.account import Account
from runtime.costs import ModelCosts, load_profile, model_size, unknown
from runtime.course import Clocks
from runtime.engine.base import BadRequest, Engine, EngineError
from runtime.engine.base import Build as Builder
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
    Departed,
    Effect,
    EngineFailed,
    Event,
    Evict,
    Fetch,
    Fetched,
    FetchFailed,
    Grow,
    Leaving,
    Lose,
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
from runtime.group import GroupBuild, Others
from runtime.handover import Handover
from runtime.instance import Instance
from runtime.journal import Began as JournalBegan
from runtime.journal import Journal, Recorded, appended
from runtime.model import Model, Phase
from runtime.pages import Pages
from runtime.pipe import (
    Began,
    DeviceEnd,
    Formed,
    Made,
    Mapped,
    Order,
    Passed,
    Place,
    Quit,
    Ready,
    ShowPages,
    Start,
    State,
    Stop,
    ToDevice,
    Withdraw,
)
from runtime.policy.by_name import POLICIES
from runtime.policy.turns import Turns
from runtime.request import ModelKey, Objective, Request, RequestId, request_id
from runtime.stepping import Stepping
from runtime.timeline import joined
from store import observe
from store.views import Stage, Use
from store.wire import Delta, Departure, EngineSpec, ModelState, Run, replace

log = structlog.get_logger()

STATE_PERIOD_S = 1.0
STATE_PAUSE_S = 0.05  # at least, between two while steps are made: models may come and go with every turn
TRANSFER_WAIT_S = 1e-3  # at a time, while the device has nothing else to do
BACKLOG_MOST = 64 << 20  # bytes: a node that does not read stops the steps, not the machine's memory

Ask = Callable[[Engine], Event | None]


class Device:
    """The loop. `build` makes engines; `clock` is monotone, in seconds."""

    def __init__(
        self,
        pipe: DeviceEnd,
        turns: Turns,
        build: Builder,
        clock: Callable[[], float],
        stepping: Stepping | None = None,
        costs: Callable[[EngineSpec], ModelCosts] | None = None,
        journal: Journal | None = None,
    ) -> None:
        costs = costs or _unknown
        pages = Pages(build.pages_total, build.page_bytes)
        self.account = Account.open(clock())
        self._clocks = Clocks(clock())
        noted = costs if journal is None else journal.noting(costs)
        self.instance = Instance(turns, pages, noted, self.account)
        self._machine = self.instance if journal is None else Recorded(self.instance, journal)
        self._pipe, self._build, self._clock = pipe, build, clock
        self._stepping = stepping or Stepping(Stepping.create())
        self._engines: dict[ModelKey, Engine] = {}
        self._unfit: set[ModelKey] = set()  # their engines failed, and are asked for nothing but to close
        self._transfers: dict[ModelKey, Ask] = {}  # under way: how to see whether it is over
        self._made: dict[str, list[Delta]] = {}
        self._state: State | None = None  # as last sent
        self._state_at, self._moves = 0.0, 0  # when, and the instance's count then
        self._told_us = self.account.at_us  # up to here the node knows where the time went
        self._stages: list[Stage] = []  # of models' ways, not told yet
        self._quit = False
        self._handover = Handover(
            self.instance,
            self._engines,
            build.hold,
            self._ask,
            self._hear,
            pipe.send,
            self._send_made,
            partial(_departed, clock),
        )

    def run(self) -> None:
        self._pipe.send(Ready(self._build.version, self._build.life))
        while not (self._quit or self._pipe.closed):
            for command in self._pipe.receive():
                self._command(command)
            self._look_at_transfers()
            self._handover.look()
            effects = self._machine.decide(self._clock())
            if not (effects and isinstance(effects[-1], Step)):
                self._clocks.nobody(self._clock())
            self._report()  # what was made must not wait for the device
            self._carry_out(effects)
            if not effects and not self._quit:
                self._rest()
            while self._pipe.backlog > BACKLOG_MOST and not self._pipe.closed:
                self._pipe.wait(STATE_PERIOD_S)

    def _command(self, command: ToDevice) -> None:
        match command:
            case Place(spec):
                event: Event = Placed(spec)
            case Withdraw(model):
                event = Withdrawn(ModelKey(model))
            case Start(run):
                id = request_id(run.gateway, run.stream)
                model = ModelKey(run.model)
                event = Arrived(_request(run, id, model, self._clock()))
            case Stop(gateway, streams):
                event = Cancelled([request_id(gateway, stream) for stream in streams])
            case Order(model, awake):
                event = Ordered(ModelKey(model), awake)
            case ShowPages():
                self._send_pages()
                return
            case Quit():
                self._quit = True
                return
            case _:
                self._handover.command(command)
                return
        self._hear(event)

    def _hear(self, event: Event) -> None:
        now = self._clock()
        effects = self._machine.hear(event, now)
        if not isinstance(event, Stepped):  # the one that comes for every token
            self._follow(event, now)
        self._carry_out(effects)

    def _follow(self, event: Event, now: float) -> None:
        """What concerns the clocks."""
        clocks = self._clocks
        match event:
            case Arrived(request):
                clocks.arrived(request, now)
            case Cancelled(requests) | Departed(requests):
                for id in requests:
                    clocks.ended(id, now)
            case Leaving(id):
                if (model := self.instance.requests.owner(id)) and (course := clocks.so_far(id, now)):
                    request = model.leaving[id]
                    delta = structs.replace(_billed(Delta(request.stream, [], request.sent), request), course=course)
                    self._made.setdefault(request.gateway, []).append(delta)
            case Withdrawn(key):
                clocks.forget(key)
            case Fetched(key) | Checked(key):
                model = self.instance.models.get(key)
                if model and model.phase is Phase.RESIDENT:
                    clocks.is_in(key, model.load_ms / 1e3, now)
                elif not (model and model.phase is Phase.CHECKING):
                    clocks.pauses(key, now)
            case Built() | BuildFailed() | FetchFailed() | EngineFailed() | Closed():
                clocks.pauses(event.model, now)

    # ── carrying out ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, effects: list[Effect]) -> None:
        """Everything in order; what comes of it is heard at once."""
        for effect in effects:
            match effect:
                case Tell():
                    self._tell(effect)
                case Lose(request, error, finish, suspect):
                    course = self._clocks.ended(request.id, self._clock())
                    lost = Delta(request.stream, [], request.sent, finish, error=error, suspect=suspect, course=course)
                    self._made.setdefault(request.gateway, []).append(_billed(lost, request))
                case Step(model):
                    self._hear(self._step(model))
                case Check(model):
                    self._hear(self._check(model))
                case Build(spec):
                    self._clocks.wakes_up(ModelKey(spec.key), self._clock(), built=True)
                    self._hear(self._make(spec))
                case Close(model):
                    self._hear(self._close(model))
                case Add(request):
                    self._clocks.joined(request, self._clock())
                    add = self._handover.add if self._handover.adopts(request.id) else _add
                    self._ask(request.model, partial(add, request))
                case Abort(model, requests):
                    self._ask(model, partial(_abort, model, requests))
                case Fetch(model):
                    self._clocks.wakes_up(model, self._clock())
                    self._ask(model, partial(self._fetch, effect))
                case Park(model):
                    self._ask(model, partial(self._park, model))
                case Evict(model) | Grow(model) | Shrink(model):
                    self._ask(model, partial(_resize, effect))

    def _ask(self, model: ModelKey, act: Ask) -> None:
        """Let the engine do it and hear what comes of it; an engine that raises is asked for nothing but to close."""
        if model in self._unfit:
            return
        try:
            event = act(self._engines[model])
        except Exception as error:
            self._unfit.add(model)
            self._transfers.pop(model, None)
            event = EngineFailed(model, _reason("device.engine_failed", model, error))
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
        )
        deltas = self._made.get(request.gateway)
        if deltas is None:
            deltas = self._made[request.gateway] = []
        deltas.append(delta)

    # ── carrying out what uses the device ─────────────────────────────────────────────────────────────────────────────

    def _step(self, model: ModelKey) -> Event:
        if model in self._unfit:
            return StepFailed(model, "it failed before")
        engine = self._engines[model]
        try:
            began = self._clock()
            self._stepping.begin(model, began)
            self._clocks.turn(model, began)
            outputs = engine.step()
            return Stepped(model, outputs, engine.busy(), engine.held(), self._clock() - began)
        except Exception as error:
            self._unfit.add(model)
            return StepFailed(model, _reason("device.step_failed", model, error))
        finally:
            self._stepping.end()

    def _check(self, model: ModelKey) -> Event:
        engine, began = self._engines[model], self._clock()
        try:
            self._stepping.begin(model, began)
            wrong = "it failed before" if model in self._unfit else engine.check()
            if wrong is not None:
                log.error("device.check_failed", model=model, wrong=wrong)
            return Checked(model, wrong, engine.held())
        except Exception as error:
            self._unfit.add(model)
            return Checked(model, _reason("device.check_failed", model, error), self.instance.pages.of(model))
        finally:
            self._stepping.end()
            self._note("check", model, began)

    def _make(self, spec: EngineSpec) -> Event:
        model = ModelKey(spec.key)
        self._send_state(Use.PLATFORM)  # a build takes long: say that it began
        began = self._clock()
        self._stepping.begin_build(model, began)
        try:
            engine = self._build(spec, partial(self._stepping.read, model, began))
            took_s = self._clock() - began
            built = Built(model, took_s, engine.weights_pages, engine.kv_pages_least, engine.held())
        except Exception as error:
            return BuildFailed(model, _reason("device.build_failed", model, error))
        finally:
            self._stepping.end_build()
            self._note("build", model, began)
        self._engines[model] = engine
        self._pipe.send(Formed(spec.key, engine.kv_form))
        log.info("device.built", model=model, took_ms=round(took_s * 1e3), weights_pages=engine.weights_pages)
        return built

    def _close(self, model: ModelKey) -> Event:
        """Whatever it raises, it is gone; pages that it did not give back are found missing when the device rests."""
        self._unfit.discard(model)
        try:
            self._engines.pop(model).close()
        except Exception as error:
            _reason("device.close_failed", model, error)
        return Closed(model)

    # ── transfers ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fetch(self, fetch: Fetch, engine: Engine) -> Event | None:
        began = self._clock()
        try:
            engine.fetch(fetch.kv_pages)
        except Exception as error:
            return FetchFailed(fetch.model, _reason("device.fetch_failed", fetch.model, error), engine.held())
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
            return FetchFailed(model, _reason("device.fetch_failed", model, error), engine.held())
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
        """`now`: what the device begins to do, where that is not what the account says."""
        self._send_passed(now or (Use.OPEN if len(self.instance.requests) else Use.IDLE))
        self._state_at, self._moves = self._clock(), self.instance.moves
        pages, turn = self.instance.pages, self.instance.turn
        state = State(
            holder=turn.holder if turn else "",
            switches=self.instance.switches,
            page_bytes=pages.page_bytes,
            pages_total=pages.total,
            pages_used=pages.used,
            models={str(key): self._model_state(model) for key, model in self.instance.models.items()},
            attainment=dict(self.instance.requests.attainment.totals),
            accounts=self.account.shown(self._clock(), len(self.instance.requests) > 0),
            wakes={source: times.shown() for source, times in self._clocks.wakes.items()},
            switch_times=self._clocks.switches.shown(),
        )
        if state != self._state:
            self._state = state
            self._pipe.send(state)

    def _note(self, stage: str, model: ModelKey, began: float) -> None:
        """A part of its way that ends now."""
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

    def _model_state(self, model: Model) -> ModelState:
        engine = self._engines.get(model.key)
        return model.state(self.instance.pages.of(model.key), engine.kv_fragmentation() if engine else 0.0)

    def _rest(self) -> None:
        """Nothing for the device: sleep until a command comes, a transfer is over or a model's idle time is up."""
        if self._transfers:
            model = next(iter(self._transfers))  # looking again and again would take time from the copies
            self._ask(model, partial(_wait, TRANSFER_WAIT_S))
            return
        if self._handover.copying:
            self._pipe.wait(TRANSFER_WAIT_S)
            return
        self.instance.check()
        used, booked = self._build.pages_used(), self.instance.pages.used
        assert used == booked, f"the pool counts {used} pages in use, and the models hold {booked}"
        self._send_state()
        tick_at = self.instance.next_tick()
        wait_s = None if tick_at is None else tick_at - self._clock()
        if len(self.instance.requests):  # who waits for these wants to know that it lives
            wait_s = STATE_PERIOD_S if wait_s is None else min(wait_s, STATE_PERIOD_S)
        self._pipe.wait(wait_s)


def _unknown(spec: EngineSpec) -> ModelCosts:
    return unknown(model_size(spec))


def _departed(clock: Callable[[], float], run: Run, departure: Departure) -> Request:
    """One that another runtime hands over."""
    id = request_id(run.gateway, run.stream)
    request = _request(replace(run, made=departure.made), id, ModelKey(run.model), clock())
    return dataclasses.replace(request, handed=True)


def _request(run: Run, id: RequestId, model: ModelKey, now: float) -> Request:
    objective = Objective(run.ttft_s, run.tbt_s, run.patience_s)
    return Request(
        id,
        run.gateway,
        run.stream,
        model,
        run.payload,
        now,
        run.prompt_tokens,
        run.max_tokens,
        objective,
        run.label,
        run.tenant,
        run.weight,
        run.made,
        run.first_late,
    )


def _billed(delta: Delta, request: Request) -> Delta:
    return structs.replace(delta, spent=request.spent.shown())


def _wait(timeout_s: float, engine: Engine) -> None:
    engine.wait(timeout_s)


def _add(request: Request, engine: Engine) -> Event:
    try:
        engine.add(request.id, request.payload, request.made)
    except BadRequest as error:
        return Refused(request.id, request.model, str(error))
    return Told(request.model, engine.held())


def _abort(model: ModelKey, requests: list[RequestId], engine: Engine) -> Event:
    engine.abort(requests)
    return Told(model, engine.held())


def _resize(effect: Evict | Grow | Shrink, engine: Engine) -> Event | None:
    match effect:
        case Evict(_, pages):
            engine.evict(pages)
        case Shrink(_, pages):
            engine.shrink(pages)
        case Grow(model, pages):
            engine.grow(pages)
            return Told(model, engine.held())
    return None


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _reason(what: str, model: ModelKey, error: Exception) -> str:
    """Logged whole; for clients an engine's own sentence, and of anything else no more than its kind."""
    log.error(what, model=model, error=type(error).__name__, detail=str(error)[:300])
    return str(error) if isinstance(error, EngineError) else type(error).__name__


def main() -> None:
    """`python -m runtime.device BEGAN`, started by the node with its pipe's end."""
    began = Began.of(sys.argv[1])
    observe.configure_logs("device")
    others = Others(began) if began.tensor_parallel > 1 else None
    from runtime.engine.builder import Builder  # seconds: only this process pays
    from runtime.engine.selfcheck import self_check

    end = DeviceEnd(socket.socket(fileno=began.pipe_fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node decides when this process ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if others:
        others.meet()
    builder = Builder(began.pool_bytes, began.host_bytes, began.host_fd, began.load_helpers)
    self_check(builder)
    build = GroupBuild(builder, others) if others else builder
    journal = None
    if began.journal:
        head = JournalBegan(began.policy, build.pages_total, build.page_bytes)
        journal = Journal(appended(Path(began.journal)), head)
    Device(end, POLICIES[began.policy](), build, time.monotonic, _stepping(began), _costs(began), journal).run()
    os._exit(0)  # vLLM's exit handlers tear down what is going anyway


def _stepping(began: Began) -> Stepping | None:
    return Stepping(began.stepping_fd) if began.stepping_fd >= 0 else None


def _costs(began: Began) -> Callable[[EngineSpec], ModelCosts]:
    """By the profile where it knows the model, else the guess; corrected as steps are made."""
    if not began.profile:
        return _unknown
    profile = load_profile(Path(began.profile).read_bytes(), began.profile)

    def costs(spec: EngineSpec) -> ModelCosts:
        try:
            return profile.costs(model_size(spec))
        except ValueError:
            return _unknown(spec)

    return costs


if __name__ == "__main__":
    main()
