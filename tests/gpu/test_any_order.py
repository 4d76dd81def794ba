"""Ten seconds of random actions on a real GPU, with kernels and copies under way: no page is lost, mixed or stale."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any

from runtime.memory.native import CacheMemory, Code, DevicePool, Direction, PoolError, Segment, TransferTicket
from tests.gpu.conftest import PAGE, SOON_S, tensor

OWNERS, SLOTS = 3, 64  # the owners want 192 pages, the pool has 128
SECONDS, SEED = 10, 1
SPIN_CYCLES = 2_000_000  # about 1 ms
PARKED = 16  # places in the cache, behind the owners' images


class Owner:
    """A reservation, a stream, and the expected content: for each page, the byte that fills the page."""

    def __init__(self, torch: Any, device: DevicePool, cache: CacheMemory, number: int, chance: random.Random) -> None:
        self.torch, self.device, self.cache, self.chance = torch, device, cache, chance
        self.reservation = device.reserve(SLOTS * PAGE)
        self.stream = torch.cuda.Stream()
        self.image_at = number * PAGE
        self.bytes = range(1 + number * 80, 81 + number * 80)  # bytes of no other owner
        self.image = self.bytes[0]
        self.content: dict[int, int] = {}
        self.clean: set[int] = set()
        self.parked: dict[int, tuple[TransferTicket, int]] = {}
        cache.view(self.image_at, PAGE)[:] = bytes([self.image]) * PAGE

    def some_slots(self) -> range:
        first = self.chance.randrange(SLOTS)
        return range(first, min(SLOTS, first + self.chance.randint(1, 24)))

    def ticket(self) -> TransferTicket:
        return self.device.stream_ticket(self.stream.cuda_stream)

    def page(self, slot: int) -> Any:
        return tensor(self.torch, self.reservation, slot * PAGE, PAGE)

    def map(self) -> None:
        slots = self.some_slots()
        if not self.content.keys().isdisjoint(slots):
            return
        try:
            self.reservation.map(slots.start * PAGE, len(slots) * PAGE, SOON_S)
        except PoolError as error:
            assert error.code is Code.NO_PAGES, error
            return
        for slot in slots:
            least, most = (int(value) for value in self.torch.aminmax(self.page(slot)))
            assert least == most and (least == 0 or least in self.bytes), "bytes of another owner"
            self.content[slot] = least

    def load(self) -> None:
        slots = [slot for slot in self.some_slots() if slot not in self.content or slot in self.clean]
        if not slots:
            return
        segments = [Segment(slot * PAGE, self.image_at, PAGE) for slot in slots]
        try:
            ticket = self.reservation.load(self.cache, segments, chunk_bytes=self.chance.randint(1, 8) * PAGE)
            if self.chance.random() < 0.3:
                ticket.cancel()
            ticket.wait(SOON_S)
        except PoolError as error:
            assert error.code in (Code.NO_PAGES, Code.CANCELLED), error
            return
        self.clean.difference_update(slots)
        self.content.update(dict.fromkeys(slots, self.image))

    def write(self) -> None:
        """Write pages by a kernel, without waiting for the kernel."""
        slots = [slot for slot in self.some_slots() if slot in self.content and slot not in self.clean]
        with self.torch.cuda.stream(self.stream):
            self.torch.cuda._sleep(SPIN_CYCLES)
            for slot in slots:
                self.content[slot] = self.chance.choice(self.bytes)
                self.page(slot).fill_(self.content[slot])

    def park(self) -> None:
        """Copy a page to the host. The copy is checked much later, when the page may belong to any owner."""
        slots = [slot for slot in self.content if slot not in self.clean]
        if not slots:
            return
        slot, place = self.chance.choice(slots), self.chance.randrange(PARKED)
        self.look_at_parked(place)
        at = self.parked_at(place)
        ticket = self.reservation.copy(slot * PAGE, self.cache, at, PAGE, Direction.TO_HOST, after=self.ticket())
        ticket.hold_stream(self.stream.cuda_stream, SOON_S)  # later writes come after the copy
        self.parked[place] = ticket, self.content[slot]

    def look_at_parked(self, place: int) -> None:
        if place in self.parked:
            ticket, byte = self.parked.pop(place)
            ticket.wait(SOON_S)
            assert self.cache.view(self.parked_at(place), PAGE) == bytes([byte]) * PAGE, "a copy came too late"

    def parked_at(self, place: int) -> int:
        return OWNERS * PAGE + (self.image_at // PAGE * PARKED + place) * PAGE

    def unmap(self) -> None:
        slots = self.some_slots()
        self.reservation.unmap(slots.start * PAGE, len(slots) * PAGE, after=self.ticket())
        self.clean.difference_update(slots)
        for slot in slots:
            self.content.pop(slot, None)

    def mark_clean(self) -> None:
        slots = self.some_slots()
        if all(self.content.get(slot) == self.image for slot in slots):
            self.stream.synchronize()
            self.reservation.mark_clean(slots.start * PAGE, len(slots) * PAGE)
            self.clean.update(slots)

    def check(self) -> None:
        clean = len(self.clean) * PAGE
        assert self.reservation.residency(0, SLOTS * PAGE) == (len(self.content) * PAGE - clean, clean)
        if self.content and self.chance.random() < 0.2:  # a look waits for the stream, and the stream should lag behind
            slot = self.chance.choice(list(self.content))
            with self.torch.cuda.stream(self.stream):
                assert bool(self.torch.all(self.page(slot) == self.content[slot])), f"slot {slot} has other bytes"


def test_pages_are_conserved_and_keep_their_bytes(torch: Any, device: DevicePool, cache: CacheMemory) -> None:
    chance = random.Random(SEED)
    owners = [Owner(torch, device, cache, number, chance) for number in range(OWNERS)]
    done: deque[str] = deque(maxlen=12)
    until = time.monotonic() + SECONDS
    try:
        while time.monotonic() < until:
            owner = chance.choice(owners)
            operation = chance.choice([owner.map, owner.load, owner.write, owner.park, owner.unmap, owner.mark_clean])
            done.append(f"owner {owners.index(owner)}: {operation.__name__}")
            operation()
            owner.check()
            stats = device.stats()
            there = stats.pages_free + stats.pages_mapped + stats.pages_clean + stats.pages_limbo
            assert (there, stats.pages_promised, stats.unmap_failures) == (stats.pages_total, 0, 0)
    except Exception as error:
        error.add_note(f"after {', '.join(done)}")
        raise
    for owner in owners:
        for place in range(PARKED):
            owner.look_at_parked(place)
        owner.stream.synchronize()
        owner.reservation.release()
