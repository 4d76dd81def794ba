"""What lies where in the host cache: runs of whole folios, who pins them, what goes when room is needed. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

FOLIO_BYTES = 2 << 20
INDEX_BYTES = FOLIO_BYTES  # of the file's beginning; everything else is runs and gaps


class Range(NamedTuple):
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


class State(enum.StrEnum):
    MAKING = enum.auto()
    READY = enum.auto()
    DISCARDED = enum.auto()  # found by nobody any more; still used
    PARKED = enum.auto()


class Run(msgspec.Struct):
    """Whole folios with one owner. Other than READY it lasts as long as a member pins it."""

    offset: int
    bytes: int
    state: State
    pins: dict[int, int]  # member → how often
    key: str = ""
    image_bytes: int = 0
    notes_bytes: int = 0
    used: int = 0  # the index's clock when it was last let go

    @property
    def end(self) -> int:
        return self.offset + self.bytes

    def overlaps(self, ranges: list[Range]) -> bool:
        return any(start < self.end and self.offset < end for start, end in ranges)


Fit = Callable[[list[Range]], list[Range]]  # of free ranges → those to take, none if they do not suffice


class Index(msgspec.Struct):
    """What lies where. Pure: who changes it holds the lock."""

    end: int  # of the file
    clock: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    members: dict[int, int] = {}  # whose process id
    lives: dict[int, int] = {}  # by member: who had its number before was another
    born: int = 0  # members that there ever were
    runs: list[Run] = []

    def bytes_of(self, *states: State) -> int:
        return sum(run.bytes for run in self.runs if run.state in states)

    def gaps(self, runs: list[Run]) -> list[Range]:
        """What is free if only these runs are there."""
        ends = [INDEX_BYTES, *(run.end for run in sorted(runs, key=lambda run: run.offset))]
        starts = [*sorted(run.offset for run in runs), self.end]
        return [Range(start, end) for start, end in zip(ends, starts, strict=True) if start < end]

    def image(self, key: str) -> Run | None:
        return next((run for run in self.runs if run.key == key and run.state in (State.MAKING, State.READY)), None)

    def at(self, offset: int) -> Run:
        return next(run for run in self.runs if run.offset == offset)

    def allocate(self, fit: Fit) -> list[Range]:
        """Ranges that `fit` chose, free now: images went for them, oldest first and no more than had to."""
        unused = sorted((run for run in self.runs if run.state is State.READY and not run.pins), key=lambda r: r.used)
        for count in range(len(unused) + 1):
            victims = {run.offset for run in unused[:count]}
            if ranges := fit(self.gaps([run for run in self.runs if run.offset not in victims])):
                left = [run for run in self.runs if run.offset not in victims or not run.overlaps(ranges)]
                self.evictions += len(self.runs) - len(left)
                self.runs = left
                return ranges
        return []

    def begin(self, member: int) -> int:
        """Its life, which no other ever had."""
        self.born += 1
        self.lives[member] = self.born
        return self.born

    def parked(self, ranges: Sequence[tuple[int, int]], life: int) -> list[Run] | None:
        """The runs in which these lie, all of them parked by the member with that life; None if not."""
        member = next((member for member, lived in self.lives.items() if lived == life), None)
        parked = [run for run in self.runs if run.state is State.PARKED and member in run.pins]
        found: dict[int, Run] = {}
        for start, end in ranges:
            run = next((run for run in parked if run.offset <= start and end <= run.end), None)
            if run is None:
                return None
            found[run.offset] = run
        return list(found.values())

    def pin(self, run: Run, member: int) -> None:
        run.pins[member] = run.pins.get(member, 0) + 1

    def unpin(self, run: Run, member: int) -> None:
        self._touch(run)
        run.pins[member] -= 1
        if not run.pins[member]:
            del run.pins[member]
        self.sweep()

    def forget(self, members: Iterable[int]) -> None:
        for member in members:
            self.members.pop(member, None)
            self.lives.pop(member, None)
            for run in self.runs:
                if run.pins.pop(member, 0):
                    self._touch(run)
        self.sweep()

    def sweep(self) -> None:
        self.runs = [run for run in self.runs if run.pins or run.state is State.READY]

    def _touch(self, run: Run) -> None:
        self.clock += 1
        run.used = self.clock


def best_fit(gaps: list[Range], size: int) -> list[Range]:
    fitting = [gap for gap in gaps if gap.bytes >= size]
    if not fitting:
        return []
    start = min(fitting, key=lambda gap: gap.bytes).start
    return [Range(start, start + size)]


def fit_blocks(gaps: list[Range], count: int, block_bytes: int) -> list[Range]:
    """Whole folios around blocks that begin at multiples of their size; of the largest gaps, to be few."""
    ranges = []
    for gap in sorted(gaps, key=lambda gap: -gap.bytes):
        first, end = -(-gap.start // block_bytes), gap.end // block_bytes
        share = min(count, end - first)
        if share > 0:
            start = first * block_bytes // FOLIO_BYTES * FOLIO_BYTES
            ranges.append(Range(start, whole_folios((first + share) * block_bytes)))
            count -= share
        if count == 0:
            return ranges
    return []


def whole_folios(size: int) -> int:
    return -(-size // FOLIO_BYTES) * FOLIO_BYTES
