"""A runtime with engines that make tokens without computing: steps, fetches and copies take the time of a profile.

`python tests/bench/fleet/paced.py node` is the product's node process with settings from the environment. Only the
device process differs: `python tests/bench/fleet/paced.py device BEGAN` is the product's loop of a device and the
product's machine, around engines of the simulator that sleep for as long as the profile says. Weights and keys and
values have pages in the books, and no memory.

Each device process writes what was measured to a file in the folder that PACED_FOLDER names.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402

from runtime.core.device.request import ModelKey, Request, RequestId  # noqa: E402
from runtime.core.engine import BadRequest, EngineError, Held, Output, WeightSource  # noqa: E402
from runtime.core.ledgers.costs import ModelCosts, Profile, load_profile, model_size  # noqa: E402
from runtime.sim.engine import SimulatedEngine  # noqa: E402
from store.contract.device_bytes import DeviceBytes  # noqa: E402
from store.contract.wire import Departure, EngineSpec, KvForm  # noqa: E402

if TYPE_CHECKING:
    from runtime.core.engine import Told
    from store.contract.views import PageRun

GAP_S_MOST = 0.02  # a longer gap between two steps is a wait for weights or requests
VERSION = "paced"  # of the engines: a Run must name the version
FOLDER = "PACED_FOLDER"
BLOCK_TOKENS = 16  # of keys and values, in moves of requests


def payload(prompt_tokens: int, output_tokens: int) -> bytes:
    """The payload of a request for a paced engine."""
    return msgspec.msgpack.encode((prompt_tokens, output_tokens))


class DeviceRecord:
    """A file with a line for each fetch and each step of a device process, kept when the process is killed.

    Lines are `fetch BEGAN` and `step BEGAN TOOK LATE BETWEEN`, in seconds on the machine's monotonic clock: the length
    by the profile, by how much the step was too long, and the time since the end of the model's last step, or -1 if
    another model stepped since."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def fetch(self, began: float) -> None:
        print("fetch", began, file=self._file, flush=True)

    def step(self, began: float, took_s: float, late_s: float, between_s: float) -> None:
        print("step", began, took_s, late_s, between_s, file=self._file)


class Pacer:
    """Sleeps as long as the device would work. A late end is made up for in the next sleeps: the mean is exact."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self._owed_s = clock, 0.0

    def work(self, seconds: float) -> float:
        """Sleep for `seconds`, less what earlier sleeps were too long. Returns by how much the sleep was too long."""
        began = self.clock()
        due = began + seconds - self._owed_s
        if due > began:
            time.sleep(due - began)
        self._owed_s = max(0.0, self.clock() - due)
        return self._owed_s


class PacedEngine:
    """Engine of a model on a paced device: `runtime/core/engine.py` has the contract."""

    sequential = False
    ahead = False
    kv_pages_least = 1
    source = WeightSource.HOST
    owners = (0, 0)

    def __init__(self, builder: PacedBuilder, spec: EngineSpec, costs: ModelCosts) -> None:
        self._builder, self._model, self._costs = builder, ModelKey(spec.key), costs
        self._engine = SimulatedEngine(costs, builder.page_bytes, builder.profile.block_tokens)
        self.weights_pages = self._engine.weights_pages
        block_bytes = round(BLOCK_TOKENS * costs.kv_bytes_per_token)
        self.kv_form = KvForm(BLOCK_TOKENS, block_bytes, VERSION)
        self._due = 0.0  # end of the transfer under way
        self._payloads: dict[RequestId, bytes] = {}
        self._copies: dict[RequestId, float] = {}  # end of the last copy of each moving request
        self._left: dict[RequestId, list[int]] = {}  # departed requests: tokens made, tokens with keys and values

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, grammar: bytes) -> None:
        """Does nothing: no request of the bench has a grammar."""

    def has_read(self, grammar: bytes) -> bool:
        return True

    def add(self, request: RequestId, payload: bytes, made: Sequence[int] = (), grammar: bytes = b"") -> None:
        self._payloads[request] = payload
        self._join(request, len(made), handed=False)

    def _join(self, id: RequestId, made: int, handed: bool) -> None:
        prompt, output = msgspec.msgpack.decode(self._payloads[id], type=tuple[int, int])
        if made >= output:
            raise BadRequest(f"the request asks for {output} tokens and has {made}: nothing is left to do")
        request = Request(id, "", 0, self._model, b"", 0.0, prompt, output, made=[0] * made, handed=handed)
        self._engine.add(request, output)
        self._engine.tell()

    def abort(self, requests: list[RequestId]) -> None:
        for id in requests:
            self._engine.abort(id)
            for known in (self._payloads, self._copies, self._left):
                known.pop(id, None)
        self._engine.tell()

    def busy(self) -> bool:
        return bool(self._engine.streams)

    def step(self, ahead: bool = False) -> list[Output]:
        builder = self._builder
        steps, step_s = builder.plan(self._engine)
        builder.work(self, step_s, self._costs.switch_s)
        outputs = self._engine.run(steps, builder.profile.batched_tokens)
        for output in outputs:
            if output.finish is not None:
                del self._payloads[output.request]
        return outputs

    def wait(self, timeout_s: float) -> None:
        time.sleep(max(0.0, min(timeout_s, self._due - self._builder.pacer.clock())))

    def close(self) -> None:
        self._builder.engines.remove(self)

    # ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def held(self) -> Held:
        return self._engine.held

    @property
    def pages(self) -> int:
        return self._engine.weights + self._engine.kv

    def kv_fragmentation(self) -> float:
        return 0.0

    def fetch(self, kv_pages: int) -> None:
        engine, costs = self._engine, self._costs
        missing = (engine.weights_pages - engine.weights) * self._builder.page_bytes
        engine.weights, engine.kv = engine.weights_pages, kv_pages
        now = self._builder.pacer.clock()
        self._due = now + costs.load(missing) + engine.kv_bytes * costs.copy_s_per_byte
        self._builder.record.fetch(now)

    def arrived(self) -> bool:
        if self._builder.pacer.clock() < self._due:
            return False
        self._engine.here = True
        self._engine.tell()
        return True

    def check(self) -> None:
        """Take no time: models of the simulator were checked before the trace begins."""

    def park(self) -> None:
        self._engine.here = False
        self._due = self._builder.pacer.clock() + self._engine.kv_bytes * self._costs.copy_s_per_byte

    def parked(self) -> bool:
        if self._builder.pacer.clock() < self._due:
            return False
        self._engine.kv = 0
        self._engine.tell()
        return True

    def grow(self, kv_pages: int) -> None:
        self._engine.kv += kv_pages
        self._engine.tell()

    def shrink(self, kv_pages: int) -> None:
        self._engine.kv -= kv_pages
        self._engine.tell()

    def evict(self, weights_pages: int) -> None:
        self._engine.weights -= weights_pages
        self._engine.tell()

    def forget_prefixes(self, salt: str) -> None:
        """Nothing to do: paced engines keep no prefixes."""

    # ── moves ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def prepare(
        self, request: RequestId, payload: bytes, tokens: int, admitted: bool = False, grammar: bytes = b""
    ) -> bool:
        self._payloads[request] = payload
        return self._engine.here

    def copy(
        self, request: RequestId, first: int, host: list[int] | None = None, admitted: bool = False
    ) -> list[int] | None:
        if host is None:
            stream = self._engine.streams.get(request)
            if stream is None or stream.prompt or not self._engine.here:
                return None
            host = list(range(first, stream.context // BLOCK_TOKENS))
        self._copy(request, len(host))
        return host

    def _copy(self, request: RequestId, blocks: int) -> None:
        took_s = blocks * self.kv_form.bytes * self._costs.copy_s_per_byte
        self._copies[request] = self._builder.pacer.clock() + took_s

    def copied(self, request: RequestId) -> bool:
        return self._builder.pacer.clock() >= self._copies.get(request, 0.0)

    def commit(self, request: RequestId, departure: Departure | None = None) -> Departure | None:
        if departure is not None:
            self._join(request, len(departure.made), handed=True)
            return None
        if request not in self._left:
            self._leave(request)
            return None
        made, computed = self._left[request]
        blocks = list(range(-(-computed // BLOCK_TOKENS)))
        return Departure([0] * made, computed, blocks, b"") if self.copied(request) else None

    def _leave(self, request: RequestId) -> None:
        stream = self._engine.streams.get(request) or self._engine.parked(request)
        if stream is None or stream.prompt:
            raise EngineError("the request has no room, or has made no token yet: move the request later")
        _, output = msgspec.msgpack.decode(self._payloads[request], type=tuple[int, int])
        self._left[request] = [output - stream.left, stream.context]
        self._engine.abort(request)
        self._engine.tell()
        self._copy(request, 1)  # the blocks since the last copy

    def abort_move(self, request: RequestId) -> None:
        if request in self._left:
            made, _ = self._left.pop(request)
            self._join(request, made, handed=True)


class PacedHold:
    """Hold on blocks that have no memory."""

    def release(self) -> None:
        """Does nothing."""


class PacedBuilder:
    """Builder of the engines of a paced device, and the device's record."""

    version = VERSION

    def __init__(self, profile: Profile, pool_bytes: int, clock: Callable[[], float], record: DeviceRecord) -> None:
        self.profile, self.pacer, self.record = profile, Pacer(clock), record
        self.life, self.block_tokens = os.getpid(), profile.block_tokens
        self.page_bytes, self.pages_total = profile.page_bytes, pool_bytes // profile.page_bytes
        self.engines: list[PacedEngine] = []
        self._last: PacedEngine | None = None  # engine of the last step
        self._ended_at = 0.0

    def costs(self, spec: EngineSpec) -> ModelCosts:
        return self.profile.costs(model_size(spec))

    def __call__(self, spec: EngineSpec, told: Told, /) -> PacedEngine:
        engine = PacedEngine(self, spec, self.costs(spec))
        self.engines.append(engine)
        return engine

    def plan(self, engine: SimulatedEngine) -> tuple[int, float]:
        """Number of steps to make, 0 or 1, and the seconds of the step."""
        return engine.plan(1, self.profile.batched_tokens)

    def work(self, engine: PacedEngine, step_s: float, switch_s: float) -> None:
        """Sleep for a step of `engine`, and for the switch if another engine made the last step."""
        began = self.pacer.clock()
        between_s = began - self._ended_at if engine is self._last else -1.0
        took_s = step_s if engine is self._last else step_s + switch_s
        late_s = self.pacer.work(took_s)
        self._last, self._ended_at = engine, self.pacer.clock()
        self.record.step(began, took_s, late_s, between_s)

    def hold(self, blocks: list[int], block_bytes: int, life: int) -> PacedHold:
        return PacedHold()

    def device_bytes(self) -> DeviceBytes:
        return DeviceBytes()

    def pages_used(self) -> int:
        return sum(engine.pages for engine in self.engines)

    def on_disk(self, spec: EngineSpec, /) -> bool:
        return False

    def proved(self, spec: EngineSpec, /) -> bool:
        return False

    def note_proof(self, spec: EngineSpec, /) -> bool:
        return True

    def drop_proof(self, spec: EngineSpec, /) -> None:
        """Do nothing: there is no disk."""

    def spare_room(self, spec: EngineSpec, later: Sequence[EngineSpec], /) -> int | None:
        return None

    def page_map(self, models: Mapping[int, str], caches: Mapping[int, str]) -> list[PageRun]:
        return []


# ── what the record says ──────────────────────────────────────────────────────────────────────────────────────────────


class TimedStep(NamedTuple):
    """A step of a paced device, in seconds: see DeviceRecord."""

    began: float
    took_s: float
    late_s: float
    between_s: float


def devices_of(folder: Path, began: float) -> tuple[int, list[list[TimedStep]]]:
    """Number of fetches since the trace began, and the steps of each device process since."""
    fetches, devices = 0, list[list[TimedStep]]()
    for path in folder.glob("device-*.txt"):
        steps: list[TimedStep] = []
        for line in path.read_text().split("\n")[:-1]:  # the last line may be incomplete
            kind, *times = line.split()
            if float(times[0]) >= began:
                fetches += kind == "fetch"
                steps += [TimedStep(*map(float, times))] if kind == "step" else []
        devices.append(steps)
    return fetches, devices


class MachineNoise(msgspec.Struct, frozen=True):
    """How well the machine kept the pace of the bench. Times are milliseconds."""

    late_p50_ms: float  # by how much a step was too long
    late_p99_ms: float
    late_max_ms: float
    sent_late_p99_ms: float  # by how much a request was sent too late
    loop_ms: float  # from a step to the model's next step, in the mean
    switch_ms: float  # from a step to the step of another model, if the device had no wait between
    busy: float  # share of the devices' time spent in steps


def noise_of(devices: Sequence[Sequence[TimedStep]], sent_late_s: Sequence[float]) -> MachineNoise:
    steps = [step for device in devices for step in device]
    late = sorted(step.late_s for step in steps)
    span_s = max(step.began for step in steps) - min(step.began for step in steps)
    count = len({index for index, device in enumerate(devices) if device})
    gaps = [gap for device in devices for gap in gaps_of(device) if gap.seconds < GAP_S_MOST]
    return MachineNoise(
        late_p50_ms=round(1e3 * quantile(late, 0.5), 3),
        late_p99_ms=round(1e3 * quantile(late, 0.99), 3),
        late_max_ms=round(1e3 * late[-1], 3),
        sent_late_p99_ms=round(1e3 * quantile(sorted(sent_late_s), 0.99), 3),
        loop_ms=round(1e3 * _mean(gap.seconds for gap in gaps if not gap.switch), 3),
        switch_ms=round(1e3 * _mean(gap.seconds for gap in gaps if gap.switch), 3),
        busy=round(sum(step.took_s for step in steps) / span_s / count, 3),
    )


class StepGap(NamedTuple):
    """Time between two steps of a device; `switch`: the steps were of two models."""

    seconds: float
    switch: bool


def gaps_of(steps: Sequence[TimedStep]) -> Iterator[StepGap]:
    """Gaps between successive steps. A late step makes the next sleep shorter: see Pacer."""
    owed_s = 0.0
    for step, following in pairwise(steps):
        ended = step.began + max(0.0, step.took_s - owed_s + step.late_s)
        owed_s = step.late_s
        yield StepGap(max(0.0, following.began - ended), following.between_s < 0)


def _mean(values: Iterable[float]) -> float:
    return statistics.mean(list(values) or [0.0])


def quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


# ── the processes ─────────────────────────────────────────────────────────────────────────────────────────────────────


def node() -> None:
    import uvloop

    from runtime.config import RuntimeSettings
    from runtime.node.runtime import serve
    from store.settings import read
    from store.telemetry import observe

    observe.configure_logs("runtime")
    uvloop.run(serve(read(RuntimeSettings), device=(sys.executable, __file__, "device")))


def device(argument: str) -> None:
    from runtime.core.turns.registry import POLICIES
    from runtime.device.loop import Device
    from runtime.device.stepping import Stepping
    from runtime.ipc import Began, DeviceEnd
    from store.telemetry import observe

    observe.configure_logs("device")
    began = Began.of(argument)
    for number in (signal.SIGINT, signal.SIGTERM):  # the node decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    profile = load_profile(Path(began.profile).read_bytes(), began.profile)
    record = DeviceRecord(Path(os.environ[FOLDER]) / f"device-{os.environ['STACCATO_RUNTIME_ID']}-{os.getpid()}.txt")
    build = PacedBuilder(profile, began.pool_bytes, time.monotonic, record)
    end, stepping = DeviceEnd(socket.socket(fileno=began.pipe_fd)), Stepping(began.stepping_fd)
    Device(end, POLICIES[began.policy](), build, time.monotonic, stepping, build.costs).run()


if __name__ == "__main__":
    if sys.argv[1] == "node":
        node()
    else:
        device(sys.argv[2])
