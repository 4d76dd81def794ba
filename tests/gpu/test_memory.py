"""The memory library on a real GPU; what it promises on any device is tested in tests/runtime/test_memory.py.

A bare GPU machine has no plugins of ours: `make -C csrc && python -m pytest -c /dev/null --rootdir . tests/gpu`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from runtime.memory.native import Backend, Cache, Device, Direction, Piece, PoolError, Reservation, Segment
from tests.conftest import ROOT

POOL_BYTES = 1 << 28
SOON_S = 30


def why_not() -> str | None:
    try:
        Device(POOL_BYTES, backend=Backend.CUDA).close()
    except PoolError as error:
        return str(error)
    return None


NO_GPU = why_not()
gpu = pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU))


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device(POOL_BYTES, backend=Backend.CUDA, page_bytes=2 << 20, exportable=True)
    yield device
    device.settle(SOON_S)
    assert device.stats().pages_free == device.stats().pages_total
    device.close()


@pytest.fixture
def cache(device: Device) -> Iterator[Cache]:
    """The first quarter is an image, the rest is zeroes to copy to."""
    cache = Cache(POOL_BYTES)
    cache.commit(0, cache.bytes)
    cache.pin(device, 0, cache.bytes)
    cache.view(0, len(IMAGE))[:] = IMAGE
    yield cache
    cache.close()


@pytest.fixture
def reservation(device: Device, cache: Cache) -> Iterator[Reservation]:
    reservation = device.reserve(1 << 36)
    yield reservation
    reservation.release()


IMAGE = b"".join(number.to_bytes(4, "little") for number in range(POOL_BYTES // 16))


def read(reservation: Reservation, cache: Cache, offset: int, size: int) -> bytes:
    reservation.copy(offset, cache, POOL_BYTES // 2, size, Direction.TO_HOST).wait(SOON_S)
    return bytes(cache.view(POOL_BYTES // 2, size))


@gpu
def test_an_image_comes_and_is_kept_as_clean_cache(device: Device, reservation: Reservation, cache: Cache) -> None:
    image = [Segment(0, 0, len(IMAGE))]
    reservation.load(cache, image).wait(SOON_S)
    assert read(reservation, cache, 0, len(IMAGE)) == IMAGE
    reservation.mark_clean(0, len(IMAGE))
    reservation.unmap(0, device.page_bytes)
    before = device.stats().to_device_bytes
    reservation.load(cache, image).wait(SOON_S)
    assert device.stats().to_device_bytes - before == device.page_bytes
    assert read(reservation, cache, 0, len(IMAGE)) == IMAGE


@gpu
def test_another_owners_bytes_are_zeroed(device: Device, reservation: Reservation, cache: Cache) -> None:
    reservation.load(cache, [Segment(0, 0, len(IMAGE))]).wait(SOON_S)
    reservation.unmap(0, len(IMAGE))
    other = device.reserve(POOL_BYTES)
    other.map(0, POOL_BYTES, SOON_S)
    for offset in range(0, POOL_BYTES, len(IMAGE)):
        assert read(other, cache, offset, len(IMAGE)) == bytes(len(IMAGE))
    other.release()


@gpu
def test_a_late_unmap_leaves_the_newer_mapping_alone(reservation: Reservation, cache: Cache) -> None:
    for _ in range(5):
        reservation.load(cache, [Segment(0, 0, len(IMAGE))]).wait(SOON_S)
        out = reservation.copy(0, cache, POOL_BYTES // 2, len(IMAGE), Direction.TO_HOST)
        reservation.unmap(0, len(IMAGE))
        reservation.map(0, len(IMAGE), SOON_S)
        out.wait(SOON_S)
        assert cache.view(POOL_BYTES // 2, len(IMAGE)) == IMAGE
        reservation.unmap(0, len(IMAGE))
        cache.view(POOL_BYTES // 2, len(IMAGE))[:] = bytes(len(IMAGE))


BLOCK, LAYERS, BLOCKS = 32 << 10, 8, 64
LAYER_OUTERMOST = [Piece(n * BLOCKS * BLOCK, BLOCK, n * BLOCK, LAYERS * BLOCK, BLOCK) for n in range(LAYERS)]
FROM, TO = [3, 4, 5, 17, 30], [40, 41, 42, 9, 63]


def moved() -> bytes:
    """The image after its blocks FROM were copied onto the blocks TO."""
    expected = bytearray(IMAGE[: LAYERS * BLOCKS * BLOCK])
    for layer in range(LAYERS):
        for old, new in zip(FROM, TO, strict=True):
            source, target = (layer * BLOCKS + old) * BLOCK, (layer * BLOCKS + new) * BLOCK
            expected[target : target + BLOCK] = IMAGE[source : source + BLOCK]
    return bytes(expected)


@gpu
def test_blocks_come_back_under_other_numbers(reservation: Reservation, cache: Cache) -> None:
    reservation.load(cache, [Segment(0, 0, len(IMAGE))]).wait(SOON_S)
    places = list(range(1000, 1000 + len(FROM)))
    out = reservation.copy_blocks(cache, LAYER_OUTERMOST, FROM, places, Direction.TO_HOST)
    reservation.copy_blocks(cache, LAYER_OUTERMOST, TO, places, Direction.TO_DEVICE, after=out).wait(SOON_S)
    assert read(reservation, cache, 0, LAYERS * BLOCKS * BLOCK) == moved()


@gpu
def test_kernels_gather_and_scatter_blocks(reservation: Reservation, cache: Cache) -> None:
    cupy = pytest.importorskip("cupy")
    module = cupy.RawModule(code=(ROOT / "csrc/kernels.cu").read_text())
    pieces = cupy.asarray(
        [[p.device_offset, p.device_stride, p.host_offset, p.host_stride, p.bytes] for p in LAYER_OUTERMOST], "u8"
    )
    packed = cupy.zeros(len(FROM) * LAYERS * BLOCK, "u1")
    reservation.load(cache, [Segment(0, 0, len(IMAGE))]).wait(SOON_S)
    address, grid, threads = cupy.uint64(reservation.address), (len(FROM), LAYERS), (256,)
    gather, scatter = module.get_function("gather_blocks"), module.get_function("scatter_blocks")
    gather(grid, threads, (packed, address, pieces, cupy.asarray(FROM, "u4")))
    scatter(grid, threads, (packed, address, pieces, cupy.asarray(TO, "u4")))
    cupy.cuda.Device().synchronize()
    assert read(reservation, cache, 0, LAYERS * BLOCKS * BLOCK) == moved()


@gpu
def test_an_unmap_waits_for_a_kernel(device: Device, reservation: Reservation) -> None:
    cupy = pytest.importorskip("cupy")
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { for (long long end = clock64() + n; clock64() < end;); }',
        "spin",
    )
    reservation.map(0, device.page_bytes, SOON_S)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        spin((1,), (1,), (cupy.int64(400_000_000),))  # about 0.2 s
    reservation.unmap(0, device.page_bytes, after=device.stream_ticket(stream.ptr))
    assert device.stats().pages_limbo == 1
    stream.synchronize()
    device.settle(SOON_S)
    assert device.stats().pages_limbo == 0


@gpu
def test_a_page_is_exported_as_a_file_descriptor(device: Device, reservation: Reservation) -> None:
    reservation.map(0, device.page_bytes, SOON_S)
    fd, offset = reservation.export_page(0)
    assert offset == 0
    os.close(fd)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_the_kernels_and_our_view_of_the_driver_compile() -> None:
    subprocess.run(["make", "-C", str(ROOT / "csrc"), "cuda"], check=True, capture_output=True, timeout=300)
