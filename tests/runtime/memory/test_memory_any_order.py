"""The memory library under any order of operations: no page lost or owned twice, content right, refusals exact."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from runtime.memory.native import (
    CacheMemory,
    Code,
    DevicePool,
    FaultPoint,
    PageInfo,
    PageState,
    PoolError,
    Segment,
)
from tests.runtime.memory.test_memory import PAGE, POOL_PAGES, SOON_S

OWNERS, SLOTS = 3, 20
Content = tuple[PageState, int]  # of a slot: mapped or clean, and the byte that fills the slot


class AnyOrder(RuleBasedStateMachine):
    """Every operation of three owners on their addresses, and faults, beside a model of the right state."""

    def __init__(self) -> None:
        super().__init__()
        self.device = DevicePool(POOL_PAGES * PAGE, page_bytes=PAGE, huge_folios=False)
        self.cache = CacheMemory(OWNERS * SLOTS * PAGE)
        self.reservations = [self.device.reserve(SLOTS * PAGE) for _ in range(OWNERS)]
        self.slots: list[list[Content | None]] = [[None] * SLOTS for _ in range(OWNERS)]
        self.scratched: list[set[int]] = [set() for _ in range(OWNERS)]  # slots
        for owner in range(OWNERS):  # the image of an owner: each page is full of a byte that tells owner and place
            for slot in range(SLOTS):
                place = (owner * SLOTS + slot) * PAGE
                self.cache.view(place, PAGE)[:] = bytes([image_byte(owner, slot)]) * PAGE

    def teardown(self) -> None:
        for reservation in self.reservations:
            reservation.release()
        self.device.settle(SOON_S)
        assert self.device.stats().pages_free == POOL_PAGES
        self.device.close()
        self.cache.close()

    def free_pages(self) -> int:
        return POOL_PAGES - sum(content is not None for slots in self.slots for content in slots)

    ranges = st.tuples(st.integers(0, OWNERS - 1), st.integers(0, SLOTS - 1), st.integers(1, SLOTS)).map(
        lambda drawn: (drawn[0], drawn[1], min(drawn[2], SLOTS - drawn[1]))
    )
    faults = st.one_of(st.none(), st.tuples(st.sampled_from(FaultPoint), st.integers(1, 6)))

    @rule(range_=ranges, fault=faults)
    def map(self, range_: tuple[int, int, int], fault: tuple[FaultPoint, int] | None) -> None:
        owner, first, count = range_
        possible = self.empty(owner, first, count) and count <= self.free_pages()
        if not self.attempt(lambda: self.reservations[owner].map(first * PAGE, count * PAGE, SOON_S), possible, fault):
            return
        for slot in range(first, first + count):
            value = self.reservations[owner].view(slot * PAGE, 1)[0]
            assert value in own_bytes(owner), "another owner's bytes"
            assert self.reservations[owner].view(slot * PAGE, PAGE) == bytes([value]) * PAGE
            self.slots[owner][slot] = (PageState.MAPPED, value)

    @rule(range_=ranges, chunk=st.integers(1, 5), fault=faults, cancel=st.booleans())
    def load(
        self, range_: tuple[int, int, int], chunk: int, fault: tuple[FaultPoint, int] | None, cancel: bool
    ) -> None:
        owner, first, count = range_
        wanted = self.slots[owner][first : first + count]
        no_scratch = self.scratched[owner].isdisjoint(range(first, first + count))
        none_mapped = all(content is None or content[0] is PageState.CLEAN for content in wanted)
        possible = no_scratch and none_mapped and wanted.count(None) <= self.free_pages()
        image = [Segment(first * PAGE, (owner * SLOTS + first) * PAGE, count * PAGE)]

        def bring() -> None:
            ticket = self.reservations[owner].load(self.cache, image, chunk * PAGE)
            if cancel:
                ticket.cancel()
            ticket.wait(SOON_S)

        if self.attempt(bring, possible, fault, may_be_cancelled=cancel):
            for slot in range(first, first + count):
                self.slots[owner][slot] = (PageState.MAPPED, image_byte(owner, slot))

    @rule(range_=ranges, fault=faults)
    def unmap(self, range_: tuple[int, int, int], fault: tuple[FaultPoint, int] | None) -> None:
        owner, first, count = range_
        self.attempt(lambda: self.reservations[owner].unmap(first * PAGE, count * PAGE), True, fault)
        self.slots[owner][first : first + count] = [None] * count

    @rule(range_=ranges)
    def mark_clean(self, range_: tuple[int, int, int]) -> None:
        """Mark pages clean, but only pages with content from a load, as a caller of `mark_clean` promises."""
        owner, first, count = range_
        wanted = self.slots[owner][first : first + count]
        if any(content and content[1] != image_byte(owner, first + i) for i, content in enumerate(wanted)):
            return
        possible = None not in wanted
        if self.attempt(lambda: self.reservations[owner].mark_clean(first * PAGE, count * PAGE), possible, None):
            self.slots[owner][first : first + count] = [(PageState.CLEAN, content[1]) for content in wanted if content]

    @rule(range_=ranges, on=st.booleans())
    def scratch(self, range_: tuple[int, int, int], on: bool) -> None:
        owner, first, count = range_
        slots = set(range(first, first + count))
        possible = self.empty(owner, first, count) if on else slots <= self.scratched[owner]
        reservation = self.reservations[owner]
        if not self.attempt(lambda: reservation.scratch(first * PAGE, count * PAGE, on), possible, None):
            return
        if on:
            assert not any(reservation.view(first * PAGE, count * PAGE))
            for slot in slots:
                reservation.view(slot * PAGE, PAGE)[:] = bytes([image_byte(owner, slot)]) * PAGE
        self.scratched[owner] = self.scratched[owner] | slots if on else self.scratched[owner] - slots

    def empty(self, owner: int, first: int, count: int) -> bool:
        slots = range(first, first + count)
        return all(self.slots[owner][slot] is None for slot in slots) and self.scratched[owner].isdisjoint(slots)

    @rule(range_=ranges, value=st.integers(0, 19))
    def write(self, range_: tuple[int, int, int], value: int) -> None:
        owner, first, count = range_
        for slot in range(first, first + count):
            content = self.slots[owner][slot]
            if content and content[0] is PageState.MAPPED:
                byte = own_bytes(owner)[1 + value]
                self.reservations[owner].view(slot * PAGE, PAGE)[:] = bytes([byte]) * PAGE
                self.slots[owner][slot] = (PageState.MAPPED, byte)

    def attempt(self, call, possible: bool, fault, may_be_cancelled: bool = False) -> bool:  # type: ignore[no-untyped-def]
        """Make a call and return whether the call succeeded. A failure must have a reason, and may change nothing."""
        if fault:
            self.device.inject(*fault)
        try:
            call()
        except PoolError as error:
            reasons = {Code.STATE, Code.NO_PAGES} if not possible else {Code.DRIVER} if fault else set()
            assert error.code in reasons | ({Code.CANCELLED} if may_be_cancelled else set()), error
            return False
        finally:
            self.device.settle(SOON_S)
            for operation in FaultPoint:
                self.device.inject(operation, 0)
        assert possible
        return True

    @invariant()
    def every_page_is_where_the_model_says(self) -> None:
        pages = self.device.pages()
        for owner, reservation in enumerate(self.reservations):
            for state in (PageState.MAPPED, PageState.CLEAN):
                expected = sum(content is not None and content[0] is state for content in self.slots[owner])
                assert pages.count(PageInfo(state, reservation.owner)) == expected
            for slot, content in enumerate(self.slots[owner]):
                clean = PAGE if content and content[0] is PageState.CLEAN else 0
                mapped = PAGE if content and not clean else 0
                assert reservation.residency(slot * PAGE, PAGE) == (mapped, clean)
                if content:
                    assert reservation.view(slot * PAGE, PAGE) == bytes([content[1]]) * PAGE
            for slot in self.scratched[owner]:
                assert reservation.view(slot * PAGE, PAGE) == bytes([image_byte(owner, slot)]) * PAGE
        stats = self.device.stats()
        assert (stats.pages_free, stats.pages_limbo, stats.pages_promised) == (self.free_pages(), 0, 0)


def own_bytes(owner: int) -> list[int]:
    """Bytes that may be in an owner's pages: zero, 20 bytes of the owner's image, and 20 bytes for other content."""
    return [0, *range(1 + owner * 40, 41 + owner * 40)]


def image_byte(owner: int, slot: int) -> int:
    return own_bytes(owner)[21 + slot]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40)
