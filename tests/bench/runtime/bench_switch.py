"""How long does the device stand still when a second model's turn comes?

Two models of different sizes with eight requests each, driven in the way of the device's loop. *Prefetched*: during
steps of the first model, the second model is brought in, weights and requests. Measured: from the end of the first
model's last step to the end of the second model's first step, in units of the second model's decode step. *One fits*:
the pool is too small for both models. Measured: from the last step of the first model, parked next, to the first tokens
of the second model. Beside it stand the times without parking: the engine built anew, around the image in the host's
cache or from files, with the prompts computed again.

`python tests/bench/runtime/bench_switch.py`
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from runtime.core.device.request import RequestId  # noqa: E402
from store.contract.wire import EngineSpec  # noqa: E402
from tests.bench.timing import WAIT_S, awaited, load, milliseconds, one_thread, seconds, spread  # noqa: E402

if TYPE_CHECKING:
    from runtime.engine.builder import Builder
    from runtime.engine.vllm import VllmEngine

MIB = 1 << 20
SHAPES: dict[str, dict[str, Any]] = {
    "0.6 M": dict(hidden=128, layers=2),
    "27 M": dict(hidden=512, layers=8, heads=8, kv_heads=4),
}
BATCH, PROMPT_TOKENS, CONTEXT = 8, 32, 1024
TURN_STEPS, ROUNDS, REBUILDS = 4, 15, 3
BOTH_FIT_BYTES, ONE_FITS_BYTES, HOST_BYTES = 256 * MIB, 176 * MIB, 2048 * MIB


@dataclass
class Model:
    name: str
    spec: EngineSpec
    engine: VllmEngine
    steps_s: list[float] = field(default_factory=list)  # without copies under way

    def add_batch(self, salt: str) -> None:
        from tests.runtime.engines import payload

        for n in range(BATCH):
            prompt = [(7 * n + 3 * i) % 500 + 3 for i in range(PROMPT_TOKENS)]
            asked = payload(prompt, salt, temperature=0, max_tokens=CONTEXT - PROMPT_TOKENS, ignore_eos=True)
            self.engine.add(RequestId(f"{salt}{n}"), asked)

    def kv_pages(self) -> int:
        """Pages for the KV cache of the model's requests, plus a block per request."""
        return self.engine.held().kv_wanted + self.engine.kv.pages_for(1 + BATCH)

    def come(self) -> None:
        self.engine.fetch(self.kv_pages())
        awaited(self.engine, self.engine.arrived)

    def turn(self) -> None:
        for _ in range(TURN_STEPS):
            self.steps_s.append(seconds(self.engine.step))

    def go(self) -> None:
        self.engine.park()
        awaited(self.engine, self.engine.parked)
        self.engine.evict(self.engine.held().weights)

    def step_s(self) -> float:
        return statistics.median(self.steps_s)


def start(build: Builder, specs: dict[str, EngineSpec]) -> list[Model]:
    """The models, asleep, with a batch after the first tokens."""
    models = []
    for name, spec in specs.items():
        model = Model(name, spec, build(spec))
        model.come()
        model.engine.grow(model.engine.kv.pages_for(1 + 2 * BATCH) - model.engine.held().kv)
        model.add_batch("r")
        while len(model.engine.step()) < BATCH:
            pass
        model.go()
        models.append(model)
    return models


# ── both fit ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def prefetched(build: Builder, specs: dict[str, EngineSpec]) -> Iterator[dict[str, object]]:
    now, then = start(build, specs)
    seen: dict[str, list[tuple[float, float, list[float]]]] = {name: [] for name in specs}
    now.come()
    for round_ in range(2 * ROUNDS + 2):
        now.turn()
        still_s, first_s, beside_s = switch(now, then)
        if round_ >= 2:
            seen[then.name].append((still_s, first_s, beside_s))
        then.turn()
        now.go()
        build.device.settle(WAIT_S)
        now, then = then, now
    steps_s = {model.name: model.step_s() for model in (now, then)}
    for model in (now, then):
        other = next(name for name in specs if name != model.name)
        still, first, beside = zip(*seen[model.name], strict=True)
        slowed = [step / steps_s[other] for steps in beside for step in steps]
        yield {
            "switch": "prefetched",
            "to": model.name,
            "step_ms": round(model.step_s() * 1e3, 2),
            "in_steps": spread((s / model.step_s() for s in still), 2),
            "ms": milliseconds(still, 2),
            "until_its_step_begins_ms": milliseconds(s - f for s, f in zip(still, first, strict=True)),
            "steps_of_the_other_meanwhile": spread((len(steps) for steps in beside), 0),
            "each_of_them_in_steps": spread(slowed, 2),
            "load": load(),
        }


def switch(now: Model, then: Model) -> tuple[float, float, list[float]]:
    """Seconds from the end of the last step to the end of the first, seconds of the first step, and of each step in
    between."""
    then.engine.fetch(then.kv_pages())
    beside_s = [seconds(now.engine.step)]
    ended = time.perf_counter()
    while not then.engine.arrived():
        beside_s.append(seconds(now.engine.step))
        ended = time.perf_counter()
    first_s = seconds(then.engine.step)
    return time.perf_counter() - ended, first_s, beside_s


# ── one fits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def one_fits(build: Builder, specs: dict[str, EngineSpec]) -> Iterator[dict[str, object]]:
    now, then = start(build, specs)
    switched_s: dict[str, list[float]] = {name: [] for name in specs}
    came: dict[str, list[int]] = {name: [] for name in specs}
    now.come()
    for round_ in range(2 * ROUNDS + 2):
        now.turn()
        took_s, requests = exchange(now, then)
        if round_ >= 2:
            switched_s[then.name].append(took_s)
            came[then.name].append(requests)
        then.turn()
        now, then = then, now
    now.go()
    build.device.settle(WAIT_S)
    for model in (now, then):
        from_image_s = [rebuilt(build, model, keep_image=True) for _ in range(REBUILDS)]
        from_files_s = [rebuilt(build, model, keep_image=False) for _ in range(REBUILDS)]
        typical_s = statistics.median(switched_s[model.name])
        yield {
            "switch": "one fits",
            "to": model.name,
            "step_ms": round(model.step_s() * 1e3, 2),
            "ms": milliseconds(switched_s[model.name], 2),
            "in_steps": spread((s / model.step_s() for s in switched_s[model.name]), 2),
            "requests_in_first_step": spread(came[model.name], 0),
            "rebuilt_around_image_ms": milliseconds(from_image_s, 0),
            "rebuilt_from_files_ms": milliseconds(from_files_s, 0),
            "faster_than_around_image": spread((s / typical_s for s in from_image_s), 0),
            "faster_than_from_files": spread((s / typical_s for s in from_files_s), 0),
            "load": load(),
        }


def exchange(now: Model, then: Model) -> tuple[float, int]:
    """Seconds until the second model's first tokens, and the number of requests with a token: requests still on their
    way in miss the first step."""
    began = time.perf_counter()
    now.go()
    then.come()
    made = then.engine.step()
    return time.perf_counter() - began, len(made)


def rebuilt(build: Builder, model: Model, keep_image: bool) -> float:
    """Seconds until a batch has its first tokens on a new engine. At the end the batch is aborted, and the model
    asleep."""
    if not keep_image:
        build.images.discard(model.engine.key)
    model.engine.close()
    began = time.perf_counter()
    model.engine = build(model.spec)
    model.engine.fetch(model.engine.kv.pages_for(1 + 2 * BATCH))
    awaited(model.engine, model.engine.arrived)
    model.add_batch("again")
    while len(model.engine.step()) < BATCH:
        pass
    took_s = time.perf_counter() - began
    model.engine.abort([RequestId(f"again{n}") for n in range(BATCH)])
    model.go()
    return took_s


def answers() -> Iterator[dict[str, object]]:
    from deploy.demo.random_weights import write_random
    from runtime.engine.builder import Builder
    from tests.runtime.engines import spec

    with tempfile.TemporaryDirectory() as folder:
        specs = {
            name: spec(write_random(Path(folder) / f"m{n}", "llama", **shape), CONTEXT)
            for n, (name, shape) in enumerate(SHAPES.items())
        }
        yield from prefetched(Builder(BOTH_FIT_BYTES, HOST_BYTES), specs)
        yield from one_fits(Builder(ONE_FITS_BYTES, HOST_BYTES), specs)


if __name__ == "__main__":
    one_thread()
    for answer in answers():
        print(json.dumps(answer), flush=True)
    os._exit(0)  # vLLM's exit handlers would tear down a process that is ending anyway
