"""The process that holds the device: carries out what the Instance machine decides, one step at a time, on one thread.

Nothing here waits but for work. Commands are read between two steps; what a step made is handed to the node process
through the pipe, which keeps what the kernel does not take at once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable

import structlog

from runtime.engine.base import BadRequest, Build, Engine, EngineError
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
from runtime.instance import Instance
from runtime.pipe import DeviceEnd, Made, Order, Place, Quit, Ready, Start, State, Stop, ToDevice, Withdraw
from runtime.policy.turns import POLICIES, Turns
from runtime.request import ModelKey, Request, request_id
from store import observe
from store.wire import Delta, Residency

log = structlog.get_logger()

STATE_PERIOD_S = 1.0
BACKLOG_MOST = 64 << 20  # bytes: a node that does not read stops the steps, not the machine's memory


class Device:
    """The loop. `build` makes engines; `clock` is monotone, in seconds."""

    def __init__(self, pipe: DeviceEnd, turns: Turns, build: Build, clock: Callable[[], float]) -> None:
        self.instance = Instance(turns)
        self._pipe, self._build, self._clock = pipe, build, clock
        self._engines: dict[ModelKey, Engine] = {}
        self._made: dict[str, list[Delta]] = {}
        self._state: State | None = None  # as last sent
        self._residencies: list[Residency] = []
        self._state_at = 0.0
        self._quit = False

    def run(self) -> None:
        self._pipe.send(Ready(self._build.version))
        event: Event = Tick()
        while not (self._quit or self._pipe.closed):
            for command in self._pipe.receive():
                self._command(command)
            done = self._carry_out(self.instance.on(event, self._clock()))
            self._report()
            if done is None and not self._quit:
                self._rest()
            while self._pipe.backlog > BACKLOG_MOST and not self._pipe.closed:
                self._pipe.wait(STATE_PERIOD_S)
            event = done or Tick()

    def _command(self, command: ToDevice) -> None:
        """Commands never use the device themselves: what they make possible is decided at the next turn of the loop."""
        match command:
            case Place(spec):
                event: Event = Placed(spec)
            case Withdraw(model):
                event = Withdrawn(ModelKey(model))
            case Start(run):
                id = request_id(run.gateway, run.stream)
                model = ModelKey(run.model)
                event = Arrived(Request(id, run.gateway, run.stream, model, run.payload, self._clock()))
            case Stop(gateway, streams):
                event = Cancelled([request_id(gateway, stream) for stream in streams])
            case Order(model, awake):
                event = Ordered(ModelKey(model), awake)
            case Quit():
                self._quit = True
                return
        self._hear(event)

    def _hear(self, event: Event) -> None:
        pending = self.instance.hear(event, self._clock())
        assert self._carry_out(pending) is None

    # ── carrying out ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, effects: list[Effect]) -> Event | None:
        """Do everything in order; the event of the device effect, if there was one."""
        done: Event | None = None
        for effect in effects:
            match effect:
                case Tell():
                    self._tell(effect)
                case Lose(request, error, finish):
                    lost = Delta(request.stream, [], request.sent, finish, error=error)
                    self._made.setdefault(request.gateway, []).append(lost)
                case Add(request):
                    self._add(request)
                case Abort(model, requests):
                    self._engines[model].abort(requests)
                case Step(model):
                    self._report()  # what the last step made must not wait for this one
                    done = self._step(model)
                case Load():
                    done = self._load(effect)
                case Unload(model):
                    self._engines.pop(model).close()
                    done = Unloaded(model)
        return done

    def _tell(self, tell: Tell) -> None:
        request, made = tell.request, tell.output
        cached, logprobs = made.cached_tokens, made.logprobs
        delta = Delta(request.stream, made.tokens, tell.at, made.finish, made.stop_reason, logprobs, cached)
        deltas = self._made.get(request.gateway)
        if deltas is None:
            deltas = self._made[request.gateway] = []
        deltas.append(delta)

    def _add(self, request: Request) -> None:
        try:
            self._engines[request.model].add(request.id, request.payload)
        except BadRequest as error:
            self._hear(Refused(request.id, request.model, str(error)))

    def _step(self, model: ModelKey) -> Event:
        engine = self._engines[model]
        try:
            return Stepped(model, engine.step(), engine.busy())
        except Exception as error:
            log.error("device.step_failed", model=model, error=type(error).__name__, detail=str(error)[:300])
            return StepFailed(model, f"{type(error).__name__}")

    def _load(self, effect: Load) -> Event:
        model = ModelKey(effect.spec.key)
        self._report()  # a load takes long: say that it began
        started = self._clock()
        try:
            self._engines[model] = self._build(effect.spec)
        except EngineError as error:
            log.error("device.load_failed", model=model, error=str(error))
            return LoadFailed(model, str(error))
        took_s = self._clock() - started
        log.info("device.loaded", model=model, took_ms=round(took_s * 1e3))
        return Loaded(model, took_s)

    # ── reporting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _report(self) -> None:
        if self._made:
            self._pipe.send(Made(self._made))
            self._made = {}
        residencies = [model.residency for model in self.instance.models.values()]
        if residencies != self._residencies or self._clock() - self._state_at >= STATE_PERIOD_S:
            self._residencies, self._state_at = residencies, self._clock()
            self._send_state()

    def _send_state(self) -> None:
        turn = self.instance.turn
        models = {str(key): model.state() for key, model in self.instance.models.items()}
        state = State(turn.holder if turn else "", self.instance.switches, models)
        if state != self._state:
            self._state = state
            self._pipe.send(state)

    def _rest(self) -> None:
        """Nothing for the device: sleep until a command comes or a model's idle time is up."""
        self.instance.check()
        self._send_state()
        tick_at = self.instance.next_tick()
        self._pipe.wait(None if tick_at is None else tick_at - self._clock())


def main() -> None:
    """`python -m runtime.device FD POLICY KV_BYTES`, started by the node with its end of the pipe as FD."""
    fd, policy, kv_bytes = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    observe.configure_logs("device")
    from runtime.engine.vllm import Builder  # seconds: only this process pays

    pipe = DeviceEnd(socket.socket(fileno=fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node decides when this process ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Device(pipe, POLICIES[policy], Builder(kv_bytes), time.monotonic).run()
    os._exit(0)  # vLLM's exit handlers tear down what is going anyway


if __name__ == "__main__":
    main()
