"""A pool on a real GPU, an image in a pinned cache, torch tensors over both; skipped, with the reason, without a GPU.

A bare GPU machine has no plugins of ours: `make -C csrc && python -m pytest -c /dev/null --rootdir . tests/gpu`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import cache as cached
from typing import Any

import pytest

from runtime.memory.native import Backend, Cache, Code, Device, Direction, PoolError, Reservation, Segment

PAGE = 2 << 20
POOL_BYTES = 128 * PAGE
SOON_S = 30
WORDS = 8 * PAGE // 4
IMAGE = array("I", range(WORDS)).tobytes()  # each word tells its place
WHOLE_IMAGE = [Segment(0, 0, len(IMAGE))]


@cached
def why_no_gpu() -> str | None:
    try:
        Device(PAGE, backend=Backend.CUDA, page_bytes=PAGE).close()
    except PoolError as error:
        if error.code is Code.UNSUPPORTED or str(error).startswith("cuInit"):
            return str(error)
        raise
    return None


@pytest.fixture
def device() -> Iterator[Device]:
    """When a test is over every page must be free again."""
    if reason := why_no_gpu():
        pytest.skip(reason)
    device = Device(POOL_BYTES, backend=Backend.CUDA, page_bytes=PAGE, exportable=True)
    yield device
    device.settle(SOON_S)
    assert device.stats().pages_free == device.stats().pages_total
    device.close()


@pytest.fixture
def cache(device: Device) -> Iterator[Cache]:
    """As large as the pool; the image lies at its beginning, the rest is zeroes to copy to."""
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


@pytest.fixture
def torch(device: Device) -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} has no CUDA")
    return torch


def read(reservation: Reservation, cache: Cache, offset: int, size: int) -> bytes:
    """By way of the cache's second half."""
    half = cache.bytes // 2
    reservation.copy(offset, cache, half, size, Direction.TO_HOST).wait(SOON_S)
    return bytes(cache.view(half, size))


class DeviceBytes:
    """Device memory as any library takes it that knows CUDA arrays."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor(torch: Any, reservation: Reservation, offset: int, size: int) -> Any:
    """Bytes of the reservation; mapped ones, for torch asks the driver whose the address is."""
    return torch.as_tensor(DeviceBytes(reservation.address + offset, size), device="cuda")
