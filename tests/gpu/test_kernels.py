"""The kernels that gather and scatter KV blocks: arithmetic on the host, refusals, and both kernels on a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.memory.kernels import CupyMissing, gather, scatter
from runtime.memory.native import CacheMemory, Code, DevicePool, Direction, Piece, PoolError, Reservation
from tests.conftest import ROOT
from tests.gpu.conftest import IMAGE, PAGE, SOON_S, WHOLE_IMAGE, tensor

# ── on the host: a C++ compiler takes the kernels as functions, and loops stand in for the grid ───────────────────────

ON_THE_HOST = """
#define __device__
#define __global__
struct uint4 { unsigned x, y, z, w; };
static struct { unsigned x, y; } blockIdx, threadIdx, blockDim = {32, 1};
#include "kernels.cu"

template <typename To, typename From>
static void run(void (*kernel)(To*, From*, const Piece*, const unsigned*), To* to, From* from, const Piece* pieces,
                unsigned count, const unsigned* blocks, unsigned length) {
    for (blockIdx.x = 0; blockIdx.x < length; blockIdx.x++)
        for (blockIdx.y = 0; blockIdx.y < count; blockIdx.y++)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) kernel(to, from, pieces, blocks);
}
extern "C" void gather(char* packed, const char* device, const Piece* pieces, unsigned count, const unsigned* blocks,
                       unsigned length) { run(gather_blocks, packed, device, pieces, count, blocks, length); }
extern "C" void scatter(const char* packed, char* device, const Piece* pieces, unsigned count, const unsigned* blocks,
                        unsigned length) { run(scatter_blocks, packed, device, pieces, count, blocks, length); }
"""


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    command = [compiler, "-std=c++17", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}", "-xc++", "-", "-o", str(library)]
    subprocess.run(command, input=ON_THE_HOST, text=True, check=True)
    return ctypes.CDLL(str(library))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Piece], list[int], list[int]]:
    """Pieces of successive layers with gaps between, blocks to gather, and blocks to scatter to."""
    layers, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    sizes = [16 * draw(st.integers(1, 40)) for _ in range(layers)]
    gap = 16 * draw(st.integers(0, 3))
    pieces, at, in_block = [], gap, 0
    for size in sizes:
        pieces.append(Piece(at, size + gap, in_block, sum(sizes), size))
        at += blocks * (size + gap)
        in_block += size
    numbers = st.permutations(range(blocks))
    count = draw(st.integers(1, blocks))
    return pieces, draw(numbers)[:count], draw(numbers)[:count]


@given(layouts())
def test_blocks_come_back_under_other_numbers(
    on_the_host: ctypes.CDLL, layout: tuple[list[Piece], list[int], list[int]]
) -> None:
    pieces, old, new = layout
    size = max(piece.device_offset + 10 * piece.device_stride for piece in pieces)
    before = bytes(number * 7 % 251 for number in range(size))
    device = ctypes.create_string_buffer(before, size)
    packed = ctypes.create_string_buffer(len(old) * pieces[0].host_stride)
    table = (ctypes.c_uint64 * (5 * len(pieces)))(*(number for piece in pieces for number in numbers(piece)))
    on_the_host.gather(packed, device, table, len(pieces), (ctypes.c_uint32 * len(old))(*old), len(old))
    on_the_host.scatter(packed, device, table, len(pieces), (ctypes.c_uint32 * len(new))(*new), len(new))
    assert packed.raw == b"".join(before[at : at + size] for at, size in places(pieces, old))
    expected = bytearray(before)
    for (source, size), (target, _) in zip(places(pieces, old), places(pieces, new), strict=True):
        expected[target : target + size] = before[source : source + size]
    assert device.raw == expected


def numbers(piece: Piece) -> tuple[int, ...]:
    return piece.device_offset, piece.device_stride, piece.host_offset, piece.host_stride, piece.bytes


def places(pieces: list[Piece], blocks: list[int]) -> list[tuple[int, int]]:
    """Offset and size of the blocks' bytes on the device, in the order of packing."""
    return [(p.device_offset + block * p.device_stride, p.bytes) for block in blocks for p in pieces]


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def on_host_memory() -> Iterator[Reservation]:
    device = DevicePool(1 << 20, page_bytes=64 << 10, huge_folios=False)
    reservation = device.reserve(1 << 20)
    yield reservation
    reservation.release()
    device.close()


@pytest.mark.parametrize(
    ("piece", "blocks", "message"),
    [
        (Piece(8, 64, 0, 64, 64), [0], r"no multiples of 16: use copy_blocks"),
        (Piece(0, 64, 0, 64, 24), [0], r"no multiples of 16: use copy_blocks"),
        (Piece(0, 64, -16, 64, 64), [0], r"no multiples of 16"),
        (Piece(0, 64, 0, 64, 0), [0], r"at least 1 byte"),
        (Piece(0, 64, 0, 32, 64), [0], r"strides no shorter"),
        (Piece(0, 64, 0, 64, 64), [16384], r"block 16384 ends at 1048640, beyond the 1048576 bytes"),
        (Piece(0, 64, 0, 1 << 19, 64), [1, 2, 3], r"3 packed blocks end at 1048640, beyond 1048576 bytes"),
        (Piece(0, 64, 0, 64, 64), [-1], r"there is no block -1"),
    ],
)
def test_what_would_leave_its_memory_is_refused(
    on_host_memory: Reservation, piece: Piece, blocks: list[int], message: str
) -> None:
    for move in (gather, scatter):
        with pytest.raises(PoolError, match=message, check=lambda error: error.code is Code.INVALID):
            move(on_host_memory, on_host_memory, [piece], blocks, 0)


def test_two_packed_blocks_onto_one_are_refused(on_host_memory: Reservation) -> None:
    with pytest.raises(PoolError, match="3 blocks have only 2 targets"):
        scatter(on_host_memory, on_host_memory, [Piece(0, 64, 0, 64, 64)], [5, 6, 5], 0)


def test_more_pieces_than_a_grid_has_are_refused(on_host_memory: Reservation) -> None:
    with pytest.raises(PoolError, match="65536 pieces: at most 65535"):
        gather(on_host_memory, on_host_memory, [Piece(0, 64, 0, 64, 64)] * 65536, [0], 0)


def test_without_cupy_the_remedy_is_named(on_host_memory: Reservation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CupyMissing, match="pip install cupy-cuda13x"):
        gather(on_host_memory, on_host_memory, [Piece(0, 64, 0, 64, 64)], [0], 0)


# ── on a GPU, beside torch's own indexing ─────────────────────────────────────────────────────────────────────────────

LAYERS, BLOCKS, PIECE_BYTES = 8, 64, 32 << 10
PIECES = [
    Piece(n * BLOCKS * PIECE_BYTES, PIECE_BYTES, n * PIECE_BYTES, LAYERS * PIECE_BYTES, PIECE_BYTES) for n in range(8)
]
OLD, NEW = [3, 4, 5, 17, 30], [40, 41, 42, 9, 63]


@pytest.mark.parametrize("pack_on", ["the device", "the host"])
def test_the_gpu_packs_and_unpacks_as_torch_would(
    torch: Any, device: DevicePool, reservation: Reservation, cache: CacheMemory, pack_on: str
) -> None:
    pytest.importorskip("cupy")
    reservation.load(cache, WHOLE_IMAGE).wait(SOON_S)
    kv = tensor(torch, reservation, 0, len(IMAGE)).view(LAYERS, BLOCKS, PIECE_BYTES)
    expected_packed = kv[:, OLD].transpose(0, 1).contiguous()
    expected = kv.clone()
    expected[:, NEW] = kv[:, OLD]
    staging = device.reserve(PAGE)
    staging.map(0, PAGE, SOON_S)
    torch.cuda.synchronize()

    stream = torch.cuda.Stream()
    size = expected_packed.numel()
    cache.view(0, size)[:] = bytes(size)
    packed = staging if pack_on == "the device" else cache
    gather(reservation, packed, PIECES, OLD, stream.cuda_stream)
    if pack_on == "the device":
        ticket = device.stream_ticket(stream.cuda_stream)
        staging.copy(0, cache, 0, size, Direction.TO_HOST, after=ticket).wait(SOON_S)
    scatter(packed, reservation, PIECES, NEW, stream.cuda_stream)
    stream.synchronize()
    assert bytes(cache.view(0, size)) == expected_packed.cpu().numpy().tobytes()
    assert torch.equal(kv, expected)
    staging.release()
