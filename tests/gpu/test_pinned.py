"""Registered memory of the host: no other memory crosses the link to a GPU, and the memory of a run stays until the end
of the run's registration."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.core.host_index import FOLIO_BYTES, INDEX_BYTES
from runtime.memory.images import HostCacheFull, ImageKey, Images, Making
from runtime.memory.native import (
    Backend,
    CacheMemory,
    Code,
    DevicePool,
    Direction,
    PoolError,
    Reservation,
    Segment,
)
from runtime.memory.parked import PIECE_LEAST
from runtime.memory.slabs import Slabs
from tests.conftest import ROOT
from tests.gpu.conftest import PAGE, POOL_BYTES, SOON_S, why_no_gpu
from tests.gpu.stand_in.frames import FRAME

ROOM = 16 * FOLIO_BYTES
SIZE = 3 * FOLIO_BYTES


@pytest.fixture
def images(device: DevicePool) -> Iterator[Images]:
    images = Images.create(INDEX_BYTES + ROOM, kept_bytes=2 * FOLIO_BYTES)
    images.pin_for(device)
    yield images
    images.close()
    assert device.stats().pinned_bytes == 0


def key(name: str) -> ImageKey:
    return ImageKey(name, "engine", "bfloat16", "0/1", "GPU")


def made(images: Images, name: str) -> None:
    making = images.make(key(name), SIZE)
    assert isinstance(making, Making)
    making.view[:] = name.encode()[:1] * SIZE
    making.seal(b"").release()


def soon(device: DevicePool, pinned_bytes: int) -> None:
    deadline = time.monotonic() + SOON_S
    while device.stats().pinned_bytes != pinned_bytes:
        assert time.monotonic() < deadline, device.stats()
        time.sleep(0.001)


def test_memory_that_is_not_pinned_is_neither_read_nor_written(device: DevicePool, reservation: Reservation) -> None:
    plain = CacheMemory(4 * PAGE)
    plain.commit(0, 4 * PAGE)
    with pytest.raises(PoolError, match="not pinned for the device: pin the range") as refused:
        reservation.load(plain, [Segment(0, 0, 2 * PAGE)]).wait(SOON_S)
    assert refused.value.code is Code.STATE
    reservation.map(0, PAGE, SOON_S)
    with pytest.raises(PoolError, match="not pinned"):
        reservation.copy(0, plain, 0, PAGE, Direction.TO_HOST).wait(SOON_S)
    plain.pin(device, 0, PAGE)
    reservation.copy(0, plain, 0, PAGE, Direction.TO_HOST).wait(SOON_S)
    plain.unpin(device, 0)
    with pytest.raises(PoolError, match="not pinned"):
        reservation.copy(0, plain, 0, PAGE, Direction.TO_HOST).wait(SOON_S)
    plain.close()
    reservation.unmap(0, PAGE)


def test_a_range_is_pinned_once_and_unpinned_by_its_beginning(device: DevicePool, cache: CacheMemory) -> None:
    with pytest.raises(PoolError, match="pinned for this device already"):
        cache.pin(device, PAGE, PAGE)
    with pytest.raises(PoolError, match="no range at"):
        cache.unpin(device, PAGE)


def test_more_than_the_limit_is_never_registered_and_every_byte_arrives() -> None:
    """A load of 64 MiB under a limit of 16 MiB: extents that were copied make room for extents to come."""
    if reason := why_no_gpu():
        pytest.skip(reason)
    size, limit = 32 * PAGE, 8 * PAGE
    device = DevicePool(POOL_BYTES, backend=Backend.CUDA, page_bytes=PAGE, pinned_most=limit)
    cache, reservation = CacheMemory(size), device.reserve(size)
    cache.commit(0, size)
    cache.pin(device, 0, size)
    for page in range(32):
        cache.view(page * PAGE, PAGE)[:] = bytes([page]) * PAGE
    for _ in range(2):
        load = reservation.load(cache, [Segment(0, 0, size)])
        while not load.done():
            assert device.stats().pinned_bytes <= limit
        out = reservation.copy(0, cache, 0, size, Direction.TO_HOST)
        out.wait(SOON_S)
        assert all(cache.view(page * PAGE, PAGE) == bytes([page]) * PAGE for page in range(32))
        reservation.unmap(0, size)
    device.await_pins(SOON_S)
    assert device.stats().pinned_bytes <= limit
    reservation.release()
    cache.close()
    device.close()


def test_an_image_is_registered_while_this_runtime_holds_the_image(device: DevicePool, images: Images) -> None:
    made(images, "a")
    soon(device, 0)
    first, second = images.find(key("a")), images.find(key("a"))
    assert first is not None and second is not None
    device.await_pins(SOON_S)
    held = device.stats().pinned_bytes
    assert held >= SIZE
    first.release()
    images.pinned.settle()
    assert device.stats().pinned_bytes == held
    reservation = device.reserve(SIZE)
    reservation.load(images.cache, [Segment(0, second.offset, SIZE)]).wait(SOON_S)
    reservation.release()
    second.release()
    soon(device, 0)


def test_the_memory_of_a_run_stays_until_its_registration_has_ended(device: DevicePool, images: Images) -> None:
    """A second runtime can take the room of an image only once the first runtime's driver has let the memory go."""
    made(images, "a")
    other = Images.open(images.fd)
    image = images.find(key("a"))
    assert image is not None
    with pytest.raises(HostCacheFull):
        other.make(key("b"), ROOM - 2 * FOLIO_BYTES)
    image.release()
    images.pinned.settle()
    assert device.stats().pinned_bytes == 0
    making = other.make(key("b"), ROOM - 2 * FOLIO_BYTES)
    assert isinstance(making, Making)
    making.abandon()
    other.close()


def test_eight_runtimes_register_the_same_memory(device: DevicePool, images: Images) -> None:
    """Physical memory is pinned once: each of eight processes has registered the same frames."""
    made(images, "a")
    command = [sys.executable, "-m", "tests.gpu.pinning_process", str(images.fd), "a"]
    pipes: dict[str, Any] = dict(cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(images.fd,))
    with contextlib.ExitStack() as stack:
        runtimes = [stack.enter_context(subprocess.Popen(command, text=True, **pipes)) for _ in range(8)]
        frames = [[int(frame) for frame in runtime.stdout.readline().split()] for runtime in runtimes if runtime.stdout]
    assert [runtime.returncode for runtime in runtimes] == [0] * 8
    if not any(frames[0]):
        pytest.skip("the kernel tells the numbers of frames to root alone")
    assert len(frames[0]) * FRAME >= SIZE and all(known == frames[0] for known in frames)


def test_room_that_is_about_to_be_free_is_waited_for(images: Images) -> None:
    made(images, "a")
    image = images.find(key("a"))
    assert image is not None
    image.release()  # the registration ends on another thread
    making = images.make(key("b"), ROOM - 2 * FOLIO_BYTES)
    assert isinstance(making, Making)
    making.abandon()


def test_memory_of_parked_blocks_stays_registered_within_the_share_of_a_runtime(device: DevicePool) -> None:
    """A registration is dearer than the copy: the second park of a batch must find the memory of the first.

    The share is smaller than a piece, so the runtime's thread adds no memory to the reserve beside the test."""
    share = 7 * FOLIO_BYTES
    assert share < PIECE_LEAST
    images = Images.create(INDEX_BYTES + ROOM, kept_bytes=FOLIO_BYTES, kept_together=share)
    images.pin_for(device)
    slabs = Slabs(images.parked, FOLIO_BYTES)
    for _ in range(3):
        blocks = slabs.take(6)
        assert blocks is not None
        device.await_pins(SOON_S)
        slabs.free(blocks)
        images.pinned.settle()
        assert device.stats().pinned_bytes == 6 * FOLIO_BYTES
    other = Images.open(images.fd)  # a second runtime halves the share
    blocks = slabs.take(6)
    assert blocks is not None
    images.stats()
    slabs.free(blocks)
    soon(device, 0)
    other.close()
    images.close()


def test_memory_for_parked_blocks_is_registered_before_anything_is_parked(device: DevicePool) -> None:
    images = Images.create(INDEX_BYTES + ROOM, kept_together=PIECE_LEAST)
    images.pin_for(device)
    soon(device, PIECE_LEAST)
    device.await_pins(SOON_S)
    calls = device.stats().pin_calls
    first, second = (Slabs(images.parked, FOLIO_BYTES).take(PIECE_LEAST // FOLIO_BYTES) for _ in range(2))
    assert first and second
    device.await_pins(SOON_S)
    assert device.stats().pin_calls == 2 * calls, "the second batch alone needs memory of its own"
    assert device.stats().pinned_bytes == 2 * PIECE_LEAST
    images.close()


def test_the_reserve_leaves_the_share_of_a_second_runtime(device: DevicePool) -> None:
    images = Images.create(INDEX_BYTES + 2 * PIECE_LEAST, kept_together=2 * PIECE_LEAST)
    images.pin_for(device)
    soon(device, 2 * PIECE_LEAST)
    other = Images.open(images.fd, kept_together=2 * PIECE_LEAST)
    other.stats()
    soon(device, PIECE_LEAST)
    other.close()
    images.close()


def test_parked_blocks_are_registered_with_their_memory(device: DevicePool, images: Images) -> None:
    slabs = Slabs(images.parked, FOLIO_BYTES)
    blocks = slabs.take(4)
    assert blocks is not None
    device.await_pins(SOON_S)
    assert device.stats().pinned_bytes == 4 * FOLIO_BYTES
    slabs.free(blocks)  # more than is kept while empty
    soon(device, 0)
    blocks = slabs.take(2)
    assert blocks is not None
    slabs.free(blocks)  # kept while empty, and taken when room is short
    making = images.make(key("b"), ROOM - 2 * FOLIO_BYTES)
    assert isinstance(making, Making)
    making.abandon()
