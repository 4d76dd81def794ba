"""The host cache under any order of operations: no run overlaps, no pinned image goes, every byte comes back."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.memory.images import (
    FOLIO_BYTES,
    INDEX_BYTES,
    NOTES_BYTES,
    FolioRun,
    HostCacheFull,
    Image,
    ImageBusy,
    Images,
    Making,
    RunState,
)
from runtime.memory.slabs import Slabs
from tests.runtime.memory.test_images import MIB, key, memory_bytes, write

RUNTIMES, FOLIOS = 3, 12
KEPT_FOLIOS = (0, 2, 12)  # most memory that a runtime keeps for blocks to come
SIZES = {"a": 1, "b": MIB, "c": 3 * MIB, "d": 5 * MIB, "e": 7 * MIB}
BLOCK_BYTES = (FOLIO_BYTES // 4, 3 * MIB)
FIRST = INDEX_BYTES // FOLIO_BYTES


@dataclass
class Held:
    """An image in use by a runtime."""

    runtime: int
    image: Image
    fill: int


class AnyOrder(RuleBasedStateMachine):
    """Several runtimes make, use, discard, park and die, beside a model of the right state."""

    def __init__(self) -> None:
        super().__init__()
        self.runtimes = [Images.create(INDEX_BYTES + FOLIOS * FOLIO_BYTES)]
        self.runtimes += [Images.open(self.runtimes[0].fd, kept * FOLIO_BYTES) for kept in KEPT_FOLIOS[1:]]
        self.slabs = [[Slabs(runtime.parked, size) for size in BLOCK_BYTES] for runtime in self.runtimes]
        self.blocks: list[list[dict[int, int]]] = [
            [{}, {}] for _ in self.runtimes
        ]  # number → byte that fills the block
        self.making: dict[str, tuple[int, Making]] = {}
        self.held: list[Held] = []
        self.ready: dict[str, tuple[int, int]] = {}  # offset, byte that fills the image; least recently used first
        self.fills = 0

    def teardown(self) -> None:
        for held in list(self.held):
            self.release(held)
        for runtime in range(RUNTIMES):
            self.die(runtime)
        for name in self.ready:
            assert self.runtimes[0].discard(key(name))
        assert self.runtimes[0].stats().free_bytes == FOLIOS * FOLIO_BYTES
        assert memory_bytes(self.runtimes[0]) == 0
        for runtime in self.runtimes:
            runtime.close()

    one = st.integers(0, RUNTIMES - 1)
    names = st.sampled_from(sorted(SIZES))

    @rule(runtime=one, name=names)
    def make(self, runtime: int, name: str) -> None:
        folios = -(-(SIZES[name] + NOTES_BYTES) // FOLIO_BYTES)
        before = self.runs()
        try:
            made = self.runtimes[runtime].make(key(name), SIZES[name], wait_s=0)
        except ImageBusy:
            assert name in self.making
        except HostCacheFull:
            assert name not in self.ready and name not in self.making
            assert longest(free(before, without=self.unused())) < folios
        else:
            if isinstance(made, Image):
                self.hold(runtime, name, made)
            else:
                assert name not in self.ready and name not in self.making
                self.making[name] = (runtime, made)
                self.went(before, lambda cells: longest(cells) >= folios)

    @precondition(lambda self: self.making)
    @rule(data=st.data(), seal=st.booleans())
    def finish(self, data: st.DataObject, seal: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.making)))
        runtime, making = self.making.pop(name)
        self.fills = self.fills % 255 + 1
        making.view[:] = bytes([self.fills]) * making.bytes
        if seal:
            self.ready[name] = (making.offset, self.fills)
            self.held.append(Held(runtime, making.seal(name.encode()), self.fills))
        else:
            making.abandon()

    @rule(runtime=one, name=names)
    def find(self, runtime: int, name: str) -> None:
        image = self.runtimes[runtime].find(key(name))
        assert (image is not None) == (name in self.ready)
        if image:
            self.hold(runtime, name, image)

    def hold(self, runtime: int, name: str, image: Image) -> None:
        assert image.offset == self.ready[name][0] and image.meta == name.encode()
        self.held.append(Held(runtime, image, self.ready[name][1]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.release(self.held[data.draw(st.integers(0, len(self.held) - 1))])

    def release(self, held: Held) -> None:
        assert held.image.verify() and bytes(held.image.view) == bytes([held.fill]) * held.image.bytes
        held.image.release()
        self.held.remove(held)
        self.used_last([held.image.offset])

    def used_last(self, offsets: list[int]) -> None:
        """Note that images at `offsets` were let go just now, in the order of the runs."""
        for offset in [run.offset for run in self.runs() if run.offset in offsets]:
            for name in [name for name, stored in self.ready.items() if stored[0] == offset]:
                self.ready[name] = self.ready.pop(name)

    @rule(runtime=one, name=names)
    def discard(self, runtime: int, name: str) -> None:
        assert self.runtimes[runtime].discard(key(name)) == (name in self.ready)
        self.ready.pop(name, None)

    @rule(runtime=one, shape=st.integers(0, 1), count=st.integers(1, 9))
    def park(self, runtime: int, shape: int, count: int) -> None:
        size, before = BLOCK_BYTES[shape], self.runs()
        taken = self.slabs[runtime][shape].take(count)
        if taken is None:
            assert whole_blocks(free(before, without=self.unused()), size) < count
            return
        self.went(before, lambda cells: whole_blocks(cells, size) >= count)
        assert len(taken) == count and not set(taken) & self.blocks[runtime][shape].keys()
        for block in taken:
            self.fills = self.fills % 255 + 1
            write(self.runtimes[runtime], size, block, self.fills)
            self.blocks[runtime][shape][block] = self.fills

    @rule(runtime=one, shape=st.integers(0, 1), data=st.data())
    def unpark(self, runtime: int, shape: int, data: st.DataObject) -> None:
        blocks = self.blocks[runtime][shape]
        some = data.draw(st.lists(st.sampled_from(sorted(blocks)), unique=True)) if blocks else []
        for block in some:
            assert bytes(self.block(runtime, shape, block)) == bytes([blocks.pop(block)]) * BLOCK_BYTES[shape]
        self.slabs[runtime][shape].free(some)

    @rule(runtime=one)
    def die(self, runtime: int) -> None:
        """Do the kernel's work at the end of a process, and start a new runtime in place of the dead runtime."""
        dead, fd = self.runtimes[runtime], os.dup(self.runtimes[runtime].fd)
        dead._locks.close()
        dead.cache.close()
        self.runtimes[runtime] = Images.open(fd, KEPT_FOLIOS[runtime] * FOLIO_BYTES)
        os.close(fd)
        self.used_last([held.image.offset for held in self.held if held.runtime == runtime])
        self.held = [held for held in self.held if held.runtime != runtime]
        self.making = {name: made for name, made in self.making.items() if made[0] != runtime}
        self.blocks[runtime] = [{}, {}]
        self.slabs[runtime] = [Slabs(self.runtimes[runtime].parked, size) for size in BLOCK_BYTES]

    @invariant()
    def runs_are_whole_do_not_overlap_and_are_those_of_the_model(self) -> None:
        runs = sorted(self.runs(), key=lambda run: run.offset)
        for run, following in pairwise([*runs, None]):
            assert run and run.offset % FOLIO_BYTES == 0 < run.bytes and run.bytes % FOLIO_BYTES == 0
            assert run.offset >= INDEX_BYTES
            assert run.end <= (following.offset if following else INDEX_BYTES + FOLIOS * FOLIO_BYTES)
        assert sorted(run.key for run in runs if run.state is RunState.READY) == sorted(str(key(n)) for n in self.ready)
        assert sorted(run.key for run in runs if run.state is RunState.MAKING) == sorted(
            str(key(n)) for n in self.making
        )
        left = {held.image.offset for held in self.held} - {offset for offset, _ in self.ready.values()}
        assert {run.offset for run in runs if run.state is RunState.DISCARDED} == left
        assert memory_bytes(self.runtimes[0]) <= sum(run.bytes for run in runs)
        for images, slabs, kept in zip(self.runtimes, self.slabs, KEPT_FOLIOS, strict=True):
            lent = sum(extent.bytes for each in slabs for extent in each._extents)
            own = sum(run.bytes for run in runs if run.state is RunState.PARKED and images.member in run.pins)
            assert own == lent + images.parked.reserved_bytes
            assert images.parked.reserved_bytes <= kept * FOLIO_BYTES

    @invariant()
    def bytes_are_what_was_written(self) -> None:
        for held in self.held:
            assert held.image.view[0] == held.image.view[-1] == held.image.view[held.image.bytes // 2] == held.fill
        for runtime in range(RUNTIMES):
            for shape, blocks in enumerate(self.blocks[runtime]):
                for block, fill in blocks.items():
                    view = self.block(runtime, shape, block)
                    assert view[0] == view[-1] == fill

    def went(self, before: list[FolioRun], fits: Callable[[set[int]], bool]) -> None:
        """Check that images gone since `before` were unused, and that sparing the youngest would have left no room."""
        after = {run.offset for run in self.runs() if run.state is RunState.READY}
        oldest_first = [offset for offset in self.unused() if any(run.offset == offset for run in before)]
        gone = {run.offset for run in before if run.state is RunState.READY} - after
        assert gone <= set(oldest_first)
        if gone:
            spared = oldest_first[: max(oldest_first.index(offset) for offset in gone)]
            assert not fits(free(before, without=spared))
        self.ready = {name: stored for name, stored in self.ready.items() if stored[0] not in gone}

    def unused(self) -> list[int]:
        """Offsets of unused images, the least recently used first."""
        held = {held.image.offset for held in self.held}
        return [offset for offset, _ in self.ready.values() if offset not in held]

    def runs(self) -> list[FolioRun]:
        with self.runtimes[0].change() as index:
            return list(index.runs)

    def block(self, runtime: int, shape: int, block: int) -> memoryview:
        return self.runtimes[runtime].cache.view(block * BLOCK_BYTES[shape], BLOCK_BYTES[shape])


def free(runs: list[FolioRun], without: list[int]) -> set[int]:
    """Numbers of folios that are free without the runs that begin at `without`."""
    used = {
        place // FOLIO_BYTES for r in runs if r.offset not in without for place in range(r.offset, r.end, FOLIO_BYTES)
    }
    return set(range(FIRST, FIRST + FOLIOS)) - used


def longest(folios: set[int]) -> int:
    return max((n for n in range(1, FOLIOS + 1) for at in folios if set(range(at, at + n)) <= folios), default=0)


def whole_blocks(folios: set[int], size: int) -> int:
    """Number of blocks of the size that lie only in `folios`."""
    blocks = range((FIRST + FOLIOS) * FOLIO_BYTES // size)
    return sum(
        {b * size // FOLIO_BYTES, *range(b * size // FOLIO_BYTES, ((b + 1) * size - 1) // FOLIO_BYTES + 1)} <= folios
        for b in blocks
    )


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40)
