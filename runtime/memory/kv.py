"""The KV cache of one model as memory: addresses for all blocks, pages for some blocks.

The bytes of a block, of all layers, lie together: block i at i * block_bytes. A region does not know the requests that
blocks belong to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby

from runtime.memory.native import CacheMemory, DevicePool, Direction, Piece, PoolError, TransferTicket

MAP_WAIT_S = 30.0  # longest wait for pages on the way back to the pool


class KvRegion:
    """A reservation for a model's KV blocks.

    `mapped`: numbers of the mapped pages. `coming`: numbers of the pages that are being mapped, in runs with tickets.
    """

    def __init__(self, device: DevicePool, block_bytes: int, blocks: int) -> None:
        self.block_bytes, self.blocks = block_bytes, blocks
        self.reservation = device.reserve(block_bytes * blocks)
        self.page_bytes = device.page_bytes
        self.pages_total = self.reservation.bytes // device.page_bytes
        self.mapped: set[int] = set()
        self.coming: dict[tuple[int, int], TransferTicket] = {}  # by first page and number of pages
        # In the host cache, too, block i lies at i * block_bytes, whichever models share the cache.
        self._pieces = [Piece(0, block_bytes, 0, block_bytes, block_bytes)]

    def pages_of(self, block: int) -> range:
        """Numbers of the pages that the block's bytes touch."""
        return range(block * self.block_bytes // self.page_bytes, -(-(block + 1) * self.block_bytes // self.page_bytes))

    def pages_for(self, blocks: int) -> int:
        """Number of pages needed to hold blocks 0 .. blocks - 1."""
        return -(-min(blocks, self.blocks) * self.block_bytes // self.page_bytes)

    def blocks_on(self, pages: Iterable[int]) -> list[int]:
        """Blocks that touch any of the pages `pages` and have all pages mapped."""
        found: dict[int, None] = {}
        for page in sorted(pages):
            first = page * self.page_bytes // self.block_bytes
            beyond = min(self.blocks, -(-(page + 1) * self.page_bytes // self.block_bytes))
            for block in range(first, beyond):
                if all(other in self.mapped for other in self.pages_of(block)):
                    found[block] = None
        return list(found)

    def map(self, count: int) -> list[int]:
        """Map the `count` lowest unmapped pages, all or none. Returns the blocks completed by the new pages.

        Raises PoolError."""
        pages = self._lowest_unmapped(count)
        done: list[int] = []
        try:
            for first, length in _runs(pages):
                self.reservation.map(first * self.page_bytes, length * self.page_bytes, MAP_WAIT_S)
                done += range(first, first + length)
        except PoolError:
            for page in done:
                self.reservation.unmap(page * self.page_bytes, self.page_bytes)
            raise
        self.mapped.update(pages)
        return self.blocks_on(pages)

    def begin(self, count: int) -> None:
        """Begin to map the `count` lowest unmapped pages, all or none, on a thread of the memory library.

        On a GPU, mapping takes calls of the driver and zeroes, for which the thread of the steps has no time. Raises
        PoolError; `land` tells how the mapping ends."""
        begun: list[tuple[int, int]] = []
        try:
            for run in _runs(self._lowest_unmapped(count)):
                self.coming[run] = self.reservation.map_later(run[0] * self.page_bytes, run[1] * self.page_bytes)
                begun.append(run)
        except PoolError:
            for run in begun:
                self.coming.pop(run).wait(MAP_WAIT_S)
                self.reservation.unmap(run[0] * self.page_bytes, run[1] * self.page_bytes)
            raise

    @property
    def pages_coming(self) -> int:
        return sum(length for _, length in self.coming)

    def landed(self) -> bool:
        """Whether no page is being mapped any more. Failures count as ends."""
        return all(_ended(ticket) for ticket in self.coming.values())

    def wait(self, timeout_s: float) -> bool:
        """Wait until no page is being mapped any more, at most `timeout_s` seconds for each run of pages.

        Returns False if no page was being mapped."""
        landed = self.landed()
        for ticket in self.coming.values():
            with suppress(PoolError):
                ticket.wait(timeout_s)
        return not landed

    def release(self) -> None:
        """Give the addresses back, with the pages left."""
        self.wait(MAP_WAIT_S)
        self.reservation.release()

    def land(self) -> list[int]:
        """Take the pages that `begin` began to map. Returns the blocks completed by the new pages.

        Call once `landed` is true. Raises PoolError if a mapping failed; then no page is added."""
        coming, self.coming = self.coming, {}
        pages: list[int] = []
        failure: PoolError | None = None
        for (first, length), ticket in coming.items():
            try:
                assert ticket.done(), "pages are still being mapped"
                pages += range(first, first + length)
            except PoolError as error:
                failure = error
        if failure is not None:
            for first, length in _runs(sorted(pages)):
                self.reservation.unmap(first * self.page_bytes, length * self.page_bytes)
            raise failure
        self.mapped.update(pages)
        return self.blocks_on(pages)

    def unmap(self, pages: Sequence[int], after: TransferTicket | None = None) -> None:
        """Unmap pages; returns at once. The pages leave when `after` and all copies that touch the pages are over."""
        self.mapped.difference_update(pages)
        for first, length in _runs(sorted(pages)):
            self.reservation.unmap(first * self.page_bytes, length * self.page_bytes, after)

    def copy(
        self,
        cache: CacheMemory,
        blocks: Sequence[int],
        host: Sequence[int],
        direction: Direction,
        after: TransferTicket | None,
    ) -> TransferTicket:
        return self.reservation.copy_blocks(cache, self._pieces, blocks, host, direction, after)

    def _lowest_unmapped(self, count: int) -> list[int]:
        pages: list[int] = []
        taken = self.mapped.union(*(range(first, first + length) for first, length in self.coming))
        page = 0
        while len(pages) < count and page < self.pages_total:
            if page not in taken:
                pages.append(page)
            page += 1
        return pages


def _ended(ticket: TransferTicket) -> bool:
    try:
        return ticket.done()
    except PoolError:
        return True


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of neighbours in ascending numbers, as (first, length)."""
    runs = []
    for _, group in groupby(enumerate(pages), lambda pair: pair[1] - pair[0]):
        run = [page for _, page in group]
        runs.append((run[0], len(run)))
    return runs
