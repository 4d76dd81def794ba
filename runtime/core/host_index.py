"""Index of the host cache: runs of whole folios, members that pin runs, and runs to evict when room is needed. Pure."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

FOLIO_BYTES = 2 << 20
RUNS_MOST = 4096  # runs beyond which no blocks are parked: 4096 runs of up to 200 bytes fit into half of the index
INDEX_BYTES = FOLIO_BYTES  # the index lies at the beginning of the file; runs and gaps fill the rest


class Range(NamedTuple):
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


class RunState(enum.StrEnum):
    MAKING = enum.auto()
    READY = enum.auto()
    DISCARDED = enum.auto()  # still used, but no longer found by its key
    PARKED = enum.auto()
    PREFIX = enum.auto()  # blocks of ended requests: the first to go when room is needed, unless pinned for a copy


class FolioRun(msgspec.Struct):
    """Run of whole folios with a single content.

    A run lasts while a member pins the run. Without a pin, a READY run lasts as well, and a PREFIX run lasts while the
    member lives that made the run."""

    offset: int
    bytes: int
    state: RunState
    pins: dict[int, int]  # number of pins of each member
    key: str = ""  # of an image; empty for parked blocks
    image_bytes: int = 0
    notes_bytes: int = 0
    used: int = 0  # clock of the index when a member last unpinned the run
    life: int = 0  # of the member that made a PREFIX run

    @property
    def end(self) -> int:
        return self.offset + self.bytes

    def overlaps(self, ranges: list[Range]) -> bool:
        return any(start < self.end and self.offset < end for start, end in ranges)


Fit = Callable[[list[Range]], list[Range]]  # takes free ranges; returns ranges to use, [] if the room does not suffice


class Index(msgspec.Struct):
    """Index of a host cache. The caller must hold the lock of the cache while changing the index."""

    end: int  # size of the file
    clock: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    members: dict[int, int] = {}  # process id of each member
    lives: dict[int, int] = {}  # life of each member: a member's number is used again, a life never
    born: int = 0  # lives begun so far
    runs: list[FolioRun] = []

    def bytes_of(self, *states: RunState) -> int:
        return sum(run.bytes for run in self.runs if run.state in states)

    def gaps(self, runs: list[FolioRun]) -> list[Range]:
        """Free ranges of the file if it holds only `runs`."""
        ends = [INDEX_BYTES, *(run.end for run in sorted(runs, key=lambda run: run.offset))]
        starts = [*sorted(run.offset for run in runs), self.end]
        return [Range(start, end) for start, end in zip(ends, starts, strict=True) if start < end]

    def image(self, key: str) -> FolioRun | None:
        return next(
            (run for run in self.runs if run.key == key and run.state in (RunState.MAKING, RunState.READY)), None
        )

    def at(self, offset: int) -> FolioRun:
        return next(run for run in self.runs if run.offset == offset)

    def allocate(self, fit: Fit) -> list[Range]:
        """Free the ranges that `fit` chooses and return the ranges; [] if the room does not suffice.

        Unpinned runs are evicted to make room, blocks of ended requests first, then images, each least recently used
        first, and only if `fit` needs their room. The caller must add runs for the ranges."""
        if ranges := fit(self.gaps(self.runs)):
            return ranges
        lasting = (run for run in self.runs if not run.pins)
        unused = sorted(lasting, key=lambda run: (run.state is RunState.READY, run.used))

        def fitted(count: int) -> list[Range]:
            """Ranges if the first `count` unused runs go."""
            victims = {run.offset for run in unused[:count]}
            return fit(self.gaps([run for run in self.runs if run.offset not in victims]))

        count = bisect_left(range(len(unused)), True, key=lambda count: bool(fitted(count)))
        if ranges := fitted(count):
            self._evict({run.offset for run in unused[:count]}, ranges)
        return ranges

    def let_go(self, fit: Fit, size: int, keys: Collection[str]) -> int:
        """Evict unused images among `keys`, the least recently used first, until `fit` finds room for `size` bytes.

        Returns 0, or the bytes that lack: then nothing is evicted."""
        unused = [run for run in self.runs if run.state is RunState.READY and not run.pins and run.key in keys]
        going: set[int] = set()
        for run in [None, *sorted(unused, key=lambda run: run.used)]:
            if run is not None:
                going.add(run.offset)
            if ranges := fit(self.gaps([run for run in self.runs if run.offset not in going])):
                self._evict(going, ranges)
                return 0
        free = sum(gap.bytes for gap in self.gaps([run for run in self.runs if run.offset not in going]))
        return max(FOLIO_BYTES, size - free)

    def _evict(self, victims: set[int], ranges: list[Range]) -> None:
        """Remove the runs at the offsets `victims` that overlap the ranges."""
        gone = [run for run in self.runs if run.offset in victims and run.overlaps(ranges)]
        self.evictions += sum(run.state is RunState.READY for run in gone)
        offsets = {run.offset for run in gone}
        self.runs = [run for run in self.runs if run.offset not in offsets]

    def begin(self, member: int) -> int:
        """Begin a life of the member and return the life: a number that no member has had before."""
        self.born += 1
        self.lives[member] = self.born
        return self.born

    def parked(self, ranges: Sequence[tuple[int, int]], life: int) -> list[FolioRun] | None:
        """Runs that contain the ranges (start and end of each, in bytes), parked by the member with the life.

        Returns None if the member is gone, or if the member has not parked some range."""
        member = next((member for member, lived in self.lives.items() if lived == life), None)
        parked = [run for run in self.runs if run.state is RunState.PARKED and member in run.pins]
        found: dict[int, FolioRun] = {}
        for start, end in ranges:
            run = next((run for run in parked if run.offset <= start and end <= run.end), None)
            if run is None:
                return None
            found[run.offset] = run
        return list(found.values())

    def pin(self, run: FolioRun, member: int) -> None:
        run.pins[member] = run.pins.get(member, 0) + 1

    def unpin(self, run: FolioRun, member: int) -> None:
        self._touch(run)
        run.pins[member] -= 1
        if not run.pins[member]:
            del run.pins[member]
        self.sweep()

    def forget(self, members: Iterable[int]) -> None:
        for member in members:
            self.members.pop(member, None)
            life = self.lives.pop(member, 0)
            for run in self.runs:
                if run.pins.pop(member, 0):
                    self._touch(run)
                if run.state is RunState.PREFIX and run.life == life:
                    run.state = RunState.DISCARDED
        self.sweep()

    def sweep(self) -> None:
        lasting = (RunState.READY, RunState.PREFIX)
        self.runs = [run for run in self.runs if run.pins or run.state in lasting]

    def prefixes(self, life: int) -> dict[int, FolioRun]:
        """Runs by offset that have blocks of ended requests of the member with the life."""
        return {run.offset: run for run in self.runs if run.state is RunState.PREFIX and run.life == life}

    def drop_oldest_prefix(self, spared: int) -> bool:
        """Remove the unpinned PREFIX run used least recently; False, and nothing goes, if its member has the life
        `spared`, or if there is no such run."""
        unpinned = [run for run in self.runs if run.state is RunState.PREFIX and not run.pins]
        oldest = min(unpinned, key=lambda run: run.used, default=None)
        if oldest is None or oldest.life == spared:
            return False
        self.runs.remove(oldest)
        return True

    def _touch(self, run: FolioRun) -> None:
        self.clock += 1
        run.used = self.clock


def best_fit(gaps: list[Range], size: int) -> list[Range]:
    fitting = [gap for gap in gaps if gap.bytes >= size]
    if not fitting:
        return []
    start = min(fitting, key=lambda gap: gap.bytes).start
    return [Range(start, start + size)]


def fit_blocks(gaps: list[Range], count: int, block_bytes: int, piece_bytes: int = 1 << 62) -> list[Range]:
    """Ranges of whole folios with room for `count` blocks, from the largest gaps, so that ranges are few; [] if the
    room does not suffice.

    Blocks begin at multiples of their size, so a range may hold more bytes than its blocks. The blocks of a range have
    at most `piece_bytes` bytes together, or a single block is larger."""
    ranges = []
    for gap in sorted(gaps, key=lambda gap: -gap.bytes):
        while count and (room := blocks_in(gap, block_bytes)):
            share = min(count, room, max(1, piece_bytes // block_bytes))
            first = -(-gap.start // block_bytes)
            start = first * block_bytes // FOLIO_BYTES * FOLIO_BYTES
            ranges.append(Range(start, whole_folios((first + share) * block_bytes)))
            count -= share
            gap = Range(ranges[-1].end, gap.end)
    return [] if count else ranges


def blocks_in(range_: Range, block_bytes: int) -> int:
    """The number of whole blocks in a range: blocks begin at multiples of their size."""
    return max(0, range_.end // block_bytes - -(-range_.start // block_bytes))


def whole_folios(size: int) -> int:
    return -(-size // FOLIO_BYTES) * FOLIO_BYTES
