"""The books of a GPU's memory: the pool and what lies outside are what the driver says, whatever happens.

Over the stand-in for the driver (csrc/tests/fake_driver.cpp), whose count of memory is exact."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.memory.native import Backend, CacheMemory, DevicePool, Direction, PoolError, Segment
from tests.gpu.conftest import PAGE, SOON_S, why_no_gpu

POOL_PAGES = 24
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["outside", "free", "map", "load", "park", "evict"]), st.integers(1, 6)), max_size=30
)


class Outside:
    """Memory of the device taken by others than the pool, as engines' tables and graphs are."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), 0)
        self._taken: list[tuple[ctypes.c_ulonglong, int]] = []

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self._taken)

    def take(self, size: int) -> None:
        address = ctypes.c_ulonglong()
        if self._in_context(lambda: self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))) == 0:
            self._taken.append((address, size))

    def free(self) -> None:
        if self._taken:
            address, _ = self._taken.pop()
            assert self._in_context(lambda: self._driver.cuMemFree_v2(address)) == 0

    def _in_context(self, call: object) -> int:
        self._driver.cuCtxPushCurrent_v2(self._context)
        try:
            return int(call())  # type: ignore[operator]
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@settings(max_examples=40)
@given(actions=ACTIONS)
def test_pool_and_outside_are_what_the_driver_says(actions: list[tuple[str, int]]) -> None:
    if reason := why_no_gpu():
        pytest.skip(reason)
    if not hasattr(ctypes.CDLL("libcuda.so.1"), "fake_calls"):
        pytest.skip("a real driver's contexts and other processes change the count")
    device, outside = DevicePool(POOL_PAGES * PAGE, backend=Backend.CUDA, page_bytes=PAGE), Outside()
    cache, reservation = CacheMemory(POOL_PAGES * PAGE), device.reserve(POOL_PAGES * PAGE)
    cache.commit(0, cache.bytes)
    cache.pin(device, 0, cache.bytes)
    held = 0  # pages from the front
    for action, pages in actions:
        try:
            match action:
                case "outside":
                    outside.take(pages * 7_000_001)
                case "free":
                    outside.free()
                case "map":
                    reservation.map(held * PAGE, pages * PAGE, SOON_S)
                    held += pages
                case "load":
                    reservation.load(cache, [Segment(held * PAGE, 0, pages * PAGE)]).wait(SOON_S)
                    held += pages
                case "park" if held:
                    reservation.copy(0, cache, 0, held * PAGE, Direction.TO_HOST).wait(SOON_S)
                case "evict" if held:
                    held -= min(pages, held)
                    reservation.unmap(held * PAGE, pages * PAGE)
                    device.settle(SOON_S)
        except PoolError:
            assert held + pages > POOL_PAGES, "a page was refused while pages were free"
        (free, total), stats = device.memory(), device.stats()
        pool = stats.pages_total * stats.page_bytes
        assert stats.pages_mapped == held and pool + outside.bytes == total - free
    while outside.bytes:
        outside.free()
    cache.close()
    reservation.release()
    device.close()
    with_context = DevicePool(PAGE, backend=Backend.CUDA, page_bytes=PAGE)
    free, total = with_context.memory()
    assert total - free == PAGE, "memory of the closed pool is still booked"
    with_context.close()
