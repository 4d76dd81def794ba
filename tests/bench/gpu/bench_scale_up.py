"""How fast does a model come back from the pinned host cache (E), as a fraction of the bare link (D)?

`python tests/bench/gpu/bench_scale_up.py [GIB] [ROUNDS]`: an image of 15 GiB, as of 8 billion weights of 2 bytes, 5
rounds, about 2 minutes. First the price of pinned memory, by the size of the host's pages; then plain copies; then, by
the size of the device's pages, loads into empty addresses, beside a plain copy of the image in the same round. `load`
maps ahead of copying, `mapped_first` maps every page before it copies any page. `unmap_call_ms` is how long the caller
of a scale to zero waits, `unmapped_after_ms` when the model's last page is free.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import cupy

from runtime.memory.native import Backend, CacheMemory, DevicePool, Direction, Reservation, Segment
from tests.bench.gpu.report import FOREVER, GIB, MIB, emit, emit_conditions, gb_s, seconds, spread

PAGES_MIB = (2, 32, 128)
COPIES_MIB = (1, 2, 8, 32, 128, 512)
PINNED_BYTES, LINK_BYTES = 2 * GIB, 4 * GIB
PIN_ROUNDS = 3


def main(gib: int = 15, rounds: int = 5) -> None:
    emit_conditions()
    keeper = DevicePool(2 * MIB, backend=Backend.CUDA, page_bytes=2 * MIB)
    for huge in (False, True):
        emit("pinned memory", **pinned_memory(keeper, min(PINNED_BYTES, gib * GIB), huge))
    cache = CacheMemory(gib * GIB)
    huge_bytes = cache.commit(0, cache.bytes)
    fill(cache)
    cache.pin(keeper, 0, cache.bytes)
    keeper.await_pins(FOREVER)
    emit("image", gib=gib, in_2_mib_folios=huge_bytes == cache.bytes)
    for answer in link(cache.address, min(LINK_BYTES, cache.bytes), rounds):
        emit("link", **answer)
    cache.unpin(keeper, 0)  # the driver takes a range once, and each pool pins for itself
    for page_mib in PAGES_MIB:
        emit("scale up", **scale_up(cache, page_mib * MIB, rounds))
    cache.close()
    keeper.close()


def fill(cache: CacheMemory) -> None:
    """Fill the cache: no two MiB are equal, and no MiB is zeroes."""
    noise = os.urandom(MIB - 8)
    for at in range(0, cache.bytes, MIB):
        cache.view(at, MIB)[:] = at.to_bytes(8, "little") + noise


# ── D: the host's memory and the link ─────────────────────────────────────────────────────────────────────────────────


def pinned_memory(device: DevicePool, size: int, huge: bool) -> dict[str, object]:
    """Seconds a GiB: to get memory of small pages or of 2 MiB folios, to pin it, and to give the memory back."""
    times = [pin_once(device, size, huge) for _ in range(PIN_ROUNDS)]
    commit, pin, close = (spread([s / size * GIB for s in column], 4) for column in zip(*times, strict=True))
    return {
        "gib": size / GIB,
        "asked_for_2_mib_folios": huge,
        "commit_s_per_gib": commit,
        "pin_s_per_gib": pin,
        "close_s_per_gib": close,
    }


def pin_once(device: DevicePool, size: int, huge: bool) -> tuple[float, float, float]:
    cache = CacheMemory(size)

    def touch() -> None:
        cache.view(0, size)[::4096] = bytes(size // 4096)

    commit_s = seconds((lambda: cache.commit(0, size)) if huge else touch)

    def pin() -> None:
        cache.pin(device, 0, size)
        device.await_pins(FOREVER)

    return commit_s, seconds(pin), seconds(cache.close)


def link(host: int, size: int, rounds: int) -> Iterator[dict[str, object]]:
    """Plain copies between pinned memory and the device, by the size of a copy."""
    device = cupy.cuda.runtime.malloc(size)
    for copy_bytes in [*(mib * MIB for mib in COPIES_MIB if mib * MIB < size), size]:
        yield {"bytes": size, "copy_mib": copy_bytes // MIB, **copies(device, host, size, copy_bytes, rounds)}
    cupy.cuda.runtime.free(device)


def copies(device: int, host: int, size: int, copy_bytes: int, rounds: int) -> dict[str, object]:
    one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    half = size // 2

    def both_ways() -> None:
        put_copies(device, host, half, copy_bytes, one)
        put_copies(host + half, device + half, half, copy_bytes, other)
        one.synchronize()
        other.synchronize()

    times = [
        (
            seconds(lambda: plain_copy(device, host, size, copy_bytes, one)),
            seconds(lambda: plain_copy(host, device, size, copy_bytes, one)),
            seconds(both_ways),
        )
        for _ in range(rounds)
    ]
    to_device, to_host, both = (gb_s(size, list(column)) for column in zip(*times, strict=True))
    return {"rounds": rounds, "to_device_gb_s": to_device, "to_host_gb_s": to_host, "both_ways_gb_s": both}


def plain_copy(target: int, source: int, size: int, copy_bytes: int, stream: cupy.cuda.Stream) -> None:
    put_copies(target, source, size, copy_bytes, stream)
    stream.synchronize()


def put_copies(target: int, source: int, size: int, copy_bytes: int, stream: cupy.cuda.Stream) -> None:
    runtime = cupy.cuda.runtime
    for at in range(0, size, copy_bytes):
        length = min(copy_bytes, size - at)
        runtime.memcpyAsync(target + at, source + at, length, runtime.memcpyDefault, stream.ptr)


# ── E: scale-up and scale to zero ─────────────────────────────────────────────────────────────────────────────────────


def scale_up(cache: CacheMemory, page_bytes: int, rounds: int) -> dict[str, object]:
    size = cache.bytes
    opened: list[DevicePool] = []
    open_s = seconds(lambda: opened.append(DevicePool(size, backend=Backend.CUDA, page_bytes=page_bytes)))
    device = opened[0]
    reservation = device.reserve(size)
    cache.pin(device, 0, size)
    device.await_pins(FOREVER)
    stream = cupy.cuda.Stream(non_blocking=True)

    def load(chunk_bytes: int) -> Callable[[], None]:
        return lambda: reservation.load(cache, [Segment(0, 0, size)], chunk_bytes).wait(FOREVER)

    def unmap() -> None:
        reservation.unmap(0, size)

    load(32 * MIB)()
    before = device.stats()
    times = []
    for _ in range(rounds):
        roof_s = seconds(lambda: plain_copy(reservation.address, cache.address, size, size, stream))
        call_s = seconds(unmap)
        gone_s = call_s + seconds(lambda: device.settle(FOREVER))
        mapped_first_s = seconds(load(size))
        unmap()
        device.settle(FOREVER)
        times.append((roof_s, call_s, gone_s, mapped_first_s, seconds(load(32 * MIB))))
        compare(reservation, cache)
    after = device.stats()
    reservation.release()
    cache.unpin(device, 0)
    device.close()
    roofs, calls, gone, mapped_first, loads = (list(column) for column in zip(*times, strict=True))
    pages = 2 * rounds * after.pages_total
    return {
        "page_mib": page_bytes // MIB,
        "gib": size / GIB,
        "rounds": rounds,
        "make_page_us": round(open_s / after.pages_total * 1e6, 1),
        "map_page_us": round((after.map_s - before.map_s) / pages * 1e6, 2),
        "unmap_page_us": round((after.unmap_s - before.unmap_s) / pages * 1e6, 2),
        "roof_gb_s": gb_s(size, roofs),
        "load_gb_s": gb_s(size, loads),
        "load_ms": spread([s * 1e3 for s in loads]),
        "load_of_roof": spread([roof / load for roof, load in zip(roofs, loads, strict=True)]),
        "mapped_first_of_roof": spread([roof / first for roof, first in zip(roofs, mapped_first, strict=True)]),
        "unmap_call_ms": spread([s * 1e3 for s in calls]),
        "unmapped_after_ms": spread([s * 1e3 for s in gone]),
    }


def compare(reservation: Reservation, cache: CacheMemory) -> None:
    """Check eleven MiB of the loaded image, from beginning to end, against the cache."""
    back = CacheMemory(MIB)
    back.commit(0, MIB)
    back.pin(reservation.device, 0, MIB)
    for tenth in range(11):
        at = (cache.bytes - MIB) * tenth // 10 // MIB * MIB
        reservation.copy(at, back, 0, MIB, Direction.TO_HOST).wait(FOREVER)
        if back.view(0, MIB) != cache.view(at, MIB):
            sys.exit(f"the MiB at {at} is not what the cache has: these times are worth nothing")
    back.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
