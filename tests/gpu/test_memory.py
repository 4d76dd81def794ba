"""The memory library on a real GPU; tests/runtime/memory/test_memory.py tests the promises for any device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from runtime.memory.native import (
    Backend,
    CacheMemory,
    Code,
    DevicePool,
    Direction,
    Piece,
    PoolError,
    Reservation,
    Segment,
)
from tests.conftest import ROOT
from tests.gpu.conftest import IMAGE, PAGE, POOL_BYTES, SOON_S, WHOLE_IMAGE, read

HALF = POOL_BYTES // 2


def test_an_image_comes_and_is_kept_as_clean_cache(
    device: DevicePool, reservation: Reservation, cache: CacheMemory
) -> None:
    reservation.load(cache, WHOLE_IMAGE).wait(SOON_S)
    assert read(reservation, cache, 0, len(IMAGE)) == IMAGE
    reservation.mark_clean(0, len(IMAGE))
    reservation.unmap(0, PAGE)
    before = device.stats().to_device_bytes
    reservation.load(cache, WHOLE_IMAGE).wait(SOON_S)
    assert device.stats().to_device_bytes - before == PAGE
    assert read(reservation, cache, 0, len(IMAGE)) == IMAGE


def test_a_page_full_of_nan_is_zeroed_for_another_owner(
    device: DevicePool, reservation: Reservation, cache: CacheMemory
) -> None:
    """0xff is NaN in every float; NaN behind an attention mask of zeroes would still spoil a sum."""
    fill_the_pool_with_nan(reservation, cache)
    other = device.reserve(POOL_BYTES)
    other.map(0, POOL_BYTES, SOON_S)
    for offset in (0, HALF):
        assert read(other, cache, offset, HALF) == bytes(HALF)
    other.release()


def fill_the_pool_with_nan(reservation: Reservation, cache: CacheMemory) -> None:
    cache.view(HALF, HALF)[:] = b"\xff" * HALF
    reservation.map(0, POOL_BYTES, SOON_S)
    for offset in (0, HALF):
        reservation.copy(offset, cache, HALF, HALF, Direction.TO_DEVICE).wait(SOON_S)
    reservation.unmap(0, POOL_BYTES)


def test_a_cancelled_load_leaves_no_bytes_of_another_owner(
    device: DevicePool, reservation: Reservation, cache: CacheMemory
) -> None:
    """Pages mapped ahead, and not yet reached by a copy, still hold the bytes of the previous owner."""
    fill_the_pool_with_nan(reservation, cache)
    other = device.reserve(POOL_BYTES)
    cache.view(0, HALF)[:] = bytes(HALF)
    device.throttle(PAGE / 0.05)
    load = other.load(cache, [Segment(0, 0, HALF)], chunk_bytes=PAGE)
    while device.stats().pages_mapped < 4:  # pages mapped ahead of the first copy, which takes 50 ms
        assert not load.done()
    load.cancel()
    with pytest.raises(PoolError, match="cancelled"):
        load.wait(SOON_S)
    device.throttle(0)
    other.map(0, POOL_BYTES, SOON_S)
    for offset in (0, HALF):
        assert read(other, cache, offset, HALF) == bytes(HALF)
    other.release()


def test_an_address_is_mapped_again_while_an_old_copy_is_pending(reservation: Reservation, cache: CacheMemory) -> None:
    for _ in range(5):
        cache.view(HALF, len(IMAGE))[:] = bytes(len(IMAGE))
        reservation.load(cache, WHOLE_IMAGE).wait(SOON_S)
        out = reservation.copy(0, cache, HALF, len(IMAGE), Direction.TO_HOST)
        reservation.unmap(0, len(IMAGE))
        reservation.map(0, len(IMAGE), SOON_S)  # a late unmap would take this mapping away
        out.wait(SOON_S)
        assert cache.view(HALF, len(IMAGE)) == IMAGE
        reservation.copy(0, cache, 0, len(IMAGE), Direction.TO_DEVICE).wait(SOON_S)
        reservation.unmap(0, len(IMAGE))


def test_blocks_come_back_under_other_numbers(reservation: Reservation, cache: CacheMemory) -> None:
    block, layers, blocks = 32 << 10, 8, 64
    pieces = [Piece(layer * blocks * block, block, layer * block, layers * block, block) for layer in range(layers)]
    ids, new_ids, places = [3, 4, 5, 17, 30], [40, 41, 42, 9, 63], [300, 301, 302, 303, 304]
    expected = bytearray(IMAGE)
    for layer in range(layers):
        for old, new in zip(ids, new_ids, strict=True):
            source, target = (layer * blocks + old) * block, (layer * blocks + new) * block
            expected[target : target + block] = IMAGE[source : source + block]
    reservation.load(cache, WHOLE_IMAGE).wait(SOON_S)
    out = reservation.copy_blocks(cache, pieces, ids, places, Direction.TO_HOST)
    reservation.copy_blocks(cache, pieces, new_ids, places, Direction.TO_DEVICE, after=out).wait(SOON_S)
    assert read(reservation, cache, 0, len(IMAGE)) == expected


def test_a_load_comes_through_another_device(device: DevicePool) -> None:
    """The load is relayed in pieces that are no whole pages."""
    try:
        helped = DevicePool(POOL_BYTES, backend=Backend.CUDA, page_bytes=PAGE, helpers=(1,), relay_bytes=3 * PAGE)
    except PoolError as error:
        if error.code is Code.UNSUPPORTED or str(error).startswith("cuDeviceGet"):
            pytest.skip(f"there is no second GPU that can write to the first one's memory: {error}")
        raise
    cache, reservation = CacheMemory(POOL_BYTES), helped.reserve(POOL_BYTES)
    cache.commit(0, POOL_BYTES)
    cache.pin(helped, 0, POOL_BYTES)
    cache.view(0, len(IMAGE))[:] = IMAGE
    reservation.load(cache, WHOLE_IMAGE).wait(SOON_S)
    assert read(reservation, cache, 0, len(IMAGE)) == IMAGE
    reservation.release()
    cache.close()
    helped.close()


def test_a_second_process_reads_and_writes_an_exported_page(reservation: Reservation, cache: CacheMemory) -> None:
    reservation.load(cache, WHOLE_IMAGE).wait(SOON_S)
    fd, offset = reservation.export_page(PAGE)
    assert offset == 0
    try:
        command = [sys.executable, str(ROOT / "tests/gpu/second_process.py"), str(fd), str(PAGE)]
        seen = subprocess.run(command, pass_fds=[fd], stdout=subprocess.PIPE, check=True, timeout=SOON_S).stdout
    finally:
        os.close(fd)
    assert seen == IMAGE[PAGE : 2 * PAGE]
    assert read(reservation, cache, 0, 3 * PAGE) == IMAGE[:PAGE] + b"\x5a" * PAGE + IMAGE[2 * PAGE : 3 * PAGE]
