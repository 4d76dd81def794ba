"""KV blocks in the host cache: `Slabs` allocates blocks of this runtime, a `HostBlockHold` pins blocks of another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Protocol

from runtime.core.host_index import Range


@dataclass(slots=True)
class Extent:
    """A range of the host cache, cut into blocks."""

    offset: int  # place in the cache
    bytes: int  # length
    first: int  # number of the first block
    blocks: int  # number of blocks
    free: set[int]  # numbers of free blocks


class HostMemory(Protocol):
    """Memory of the host cache, lent in whole folios to the parked blocks of a runtime."""

    def lend(self, blocks: int, block_bytes: int) -> list[Range]:
        """Memory for `blocks` blocks, in one or several ranges; [] if the cache has too little memory."""

    def take_back(self, lent: Range) -> None:
        """Take back a range that was lent and has no block any more."""


class Slabs:
    """Allocator of host blocks for one model's parked requests: block i lies at i * block_bytes of the host cache.

    Use from one thread. The slabs grow by whole folios, and unused images are evicted to make room: a parked request is
    dearer than an image, for a request can't be read again from a file."""

    def __init__(self, memory: HostMemory, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._memory = memory
        self._extents: list[Extent] = []  # sorted by block number

    @property
    def taken(self) -> int:
        """Number of blocks in use."""
        return sum(extent.blocks - len(extent.free) for extent in self._extents)

    @property
    def spare(self) -> int:
        """Number of blocks with memory that are not in use."""
        return sum(len(extent.free) for extent in self._extents)

    def take(self, count: int) -> list[int] | None:
        """Allocate `count` blocks, neighbours if possible. Returns their numbers; None if there is too little room."""
        missing = count - self.spare
        if missing > 0 and not self._grow(missing):
            return None
        taken: list[int] = []
        for extent in sorted(self._extents, key=lambda extent: len(extent.free)):  # fullest first, so extents get empty
            share = sorted(extent.free)[: count - len(taken)]
            extent.free.difference_update(share)
            taken += share
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Free blocks, and give the memory of extents without a block back to the cache."""
        touched = [self._give_back(block) for block in blocks]
        self._give_back_empty({id(extent): extent for extent in touched}.values())

    def give_back_empty(self) -> None:
        """Give extents without a block back to the cache."""
        self._give_back_empty([*self._extents])

    def _give_back_empty(self, extents: Iterable[Extent]) -> None:
        for extent in extents:
            if len(extent.free) == extent.blocks:
                self.lose(extent)
                self._memory.take_back(Range(extent.offset, extent.offset + extent.bytes))

    def lose(self, extent: Extent) -> None:
        """Forget an extent: the cache takes the extent's memory back, or has taken the memory."""
        self._extents.remove(extent)

    def extent_of(self, block: int) -> Extent | None:
        """The extent of a block; None if the slabs have no such block, or no longer."""
        place = bisect_right(self._extents, block, key=lambda extent: extent.first) - 1
        extent = self._extents[place] if place >= 0 else None
        return None if extent is None or block >= extent.first + extent.blocks else extent

    def extents(self, offsets: Container[int]) -> list[Extent]:
        """The extents at the offsets, as far as the slabs have them."""
        return [extent for extent in self._extents if extent.offset in offsets]

    def _give_back(self, block: int) -> Extent:
        extent = self.extent_of(block)
        if extent is None or block in extent.free:
            raise ValueError(f"block {block} of {self.block_bytes} bytes is not taken")
        extent.free.add(block)
        return extent

    def _grow(self, count: int) -> bool:
        ranges = self._memory.lend(count, self.block_bytes)
        self.add(ranges)
        return bool(ranges)

    def add(self, ranges: Iterable[Range]) -> None:
        """Add memory of the cache, in ranges as of `HostMemory.lend`."""
        for range_ in ranges:
            first, end = -(-range_.start // self.block_bytes), range_.end // self.block_bytes
            self._extents.append(Extent(range_.start, range_.bytes, first, end - first, set(range(first, end))))
        self._extents.sort(key=lambda extent: extent.first)


class HostBlockHold:
    """A pin on another runtime's parked blocks: the blocks stay until `release`."""

    def __init__(self, release: Callable[[int], None], offsets: list[int]) -> None:
        """`release`: gives back the pin on the run at an offset."""
        self._release, self._offsets = release, offsets

    def release(self) -> None:
        """Release the blocks; a second call does nothing."""
        for offset in self._offsets:
            self._release(offset)
        self._offsets = []
