"""The KV cache of one model as memory: addresses for all its blocks, pages for some of them.

A block's bytes, of all layers, lie together: block i at i * block_bytes. Which blocks belong to whom is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from runtime.memory.native import Cache, Device, Direction, Piece, PoolError, Ticket

MAP_WAIT_S = 30.0  # for pages that are on their way back to the pool


class KvRegion:
    """`mapped` are the numbers of the pages that are there."""

    def __init__(self, device: Device, block_bytes: int, blocks: int) -> None:
        self.block_bytes, self.blocks = block_bytes, blocks
        self.reservation = device.reserve(block_bytes * blocks)
        self.page_bytes = device.page_bytes
        self.pages_total = self.reservation.bytes // device.page_bytes
        self.mapped: set[int] = set()
        # A block lies in the cache at its number times its size, whoever shares the cache.
        self._pieces = [Piece(0, block_bytes, 0, block_bytes, block_bytes)]

    def pages_of(self, block: int) -> range:
        """The pages its bytes touch."""
        return range(block * self.block_bytes // self.page_bytes, -(-(block + 1) * self.block_bytes // self.page_bytes))

    def pages_for(self, blocks: int) -> int:
        """So many pages hold blocks 0 .. blocks - 1."""
        return -(-min(blocks, self.blocks) * self.block_bytes // self.page_bytes)

    def blocks_on(self, pages: Iterable[int]) -> list[int]:
        """Blocks that touch any of these pages and have all of theirs mapped."""
        found: dict[int, None] = {}
        for page in sorted(pages):
            first = page * self.page_bytes // self.block_bytes
            beyond = min(self.blocks, -(-(page + 1) * self.page_bytes // self.block_bytes))
            for block in range(first, beyond):
                if all(other in self.mapped for other in self.pages_of(block)):
                    found[block] = None
        return list(found)

    def map(self, count: int) -> list[int]:
        """Blocks that came into being by so many more pages, the lowest; all pages or none. Raises PoolError."""
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

    def unmap(self, pages: Sequence[int], after: Ticket | None = None) -> None:
        """They leave when `after` and all copies that touch them are over."""
        self.mapped.difference_update(pages)
        for first, length in _runs(sorted(pages)):
            self.reservation.unmap(first * self.page_bytes, length * self.page_bytes, after)

    def copy(
        self, cache: Cache, blocks: Sequence[int], host: Sequence[int], direction: Direction, after: Ticket | None
    ) -> Ticket:
        return self.reservation.copy_blocks(cache, self._pieces, blocks, host, direction, after)

    def _lowest_unmapped(self, count: int) -> list[int]:
        pages: list[int] = []
        page = 0
        while len(pages) < count and page < self.pages_total:
            if page not in self.mapped:
                pages.append(page)
            page += 1
        return pages


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """(first, length) of neighbours in ascending numbers."""
    runs = []
    for _, group in groupby(enumerate(pages), lambda pair: pair[1] - pair[0]):
        run = [page for _, page in group]
        runs.append((run[0], len(run)))
    return runs
