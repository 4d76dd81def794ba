"""The supervisor starts nats-server again if the store fails and the disk has room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.ops import bus_store
from gateway.ops.bus_store import BusStore
from tests.conftest import soon

LINE = "[1] [ERR] JetStream failed to store a msg on stream '$G > USAGE': write 1.blk: no space left on device"


class Watched:
    """A store on a disk with as much room as the test chooses."""

    def __init__(self, folder: Path) -> None:
        self.restarts = 0
        self.said: list[str] = []
        self.store = BusStore(folder, self.restart, self.said.append)

    def restart(self) -> None:
        self.restarts += 1


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    bytes_free = [0]
    monkeypatch.setattr(bus_store, "free_bytes", lambda folder: bytes_free[0])
    monkeypatch.setattr(bus_store, "LOOK_PERIOD_S", 0.02)
    monkeypatch.setattr(bus_store, "HOLD_S", 0.5)
    yield bytes_free


@pytest.fixture
async def watched(tmp_path: Path, free: list[int]) -> AsyncIterator[Watched]:
    watched = Watched(tmp_path)
    task = asyncio.create_task(watched.store.watch())
    yield watched
    task.cancel()


async def test_a_store_that_fails_although_the_disk_has_room_is_started_again(
    watched: Watched, free: list[int]
) -> None:
    watched.store.heard(LINE)
    await soon(lambda: len(watched.said) == 1)
    assert "is full" in watched.said[0] and watched.restarts == 0, "while the disk is full"
    free[0] = 1 << 30
    await asyncio.sleep(0.1)
    assert watched.restarts == 0, "the store may have come to itself"
    watched.store.heard(LINE)
    await soon(lambda: watched.restarts == 1)
    assert "nats is started again" in watched.said[1]


async def test_between_two_restarts_some_seconds_pass(watched: Watched, free: list[int]) -> None:
    free[0] = 1 << 30
    loop = asyncio.get_running_loop()
    began = loop.time()
    while watched.restarts < 2:
        watched.store.heard(LINE)
        await asyncio.sleep(0.01)
    assert loop.time() - began >= 0.5


async def test_other_lines_restart_nothing(watched: Watched, free: list[int]) -> None:
    free[0] = 1 << 30
    for _ in range(3):
        watched.store.heard("[1] [INF] Server is ready")
        await asyncio.sleep(0.02)
    assert watched.restarts == 0 and watched.said == []
