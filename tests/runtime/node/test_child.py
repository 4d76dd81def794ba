"""A device process that hangs at the start is ended. The processes are real, and never say that they are ready."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import psutil
import pytest
from pydantic import ByteSize

from runtime.config import RuntimeSettings
from runtime.node.child import START_S_MOST, DeviceChild


@pytest.fixture
async def child() -> AsyncIterator[DeviceChild]:
    host_cache = os.memfd_create("host-cache")
    os.ftruncate(host_cache, 1 << 20)
    made = DeviceChild(RuntimeSettings(runtime_id="r1", host_cache=ByteSize(1 << 20)), host_cache)
    yield made
    await made.end()
    os.close(host_cache)


async def test_a_device_that_freezes_while_it_starts_is_ended(child: DeviceChild) -> None:
    end = await child.start()
    try:
        (process,) = (each for each in psutil.Process().children() if "runtime.device" in each.cmdline())
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        child.look(False, began + START_S_MOST - 1)
        await asyncio.sleep(0.2)
        assert process.status() == psutil.STATUS_STOPPED
        child.look(False, began + START_S_MOST + 1)
        async with asyncio.timeout(60):
            assert [message async for message in end.messages()] == []
    finally:
        end.close()


async def test_one_that_has_begun_to_work_may_say_nothing_for_as_long(child: DeviceChild) -> None:
    end = await child.start()
    try:
        child.heard()
        (process,) = (each for each in psutil.Process().children() if "runtime.device" in each.cmdline())
        child.look(False, time.monotonic() + 2 * START_S_MOST)
        await asyncio.sleep(0.2)
        assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    finally:
        end.close()
