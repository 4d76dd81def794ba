"""What does it cost to take a request out of the device and to put it back? Beside plain copies, and a new prefill.

A request with a KV cache of 16 MiB, then 64 MiB. A round measures in turns: the library's plain copy of as many bytes
between the same pages and warm memory of the host, to the host and back (the roofs); from `park` to `parked`; and from
`fetch` to `arrived`, with the weights still on the device as clean cache, so only the request travels. Before the
rounds, prefills of the same prompt are measured. The very first park has to get the host's memory, and stands apart.

`python tests/bench/runtime/bench_park.py`
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from runtime.core.device.request import RequestId  # noqa: E402
from runtime.memory.native import CacheMemory, Direction  # noqa: E402
from tests.bench.timing import (  # noqa: E402
    WAIT_S,
    awaited,
    gb_s,
    load,
    milliseconds,
    one_thread,
    ratios,
    seconds,
    spread,
)

if TYPE_CHECKING:
    from runtime.engine.builder import Builder
    from runtime.engine.vllm import VllmEngine

MIB = 1 << 20
SIZES_MIB = (16, 64)
ROUNDS, PREFILLS = 15, 3
CONTEXT = 8192
SHAPE: dict[str, Any] = dict(hidden=256, layers=8, heads=8, kv_heads=8, context=CONTEXT)
TOKEN_BYTES = 8 * 2 * 256 * 4  # layers x (K and V) x width x float32: 16 KiB
POOL_BYTES, HOST_BYTES = 256 * MIB, 4096 * MIB  # a 32nd of the host memory is kept warm for parked requests: 128 MiB


@dataclass(frozen=True)
class Trip:
    """A trip in one direction, by the engine and by a plain copy."""

    moved: int  # bytes
    took_s: float
    copying_s: float  # part of took_s spent in copies
    roof_s: float  # time of a plain copy of as many bytes


def measure(build: Builder, engine: VllmEngine, size: int) -> dict[str, object]:
    """Measure trips of a request with `size` bytes of KV cache. The engine is asleep before and after."""
    from tests.runtime.engines import payload

    prompt = [(7 * n) % 500 + 3 for n in range(size // TOKEN_BYTES)]
    engine.fetch(2 * (size // build.page_bytes) + 4)  # room for the request and for prefills beside it
    awaited(engine, engine.arrived)
    engine.add(RequestId("r"), payload(prompt, "r", temperature=0, max_tokens=4 * ROUNDS, ignore_eos=True))
    while not engine.step():
        pass
    prefills_s = [prefill_s(engine, payload(prompt, f"{n}", max_tokens=1)) for n in range(PREFILLS)]
    host = CacheMemory(size)
    host.commit(0, size)
    first, *rounds = (there_and_back(build, engine, host, size) for _ in range(ROUNDS + 1))
    engine.abort([RequestId("r")])
    sleep(build, engine)
    host.close()
    out, back = zip(*rounds, strict=True)
    both_s = [there.took_s + again.took_s for there, again in rounds]
    both_roofs_s = [there.roof_s + again.roof_s for there, again in rounds]
    return {
        "kv_mib": round(out[0].moved / MIB, 1),
        "tokens": len(prompt),
        "park": beside_roof(out),
        "resume": beside_roof(back),
        "both_of_roof": ratios(both_roofs_s, both_s),
        "first_park_ms": round(first[0].took_s * 1e3, 2),
        "prefill_ms": milliseconds(prefills_s, 1),
        "faster_than_prefill": spread((statistics.median(prefills_s) / s for s in both_s), 0),
        "load": load(),
    }


def beside_roof(trips: Sequence[Trip]) -> dict[str, list[float]]:
    roofs_s = [trip.roof_s for trip in trips]
    return {
        "ms": milliseconds(trip.took_s for trip in trips),
        "roof_gb_s": gb_s(trips[0].moved, roofs_s),
        "of_roof": ratios(roofs_s, [trip.took_s for trip in trips]),
        "copying_of_roof": ratios(roofs_s, [trip.copying_s for trip in trips]),
    }


def prefill_s(engine: VllmEngine, payload: bytes) -> float:
    """Seconds of a prefill beside the running request, which takes a token in every step."""
    engine.add(RequestId("again"), payload)
    started = time.perf_counter()
    while not any(output.request == "again" and output.finish is not None for output in engine.step()):
        pass
    return time.perf_counter() - started


def _away(engine: VllmEngine) -> None:
    engine.park()
    awaited(engine, engine.parked)


def _home(engine: VllmEngine) -> None:
    engine.fetch(engine.held().kv_wanted)
    awaited(engine, engine.arrived)


def there_and_back(build: Builder, engine: VllmEngine, host: CacheMemory, size: int) -> tuple[Trip, Trip]:
    reservation = engine.kv.reservation
    roof_out_s = seconds(lambda: reservation.copy(0, host, 0, size, Direction.TO_HOST).wait(WAIT_S))
    roof_back_s = seconds(lambda: reservation.copy(0, host, 0, size, Direction.TO_DEVICE).wait(WAIT_S))

    at_home = build.device.stats()
    out_s = seconds(partial(_away, engine))
    build.device.settle(WAIT_S)
    away = build.device.stats()
    back_s = seconds(partial(_home, engine))
    again = build.device.stats()

    moved = away.to_host_bytes - at_home.to_host_bytes
    assert again.to_device_bytes - away.to_device_bytes == moved, "the weights travelled too"
    assert engine.step(), "the request goes on where it stopped"
    out = Trip(moved, out_s, away.copy_s - at_home.copy_s, roof_out_s * moved / size)
    back = Trip(moved, back_s, again.copy_s - away.copy_s, roof_back_s * moved / size)
    return out, back


def sleep(build: Builder, engine: VllmEngine) -> None:
    engine.park()
    awaited(engine, engine.parked)
    engine.evict(engine.held().weights)
    build.device.settle(WAIT_S)


def answers() -> Iterator[dict[str, object]]:
    from deploy.demo.random_weights import write_random
    from runtime.engine.builder import Builder
    from tests.runtime.engines import spec

    with tempfile.TemporaryDirectory() as folder:
        build = Builder(POOL_BYTES, HOST_BYTES)
        engine = build(spec(write_random(Path(folder) / "m", "llama", **SHAPE), CONTEXT))
        for mib in SIZES_MIB:
            yield measure(build, engine, mib * MIB)


if __name__ == "__main__":
    one_thread()
    for answer in answers():
        print(json.dumps(answer), flush=True)
    os._exit(0)  # vLLM's exit handlers would tear down a process that is ending anyway
