"""The device process of the benches with a served trace: real engines, profiled once, and measurements of the steps.

`python tests/bench/fleet/served.py FD FOLDER KIND`: FD is the device's end of the pipe to the node, FOLDER is for
models, KIND is `llama` or `hybrids`: models whose layers keep windows, or a state beside attention.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402

from runtime import ipc  # noqa: E402
from runtime.core.device.request import RequestId  # noqa: E402
from runtime.core.ledgers.costs import ModelCosts, Profile, model_size  # noqa: E402
from runtime.core.turns.registry import POLICIES  # noqa: E402
from store.contract.device_bytes import DeviceBytes  # noqa: E402
from store.contract.views import PageRun  # noqa: E402
from store.contract.wire import EngineSpec  # noqa: E402
from tests.bench.timing import one_thread  # noqa: E402

if TYPE_CHECKING:
    from runtime.core.engine import Engine, Output, Told

MIB = 1 << 20
MODELS = 10
SHAPES = ((256, 8), (384, 8), (512, 8))  # hidden width and layers, in turn
HYBRIDS: tuple[tuple[str, dict[str, Any]], ...] = (  # in turn; by families of tests/runtime/hybrids.py
    ("gemma3_text", {"hidden_size": 384, "num_hidden_layers": 12, "sliding_window": 128}),
    ("falcon_h1", {"num_hidden_layers": 6}),
    ("cohere2", {"hidden_size": 512, "num_hidden_layers": 8, "sliding_window": 128}),
)
CONTEXT, CONTEXT_TYPICAL = 1024, 300
POOL_BYTES = {"llama": 192 * MIB, "hybrids": 96 * MIB}  # for two or three of the models
HOST_BYTES = 4096 * MIB


class Seen(msgspec.Struct, frozen=True):
    """Measurements of a device in a run."""

    busy_s: float  # seconds in steps
    slower: float  # time of decode steps beside the profile's
    prefill_slower: float  # time of steps with prompts beside the profile's
    loop_s: float  # median time from the end of a step to the model's next step, without another model's step between
    steps: int


@dataclass
class Slower:
    """Seconds of steps: how long the steps took in total, and how long by the profile."""

    took_s: float = 0.0
    said_s: float = 0.0

    def count(self, took_s: float, said_s: float) -> None:
        self.took_s += took_s
        self.said_s += said_s

    @property
    def ratio(self) -> float:
        return self.took_s / self.said_s if self.said_s else 1.0


@dataclass
class Counted:
    """Counters over the engines together; times in seconds."""

    busy_s: float = 0.0  # time in steps
    decode: Slower = field(default_factory=Slower)
    prefill: Slower = field(default_factory=Slower)
    steps: int = 0
    ended_at: float = 0.0
    last: object = None  # engine of the last step
    between_s: list[float] = field(default_factory=list)  # gaps between two successive steps of a model

    def began(self, engine: object, now: float) -> None:
        if engine is self.last:
            self.between_s.append(now - self.ended_at)
        self.last = engine

    def seen(self) -> Seen:
        loop_s = statistics.median(self.between_s or [0.0])
        return Seen(self.busy_s, self.decode.ratio, self.prefill.ratio, loop_s, self.steps)


class Watched:
    """Records how long the steps of an engine take. The engine was built before."""

    def __init__(self, engine: Engine, costs: ModelCosts) -> None:
        self._engine, self._costs, self.counted = engine, costs, Counted()
        self._prompts: list[int] = []  # prompt lengths of the requests prefilled in the next step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, request: RequestId, payload: bytes, made: Sequence[int] = (), grammar: bytes = b"") -> None:
        self._engine.add(request, payload, made, grammar)
        self._prompts.append(prompt_tokens(payload))

    def step(self, ahead: bool = False) -> list[Output]:
        counted, began = self.counted, time.perf_counter()
        counted.began(self, began)
        outputs = self._engine.step(ahead)
        counted.ended_at = time.perf_counter()
        took_s = counted.ended_at - began
        counted.busy_s += took_s
        counted.steps += 1
        if self._prompts:
            counted.prefill.count(took_s, self._said(len(outputs) - len(self._prompts)))
        else:
            counted.decode.count(took_s, self._costs.step(len(outputs), CONTEXT_TYPICAL * len(outputs)))
        self._prompts.clear()
        return outputs

    def _said(self, older: int) -> float:
        """Predicted seconds of a step with the new prompts and a token for each of `older` requests."""
        costs = self._costs
        one_by_one_s = sum([costs.prefill(tokens) - costs.prefill_s for tokens in self._prompts])
        beside_s = costs.step(older, CONTEXT_TYPICAL * older) - costs.step_s if older > 0 else 0.0
        return costs.prefill_s + one_by_one_s + beside_s


@dataclass
class Watching:
    """A builder for the device that hands out the engines built before."""

    version: str
    pages_total: int
    page_bytes: int
    pages_used: Callable[[], int]
    engines: dict[str, Watched]
    life: int = 0
    block_tokens: int = 0

    def __call__(self, spec: EngineSpec, told: Told, /) -> Any:
        return self.engines[spec.key]

    def hold(self, blocks: Sequence[int], block_bytes: int, life: int) -> None:
        """Does nothing: these benches move no request between devices."""

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

    def device_bytes(self) -> DeviceBytes:
        return DeviceBytes()

    def page_map(self, models: Mapping[int, str], caches: Mapping[int, str]) -> list[PageRun]:
        return []


def serve(fd: int, scratch: Path, kind: str) -> None:
    """Serve traces of models of `kind` until stdin ends.

    Writes a line with the profile and the models. Then, for every line on stdin (a policy), runs a device until the
    node tells the device to quit, and writes a line with the run's measurements."""
    from runtime.device.loop import Device
    from runtime.engine import probe
    from runtime.engine.builder import Builder
    from runtime.profile import measure, start

    build = Builder(POOL_BYTES[kind], HOST_BYTES)
    specs = [written(kind, scratch / f"m{n}", n % len(SHAPES)) for n in range(MODELS)]
    batched = probe.batched_tokens(specs[0])
    models = [start(build, spec, batched, lambda line: None) for spec in specs]
    for number, model in enumerate(models):  # a page or two more than the files take: with small models a page counts
        held_bytes = model.engine.weights_pages * build.page_bytes
        specs[number] = msgspec.structs.replace(specs[number], weight_bytes=held_bytes)
        model.size = model_size(specs[number])
    measured = models[: len(SHAPES)]
    rounds = measure(measured, lambda line: print(line, file=sys.stderr))
    profile = profile_of(specs, models, build, batched)
    tell({"profile": msgspec.to_builtins(profile), "specs": msgspec.to_builtins(specs), "rounds": rounds})

    engines = {
        spec.key: Watched(model.engine, profile.models[spec.key]) for spec, model in zip(specs, models, strict=True)
    }
    watching = Watching(build.version, build.pages_total, build.page_bytes, build.pages_used, engines)
    end = ipc.DeviceEnd(socket.socket(fileno=fd))
    for line in sys.stdin:
        turns, counted = POLICIES[line.strip()](), Counted()
        for engine in engines.values():
            engine.counted = counted
        device = Device(end, turns, watching, time.monotonic, costs=lambda spec: profile.costs(model_size(spec)))
        device.run()
        tell(msgspec.to_builtins(counted.seen()))
    os._exit(0)  # vLLM's exit handlers would tear down a process that is ending anyway


def prompt_tokens(payload: bytes) -> int:
    """Number of prompt tokens in a request written by `probe.request`."""
    return len(msgspec.msgpack.decode(payload)[1])


def written(kind: str, folder: Path, shape: int) -> EngineSpec:
    """Write a model of the kind and of one of its three shapes, and return the model's spec."""
    from runtime.engine import probe

    if kind == "llama":
        return in_float32(probe.write_llama(folder, *SHAPES[shape], CONTEXT))
    from store.files.architectures import TABLE, Known
    from store.files.artefact import inspect
    from tests.runtime.hybrids import write_hybrid

    family, sizes = HYBRIDS[shape]
    found = inspect(write_hybrid(folder, family, context=CONTEXT, **sizes), Known(frozenset(TABLE)))
    return EngineSpec(
        key=folder.name,
        path=str(folder),
        digest="",
        architecture=found.architecture,
        dtype="float32",
        max_model_len=CONTEXT,
        weight_bytes=found.weight_bytes,
        kv_bytes_per_token=2 * found.kv_bytes_per_token,
        kv_layers=found.kv_layers_as("float32"),
    )


def in_float32(spec: EngineSpec) -> EngineSpec:
    """The model in float32: without 16-bit products, a processor takes as long for a batch as for its requests
    in turn."""
    return msgspec.structs.replace(
        spec, dtype="float32", weight_bytes=2 * spec.weight_bytes, kv_bytes_per_token=2 * spec.kv_bytes_per_token
    )


def tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def profile_of(specs: Sequence[EngineSpec], models: Sequence[Any], build: Any, batched: int) -> Profile:
    """The profile: a model of each shape was measured, and models of a shape cost equally much."""
    from runtime.profile import model_costs

    costs: dict[str, ModelCosts] = {}
    for n, spec in enumerate(specs):
        like = models[n % len(SHAPES)]
        costs[spec.key] = model_costs(like.size, like.times)[0]
    return Profile(
        name="this machine",
        kind="measured",
        conditions={},
        memory_bytes=build.pages_total * build.page_bytes,
        page_bytes=build.page_bytes,
        batched_tokens=batched,
        host_bytes_per_s=1e10,  # a single device does not share the host's bandwidth
        block_tokens=models[0].engine.kv_form.tokens,
        models=costs,
    )


if __name__ == "__main__":
    one_thread()
    serve(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
