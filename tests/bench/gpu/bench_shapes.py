"""The product's engines on a GPU with the shapes of real models: build, cold start, parking, turns; through `Builder`.

`python tests/bench/gpu/bench_shapes.py [--graphs N] [SHAPE ...]`, by default two models of 0.6 B and a model of 8 B.
`--graphs N`: decode steps of up to N requests are replayed from CUDA graphs. The questions, each a line of JSON:

  build     seconds from files and around the image; memory outside the pool; blocks that stayed outside
  cold      from an image in the pinned host cache to `arrived`, beside a plain copy of as many bytes (the link's roof)
  park      a batch with KV cache leaves the device and comes back, beside plain copies of as many bytes
  turns     a prefetched model takes over: from the end of a step to the end of the other model's first step

The models are written once to STACCATO_BENCH_MODELS (/dev/shm/staccato-models). `tiny` rehearses the bench without a
GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from runtime.core.device.request import RequestId  # noqa: E402
from runtime.memory.native import CacheMemory, Direction  # noqa: E402
from store.contract.wire import EngineSpec  # noqa: E402
from tests.bench.gpu.report import emit, emit_conditions, gb_s, seconds, spread  # noqa: E402
from tests.bench.gpu.shapes import SHAPES, write  # noqa: E402
from tests.bench.timing import WAIT_S, awaited  # noqa: E402

if TYPE_CHECKING:
    from runtime.engine.builder import Builder
    from runtime.engine.vllm import VllmEngine

MODELS = Path(os.environ.get("STACCATO_BENCH_MODELS", "/dev/shm/staccato-models"))
MIB, GIB = 1 << 20, 1 << 30
ROUNDS = 5
PARKED_REQUESTS, PARKED_TOKENS = 16, 2000  # requests that are parked, and tokens of the prompt of each
BATCH, PROMPT_TOKENS, TURN_STEPS = 8, 32, 8


class Model:
    """An engine, driven as a device's loop drives it."""

    def __init__(self, build: Builder, engine: VllmEngine, spec: EngineSpec) -> None:
        self.build, self.engine, self.spec = build, engine, spec
        self.steps_s: list[float] = []

    @property
    def roof(self) -> tuple[int, int]:
        """Bytes of the weights and the place of the image in the host cache."""
        image = self.engine.weights.image
        assert image is not None
        return self.engine.weights.size, image.offset

    def come(self, kv_pages: int = 0) -> None:
        engine = self.engine
        engine.fetch(max(kv_pages, engine.kv_pages_least, engine.held().kv_wanted))
        awaited(engine, engine.arrived)

    def come_whole(self) -> None:
        """As `come`, and wait for every parked request: a turn may start with the first of the requests."""
        self.come()
        scheduler = self.engine._scheduler
        awaited(self.engine, lambda: self.engine.arrived() and not scheduler.arriving)

    def leave(self) -> None:
        """Park the requests; the weights stay."""
        self.engine.park()
        awaited(self.engine, self.engine.parked)

    def go(self) -> None:
        """Scale to zero, and wait until the pages are free."""
        self.leave()
        self.engine.evict(self.engine.held().weights)
        self.build.device.settle(WAIT_S)

    def add(self, salt: str, requests: int, prompt_tokens: int, max_tokens: int) -> None:
        from tests.runtime.engines import payload

        for n in range(requests):
            prompt = [(7 * n + 3 * i) % 400 + 3 for i in range(prompt_tokens)]
            asked = payload(prompt, f"{salt}{n}", temperature=0, max_tokens=max_tokens, ignore_eos=True)
            self.engine.add(RequestId(f"{salt}{n}"), asked)

    def pages(self, requests: int, tokens: int) -> int:
        """Pages for the KV cache of requests with as many tokens."""
        blocks = 1 + requests * (2 + tokens // self.engine.kv_form.tokens)
        return self.engine.kv.pages_for(blocks)

    def until_all_began(self, requests: int) -> None:
        began: set[str] = set()
        while len(began) < requests:
            began |= {output.request for output in self.engine.step()}

    def end(self, salt: str, requests: int) -> None:
        self.engine.abort([RequestId(f"{salt}{n}") for n in range(requests)])


def outside(build: Builder) -> dict[str, object]:
    now = build.device_bytes()
    return {
        "outside_pool_mib": round(now.outside / MIB),
        "torch_mib": round(now.torch / MIB),
        "pinned_mib": round(now.cache_pinned / MIB),
    }


def built(build: Builder, name: str, seed: int) -> Model:
    spec = write(MODELS / f"{name}-{seed}", SHAPES[name], seed)
    before = outside(build)
    engines: list[VllmEngine] = []
    files_s = seconds(lambda: engines.append(build(spec)))
    strays = engines[0].home.left
    engines.pop().close()
    image_s = seconds(lambda: engines.append(build(spec)))
    model = Model(build, engines[0], spec)
    first_s = seconds(model.come)
    check_s = seconds(lambda: _checked(model.engine))
    emit(
        "build",
        model=spec.key,
        weights_mib=model.engine.weights.size // MIB,
        from_files_s=round(files_s, 2),
        around_image_s=round(image_s, 2),
        first_fetch_s=round(first_s, 3),
        golden_check_s=round(check_s, 3),
        strays=[len(strays), sum(strays.values()) // MIB],
        before=before,
        after=outside(build),
    )
    model.go()
    return model


def _build(models: list[Model], build: Builder, name: str, seed: int) -> None:
    models.append(built(build, name, seed))


def _checked(engine: VllmEngine) -> None:
    if (wrong := engine.check()) is not None:
        raise AssertionError(wrong)


def cold(model: Model) -> None:
    """Cold starts from the host cache beside the link's roof, one pair a round."""
    size, offset = model.roof
    reservation, cache = model.engine.weights.reservation, model.build.images.cache
    rounds: list[tuple[float, float, float, float]] = []
    for _ in range(ROUNDS):
        come_s = seconds(model.come)
        roof_s = seconds(lambda: reservation.copy(0, cache, offset, size, Direction.TO_DEVICE).wait(WAIT_S))
        call_s = seconds(model.leave) + seconds(lambda: model.engine.evict(model.engine.held().weights))
        gone_s = call_s + seconds(lambda: model.build.device.settle(WAIT_S))
        rounds.append((come_s, roof_s, call_s, gone_s))
    comes, roofs, calls, gone = (list(column) for column in zip(*rounds, strict=True))
    emit(
        "cold",
        model=model.spec.key,
        bytes=size,
        ms=spread([s * 1e3 for s in comes], 2),
        gb_s=gb_s(size, comes),
        roof_gb_s=gb_s(size, roofs),
        of_roof=spread([roof / come for roof, come in zip(roofs, comes, strict=True)]),
        to_zero_call_ms=spread([s * 1e3 for s in calls], 2),
        pages_free_after_ms=spread([s * 1e3 for s in gone], 2),
    )


def park(model: Model, requests: int, tokens: int) -> None:
    """Park and resume a batch, with the weights on the device, beside plain copies of as many bytes."""
    build, engine = model.build, model.engine
    model.come(model.pages(requests, tokens + 4 * ROUNDS))
    model.add("p", requests, tokens, 8 * ROUNDS)
    prefill_s = seconds(lambda: model.until_all_began(requests))
    size = engine.kv.block_bytes * requests * (tokens // engine.kv_form.tokens)
    host = CacheMemory(size)
    host.commit(0, size)
    host.pin(build.device, 0, size)
    build.device.await_pins(-1)
    reservation, plain = engine.weights.reservation, min(size, engine.weights.size)  # weights go out and come back
    trips: list[tuple[float, float, float, float, int]] = []
    for _ in range(ROUNDS + 1):
        roof_out = seconds(lambda: reservation.copy(0, host, 0, plain, Direction.TO_HOST).wait(WAIT_S))
        roof_in = seconds(lambda: reservation.copy(0, host, 0, plain, Direction.TO_DEVICE).wait(WAIT_S))
        before = build.device.stats()
        out_s = seconds(model.leave)
        build.device.settle(WAIT_S)
        moved = build.device.stats().to_host_bytes - before.to_host_bytes
        back_s = seconds(model.come_whole)
        assert engine.step(), "the requests go on where the requests stopped"
        trips.append((out_s, back_s, roof_out * moved / plain, roof_in * moved / plain, moved))
    first, *rest = trips  # the first trip also gets the memory that the reserve of the host cache lacks
    outs, backs, roofs_out, roofs_in, _ = (list(column) for column in zip(*rest, strict=True))
    emit(
        "park",
        model=model.spec.key,
        requests=requests,
        tokens=tokens,
        kv_mib=first[4] // MIB,
        prefill_s=round(prefill_s, 3),
        first_park_ms=round(first[0] * 1e3, 1),
        park_ms=spread([s * 1e3 for s in outs], 2),
        resume_ms=spread([s * 1e3 for s in backs], 2),
        park_of_roof=spread([roof / s for roof, s in zip(roofs_out, outs, strict=True)]),
        resume_of_roof=spread([roof / s for roof, s in zip(roofs_in, backs, strict=True)]),
        faster_than_prefill=round(prefill_s / statistics.median(a + b for a, b in zip(outs, backs, strict=True)), 2),
    )
    model.end("p", requests)
    model.go()
    host.close()


def turns(first: Model, second: Model) -> None:
    """A turn of `first` ends while `second` is brought in, and a step of `second` follows; then the other way."""
    models = [first, second]
    for model in models:
        model.come(model.pages(BATCH, PROMPT_TOKENS + 40 * TURN_STEPS))
        model.add("t", BATCH, PROMPT_TOKENS, 60 * TURN_STEPS)
        model.until_all_began(BATCH)
        for _ in range(4 * TURN_STEPS):
            model.steps_s.append(seconds(model.engine.step))
        model.leave()
    now, then = models
    now.come()
    seen: dict[str, list[tuple[float, float, int]]] = {first.spec.key: [], second.spec.key: []}
    for _ in range(2 * ROUNDS + 2):
        for _ in range(TURN_STEPS):
            now.engine.step()
        then.engine.fetch(max(then.engine.kv_pages_least, then.engine.held().kv_wanted))
        beside = 0
        while not then.engine.arrived():
            now.engine.step()
            beside += 1
        ended = time.perf_counter()
        first_step_s = seconds(then.engine.step)
        seen[then.spec.key].append((time.perf_counter() - ended, first_step_s, beside))
        now.leave()
        now, then = then, now
    for model in models:
        gaps, steps, beside_all = (list(column) for column in zip(*seen[model.spec.key][1:], strict=True))
        step_s = statistics.median(model.steps_s)
        emit(
            "turns",
            to=model.spec.key,
            step_ms=round(step_s * 1e3, 3),
            switch_ms=spread([s * 1e3 for s in gaps], 3),
            above_a_step_ms=spread([(s - step_s) * 1e3 for s in gaps], 3),
            first_step_ms=spread([s * 1e3 for s in steps], 3),
            steps_of_the_other_meanwhile=spread([float(n) for n in beside_all], 0),
        )
    now.leave()
    for model in models:
        model.end("t", BATCH)
        model.go()


def asked(what: str, work: Callable[[], object]) -> Iterator[str]:
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        emit("failed", question=what, error=f"{type(error).__name__}: {str(error)[:500]}")
        yield what


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--graphs", type=int, default=0)
    options.add_argument("--unchecked", action="store_true", help="leave the self-check out")
    options.add_argument("--pool-gib", type=float, default=0)
    options.add_argument("--host-gib", type=float, default=0)
    options.add_argument("shapes", nargs="*")
    given = options.parse_args()
    names = given.shapes or ["0.6B", "0.6B", "8B"]
    if not all(name == "tiny" for name in names):
        emit_conditions()
    from runtime.engine.builder import Builder
    from runtime.engine.selfcheck import prepare

    tiny = names[0] == "tiny"
    pool = int((given.pool_gib or (0.25 if tiny else 48)) * GIB)
    host = int((given.host_gib or (1 if tiny else 40)) * GIB)
    build = Builder(pool, host, graphs=given.graphs)
    failed: list[str] = []
    began = time.perf_counter()
    if not given.unchecked:
        failed += asked("self-check", lambda: prepare(build))
    emit("self-check", s=round(time.perf_counter() - began, 2), graphs=given.graphs, **outside(build))
    models: list[Model] = []
    for seed, name in enumerate(names):
        failed += asked(f"build {name}", partial(_build, models, build, name, seed))
    requests, tokens = (4, 200) if tiny else (PARKED_REQUESTS, PARKED_TOKENS)
    for model in models:
        failed += asked(f"cold {model.spec.key}", partial(cold, model))
        failed += asked(f"park {model.spec.key}", partial(park, model, requests, tokens))
    for first, second in zip(models, models[1:], strict=False):
        failed += asked("turns", partial(turns, first, second))
    stats = build.device.stats()
    emit("end", failed=failed, pages_free=stats.pages_free, pages_total=stats.pages_total, **outside(build))
    os._exit(int(bool(failed)))  # vLLM's exit handlers would tear down a process that is ending anyway


if __name__ == "__main__":
    main()
