"""Memory of the host cache for requests to be parked, and a reserve of such memory.

Pages and a registration with a GPU's driver take 0.2 to 0.4 s for each GiB, and the copy of a parked request 0.02 s. So
memory that no parked request needs any more is kept in the reserve within a bound, for whatever model parks next, and a
runtime with a GPU fills its reserve before anything is parked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import structlog

from runtime.core.host_index import (
    RUNS_MOST,
    Fit,
    FolioRun,
    Index,
    Range,
    RunState,
    best_fit,
    blocks_in,
    fit_blocks,
    whole_folios,
)
from runtime.memory.native import CacheMemory, Code, PoolError
from runtime.memory.pinning import NothingPinned

PIECES, PIECE_LEAST = 1024, 16 << 20  # memory is lent in pieces of a 1,024th of the cache, or of so many bytes
TEND_S = 2.0  # between two looks at the reserve

log = structlog.get_logger()


class SpareRanges:
    """Ranges of the host cache without content. Thread-safe.

    Args:
        most: returns the most bytes to be kept."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._ranges: list[Range] = []  # the range kept for longest comes first

    @property
    def bytes(self) -> int:
        """Bytes of all ranges."""
        with self._lock:
            return self._bytes()

    def put(self, kept: Range) -> list[Range]:
        """Keep a range. Returns the ranges beyond the bound, kept for longest, for the caller to give back."""
        with self._lock:
            self._ranges.append(kept)
            beyond: list[Range] = []
            while self._ranges and self._bytes() > self._most():
                beyond.append(self._ranges.pop(0))
            return beyond

    def take(self, blocks: int, block_bytes: int) -> list[Range]:
        """Take ranges with room for `blocks` blocks of `block_bytes` bytes, or for a part of the blocks.

        The largest ranges come first, so that ranges are few. Only the last range may have room for more blocks."""
        with self._lock:
            taken: list[Range] = []
            for kept in sorted(self._ranges, key=lambda kept: -kept.bytes):
                if 0 < (room := blocks_in(kept, block_bytes)) <= blocks:
                    taken.append(kept)
                    blocks -= room
            for kept in taken:
                self._ranges.remove(kept)
            larger = [kept for kept in self._ranges if blocks_in(kept, block_bytes) > blocks]
            if blocks and larger:
                taken.append(min(larger, key=lambda kept: kept.bytes))
                self._ranges.remove(taken[-1])
            return taken

    def give_up(self, above: int) -> Range | None:
        """Take out the range kept for longest while the reserve has more than `above` bytes; None if it has not."""
        with self._lock:
            return self._ranges.pop(0) if self._bytes() > above else None

    def _bytes(self) -> int:
        return sum(kept.bytes for kept in self._ranges)


class HostRuns(Protocol):
    """A runtime's access to the runs of the host cache."""

    cache: CacheMemory
    pinned: NothingPinned
    member: int  # number of the runtime
    members: int  # number of runtimes that use the cache

    def change(self) -> AbstractContextManager[Index]:
        """The index, locked; written on leaving without an error."""

    def release(self, offset: int) -> None:
        """End the registration of the run at `offset`, and give back a pin of this runtime, now or soon."""

    def give_back(self, offset: int) -> None:
        """Give back a pin of this runtime on the run at `offset`, which is not registered."""


class ParkedMemory:
    """A runtime's memory for parked requests: the `HostMemory` of the slabs of its models. Thread-safe.

    Args:
        kept_bytes, kept_together: see `Images.create`."""

    def __init__(self, runs: HostRuns, kept_bytes: int, kept_together: int) -> None:
        self._runs, self._kept_bytes, self._kept_together = runs, kept_bytes, kept_together
        self._reserve = SpareRanges(lambda: max(self._kept_bytes, self._share()))
        self._piece_bytes = max(PIECE_LEAST, whole_folios(runs.cache.bytes // PIECES))
        self._tending: threading.Thread | None = None
        self._ending = threading.Event()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the reserve."""
        return self._reserve.bytes

    def lend(self, blocks: int, block_bytes: int) -> list[Range]:
        """Lend memory for `blocks` blocks, of the reserve first, in one range or several; [] if there is too little."""
        ranges = self._reserve.take(blocks, block_bytes)
        missing = blocks - sum(blocks_in(range_, block_bytes) for range_ in ranges)
        if missing <= 0:
            return ranges
        if more := self._lend_new(missing, block_bytes):
            return ranges + more
        for range_ in ranges:
            self.take_back(range_)
        return self._lend_new(blocks, block_bytes) if ranges else []  # the ranges with the room around them may do

    def take_back(self, lent: Range) -> None:
        """Keep a lent range without blocks in the reserve; beyond the bound, the range kept for longest goes."""
        for range_ in self._reserve.put(lent):
            self._runs.release(range_.start)

    def allocate(self, index: Index, fit: Fit) -> list[Range]:
        """Free the ranges that `fit` chooses and return the ranges; [] if the room does not suffice.

        The reserve above `kept_bytes` goes before images that nobody uses, the rest of the reserve goes after these."""
        while not fit(index.gaps(index.runs)) and self._give_up(index, self._kept_bytes):
            pass
        ranges = index.allocate(fit)
        if not ranges and self._give_up(index, 0):
            while self._give_up(index, 0):
                pass
            ranges = index.allocate(fit)
        return ranges

    def fill(self) -> None:
        """From now on, keep the reserve at this runtime's share of `kept_together`, on a thread."""
        self._tending = threading.Thread(target=self._tend, name="reserve", daemon=True)
        self._tending.start()

    def close(self) -> None:
        """End the thread of `fill`."""
        self._ending.set()
        if self._tending is not None:
            self._tending.join()

    def _lend_new(self, blocks: int, block_bytes: int) -> list[Range]:
        def fit(gaps: list[Range]) -> list[Range]:
            # Between two pieces, the room of a part of a block is lost: if the room is short, pieces are larger.
            return fit_blocks(gaps, blocks, block_bytes, self._piece_bytes) or fit_blocks(gaps, blocks, block_bytes)

        ranges = self._allocated(fit)
        if not ranges and self._runs.pinned.settle():
            ranges = self._allocated(fit)
        return ranges

    def _allocated(self, fit: Fit) -> list[Range]:
        """Make runs with memory, registered. Returns their ranges; [] if the room or the memory does not suffice."""
        with self._runs.change() as index:
            ranges = self.allocate(index, fit)
            if len(index.runs) + len(ranges) > RUNS_MOST:
                return []
            self._add(index, ranges)
        return self._with_memory(ranges)

    def _add(self, index: Index, ranges: list[Range]) -> None:
        index.runs += [FolioRun(r.start, r.bytes, RunState.PARKED, {self._runs.member: 1}) for r in ranges]

    def _with_memory(self, ranges: list[Range]) -> list[Range]:
        """Get memory for new runs, and register the memory; [], and the runs go, if the machine has no memory."""
        runs, held = self._runs, list[Range]()
        try:
            for range_ in ranges:
                runs.cache.commit(range_.start, range_.bytes)
                runs.pinned.take(range_.start, range_.bytes)
                held.append(range_)
        except BaseException as error:
            for range_ in ranges:
                runs.release(range_.start) if range_ in held else runs.give_back(range_.start)
            if isinstance(error, PoolError) and error.code is Code.NO_MEMORY:
                return []
            raise
        return ranges

    def _give_up(self, index: Index, above: int) -> bool:
        """Free a range of the reserve while the reserve has more than `above` bytes. Returns whether a range went."""
        if (range_ := self._reserve.give_up(above)) is None:
            return False
        self._runs.pinned.leave_now(range_.start)
        index.unpin(index.at(range_.start), self._runs.member)
        return True

    def _tend(self) -> None:
        while not self._ending.is_set():
            try:
                while not self._ending.is_set() and self._fill():
                    pass
            except Exception as error:  # a request that is parked gets its own memory, and reports the reason
                log.warning("memory.not_reserved", error=type(error).__name__, detail=str(error)[:300])
            self._ending.wait(TEND_S)
            while (range_ := self._reserve.give_up(max(self._kept_bytes, self._share()))) is not None:
                self._runs.release(range_.start)

    def _fill(self) -> bool:
        """Get a further piece for the reserve from free room. Returns whether share, room and memory had a piece."""
        with self._runs.change() as index:
            parked = [run for run in index.runs if run.state is RunState.PARKED]
            own = sum(run.bytes for run in parked if self._runs.member in run.pins)
            room = min(self._share() - own, self._kept_together - sum(run.bytes for run in parked))
            wanted = room >= self._piece_bytes and len(index.runs) < RUNS_MOST // 2
            ranges = best_fit(index.gaps(index.runs), self._piece_bytes) if wanted else []
            self._add(index, ranges)
        filled = self._with_memory(ranges)
        for range_ in filled:
            self.take_back(range_)
        return bool(filled)

    def _share(self) -> int:
        """This runtime's part of the bytes that all runtimes keep together."""
        return self._kept_together // self._runs.members
