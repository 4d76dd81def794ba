"""Blocks of KV cache in the host cache: those that one runtime parks there, and those of another that must not go."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.memory.images import Images


@dataclass(slots=True)
class Extent:
    """Some of the cache's memory, in blocks."""

    offset: int
    bytes: int
    first: int
    blocks: int
    free: set[int]


class Slabs:
    """KV blocks of one model's parked requests: block i lies at i * block_bytes of the cache. For one thread.

    Grows by whole folios for which images that nobody uses are evicted: a parked request is dearer, it can't be read
    again from a file."""

    def __init__(self, images: Images, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._images = images
        self._extents: list[Extent] = []  # by place

    @property
    def taken(self) -> int:
        """Blocks."""
        return sum(extent.blocks - len(extent.free) for extent in self._extents)

    def take(self, count: int) -> list[int] | None:
        """Numbers of blocks, neighbours where possible; None when there is no room for all of them."""
        missing = count - sum(len(extent.free) for extent in self._extents)
        if missing > 0 and not self._grow(missing):
            return None
        taken: list[int] = []
        for extent in sorted(self._extents, key=lambda extent: len(extent.free)):  # the fullest: others may get empty
            share = sorted(extent.free)[: count - len(taken)]
            if share:
                self._images._use(extent)
            extent.free.difference_update(share)
            taken += share
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        touched = [self._give_back(block) for block in blocks]
        for extent in {id(extent): extent for extent in touched}.values():
            if len(extent.free) == extent.blocks:
                self._images._keep(self, extent)

    def lose(self, extent: Extent) -> None:
        """One that is empty."""
        self._extents.remove(extent)

    def _give_back(self, block: int) -> Extent:
        place = bisect_right(self._extents, block, key=lambda extent: extent.first) - 1
        extent = self._extents[place] if place >= 0 else None
        if extent is None or block >= extent.first + extent.blocks or block in extent.free:
            raise ValueError(f"block {block} of {self.block_bytes} bytes is not taken")
        extent.free.add(block)
        return extent

    def _grow(self, count: int) -> bool:
        ranges = self._images._park(count, self.block_bytes)
        for range_ in ranges:
            first, end = -(-range_.start // self.block_bytes), range_.end // self.block_bytes
            self._extents.append(Extent(range_.start, range_.bytes, first, end - first, set(range(first, end))))
        self._extents.sort(key=lambda extent: extent.first)
        return bool(ranges)


class Hold:
    """Parked blocks of another runtime that stay until they are released."""

    def __init__(self, images: Images, offsets: list[int]) -> None:
        self._images, self._offsets = images, offsets

    def release(self) -> None:
        """Again does no harm."""
        for offset in self._offsets:
            self._images._release(offset)
        self._offsets = []
