"""Full collections of Python's garbage, in a process that serves streams."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import pytest

from store import garbage
from store.garbage import rarely_collected
from tests.conftest import soon

MIB = 1 << 20


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


class Payload:
    """A cycle of objects, with memory of the kernel's: an allocator may give memory that a test before has freed, and
    then the process does not grow."""

    def __init__(self, size: int) -> None:
        self.data = mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        self.data.write(b"x" * size)
        self.own = self


def old_garbage(payloads: int, size: int) -> list[weakref.ref[Payload]]:
    """Garbage that no collection of younger objects frees."""
    made = [Payload(size) for _ in range(payloads)]
    gc.collect(1)
    gc.collect(1)
    return [weakref.ref(payload) for payload in made]


def steps_of_many_streams() -> int:
    """Make and drop the objects of 1,000 streams' steps; returns the full collections meanwhile."""
    full = 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal full
        full += phase == "start" and info["generation"] == 2

    streams = [[[stream] for stream in range(200)] for _ in range(1000)]
    gc.callbacks.append(count)
    try:
        for _ in range(100):
            step = [[token] for token in range(20_000)]
            streams[step[-1][0] % 1000] = [[0] for _ in range(200)]
            del step
    finally:
        gc.callbacks.remove(count)
    return full


def test_steps_of_many_streams_begin_full_collections_by_pythons_default() -> None:
    gc.collect()
    gc.freeze()
    assert steps_of_many_streams() > 0


async def test_steps_of_many_streams_begin_no_full_collection() -> None:
    async with rarely_collected():
        assert steps_of_many_streams() == 0


async def test_garbage_in_cycles_is_freed_when_memory_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "GROWN_BYTES", 8 * MIB)
    monkeypatch.setattr(garbage, "PERIOD_S", 0.01)
    async with rarely_collected():
        await asyncio.sleep(0.1)
        left = old_garbage(64, MIB)
        assert all(each() is not None for each in left)
        await soon(lambda: not any(each() is not None for each in left))


async def test_python_collects_as_by_default_afterwards() -> None:
    before = gc.get_threshold()
    async with rarely_collected():
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before
