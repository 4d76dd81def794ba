"""A node's access to KV blocks in the host cache: reads blocks that the device parked, takes room for received blocks.

The node is a member of the cache's index, as the device is. If a member dies, the next member that uses the index drops
the dead member's blocks. The node never waits for the index, or for memory, on the event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import TypeVar

from runtime.memory.images import HostCacheMismatch, Images
from runtime.memory.locks import HostCacheStuck
from runtime.memory.native import LibraryMissing, PoolError
from runtime.memory.slabs import Slabs

RECEIVED_PART = 4  # blocks from other hosts take at most 1/4 of the cache
KEPT_PART = 64  # the node keeps 1/64 of the cache for blocks to come: getting memory takes long
CARRYING = 8  # batches in each direction at a time

T = TypeVar("T")


class HostBlocksError(Exception):
    """Error of a host cache without room, without the blocks, or out of order; the message says the numbers."""


class HostBlocks:
    """Blocks in the host cache of the file `fd`, for one event loop.

    The cache is opened at the first use: most nodes never use the cache."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._images: Images | None = None
        self._slabs: dict[int, Slabs] = {}  # by size of a block in bytes
        self._index = ThreadPoolExecutor(1, "host-cache")
        self._sending = ThreadPoolExecutor(CARRYING, "blocks-out")
        self._receiving = ThreadPoolExecutor(CARRYING, "blocks-in")
        self.taken_bytes = 0

    async def take(self, count: int, block_bytes: int) -> list[int]:
        """Take room for `count` blocks; return the block numbers, neighbours where possible. Raises HostBlocksError.

        Must not be cancelled: the taken blocks would be lost."""
        return await self._apart(lambda: self._take(count, block_bytes))

    async def free(self, blocks: Sequence[int], block_bytes: int) -> None:
        """Free blocks of `take`. No process may read the blocks any more."""
        if blocks:
            await self._apart(lambda: self._free(blocks, block_bytes))

    async def views(self, blocks: Sequence[int], block_bytes: int) -> list[memoryview]:
        """Return views of the blocks, a view for each run of neighbours. Raises HostBlocksError."""
        images = self._images if self._images is not None else await self._apart(self._opened)
        runs = [[block for _, block in run] for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0])]
        try:
            return [images.cache.view(run[0] * block_bytes, len(run) * block_bytes) for run in runs]
        except PoolError as error:
            raise HostBlocksError(str(error)) from error

    def sending(self, job: Callable[[], T]) -> Future[T]:
        """Run on a thread a job that reads views. The future is done when the job no longer reads."""
        return self._sending.submit(job)

    def receiving(self, job: Callable[[], T]) -> Future[T]:
        """Run on a thread a job that writes to views."""
        return self._receiving.submit(job)

    def close(self) -> None:
        """Give all blocks back. A later access to a view would end the process."""
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
        slabs = self._slabs.get(block_bytes) or self._slabs.setdefault(block_bytes, Slabs(images.parked, block_bytes))
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
