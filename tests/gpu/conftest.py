"""A pool on a real GPU, an image in a pinned cache, torch tensors over both; skipped, with the reason, without a GPU.

A bare GPU machine lacks the repository's pytest plugins: `make -C csrc && python -m pytest -c /dev/null --rootdir .
tests/gpu`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import cache as cached
from typing import Any

import pytest

from runtime.memory.native import Backend, CacheMemory, Code, DevicePool, Direction, PoolError, Reservation, Segment

PAGE = 2 << 20
POOL_BYTES = 128 * PAGE
SOON_S = 30
WORDS = 8 * PAGE // 4
IMAGE = array("I", range(WORDS)).tobytes()  # the value of each word is its place
WHOLE_IMAGE = [Segment(0, 0, len(IMAGE))]


@cached
def why_no_gpu() -> str | None:
    try:
        DevicePool(PAGE, backend=Backend.CUDA, page_bytes=PAGE).close()
    except PoolError as error:
        if error.code is Code.UNSUPPORTED or str(error).startswith("cuInit"):
            return str(error)
        raise
    return None


@pytest.fixture
def device() -> Iterator[DevicePool]:
    """A device. After a test, every page must be free again."""
    if reason := why_no_gpu():
        pytest.skip(reason)
    device = DevicePool(POOL_BYTES, backend=Backend.CUDA, page_bytes=PAGE, exportable=True)
    yield device
    device.settle(SOON_S)
    assert device.stats().pages_free == device.stats().pages_total
    device.close()


@pytest.fixture
def cache(device: DevicePool) -> Iterator[CacheMemory]:
    """A cache as large as the pool; the image lies at the beginning, the rest is zeroes to copy to."""
    cache = CacheMemory(POOL_BYTES)
    cache.commit(0, cache.bytes)
    cache.pin(device, 0, cache.bytes)
    cache.view(0, len(IMAGE))[:] = IMAGE
    yield cache
    cache.close()


@pytest.fixture
def reservation(device: DevicePool, cache: CacheMemory) -> Iterator[Reservation]:
    reservation = device.reserve(1 << 36)
    yield reservation
    reservation.release()


@pytest.fixture
def torch(device: DevicePool) -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} has no CUDA")
    return torch


def read(reservation: Reservation, cache: CacheMemory, offset: int, size: int) -> bytes:
    """Bytes of the reservation, read by way of the cache's second half."""
    half = cache.bytes // 2
    reservation.copy(offset, cache, half, size, Direction.TO_HOST).wait(SOON_S)
    return bytes(cache.view(half, size))


class DeviceBytes:
    """Device memory in the form taken by any library with CUDA arrays."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor(torch: Any, reservation: Reservation, offset: int, size: int) -> Any:
    """A tensor over mapped bytes of the reservation: torch asks the driver for the owner of the address."""
    return torch.as_tensor(DeviceBytes(reservation.address + offset, size), device="cuda")
