"""Kept blocks give way to images and parked requests of any runtime, and end with their process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.memory.images import FOLIO_BYTES, INDEX_BYTES, HostCacheFull, Images, Making, RunState
from runtime.memory.kv import KvRegion
from runtime.memory.native import Backend, DevicePool
from runtime.memory.prefixes import EndedBlock, HostPrefixes, PrefixSpace
from runtime.memory.slabs import Slabs
from tests.runtime.memory.test_images import MIB, key, memory_bytes

FOLIOS, BLOCK_BYTES, BLOCKS = 8, MIB, 64
TTL_S = 100.0
SIZES = (MIB, 3 * MIB, 7 * MIB)  # of images


class Runtime:
    """A device with blocks, each filled with a byte, and the blocks that the host keeps."""

    def __init__(self, images: Images, most_bytes: int = FOLIOS * FOLIO_BYTES) -> None:
        self.images, self.now, self.dead = images, 0.0, False
        self.device = DevicePool(BLOCKS * BLOCK_BYTES, backend=Backend.HOST)
        self.kv = KvRegion(self.device, BLOCK_BYTES, BLOCKS)
        self.kv.map(self.kv.pages_total)
        self.store = HostPrefixes(images, most_bytes, TTL_S, lambda: self.now)
        self.space = self.store.space(self.kv)

    def keep(self, *fills: int, tenant: str = "a", space: PrefixSpace | None = None) -> None:
        """Keep a block for each byte of `fills`: the first is to go first. The byte names the block as well."""
        for block, fill in enumerate(fills):
            self.kv.reservation.view(block * BLOCK_BYTES, BLOCK_BYTES)[:] = bytes([fill]) * BLOCK_BYTES
        (space or self.space).keep([EndedBlock(block, bytes([fill]), tenant) for block, fill in enumerate(fills)], None)
        self.store.settle()

    def bring(self, *fills: int) -> int:
        """Bring a chain back. Returns the number of blocks that came, each of which is compared."""
        device = range(BLOCKS // 2, BLOCKS // 2 + len(fills))
        came = self.space.bring([bytes([fill]) for fill in fills], device)
        for block, fill in zip(device, fills[:came], strict=False):
            assert bytes(self.kv.reservation.view(block * BLOCK_BYTES, BLOCK_BYTES)) == bytes([fill]) * BLOCK_BYTES
        return came

    def has(self, *fills: int) -> list[int]:
        return [fill for fill in fills if self.space.has(bytes([fill]))]

    def die(self) -> None:
        """Do the kernel's work at the end of the process."""
        self.dead = True
        self.images._locks.close()
        self.images.cache.close()

    def close(self) -> None:
        """Give the memory of the device and of the host back: each runtime has 64 MiB."""
        if not self.dead and self.space.number in self.store._spaces:
            self.space.close()
        self.store.close()
        if not self.dead:
            self.images.close()
        self.kv.reservation.release()
        self.device.close()


@contextmanager
def runtimes(count: int = 1, most_bytes: int = FOLIOS * FOLIO_BYTES) -> Iterator[list[Runtime]]:
    images = [Images.create(INDEX_BYTES + FOLIOS * FOLIO_BYTES)]
    images += [Images.open(images[0].fd) for _ in range(1, count)]
    made = [Runtime(each, most_bytes) for each in images]
    try:
        yield made
    finally:
        for runtime in made:
            runtime.close()


def test_kept_blocks_come_back_as_they_went() -> None:
    with runtimes() as (runtime,):
        runtime.keep(1, 2, 3)
        assert runtime.bring(1, 2, 3) == 3 and runtime.bring(1, 9, 3) == 1
        assert runtime.store.counts() == {"kept": 3, "brought": 4, "held_bytes": 3 * BLOCK_BYTES}


def test_a_block_is_copied_once() -> None:
    with runtimes() as (runtime,):
        runtime.keep(1, 2)
        runtime.keep(1, 2, 3)
        assert runtime.store.counts()["kept"] == 3


@pytest.mark.parametrize("at", [0, BLOCK_BYTES // 2, BLOCK_BYTES - 1])
def test_a_changed_byte_is_noticed_and_the_block_is_forgotten(at: int) -> None:
    with runtimes() as (runtime,):
        runtime.keep(1, 2, 3)
        host = runtime.store._index.get(runtime.space.number, bytes([2])).host  # type: ignore[union-attr]
        runtime.images.cache.view(host * BLOCK_BYTES + at, 1)[0] ^= 128
        assert runtime.bring(1, 2, 3) == 1
        assert runtime.has(1, 2, 3) == [1, 3] and runtime.store.counts()["wrong"] == 1


def test_an_image_takes_the_room_of_kept_blocks_on_any_runtime() -> None:
    with runtimes(2) as (runtime, other):
        runtime.keep(*range(1, 17))
        assert runtime.images.stats().free_bytes == 0
        with other.images.make(key("a"), 5 * MIB) as making:
            assert isinstance(making, Making)
        came = runtime.bring(*range(16, 0, -1))
        assert came < 16 and len(runtime.has(*range(1, 17))) < 16
        assert runtime.store.counts()["dropped"] >= 6
        runtime.keep(*range(1, 17))
        assert len(runtime.has(*range(1, 17))) == 16, "the image was abandoned: there is room again"


def test_parked_requests_take_the_room_of_kept_blocks() -> None:
    with runtimes() as (runtime,):
        runtime.keep(*range(1, 17))
        parked = Slabs(runtime.images.parked, BLOCK_BYTES).take(16)
        assert parked is not None and len(parked) == 16
        assert runtime.bring(1, 2, 3) == 0
        runtime.keep(1, 2, 3)
        assert runtime.has(1, 2, 3) == [], "parked requests do not give way"


def test_kept_blocks_take_no_image() -> None:
    with runtimes() as (runtime,):
        made = runtime.images.make(key("a"), 5 * MIB)
        assert isinstance(made, Making)
        made.seal(b"").release()
        runtime.keep(*range(1, 17))
        assert runtime.images.state(key("a")) is RunState.READY
        assert 0 < len(runtime.has(*range(1, 17))) < 16


def test_the_bound_holds_for_all_runtimes_of_a_node() -> None:
    with runtimes(2, most_bytes=3 * FOLIO_BYTES) as (runtime, other):
        runtime.keep(1, 2, 3, 4)
        other.keep(5, 6, 7, 8)
        assert runtime.images.stats().prefix_bytes <= 3 * FOLIO_BYTES
        assert other.has(5, 6, 7, 8) == [5, 6, 7, 8], "the longest unused blocks of the node went"
        assert runtime.bring(4, 3, 2, 1) < 4


def test_old_blocks_go() -> None:
    with runtimes() as (runtime,):
        runtime.keep(1, 2)
        runtime.now = TTL_S - 1
        runtime.bring(1)
        runtime.store.expire()
        assert runtime.has(1, 2) == [1, 2]
        runtime.now = TTL_S
        runtime.store.expire()
        assert runtime.has(1, 2) == [1]


def test_an_engine_takes_its_blocks_along() -> None:
    with runtimes() as (runtime,):
        second = runtime.store.space(runtime.kv)
        runtime.keep(1, 2)
        runtime.keep(1, 2, space=second)
        second.close()
        assert runtime.bring(1, 2) == 2
        runtime.space.close()
        assert runtime.images.stats().prefix_bytes == 0 == memory_bytes(runtime.images)


def test_a_dead_process_leaves_no_block_behind() -> None:
    with runtimes(2) as (runtime, other):
        runtime.keep(1, 2, 3)
        assert other.images.stats().prefix_bytes > 0
        runtime.die()
        assert other.images.stats().prefix_bytes == 0 == memory_bytes(other.images)


def test_a_copy_that_fails_keeps_nothing() -> None:
    with runtimes() as (runtime,):
        runtime.kv.unmap(sorted(runtime.kv.mapped))
        runtime.space.keep([EndedBlock(0, b"1", "a")], None)
        runtime.store.settle()
        assert not runtime.space.has(b"1") and runtime.images.stats().prefix_bytes == 0


class AnyOrder(RuleBasedStateMachine):
    """Two runtimes keep and bring blocks while images and parked requests come and go."""

    def __init__(self) -> None:
        super().__init__()
        images = [Images.create(INDEX_BYTES + FOLIOS * FOLIO_BYTES)]
        images.append(Images.open(images[0].fd))
        self.runtimes = [Runtime(each, 5 * FOLIO_BYTES) for each in images]
        self.parked: list[tuple[Slabs, list[int]]] = []
        self.making: dict[str, Making] = {}

    def teardown(self) -> None:
        for name in list(self.making):
            self.abandon(name)
        self.unpark_all()
        for runtime in self.runtimes:
            runtime.space.close()
        for name in "xyz":
            for size in SIZES:
                self.runtimes[0].images.discard(key(f"{name}{size}"))
        assert self.runtimes[0].images.stats().free_bytes == FOLIOS * FOLIO_BYTES
        assert memory_bytes(self.runtimes[0].images) == 0
        for runtime in self.runtimes:
            runtime.close()

    one = st.integers(0, 1)
    fills = st.lists(st.integers(1, 20), min_size=1, max_size=9, unique=True)

    @rule(one=one, fills=fills, tenant=st.sampled_from("ab"))
    def keep(self, one: int, fills: list[int], tenant: str) -> None:
        self.runtimes[one].keep(*fills, tenant=tenant)

    @rule(one=one, fills=fills)
    def bring(self, one: int, fills: list[int]) -> None:
        runtime = self.runtimes[one]
        had = len(runtime.has(*fills))
        assert runtime.bring(*fills) <= had

    @rule(one=one, name=st.sampled_from("xyz"), size=st.sampled_from(SIZES))
    def make(self, one: int, name: str, size: int) -> None:
        if name in self.making:
            return
        images = self.runtimes[one].images
        try:
            made = images.make(key(f"{name}{size}"), size, wait_s=0)
        except HostCacheFull:
            stats = images.stats()
            assert stats.prefix_bytes + stats.free_bytes < FOLIOS * FOLIO_BYTES
            return
        if isinstance(made, Making):
            made.view[:] = b"\xff" * made.bytes
            self.making[name] = made
        else:
            made.release()

    @precondition(lambda self: self.making)
    @rule(data=st.data(), seal=st.booleans())
    def finish(self, data: st.DataObject, seal: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.making)))
        if not seal:
            return self.abandon(name)
        image = self.making.pop(name).seal(b"")
        assert image.verify()
        image.release()
        return None

    def abandon(self, name: str) -> None:
        self.making.pop(name).abandon()

    @rule(one=one, count=st.integers(1, 9))
    def park(self, one: int, count: int) -> None:
        slabs = Slabs(self.runtimes[one].images.parked, BLOCK_BYTES)
        if (blocks := slabs.take(count)) is not None:
            for block in blocks:
                self.runtimes[one].images.cache.view(block * BLOCK_BYTES, BLOCK_BYTES)[:] = b"\xfe" * BLOCK_BYTES
            self.parked.append((slabs, blocks))

    @rule()
    def unpark_all(self) -> None:
        for slabs, blocks in self.parked:
            for block in blocks:
                view = self.runtimes[0].images.cache.view(block * BLOCK_BYTES, BLOCK_BYTES)
                assert bytes(view) == b"\xfe" * BLOCK_BYTES, "a kept block was written over a parked block"
            slabs.free(blocks)
        self.parked = []

    @rule(one=one)
    def grow_old(self, one: int) -> None:
        self.runtimes[one].now += TTL_S
        self.runtimes[one].store.expire()

    @invariant()
    def the_bound_holds_and_nothing_overlaps(self) -> None:
        with self.runtimes[0].images.change() as index:
            runs = sorted(index.runs, key=lambda run: run.offset)
        assert all(run.end <= after.offset for run, after in zip(runs, runs[1:], strict=False))
        assert all(not run.pins for run in runs if run.state is RunState.PREFIX)
        assert sum(run.bytes for run in runs if run.state is RunState.PREFIX) <= 5 * FOLIO_BYTES
        assert all(making.view[0] == 255 for making in self.making.values())


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=30)
