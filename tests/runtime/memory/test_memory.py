"""The memory library, with the host's memory as a device: real pages, real mappings, a real second process."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from ctypes.util import find_library

import pytest

from runtime.memory.native import (
    MIXED,
    Backend,
    CacheMemory,
    Code,
    DevicePool,
    Direction,
    FaultPoint,
    PageInfo,
    PageState,
    Piece,
    PoolError,
    Reservation,
    Segment,
    TransferTicket,
)
from tests.conftest import ROOT
from tests.runtime.memory.resident import resident_bytes

PAGE = 64 << 10
POOL_PAGES = 32
SOON_S = 30
NUMBERS = b"".join(number.to_bytes(4, "little") for number in range(POOL_PAGES * PAGE // 4))


@pytest.fixture
def device() -> Iterator[DevicePool]:
    """A device. After the test, every page must be free again."""
    device = DevicePool(POOL_PAGES * PAGE, page_bytes=PAGE, huge_folios=False)
    yield device
    device.settle(SOON_S)
    stats = device.stats()
    assert (stats.pages_free, stats.pages_promised, stats.reserved_bytes) == (POOL_PAGES, 0, 0)
    device.close()


@pytest.fixture
def cache() -> Iterator[CacheMemory]:
    """A host cache filled with bytes that tell their place."""
    cache = CacheMemory(len(NUMBERS))
    cache.commit(0, cache.bytes)
    cache.view(0, cache.bytes)[:] = NUMBERS
    yield cache
    cache.close()


@pytest.fixture
def reservation(device: DevicePool) -> Iterator[Reservation]:
    reservation = device.reserve(64 * PAGE)
    yield reservation
    reservation.release()


def refused(code: Code) -> pytest.RaisesExc[PoolError]:
    return pytest.raises(PoolError, check=lambda error: error.code is code)


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_addresses_stay_while_pages_come_and_go(reservation: Reservation) -> None:
    view = reservation.view(0, PAGE)
    for value in (1, 2, 3):
        reservation.map(0, PAGE, SOON_S)
        view[:] = bytes([value]) * PAGE
        assert reservation.view(0, PAGE) == bytes([value]) * PAGE
        reservation.unmap(0, PAGE)


def test_far_more_addresses_than_memory_cost_no_memory(device: DevicePool) -> None:
    reservation = device.reserve(1 << 36)
    assert reservation.bytes == 1 << 36 and resident_bytes(reservation) == 0
    reservation.release()


def test_unmapping_takes_memory_from_the_process(device: DevicePool, reservation: Reservation) -> None:
    reservation.map(0, 32 * PAGE, SOON_S)
    assert resident_bytes(reservation) == 32 * PAGE
    reservation.unmap(0, 32 * PAGE)
    device.settle(SOON_S)
    assert resident_bytes(reservation) == 0


def test_another_owners_bytes_are_zeroed_and_ones_own_are_not(device: DevicePool) -> None:
    first, second = device.reserve(POOL_PAGES * PAGE), device.reserve(POOL_PAGES * PAGE)
    first.map(0, POOL_PAGES * PAGE, SOON_S)
    first.view(0, first.bytes)[:] = b"\xff" * first.bytes  # NaN in any float
    first.unmap(0, 16 * PAGE)
    second.map(0, 16 * PAGE, SOON_S)
    assert second.view(0, 16 * PAGE) == bytes(16 * PAGE)
    assert device.stats().zeroed_bytes == 16 * PAGE
    first.unmap(16 * PAGE, 16 * PAGE)
    first.map(0, 16 * PAGE, SOON_S)
    assert first.view(0, 16 * PAGE) == b"\xff" * (16 * PAGE)
    assert device.stats().zeroed_bytes == 16 * PAGE
    first.release()
    second.release()


@pytest.mark.parametrize(
    ("offset", "size", "code"),
    [
        (0, PAGE, Code.STATE),
        (PAGE // 2, PAGE, Code.INVALID),
        (2 * PAGE, PAGE - 1, Code.INVALID),
        (63 * PAGE, 2 * PAGE, Code.INVALID),
        (PAGE, 0, Code.INVALID),
        (PAGE, 32 * PAGE, Code.NO_PAGES),
    ],
    ids=["mapped already", "not at a page", "not whole pages", "past the end", "nothing", "more than is free"],
)
def test_a_map_that_can_not_be_changes_nothing(
    device: DevicePool, reservation: Reservation, offset: int, size: int, code: Code
) -> None:
    reservation.map(0, PAGE, SOON_S)
    before = device.pages()
    with refused(code):
        reservation.map(offset, size, SOON_S)
    assert device.pages() == before
    reservation.map(PAGE, 31 * PAGE, SOON_S)


def test_a_refusal_names_the_numbers_and_the_remedy(reservation: Reservation) -> None:
    with pytest.raises(PoolError, match=r"33 pages of 0\.0625 MiB are wanted, 32 of 32 are free.*evict"):
        reservation.map(0, 33 * PAGE, SOON_S)


def test_a_failed_map_gives_back_what_it_had(device: DevicePool, reservation: Reservation) -> None:
    reservation.map(0, 32 * PAGE, SOON_S)
    for slot in range(0, 32, 2):  # the holes make the next map take as many calls as pages
        reservation.unmap(slot * PAGE, PAGE)
    device.settle(SOON_S)
    device.inject(FaultPoint.MAP, 9)
    before = resident_bytes(reservation)
    with pytest.raises(PoolError, match="made to fail"):
        reservation.map(40 * PAGE, 16 * PAGE, SOON_S)
    device.settle(SOON_S)
    assert device.stats().pages_free == 16 and resident_bytes(reservation) == before
    reservation.map(40 * PAGE, 16 * PAGE, SOON_S)


def test_a_failed_unmap_is_tried_again(device: DevicePool, reservation: Reservation) -> None:
    reservation.map(0, 8 * PAGE, SOON_S)
    device.inject(FaultPoint.UNMAP, 1)
    reservation.unmap(0, 8 * PAGE)
    device.settle(SOON_S)
    stats = device.stats()
    assert (stats.unmap_failures, stats.unmap_calls, stats.pages_free) == (1, 1, POOL_PAGES)


def test_an_exported_page_is_the_same_memory(reservation: Reservation) -> None:
    reservation.map(0, 4 * PAGE, SOON_S)
    reservation.view(2 * PAGE, PAGE)[:] = b"\x07" * PAGE
    fd, offset = reservation.export_page(2 * PAGE)
    try:
        assert os.pread(fd, PAGE, offset) == b"\x07" * PAGE
    finally:
        os.close(fd)
    with refused(Code.STATE):
        reservation.export_page(5 * PAGE)


def test_what_is_in_use_is_not_closed_and_what_is_closed_is_refused(device: DevicePool, cache: CacheMemory) -> None:
    reservation = device.reserve(PAGE)
    with pytest.raises(PoolError, match="has 1 reservations"):
        device.close()
    gone = CacheMemory(PAGE)
    gone.close()
    with refused(Code.INVALID):
        reservation.load(gone, [Segment(0, 0, PAGE)])
    reservation.release()
    with refused(Code.INVALID):
        reservation.map(0, PAGE, SOON_S)


@pytest.mark.skipif(find_library("cuda") is not None, reason="this machine has a CUDA driver")
def test_the_host_has_no_helpers() -> None:
    with pytest.raises(PoolError, match="helpers are other CUDA devices"):
        DevicePool(PAGE, page_bytes=PAGE, helpers=(1,))


def test_a_machine_without_a_gpu_says_so() -> None:
    with pytest.raises(PoolError, match="no CUDA driver"):
        DevicePool(1 << 30, backend=Backend.CUDA)


# ── loads ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_load_brings_every_segment_and_zeroes_between_them(
    device: DevicePool, reservation: Reservation, cache: CacheMemory
) -> None:
    fill_with_junk(device)
    segments = [Segment(20 * PAGE + 5, 0, 3), Segment(100, 7, 5 * PAGE), Segment(5 * PAGE + 200, 6 * PAGE, PAGE)]
    ticket = reservation.load(cache, segments, chunk_bytes=2 * PAGE)
    ticket.wait(SOON_S)
    expected = bytearray(7 * PAGE)
    expected[100 : 100 + 5 * PAGE] = NUMBERS[7 : 7 + 5 * PAGE]
    expected[5 * PAGE + 200 : 6 * PAGE + 200] = NUMBERS[6 * PAGE : 7 * PAGE]
    assert reservation.view(0, 7 * PAGE) == expected
    assert reservation.view(20 * PAGE, PAGE) == bytes(5) + NUMBERS[:3] + bytes(PAGE - 8)
    assert device.stats().pages_mapped == 8 and ticket.landed_bytes() == 6 * PAGE + 3


def fill_with_junk(device: DevicePool) -> None:
    junk = device.reserve(POOL_PAGES * PAGE)
    junk.map(0, junk.bytes, SOON_S)
    junk.view(0, junk.bytes)[:] = b"\xff" * junk.bytes
    junk.release()


def test_clean_pages_are_kept_and_only_the_missing_ones_are_copied(
    device: DevicePool, reservation: Reservation, cache: CacheMemory
) -> None:
    image = [Segment(0, 0, 8 * PAGE)]
    reservation.load(cache, image).wait(SOON_S)
    reservation.mark_clean(0, 8 * PAGE)
    reservation.unmap(3 * PAGE, 2 * PAGE)  # two pages were needed by a second owner
    device.settle(SOON_S)
    assert reservation.residency(0, 8 * PAGE) == (0, 6 * PAGE)
    before = device.stats().to_device_bytes
    reservation.load(cache, image).wait(SOON_S)
    assert device.stats().to_device_bytes - before == 2 * PAGE
    assert reservation.residency(0, 8 * PAGE) == (8 * PAGE, 0)
    assert reservation.view(0, 8 * PAGE) == NUMBERS[: 8 * PAGE]


@pytest.mark.parametrize("operation", [FaultPoint.MAP, FaultPoint.COPY])
def test_a_load_that_fails_in_the_middle_leaves_all_as_it_was(
    device: DevicePool, reservation: Reservation, cache: CacheMemory, operation: FaultPoint
) -> None:
    image = [Segment(0, 0, 16 * PAGE)]
    reservation.load(cache, [Segment(0, 0, 2 * PAGE)]).wait(SOON_S)
    reservation.mark_clean(0, 2 * PAGE)
    device.inject(operation, 4)
    with pytest.raises(PoolError, match="made to fail"):
        reservation.load(cache, image, chunk_bytes=PAGE).wait(SOON_S)
    device.settle(SOON_S)
    stats = device.stats()
    assert (stats.pages_clean, stats.pages_free, stats.pages_promised) == (2, 30, 0)
    reservation.load(cache, image).wait(SOON_S)
    assert reservation.view(0, 16 * PAGE) == NUMBERS[: 16 * PAGE]


@pytest.mark.parametrize("next_owner", ["who loaded", "who was there before"])
def test_nobody_sees_anothers_bytes_after_a_load_that_failed(
    device: DevicePool, cache: CacheMemory, next_owner: str
) -> None:
    loading, before = (device.reserve(POOL_PAGES * PAGE) for _ in range(2))
    before.map(0, before.bytes, SOON_S)
    before.view(0, before.bytes)[:] = b"\xff" * before.bytes
    before.unmap(0, before.bytes)
    device.inject(FaultPoint.COPY, 8)  # by then some pages are full, and others mapped ahead
    with refused(Code.DRIVER):
        loading.load(cache, [Segment(0, 0, cache.bytes)], chunk_bytes=PAGE).wait(SOON_S)
    device.settle(SOON_S)
    assert PageInfo(PageState.FREE, MIXED) in device.pages()
    after, own = (loading, {0}) if next_owner == "who loaded" else (before, {0, 0xFF})
    after.map(0, after.bytes, SOON_S)
    assert set(after.view(0, after.bytes)) <= own
    loading.release()
    before.release()


def test_every_cancelled_load_returns_its_pages(
    device: DevicePool, reservation: Reservation, cache: CacheMemory
) -> None:
    device.throttle(4e6)  # a load takes half a second: a busy machine, too, cancels before the end
    before = resident_bytes(reservation)
    for pause_s in [0, 0.001, 0.005, 0.02, 0.05] * 4:
        ticket = reservation.load(cache, [Segment(0, 0, 32 * PAGE)], chunk_bytes=PAGE)
        time.sleep(pause_s)
        ticket.cancel()
        with refused(Code.CANCELLED):
            ticket.wait(SOON_S)
        device.settle(SOON_S)
        assert device.stats().pages_free == POOL_PAGES and resident_bytes(reservation) == before


def test_a_load_takes_the_pages_that_another_is_still_leaving(device: DevicePool, cache: CacheMemory) -> None:
    old, new = device.reserve(24 * PAGE), device.reserve(24 * PAGE)
    old.map(0, 24 * PAGE, SOON_S)
    old.view(0, 24 * PAGE)[:] = b"\x05" * (24 * PAGE)
    parked = CacheMemory(24 * PAGE)
    device.throttle(50e6)
    swap_out = old.copy(0, parked, 0, 24 * PAGE, Direction.TO_HOST)
    old.unmap(0, 24 * PAGE)
    ticket = new.load(cache, [Segment(0, 0, 24 * PAGE)], chunk_bytes=4 * PAGE)
    assert not swap_out.done()  # the load was accepted while the needed pages were being read
    ticket.wait(SOON_S)
    assert swap_out.done() and parked.view(0, 24 * PAGE) == b"\x05" * (24 * PAGE)
    assert new.view(0, 24 * PAGE) == NUMBERS[: 24 * PAGE]
    old.release()
    new.release()
    parked.close()


def test_pages_promised_to_a_load_are_given_to_nobody_else(device: DevicePool, cache: CacheMemory) -> None:
    old, loading, other = (device.reserve(24 * PAGE) for _ in range(3))
    old.map(0, 24 * PAGE, SOON_S)
    parked = CacheMemory(24 * PAGE)
    device.throttle(50e6)
    old.copy(0, parked, 0, 24 * PAGE, Direction.TO_HOST)
    old.unmap(0, 24 * PAGE)  # 8 pages are free, 24 will be
    ticket = loading.load(cache, [Segment(0, 0, 24 * PAGE)], chunk_bytes=PAGE)
    with refused(Code.NO_PAGES):
        other.map(0, 9 * PAGE, SOON_S)
    with refused(Code.TIMEOUT):
        other.map(0, 8 * PAGE, 0)
    other.map(0, 8 * PAGE, SOON_S)
    ticket.wait(SOON_S)
    for reservation in (old, loading, other):
        reservation.release()
    parked.close()


def test_what_is_being_loaded_is_neither_unmapped_nor_released(
    device: DevicePool, reservation: Reservation, cache: CacheMemory
) -> None:
    device.throttle(50e6)
    ticket = reservation.load(cache, [Segment(0, 0, 16 * PAGE)], chunk_bytes=PAGE)
    for refusal in (
        lambda: reservation.unmap(0, PAGE),
        lambda: reservation.mark_clean(0, PAGE),
        lambda: reservation.load(cache, [Segment(0, 0, PAGE)]),
        reservation.release,
        cache.close,
    ):
        with refused(Code.STATE):
            refusal()
    ticket.wait(SOON_S)


@pytest.mark.parametrize(
    ("segments", "code"),
    [
        ([], Code.INVALID),
        ([Segment(0, 0, 2 * PAGE), Segment(PAGE, 0, PAGE)], Code.INVALID),
        ([Segment(0, 31 * PAGE, 2 * PAGE)], Code.INVALID),
        ([Segment(63 * PAGE, 0, 2 * PAGE)], Code.INVALID),
        ([Segment(0, 0, 0)], Code.INVALID),
        ([Segment(slot * PAGE, 0, 1) for slot in range(33)], Code.NO_PAGES),
    ],
    ids=["none", "overlapping", "past the cache", "past the reservation", "empty", "more than the pool"],
)
def test_a_load_that_can_not_be_is_refused_at_once(
    device: DevicePool, reservation: Reservation, cache: CacheMemory, segments: list[Segment], code: Code
) -> None:
    with refused(code):
        reservation.load(cache, segments)
    assert device.stats().pages_promised == 0


# ── copies ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_late_unmap_leaves_the_newer_mapping_alone(device: DevicePool, reservation: Reservation) -> None:
    parked = CacheMemory(16 * PAGE)
    device.throttle(200e6)
    late = 0
    for value in range(1, 20):
        reservation.map(0, 16 * PAGE, SOON_S)
        reservation.view(0, 16 * PAGE)[:] = bytes([value]) * (16 * PAGE)
        ticket = reservation.copy(0, parked, 0, 16 * PAGE, Direction.TO_HOST)
        reservation.unmap(0, 16 * PAGE)
        late += not ticket.done()  # a busy machine may come back after the copy
        reservation.map(0, 16 * PAGE, SOON_S)  # map the addresses again while the copy reads the old pages
        reservation.view(0, 16 * PAGE)[:] = b"\xc8" * (16 * PAGE)
        ticket.wait(SOON_S)
        assert parked.view(0, 16 * PAGE) == bytes([value]) * (16 * PAGE)
        assert reservation.view(0, 16 * PAGE) == b"\xc8" * (16 * PAGE)
        reservation.unmap(0, 16 * PAGE)
    assert late > 0
    parked.close()


def test_a_load_waits_for_its_own_addresses(device: DevicePool, reservation: Reservation, cache: CacheMemory) -> None:
    parked = CacheMemory(16 * PAGE)
    reservation.map(0, 16 * PAGE, SOON_S)
    device.throttle(50e6)
    swap_out = reservation.copy(0, parked, 0, 16 * PAGE, Direction.TO_HOST)
    reservation.unmap(0, 16 * PAGE)
    reservation.load(cache, [Segment(0, 0, 16 * PAGE)]).wait(SOON_S)  # 16 different pages are free
    assert swap_out.done() and parked.view(0, 16 * PAGE) == bytes(16 * PAGE)
    device.settle(SOON_S)
    assert reservation.view(0, 16 * PAGE) == NUMBERS[: 16 * PAGE]
    parked.close()


def test_an_unmap_waits_for_the_ticket_it_is_given(
    device: DevicePool, reservation: Reservation, cache: CacheMemory
) -> None:
    other = device.reserve(PAGE)
    other.map(0, PAGE, SOON_S)
    reservation.map(0, 4 * PAGE, SOON_S)
    device.throttle(1e6)
    ticket = other.copy(0, cache, 0, PAGE, Direction.TO_DEVICE)
    reservation.unmap(0, 4 * PAGE, after=ticket)
    time.sleep(0.01)
    assert device.stats().pages_limbo == 4 and not ticket.done()
    ticket.wait(SOON_S)
    device.settle(SOON_S)
    assert device.stats().pages_limbo == 0
    other.release()


def test_a_copy_needs_mapped_pages(reservation: Reservation, cache: CacheMemory) -> None:
    reservation.map(0, 2 * PAGE, SOON_S)
    with refused(Code.STATE):
        reservation.copy(PAGE, cache, 0, 2 * PAGE, Direction.TO_DEVICE)
    reservation.mark_clean(PAGE, PAGE)
    with refused(Code.STATE):
        reservation.copy(0, cache, 0, 2 * PAGE, Direction.TO_DEVICE)


def test_blocks_come_back_under_other_numbers(device: DevicePool, reservation: Reservation) -> None:
    """Four layers, keys and values; a block of a layer is 3 KiB; the host keeps a block's pieces together."""
    block, layers, blocks = 3 << 10, 8, 40
    pieces = [Piece(layer * blocks * block, block, layer * block, layers * block, block) for layer in range(layers)]
    reservation.map(0, 16 * PAGE, SOON_S)
    device_bytes = reservation.view(0, layers * blocks * block)
    device_bytes[:] = NUMBERS[: len(device_bytes)]
    before = bytes(device_bytes)
    parked = CacheMemory(16 * PAGE)
    ids, new_ids, places = [3, 4, 5, 17, 30], [9, 2, 31, 10, 11], [0, 1, 2, 3, 7]
    out = reservation.copy_blocks(parked, pieces, ids, places, Direction.TO_HOST)
    reservation.copy_blocks(parked, pieces, new_ids, places, Direction.TO_DEVICE, after=out).wait(SOON_S)
    expected = bytearray(before)
    for layer in range(layers):
        for old, new in zip(ids, new_ids, strict=True):
            source, target = (layer * blocks + old) * block, (layer * blocks + new) * block
            expected[target : target + block] = before[source : source + block]
    assert device_bytes == expected
    parked.close()


def test_neighbours_on_both_sides_travel_as_one(device: DevicePool, reservation: Reservation) -> None:
    piece = Piece(0, 1024, 0, 1024, 1024)
    reservation.map(0, PAGE, SOON_S)
    parked = CacheMemory(PAGE)
    reservation.copy_blocks(parked, [piece], [7, 5, 6, 20, 21, 40], [3, 1, 2, 11, 12, 13], Direction.TO_HOST).wait(
        SOON_S
    )
    assert device.stats().copy_calls == 3  # 5-7, 20-21, 40
    parked.close()


def test_two_blocks_onto_one_are_refused(reservation: Reservation, cache: CacheMemory) -> None:
    piece = Piece(0, 1024, 0, 1024, 1024)
    reservation.map(0, PAGE, SOON_S)
    with pytest.raises(PoolError, match="block 9 is the target of two copies"):
        reservation.copy_blocks(cache, [piece], [1, 2], [9, 9], Direction.TO_HOST)
    reservation.copy_blocks(cache, [piece], [1, 2], [9, 9], Direction.TO_DEVICE).wait(SOON_S)


@pytest.mark.parametrize(
    "piece",
    [Piece(0, 512, 0, 1024, 1024), Piece(0, 1024, 0, 1 << 60, 1024), Piece(60 * PAGE, PAGE, 0, 1024, 1024)],
    ids=["overlapping", "absurd", "past the end"],
)
def test_blocks_that_can_not_be_are_refused(reservation: Reservation, cache: CacheMemory, piece: Piece) -> None:
    with refused(Code.INVALID):
        reservation.copy_blocks(cache, [piece], [1, 9], [1, 2], Direction.TO_HOST)


def test_what_waits_for_a_failed_copy_fails_too(
    device: DevicePool, reservation: Reservation, cache: CacheMemory
) -> None:
    reservation.map(0, PAGE, SOON_S)
    device.inject(FaultPoint.COPY, 1)
    out = reservation.copy(0, cache, 0, PAGE, Direction.TO_HOST)
    back = reservation.copy(0, cache, 0, PAGE, Direction.TO_DEVICE, after=out)
    for ticket in (out, back):
        with pytest.raises(PoolError, match="made to fail"):
            ticket.wait(SOON_S)


def test_the_throttle_is_the_speed_of_the_link(
    device: DevicePool, reservation: Reservation, cache: CacheMemory
) -> None:
    device.throttle(20 * PAGE / 0.1)
    started = time.perf_counter()
    ticket = reservation.load(cache, [Segment(0, 0, 20 * PAGE)], chunk_bytes=PAGE)
    landed = []
    while not ticket.done():
        landed.append(ticket.landed_bytes())
        time.sleep(0.01)
    assert time.perf_counter() - started >= 0.1
    assert landed == sorted(landed) and len(set(landed)) > 2


def test_a_wait_that_is_too_short_leaves_the_transfer_alone(
    device: DevicePool, reservation: Reservation, cache: CacheMemory
) -> None:
    device.throttle(20 * PAGE / 0.1)
    ticket = reservation.load(cache, [Segment(0, 0, 20 * PAGE)], chunk_bytes=PAGE)
    with refused(Code.TIMEOUT):
        ticket.wait(0.01)
    ticket.wait(SOON_S)


def test_a_finished_ticket_stays_finished_and_a_failed_one_failed(
    device: DevicePool, reservation: Reservation, cache: CacheMemory
) -> None:
    reservation.map(0, PAGE, SOON_S)
    device.inject(FaultPoint.COPY, 1)
    failed = reservation.copy(0, cache, 0, 4, Direction.TO_HOST)
    tickets = [reservation.copy(0, cache, 0, 4, Direction.TO_HOST) for _ in range(2000)]  # more tickets than are kept
    tickets[-1].wait(SOON_S)
    assert all(ticket.done() for ticket in tickets)
    with pytest.raises(PoolError, match="made to fail"):
        failed.done()
    with refused(Code.INVALID):
        TransferTicket(device, tickets[-1].id + 1).done()


# ── the cache ─────────────────────────────────────────────────────────────────────────────────────────────────────────

SECOND_PROCESS = """
import sys
from runtime.memory.native import CacheMemory
fd, size = map(int, sys.argv[1:])
cache = CacheMemory(size, fd)
assert cache.view(0, 8) == bytes([0, 0, 0, 0, 1, 0, 0, 0])
cache.view(size - 1, 1)[0] = 99
cache.close()
"""


def test_a_cache_is_shared_with_another_process(cache: CacheMemory) -> None:
    command = [sys.executable, "-c", SECOND_PROCESS, str(cache.fd), str(cache.bytes)]
    subprocess.run(command, cwd=ROOT, pass_fds=[cache.fd], check=True, timeout=SOON_S)
    assert cache.view(cache.bytes - 1, 1)[0] == 99


def test_a_cache_that_is_larger_than_its_file_is_refused(cache: CacheMemory) -> None:
    with pytest.raises(PoolError, match=r"has 2097152 bytes, the cache is to have 2097153"):
        CacheMemory(cache.bytes + 1, cache.fd)


def test_discarded_memory_goes_back_to_the_machine(cache: CacheMemory) -> None:
    before = os.fstat(cache.fd).st_blocks * 512
    cache.discard(PAGE, 16 * PAGE)
    assert before - os.fstat(cache.fd).st_blocks * 512 >= 16 * PAGE
    assert cache.view(PAGE, 4) == bytes(4) and cache.view(17 * PAGE, 4) == NUMBERS[17 * PAGE : 17 * PAGE + 4]


def pool_file_bytes() -> int:
    """Memory of the pools of this process."""
    numbers = [number for number in os.listdir("/proc/self/fd") if _is_pool(number)]
    return sum(os.stat(f"/proc/self/fd/{number}").st_blocks * 512 for number in numbers)


def _is_pool(number: str) -> bool:
    with contextlib.suppress(OSError):
        return "staccato-pool" in os.readlink(f"/proc/self/fd/{number}")
    return False


def test_a_lazy_pool_has_memory_for_the_pages_that_were_mapped() -> None:
    gc.collect()
    before = pool_file_bytes()
    device = DevicePool(64 << 20, lazy=True)
    assert pool_file_bytes() == before
    reservation = device.reserve(8 << 20)
    reservation.map(0, 3 * device.page_bytes, SOON_S)
    assert pool_file_bytes() - before == 3 * device.page_bytes
    reservation.release()
    device.close()
    whole = DevicePool(64 << 20)
    assert pool_file_bytes() - before == 64 << 20
    whole.close()
