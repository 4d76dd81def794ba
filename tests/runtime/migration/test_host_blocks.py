"""Blocks in the host cache, as used by a node: blocks of a dead node are freed, and missing blocks are refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from runtime.migration.host_blocks import HostBlocks, HostBlocksError
from tests.conftest import ROOT
from tests.runtime.hosts import CACHE_BYTES, host_caches

BLOCK = 300_000  # bytes


async def test_what_a_node_that_died_held_is_free_again() -> None:
    code = (
        "import asyncio, os, sys; from runtime.migration.host_blocks import HostBlocks\n"
        f"asyncio.run(HostBlocks(int(sys.argv[1])).take(20, {BLOCK}))\n"
        "print('taken', flush=True); os.kill(os.getpid(), 9)"
    )
    with host_caches(1) as (cache,):
        command = [sys.executable, "-c", code, str(cache.fd)]
        died = subprocess.run(command, cwd=ROOT, pass_fds=[cache.fd], capture_output=True, text=True)
        assert died.stdout == "taken\n" and died.returncode == -9
        assert cache.device.stats().parked_bytes == 0
        await cache.blocks.free(await cache.blocks.take(20, BLOCK), BLOCK)


async def test_blocks_come_as_views_of_neighbours() -> None:
    with host_caches(1) as (cache,):
        blocks = await cache.blocks.take(6, BLOCK)
        assert blocks == list(range(blocks[0], blocks[0] + 6))
        views = await cache.blocks.views([*blocks[:2], *blocks[4:], blocks[3]], BLOCK)
        assert [len(view) // BLOCK for view in views] == [2, 2, 1]
        views[2][5] = 77
        assert cache.view(blocks[3], BLOCK)[5] == 77
        await cache.blocks.free(blocks, BLOCK)


async def test_what_is_not_there_and_what_is_no_host_cache_is_refused() -> None:
    with host_caches(1) as (cache,):
        with pytest.raises(HostBlocksError, match="do not lie in a cache of"):
            await cache.blocks.views([CACHE_BYTES // BLOCK], BLOCK)
    fd = os.memfd_create("no cache")
    os.truncate(fd, CACHE_BYTES)
    os.pwrite(fd, b"something else", 0)
    blocks = HostBlocks(fd)
    with pytest.raises(HostBlocksError, match="start all runtimes of a node from one release"):
        await blocks.take(1, BLOCK)
    blocks.close()
    os.close(fd)


async def test_a_node_that_carries_nothing_is_no_member_of_its_host_cache() -> None:
    fd = os.memfd_create("cache")
    os.truncate(fd, CACHE_BYTES)
    HostBlocks(fd).close()
    assert os.pread(fd, 8, 0) == bytes(8), "it is as it was"
    os.close(fd)
