"""Blocks of KV cache in the host cache, as a node sees them: those that its device keeps there, to read, and room for
those that come from other hosts.

The node is a member of the cache's index like its device is: whoever of them dies, what it held is dropped by the next
that comes along. It never waits for the index, or for memory, on its event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import TypeVar

from runtime.memory.images import HostCacheMismatch, HostCacheStuck, Images
from runtime.memory.native import LibraryMissing, PoolError
from runtime.memory.slabs import Slabs

RECEIVED_PART = 4  # of the cache: others' blocks take no more of it
KEPT_PART = 64  # of the cache, for blocks to come: memory is dear to get
CARRYING = 8  # batches in each direction at a time

T = TypeVar("T")


class HostBlocksError(Exception):
    """The host cache has no room, no such blocks, or can't be used; the message says which, and the numbers."""


class HostBlocks:
    """`fd` is the file of the cache, which is opened when it is needed: most nodes never are. For one event loop."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._images: Images | None = None
        self._slabs: dict[int, Slabs] = {}  # by bytes of a block
        self._index = ThreadPoolExecutor(1, "host-cache")
        self._sending = ThreadPoolExecutor(CARRYING, "blocks-out")
        self._receiving = ThreadPoolExecutor(CARRYING, "blocks-in")
        self.taken_bytes = 0

    async def take(self, count: int, block_bytes: int) -> list[int]:
        """Numbers of so many blocks, neighbours where possible. Raises HostBlocksError.

        Not to be cancelled: nobody would know what was taken."""
        return await self._apart(lambda: self._take(count, block_bytes))

    async def free(self, blocks: Sequence[int], block_bytes: int) -> None:
        """What `take` gave; nothing may be read from it any more."""
        if blocks:
            await self._apart(lambda: self._free(blocks, block_bytes))

    async def views(self, blocks: Sequence[int], block_bytes: int) -> list[memoryview]:
        """Of these blocks, one for each run of neighbours. Raises HostBlocksError."""
        images = self._images if self._images is not None else await self._apart(self._opened)
        runs = [[block for _, block in run] for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0])]
        try:
            return [images.cache.view(run[0] * block_bytes, len(run) * block_bytes) for run in runs]
        except PoolError as error:
            raise HostBlocksError(str(error)) from error

    def sending(self, job: Callable[[], T]) -> Future[T]:
        """Let a thread do what reads views. The future is done when nothing is read any more."""
        return self._sending.submit(job)

    def receiving(self, job: Callable[[], T]) -> Future[T]:
        """Let a thread do what writes to views."""
        return self._receiving.submit(job)

    def close(self) -> None:
        """Everything is given back. No view may be touched any more: that would end the process."""
        self._sending.shutdown()
        self._receiving.shutdown()
        self._index.shutdown()
        if self._images is not None:
            self._images.close()

    # ── on the thread of the index ────────────────────────────────────────────────────────────────────────────────────

    async def _apart(self, job: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._index, job)
        except (PoolError, HostCacheStuck, HostCacheMismatch, LibraryMissing, OSError) as error:
            raise HostBlocksError(str(error)) from error

    def _opened(self) -> Images:
        if self._images is None:
            self._images = Images.open(self._fd, os.fstat(self._fd).st_size // KEPT_PART)
        return self._images

    def _take(self, count: int, block_bytes: int) -> list[int]:
        images = self._opened()
        most, asked = images.cache.bytes // RECEIVED_PART, count * block_bytes
        slabs = self._slabs.get(block_bytes) or self._slabs.setdefault(block_bytes, Slabs(images, block_bytes))
        blocks = slabs.take(count) if self.taken_bytes + asked <= most else None
        if blocks is None:
            raise HostBlocksError(
                f"{count} blocks of {block_bytes} bytes find no room in a host cache of {images.cache.bytes} bytes: "
                f"those from other hosts have {self.taken_bytes}, of {most} at most: raise STACCATO_HOST_CACHE"
            )
        self.taken_bytes += asked
        return blocks

    def _free(self, blocks: Sequence[int], block_bytes: int) -> None:
        self.taken_bytes -= len(blocks) * block_bytes
        self._slabs[block_bytes].free(blocks)
