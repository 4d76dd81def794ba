"""What does it cost to take a request out of the device and to put it back? Beside plain copies, and beside a new prefill.

One request whose KV cache takes 16 MiB, then 64 MiB. Each round measures in turns: the library's plain copy of as many
bytes between the same pages and warm memory of the host, to the host and back (the roofs); from `park` to `parked`; from
`fetch` to `arrived`, with the weights still there as clean cache, so that the request is all that travels; and a prefill
of the same prompt. `python tests/bench/bench_park.py`
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from runtime.memory.native import Cache, Direction  # noqa: E402
from runtime.request import RequestId  # noqa: E402
from tests.bench.timing import WAIT_S, gb_s, load, milliseconds, one_thread, polled, ratios, seconds  # noqa: E402

if TYPE_CHECKING:
    from runtime.engine.builder import Builder
    from runtime.engine.vllm import VllmEngine

MIB = 1 << 20
SIZES_MIB = (16, 64)
ROUNDS, PREFILLS = 15, 3
CONTEXT = 8192
SHAPE = dict(hidden=256, layers=8, heads=8, kv_heads=8, context=CONTEXT)
TOKEN_BYTES = 8 * 2 * 256 * 4  # layers x (K and V) x width x float32: 16 KiB
POOL_BYTES, HOST_BYTES = 256 * MIB, 4096 * MIB  # a 32nd of the host's is kept warm for parked requests: 128 MiB
LOOK_S = 5e-5  # the device's loop looks every 0.5 ms at most, and a copy of 16 MiB takes little longer


def measure(build: Builder, engine: VllmEngine, size: int) -> dict[str, object]:
    """The engine comes asleep and goes asleep."""
    from tests.runtime.engines import payload

    prompt = [(7 * n) % 500 + 3 for n in range(size // TOKEN_BYTES)]
    kv_pages = 2 * (size // build.page_bytes) + 4  # room for the request and for prefills beside it
    engine.fetch(kv_pages)
    polled(engine.arrived)
    engine.add(RequestId("r"), payload(prompt, "r", temperature=0, max_tokens=4 * ROUNDS, ignore_eos=True))
    while not engine.step():
        pass
    prefills = [prefill_s(engine, payload(prompt, f"{n}", max_tokens=1)) for n in range(PREFILLS)]
    host = Cache(size)
    host.commit(0, size)
    rounds = [there_and_back(build, engine, host, size, kv_pages) for _ in range(ROUNDS)]
    engine.abort([RequestId("r")])
    sleep(build, engine)
    host.close()

    first_park_s = rounds[0][2]
    _, *out_s = (one[2] for one in rounds)
    _, *in_s = (one[3] for one in rounds)
    _, *moved = (one[4] for one in rounds)
    roofs_out, roofs_in = ([one[n] * one[4] / size for one in rounds[1:]] for n in (0, 1))  # for the bytes that moved
    both_s = [a + b for a, b in zip(out_s, in_s, strict=True)]
    prefill = [sorted(prefills)[PREFILLS // 2]] * len(both_s)
    return {
        "kv_mib": round(moved[0] / MIB, 1),
        "tokens": len(prompt),
        "roof_gb_s": {"to_host": gb_s(moved[0], roofs_out), "to_device": gb_s(moved[0], roofs_in)},
        "park_ms": milliseconds(out_s),
        "resume_ms": milliseconds(in_s),
        "park_of_roof": ratios(roofs_out, out_s),
        "resume_of_roof": ratios(roofs_in, in_s),
        "first_park_ms": round(first_park_s * 1e3, 2),
        "prefill_ms": milliseconds(prefills, 1),
        "faster_than_prefill": ratios(prefill, both_s, 0),
        "load": load(),
    }


def prefill_s(engine: VllmEngine, payload: bytes) -> float:
    """Beside the running request, which takes a token for each step of it."""
    engine.add(RequestId("again"), payload)
    started = time.perf_counter()
    while not any(output.request == "again" and output.finish is not None for output in engine.step()):
        pass
    return time.perf_counter() - started


def there_and_back(
    build: Builder, engine: VllmEngine, host: Cache, size: int, kv_pages: int
) -> tuple[float, float, float, float, int]:
    """Seconds to the host and back by plain copies, out and in by the engine, and how many bytes it moved each way."""
    reservation, before = engine.kv.reservation, build.device.stats()
    roof_out_s = seconds(lambda: reservation.copy(0, host, 0, size, Direction.TO_HOST).wait(WAIT_S))
    roof_in_s = seconds(lambda: reservation.copy(0, host, 0, size, Direction.TO_DEVICE).wait(WAIT_S))
    out_s = seconds(lambda: (engine.park(), polled(engine.parked, LOOK_S)))
    build.device.settle(WAIT_S)
    in_s = seconds(lambda: (engine.fetch(kv_pages), polled(engine.arrived, LOOK_S)))
    after = build.device.stats()
    moved = after.to_host_bytes - before.to_host_bytes - size
    assert after.to_device_bytes - before.to_device_bytes - size == moved, "the weights travelled too"
    assert engine.step(), "the request goes on where it stopped"
    return roof_out_s, roof_in_s, out_s, in_s, moved


def sleep(build: Builder, engine: VllmEngine) -> None:
    engine.park()
    polled(engine.parked)
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
    os._exit(0)  # vLLM's exit handlers tear down what is going anyway
