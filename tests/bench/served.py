"""The device's process of the benches that serve a trace: real engines, profiled once, and what their steps took.

`python tests/bench/served.py FD FOLDER`: FD is the device's end of the pipe to the node, FOLDER is for models.
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

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402

from runtime import pipe  # noqa: E402
from runtime.costs import ModelCosts, Profile, model_size  # noqa: E402
from runtime.policy.by_name import POLICIES  # noqa: E402
from runtime.request import RequestId  # noqa: E402
from store.views import PageRun  # noqa: E402
from store.wire import EngineSpec  # noqa: E402
from tests.bench.timing import one_thread  # noqa: E402

if TYPE_CHECKING:
    from runtime.engine.base import Engine, Output, Told

MIB = 1 << 20
MODELS = 10
SHAPES = ((256, 8), (384, 8), (512, 8))  # hidden width and layers, in turn
CONTEXT, CONTEXT_TYPICAL = 1024, 300
POOL_BYTES, HOST_BYTES = 192 * MIB, 4096 * MIB


class Seen(msgspec.Struct, frozen=True):
    """Of a device, in one run."""

    busy_s: float  # in steps
    slower: float  # decode steps, than the profile says
    prefill_slower: float  # steps with prompts
    loop_s: float  # from the end of a step to the next of the same model, in the median
    steps: int


@dataclass
class Slower:
    """Steps, than they were said to be; seconds, of all of them."""

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
    """Of all engines together; seconds."""

    busy_s: float = 0.0  # in steps
    decode: Slower = field(default_factory=Slower)
    prefill: Slower = field(default_factory=Slower)
    steps: int = 0
    ended_at: float = 0.0
    last: object = None  # engine that stepped
    between_s: list[float] = field(default_factory=list)  # steps of one model

    def began(self, engine: object, now: float) -> None:
        if engine is self.last:
            self.between_s.append(now - self.ended_at)
        self.last = engine

    def seen(self) -> Seen:
        loop_s = statistics.median(self.between_s or [0.0])
        return Seen(self.busy_s, self.decode.ratio, self.prefill.ratio, loop_s, self.steps)


class Watched:
    """An engine that was built before; how long it steps is written down."""

    def __init__(self, engine: Engine, costs: ModelCosts) -> None:
        self._engine, self._costs, self.counted = engine, costs, Counted()
        self._prompts: list[int] = []  # tokens, of those that the next step computes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, request: RequestId, payload: bytes, made: Sequence[int] = ()) -> None:
        self._engine.add(request, payload, made)
        self._prompts.append(prompt_tokens(payload))

    def step(self) -> list[Output]:
        counted, began = self.counted, time.perf_counter()
        counted.began(self, began)
        outputs = self._engine.step()
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
        """Of a step with the prompts, beside which so many requests get a token."""
        costs = self._costs
        one_by_one_s = sum([costs.prefill(tokens) - costs.prefill_s for tokens in self._prompts])
        beside_s = costs.step(older, CONTEXT_TYPICAL * older) - costs.step_s if older > 0 else 0.0
        return costs.prefill_s + one_by_one_s + beside_s


@dataclass
class Watching:
    """In the place of a builder: gives out the engines that there are."""

    version: str
    pages_total: int
    page_bytes: int
    pages_used: Callable[[], int]
    engines: dict[str, Watched]
    life: int = 0

    def __call__(self, spec: EngineSpec, told: Told, /) -> Any:
        return self.engines[spec.key]

    def hold(self, blocks: Sequence[int], block_bytes: int, life: int) -> None:
        """Nothing moves between devices here."""

    def page_map(self, models: Mapping[int, str], caches: Mapping[int, str]) -> list[PageRun]:
        return []


def serve(fd: int, scratch: Path) -> None:
    """A line with the profile and the models; then for each line, a policy, a device that runs until it is
    told to quit, and a line with what it counted."""
    from runtime.device import Device
    from runtime.engine import probe
    from runtime.engine.builder import Builder
    from runtime.profile import measure, start

    build = Builder(POOL_BYTES, HOST_BYTES)
    shapes = [SHAPES[n % len(SHAPES)] for n in range(MODELS)]
    specs = [in_float32(probe.write_llama(scratch / f"m{n}", *shape, CONTEXT)) for n, shape in enumerate(shapes)]
    batched = probe.batched_tokens(specs[0])
    models = [start(build, spec, batched, lambda line: None) for spec in specs]
    for number, model in enumerate(models):  # a page or two more than their files have: here that counts
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
    end = pipe.DeviceEnd(socket.socket(fileno=fd))
    for line in sys.stdin:
        turns, counted = POLICIES[line.strip()](), Counted()
        for engine in engines.values():
            engine.counted = counted
        device = Device(end, turns, watching, time.monotonic, costs=lambda spec: profile.costs(model_size(spec)))
        device.run()
        tell(msgspec.to_builtins(counted.seen()))
    os._exit(0)  # vLLM's exit handlers tear down what is going anyway


def prompt_tokens(payload: bytes) -> int:
    """Of the prompt of a request as `probe.request` writes it."""
    return len(msgspec.msgpack.decode(payload)[1])


def in_float32(spec: EngineSpec) -> EngineSpec:
    """Processors without products of 16 bits take as long for a batch as for its requests one by one."""
    return msgspec.structs.replace(
        spec, dtype="float32", weight_bytes=2 * spec.weight_bytes, kv_bytes_per_token=2 * spec.kv_bytes_per_token
    )


def tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def profile_of(specs: Sequence[EngineSpec], models: Sequence[Any], build: Any, batched: int) -> Profile:
    """One of each shape was measured, and the others of that shape cost the same."""
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
        host_bytes_per_s=1e10,  # one device does not share it
        block_tokens=models[0].engine.kv_form.tokens,
        models=costs,
    )


if __name__ == "__main__":
    one_thread()
    serve(int(sys.argv[1]), Path(sys.argv[2]))
