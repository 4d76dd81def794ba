"""Memory built off the pool: scratch memory, with the weights that oneDNN packs inside vLLM's CPU kernels."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.memory.native import (
    LIBRARY,
    CacheMemory,
    Captured,
    Code,
    DevicePool,
    Direction,
    PoolError,
    Reservation,
    Segment,
    capture,
    capture_forget,
    capture_install,
)
from tests.runtime.memory.resident import resident_bytes
from tests.runtime.memory.test_memory import PAGE, SOON_S, refused

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch
ROWS, COLUMNS = 1000, 300  # no multiples of a tile: packed weights take more room
ROOM_PAGES = 2 * ROWS * COLUMNS * 4 // PAGE
TILE_BYTES = 1024
BATCHES = (1, 2, 8, 50)


@pytest.fixture(scope="module")
def ops() -> Any:
    """vLLM's kernels, whose allocations can be captured from now on."""
    from runtime.engine.settings import check_version

    check_version()
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/vllm/_C" in line}
    assert len(mapped) == 1
    capture_install(*mapped)
    capture_install(*mapped)  # does no harm
    return _custom_ops


@pytest.fixture
def weight(ops: Any, request: pytest.FixtureRequest) -> Any:
    import torch

    dtype = getattr(request, "param", "float32")
    if dtype == "bfloat16" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor does not multiply bfloat16")
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(7)).to(getattr(torch, dtype))


every_dtype = pytest.mark.parametrize("weight", ["float32", "bfloat16"], indirect=True)


@pytest.fixture
def device() -> Iterator[DevicePool]:
    device = DevicePool(2 * ROOM_PAGES * PAGE, page_bytes=PAGE, huge_folios=False)
    yield device
    device.close()


@pytest.fixture
def home(device: DevicePool) -> Iterator[Reservation]:
    """Scratch memory for a build."""
    home = device.reserve(ROOM_PAGES * PAGE)
    home.scratch(0, home.bytes, True)
    yield home
    home.release()
    capture_forget(home.address)


# ── scratch memory ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def reservation(device: DevicePool) -> Iterator[Reservation]:
    """Far more addresses than the pool has pages."""
    reservation = device.reserve(1 << 30)
    yield reservation
    reservation.release()


def test_scratch_memory_is_the_machines_and_goes_back_to_it(device: DevicePool, reservation: Reservation) -> None:
    reservation.scratch(PAGE, 1000 * PAGE, True)
    reservation.view(PAGE, 1000 * PAGE)[:] = b"\x07" * (1000 * PAGE)
    stats = device.stats()
    assert resident_bytes(reservation) == 1000 * PAGE and stats.pages_free == stats.pages_total
    reservation.scratch(PAGE, 1000 * PAGE, False)
    assert resident_bytes(reservation) == 0
    with tempfile.TemporaryFile() as file, pytest.raises(OSError, match="Bad address"):
        os.write(file.fileno(), reservation.view(PAGE, 1))


def test_a_release_takes_scratch_memory_away(device: DevicePool) -> None:
    reservation = device.reserve(1000 * PAGE)
    reservation.scratch(0, 1000 * PAGE, True)
    reservation.view(0, 1000 * PAGE)[:] = b"\x07" * (1000 * PAGE)
    assert resident_bytes(reservation) == 1000 * PAGE
    reservation.release()
    assert resident_bytes(reservation) == 0


def test_scratch_memory_and_pages_exclude_each_other(reservation: Reservation) -> None:
    image = CacheMemory(PAGE)
    reservation.scratch(0, 4 * PAGE, True)
    reservation.view(0, PAGE)[:] = b"\x07" * PAGE
    reservation.map(4 * PAGE, PAGE, SOON_S)
    for refusal in (
        lambda: reservation.map(3 * PAGE, PAGE, SOON_S),
        lambda: reservation.load(image, [Segment(3 * PAGE, 0, 1)]),
        lambda: reservation.copy(0, image, 0, PAGE, Direction.TO_HOST),
        lambda: reservation.mark_clean(3 * PAGE, 2 * PAGE),
        lambda: reservation.export_page(0),
        lambda: reservation.scratch(3 * PAGE, PAGE, True),
        lambda: reservation.scratch(4 * PAGE, PAGE, True),
        lambda: reservation.scratch(3 * PAGE, 2 * PAGE, False),
    ):
        with refused(Code.STATE):
            refusal()
    reservation.unmap(0, 8 * PAGE)  # the unmap passes over the scratch memory
    assert reservation.residency(0, 8 * PAGE) == (0, 0) and reservation.view(0, PAGE) == b"\x07" * PAGE
    reservation.scratch(0, 4 * PAGE, False)
    reservation.map(0, 4 * PAGE, SOON_S)
    assert not any(reservation.view(0, PAGE))
    image.close()


def test_no_scratch_memory_below_pages_that_are_still_leaving(device: DevicePool, reservation: Reservation) -> None:
    parked = CacheMemory(PAGE)
    reservation.map(0, PAGE, SOON_S)
    device.throttle(2e5)  # a third of a second
    reservation.copy(0, parked, 0, PAGE, Direction.TO_HOST)
    reservation.unmap(0, PAGE)
    with refused(Code.STATE):
        reservation.scratch(0, PAGE, True)
    device.settle(SOON_S)
    reservation.scratch(0, PAGE, True)
    parked.close()


# ── captured allocations ──────────────────────────────────────────────────────────────────────────────────────────────


def packed(ops: Any, weight: Any, home: Reservation) -> tuple[Any, Captured]:
    least = weight.numel() * weight.element_size()
    with capture(least, home.bytes, home.address, TILE_BYTES) as captured:
        handler = ops.create_onednn_mm(weight.t(), 32)
    assert least < captured.bytes <= home.bytes
    return handler, captured


def products(ops: Any, handler: Any, weight: Any) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(8)
    inputs = [torch.randn(batch, COLUMNS, generator=generator).to(weight.dtype) for batch in BATCHES]
    return [ops.onednn_mm(handler, input_, None) for input_ in inputs]


def equal(one: list[Any], other: list[Any]) -> bool:
    return all((a == b).all() for a, b in zip(one, other, strict=True))


@every_dtype
def test_captured_weights_say_the_same_at_our_address_and_after_their_memory_was_exchanged(
    ops: Any, weight: Any, device: DevicePool, home: Reservation
) -> None:
    expected = products(ops, ops.create_onednn_mm(weight.t(), 32), weight)
    handler, captured = packed(ops, weight, home)
    assert equal(products(ops, handler, weight), expected)

    image = CacheMemory(captured.bytes)
    image.view(0, captured.bytes)[:] = home.view(0, captured.bytes)
    home.scratch(0, home.bytes, False)
    other = device.reserve(ROOM_PAGES * PAGE)
    for _ in range(2):
        home.load(image, [Segment(0, 0, captured.bytes)]).wait(SOON_S)
        assert equal(products(ops, handler, weight), expected)
        home.unmap(0, home.bytes)
        other.map(0, other.bytes, SOON_S)
        other.view(0, other.bytes)[:] = b"\xff" * other.bytes
        other.unmap(0, other.bytes)
    other.release()
    image.close()


@every_dtype
def test_nothing_of_the_weights_is_kept_elsewhere(ops: Any, weight: Any, home: Reservation) -> None:
    handler, captured = packed(ops, weight, home)
    assert all(product.any() for product in products(ops, handler, weight))
    home.view(0, captured.bytes)[:] = bytes(captured.bytes)
    assert not any(product.any() for product in products(ops, handler, weight))


def test_what_was_captured_can_be_freed_and_its_place_used_again(ops: Any, weight: Any, home: Reservation) -> None:
    for _ in range(3):
        handler, captured = packed(ops, weight, home)
        expected = products(ops, handler, weight)
        del handler  # frees the weights: the C library would end the process at a foreign address
        capture_forget(home.address)
        assert equal(products(ops, ops.create_onednn_mm(weight.t(), 32), weight), expected)


def test_one_allocation_is_captured_and_no_more(ops: Any, weight: Any, home: Reservation) -> None:
    with capture(weight.numel() * weight.element_size(), home.bytes, home.address, TILE_BYTES) as captured:
        first = ops.create_onednn_mm(weight.t(), 32)
        second = ops.create_onednn_mm(-weight.t(), 32)
    expected = products(ops, first, weight)
    home.view(0, captured.bytes)[:] = bytes(captured.bytes)
    assert equal(products(ops, second, weight), [-product for product in expected])


def test_an_allocation_of_another_size_is_left_alone(ops: Any, weight: Any, home: Reservation) -> None:
    with capture(home.bytes, home.bytes, home.address) as captured:
        handler = ops.create_onednn_mm(weight.t(), 32)
    assert captured.bytes == 0 and not any(home.view(0, home.bytes))
    assert equal(products(ops, handler, weight), products(ops, ops.create_onednn_mm(weight.t(), 32), weight))


def test_another_threads_allocation_is_left_alone(ops: Any, weight: Any, home: Reservation) -> None:
    handlers: list[Any] = []
    with capture(weight.numel() * weight.element_size(), home.bytes, home.address, TILE_BYTES) as captured:
        thread = threading.Thread(target=lambda: handlers.append(ops.create_onednn_mm(weight.t(), 32)))
        thread.start()
        thread.join()
    assert captured.bytes == 0 and len(handlers) == 1


def test_an_address_that_is_less_aligned_than_asked_for_is_not_given(ops: Any, weight: Any, home: Reservation) -> None:
    size = weight.numel() * weight.element_size()
    with capture(size, home.bytes - 32, home.address + 32, TILE_BYTES) as captured:
        ops.create_onednn_mm(weight.t(), 32)
    assert captured.bytes == 0


def test_a_failure_inside_says_what_was_captured_and_captures_no_more(ops: Any, weight: Any, home: Reservation) -> None:
    size = weight.numel() * weight.element_size()
    with pytest.raises(ZeroDivisionError), capture(size, home.bytes, home.address, TILE_BYTES) as captured:
        ops.create_onednn_mm(weight.t(), 32)
        raise ZeroDivisionError
    assert captured.bytes > size
    capture_forget(home.address)
    packed(ops, weight, home)


def test_two_captures_are_not_mixed_up() -> None:
    with capture(1, 2, 64), refused(Code.STATE), capture(1, 2, 128):
        pass
    with pytest.raises(PoolError, match="no allocation has 2 bytes, or up to 1 "), capture(2, 1, 64):
        pass


def test_a_place_in_use_is_not_handed_out_again(ops: Any, weight: Any, home: Reservation) -> None:
    handler, _ = packed(ops, weight, home)
    with pytest.raises(PoolError, match="handed out before: forget it first"):
        packed(ops, weight, home)
    assert all(product.any() for product in products(ops, handler, weight))


def test_only_an_object_that_is_loaded_and_allocates_can_be_installed() -> None:
    with pytest.raises(PoolError, match="is not loaded: import it first"):
        capture_install(str(LIBRARY.with_name("nothing.so")))
    with pytest.raises(PoolError, match="does not import posix_memalign"):
        capture_install("libm.so.6")
