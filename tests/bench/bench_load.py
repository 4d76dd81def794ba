"""How fast does a model come back from the host cache? A load into unmapped addresses beside plain copies of it.

Each round measures all of them in turns, on the same pages: glibc's memcpy and the library's own copy (streaming
stores: the roof) into pages that are mapped and warm, then the scale to zero, then a load, which has to map the pages
first. The answer is the ratio of load and roof, round by round. `python tests/bench/bench_load.py [MiB]`
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from runtime.memory.native import Cache, Device, Direction, Segment  # noqa: E402

ROUNDS = 9
MIB = 1 << 20


def measure(image_bytes: int) -> dict[str, object]:
    device = Device(image_bytes)
    cache = Cache(image_bytes)
    huge = cache.commit(0, image_bytes)
    noise = os.urandom(MIB)
    for at in range(0, image_bytes, MIB):
        cache.view(at, MIB)[:] = noise
    reservation = device.reserve(image_bytes)

    def load() -> None:
        reservation.load(cache, [Segment(0, 0, image_bytes)]).wait(60)

    def plain_copy() -> None:
        ctypes.memmove(reservation.address, cache.address, image_bytes)

    def roof() -> None:
        reservation.copy(0, cache, 0, image_bytes, Direction.TO_DEVICE).wait(60)

    rounds = []
    load()
    for n in range(ROUNDS + 1):
        plain_s, roof_s = seconds(plain_copy), seconds(roof)
        call_s = seconds(lambda: reservation.unmap(0, image_bytes))
        gone_s = call_s + seconds(lambda: device.settle(60))
        load_s = seconds(load)
        assert reservation.view(image_bytes - MIB, MIB) == noise
        if n > 0:  # the first one warms up
            rounds.append((plain_s, roof_s, load_s, call_s, gone_s))
    plain, roofs, loads, calls, gone = (list(column) for column in zip(*rounds, strict=True))
    stats = device.stats()
    reservation.release()
    cache.close()
    device.close()
    return {
        "image_mib": image_bytes // MIB,
        "in_2_mib_folios": {"pool": stats.huge_bytes == image_bytes, "cache": huge == image_bytes},
        "memcpy_gb_s": speed(image_bytes, plain),
        "roof_gb_s": speed(image_bytes, roofs),
        "load_gb_s": speed(image_bytes, loads),
        "load_of_roof": spread([roof_s / load_s for roof_s, load_s in zip(roofs, loads, strict=True)], 3),
        "load_of_memcpy": spread([plain_s / load_s for plain_s, load_s in zip(plain, loads, strict=True)], 3),
        "unmap_call_ms": spread([s * 1e3 for s in calls], 3),
        "unmapped_after_ms": spread([s * 1e3 for s in gone], 3),
    }


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def speed(size: int, times: list[float]) -> list[float]:
    return spread([size / s / 1e9 for s in times], 2)


def spread(values: list[float], digits: int) -> list[float]:
    """Smallest, median, largest."""
    return [round(value, digits) for value in (min(values), statistics.median(values), max(values))]


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1] if len(sys.argv) > 1 else 512) * MIB), indent=2))
