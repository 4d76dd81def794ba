"""What the driver asks for: mapping by page size, pinning, and a model's way back from the cache beside the bare copy.

`make -C csrc && python tests/gpu/bench_memory.py [GiB]` on a machine with a GPU; one line of JSON for each page size.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[2]))

from runtime.memory.native import Backend, Cache, Device, Direction, Segment

MIB, GIB = 1 << 20, 1 << 30
PAGES_MIB = (2, 8, 16, 32, 64, 128)
ROUNDS = 5
Result = TypeVar("Result")


def measure(page_bytes: int, image_bytes: int) -> dict[str, object]:
    open_s, device = timed(lambda: Device(image_bytes, backend=Backend.CUDA, page_bytes=page_bytes))
    cache = Cache(image_bytes)
    commit_s, huge = timed(lambda: cache.commit(0, image_bytes))
    pin_s, _ = timed(lambda: cache.pin(device, 0, image_bytes))
    reservation = device.reserve(image_bytes)

    def load() -> None:
        reservation.load(cache, [Segment(0, 0, image_bytes)]).wait(60)

    def roof() -> None:
        reservation.copy(0, cache, 0, image_bytes, Direction.TO_DEVICE).wait(60)

    load()
    before = device.stats()
    rounds = []
    for _ in range(ROUNDS):
        roof_s = timed(roof)[0]
        call_s = timed(lambda: reservation.unmap(0, image_bytes))[0]
        gone_s = call_s + timed(lambda: device.settle(60))[0]
        rounds.append((roof_s, call_s, gone_s, timed(load)[0]))
    roofs, calls, gone, loads = (list(column) for column in zip(*rounds, strict=True))
    after = device.stats()
    pages = ROUNDS * after.pages_total
    reservation.release()
    cache.close()
    device.close()
    return {
        "page_mib": page_bytes // MIB,
        "image_gib": image_bytes / GIB,
        "make_page_us": round(open_s / after.pages_total * 1e6, 1),
        "map_page_us": round((after.map_s - before.map_s) / pages * 1e6, 1),
        "unmap_page_us": round((after.unmap_s - before.unmap_s) / pages * 1e6, 1),
        "commit_s_per_gib": round(commit_s / image_bytes * GIB, 3),
        "pin_s_per_gib": round(pin_s / image_bytes * GIB, 3),
        "cache_in_2_mib_folios": huge == image_bytes,
        "roof_gb_s": spread([image_bytes / s / 1e9 for s in roofs]),
        "load_gb_s": spread([image_bytes / s / 1e9 for s in loads]),
        "load_of_roof": spread([roof_s / load_s for roof_s, load_s in zip(roofs, loads, strict=True)]),
        "unmap_call_ms": spread([s * 1e3 for s in calls]),
        "unmapped_after_ms": spread([s * 1e3 for s in gone]),
    }


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def spread(values: list[float]) -> list[float]:
    """Smallest, median, largest."""
    return [round(value, 3) for value in (min(values), statistics.median(values), max(values))]


if __name__ == "__main__":
    for page_mib in PAGES_MIB:
        size = int(float(sys.argv[1] if len(sys.argv) > 1 else 8) * GIB)
        print(json.dumps(measure(page_mib * MIB, size)), flush=True)
