"""torch over the memory library on a real GPU: tensors, kernels and graphs stay valid while pages come and go."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.memory.native import CacheMemory, DevicePool, Reservation
from tests.gpu.conftest import IMAGE, PAGE, SOON_S, WHOLE_IMAGE, WORDS, tensor

SPIN_CYCLES = 400_000_000  # about 0.2 s


def test_a_tensor_keeps_its_address_over_scale_to_zero(
    torch: Any, device: DevicePool, reservation: Reservation, cache: CacheMemory
) -> None:
    reservation.load(cache, WHOLE_IMAGE).wait(SOON_S)
    weights = tensor(torch, reservation, 0, len(IMAGE)).view(torch.int32)
    expected = torch.arange(WORDS, dtype=torch.int32, device="cuda")
    for _ in range(3):
        assert weights.data_ptr() == reservation.address and torch.equal(weights, expected)
        torch.cuda.synchronize()
        reservation.unmap(0, len(IMAGE))
        device.settle(SOON_S)
        assert device.stats().pages_mapped == 0
        reservation.load(cache, WHOLE_IMAGE).wait(SOON_S)


def test_a_graph_captured_before_scale_to_zero_replays_right_after_the_load(
    torch: Any, device: DevicePool, reservation: Reservation, cache: CacheMemory
) -> None:
    """The stream waits for the load and the unmap for the stream; the host waits for neither."""
    reservation.load(cache, WHOLE_IMAGE).wait(SOON_S)
    weights = tensor(torch, reservation, 0, len(IMAGE)).view(torch.int32)
    result = torch.empty_like(weights)
    torch.add(weights, 1, out=result)  # a kernel is loaded at its first use, which a capture does not allow
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        torch.add(weights, 1, out=result)
    expected = torch.arange(1, WORDS + 1, dtype=torch.int32, device="cuda")
    for _ in range(3):
        reservation.unmap(0, len(IMAGE), after=device.stream_ticket(stream.cuda_stream))
        device.settle(SOON_S)
        result.zero_()
        torch.cuda.synchronize()
        reservation.load(cache, WHOLE_IMAGE).hold_stream(stream.cuda_stream, SOON_S)
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()
        assert torch.equal(result, expected)


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_a_graph_is_captured_while_the_pages_of_another_model_come(
    torch: Any, device: DevicePool, reservation: Reservation, cache: CacheMemory, mode: str
) -> None:
    """While a capture is global, which is torch's default, the driver refuses to tell most threads about events."""
    result = torch.zeros(1, dtype=torch.int32, device="cuda")
    result += 1
    device.throttle(len(IMAGE) / 0.2)
    load = reservation.load(cache, WHOLE_IMAGE, chunk_bytes=PAGE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        for _ in range(1000):
            result += 1
    load.wait(SOON_S)
    graph.replay()
    assert result.item() == 1001


def test_an_unmap_waits_for_the_kernels_of_a_stream(torch: Any, device: DevicePool, reservation: Reservation) -> None:
    """If the page were gone when the second kernel writes, the context would be broken for good."""
    reservation.map(0, PAGE, SOON_S)
    page = tensor(torch, reservation, 0, PAGE)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SPIN_CYCLES)
        page.fill_(7)
    reservation.unmap(0, PAGE, after=device.stream_ticket(stream.cuda_stream))
    pages_limbo, running = device.stats().pages_limbo, not stream.query()
    assert pages_limbo == 1 or not running
    stream.synchronize()
    device.settle(SOON_S)
    assert device.stats().pages_limbo == 0


def test_the_pages_that_a_kernel_still_writes_reach_no_other_owner(
    torch: Any, device: DevicePool, reservation: Reservation
) -> None:
    whole_pool = device.stats().pages_total * PAGE
    reservation.map(0, whole_pool, SOON_S)
    mine = tensor(torch, reservation, 0, whole_pool)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SPIN_CYCLES)
        mine.fill_(0xFF)
    reservation.unmap(0, whole_pool, after=device.stream_ticket(stream.cuda_stream))
    other = device.reserve(whole_pool)
    other.map(0, whole_pool, SOON_S)  # waits for the kernel, then for the zeroes
    assert torch.count_nonzero(tensor(torch, other, 0, whole_pool)).item() == 0
    torch.cuda.synchronize()
    other.release()
