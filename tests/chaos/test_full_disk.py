"""A bus after a full disk: the supervisor starts nats-server again, and the operator does not have to act.

The supervisor and the server are real; the roles are stand-ins, so that the test takes seconds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.config import load
from store.bus import Bus
from store.contract import grants, wire
from tests.chaos.faults import NoMount, small_disk
from tests.conftest import free_port
from tests.gateway.ops.test_up import Platform

DISK_MIB = 128
RESERVE_BYTES = 16 << 20
HEALED_S = 60.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        try:
            mounted = stack.enter_context(small_disk(tmp_path / "disk", DISK_MIB))
        except NoMount as refused:
            pytest.skip(str(refused))
        yield mounted


@pytest.fixture
def platform(disk: Path) -> Iterator[Platform]:
    settings = load(data=disk / "data", port=free_port())
    platform = Platform(settings, environment={"STACCATO_DISK_RESERVE": str(RESERVE_BYTES)})
    platform.ready()
    yield platform
    platform.process.terminate()
    platform.end()


@pytest.fixture
async def bus(platform: Platform) -> AsyncIterator[Bus]:
    data = platform.settings.data
    url = f"nats://127.0.0.1:{(data / 'nats.port').read_text().strip()}"
    async with Bus.connect(url, "gateway", grants.GATEWAY, data / "nats-users" / "gateway.nk") as bus:
        yield bus


async def stored(bus: Bus) -> bool:
    """Whether the stream of usage took a message."""
    with contextlib.suppress(Exception):
        await bus._js.publish(wire.usage_subject("t"), bytes(500), timeout=1.0)
        return True
    return False


async def fill(disk: Path) -> Path:
    """Write a file that takes the last room on the disk; returns the file."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 20)):
            await asyncio.sleep(0)
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            await asyncio.sleep(0)
    return ballast


async def test_a_bus_that_met_a_full_disk_stores_again_soon_after_there_is_room(
    platform: Platform, disk: Path, bus: Bus
) -> None:
    """Without a restart nats-server refuses messages for ever."""
    assert await stored(bus)
    ballast = await fill(disk)
    async with asyncio.timeout(HEALED_S):
        while await stored(bus):  # the last block of the stream has some room left
            pass
    ballast.unlink()
    async with asyncio.timeout(HEALED_S):
        while not await stored(bus):
            await asyncio.sleep(0.1)
