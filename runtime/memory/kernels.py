"""Kernels to pack KV blocks of many small pieces into a buffer on the GPU, and to unpack the buffer.

A packed buffer crosses the link to the host as one copy. The kernels are csrc/kernels.cu, compiled at first use by
NVRTC, through CuPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from runtime.memory.native import Backend, CacheMemory, Code, Piece, PoolError, Reservation

SOURCE = Path(__file__).parents[2] / "csrc/kernels.cu"
THREADS = 256
WORD_BYTES = 16  # moved by a thread at once
PIECES_MOST = 65_535  # limit of a grid's second dimension


class CupyMissing(Exception):
    """CuPy is not installed: CuPy compiles and launches the kernels."""


def gather(
    source: Reservation, packed: Reservation | CacheMemory, pieces: Sequence[Piece], blocks: Sequence[int], stream: int
) -> None:
    """Put a kernel on a CUDA stream to pack the blocks `blocks` of `source` into `packed`.

    Block i of the list goes to the place of host block i in `Reservation.copy_blocks`, with `packed` as the host.
    `packed` is memory of the device, or a pinned cache; the kernel writes into a cache over the link. Keep all memory
    touched by the kernel mapped until the kernel is over: let unmaps and copies wait for a `Device.stream_ticket`.
    Raises PoolError and CupyMissing.
    """
    _launch("gather_blocks", packed, source, pieces, blocks, stream)


def scatter(
    packed: Reservation | CacheMemory, target: Reservation, pieces: Sequence[Piece], blocks: Sequence[int], stream: int
) -> None:
    """Put a kernel on a CUDA stream to undo `gather`: packed block i goes to block `blocks[i]` of `target`.

    Raises PoolError, also if a block has two sources, and CupyMissing."""
    if len(set(blocks)) < len(blocks):
        raise PoolError(Code.INVALID, f"{len(blocks)} blocks have only {len(set(blocks))} targets: name each one once")
    _launch("scatter_blocks", packed, target, pieces, blocks, stream)


def _launch(
    kernel: str,
    packed: Reservation | CacheMemory,
    scattered: Reservation,
    pieces: Sequence[Piece],
    blocks: Sequence[int],
    stream: int,
) -> None:
    if not pieces or not blocks:
        return
    _check_pieces(pieces)
    _check_bounds(packed.bytes, scattered.bytes, pieces, blocks)
    cupy = _cupy()
    device = scattered.device
    if device.backend is not Backend.CUDA:
        raise PoolError(Code.UNSUPPORTED, "the host's memory has no kernels: use Reservation.copy_blocks")
    with cupy.cuda.Device(device.ordinal), cupy.cuda.ExternalStream(stream):
        # On return CuPy takes the tables' memory back, and gives the memory only to later work of this stream.
        table = cupy.asarray([_numbers(piece) for piece in pieces], "u8")
        arguments = (cupy.uint64(packed.address), cupy.uint64(scattered.address), table, cupy.asarray(blocks, "u4"))
        _compiled(device.ordinal, kernel)((len(blocks), len(pieces)), (THREADS,), arguments)


def _numbers(piece: Piece) -> tuple[int, ...]:
    """The piece's numbers in the order of `Piece` in csrc/kernels.cu."""
    return piece.device_offset, piece.device_stride, piece.host_offset, piece.host_stride, piece.bytes


def _check_pieces(pieces: Sequence[Piece]) -> None:
    if len(pieces) > PIECES_MOST:
        raise PoolError(Code.INVALID, f"a block of {len(pieces)} pieces: at most {PIECES_MOST} can move at once")
    for piece in pieces:
        if any(number < 0 or number % WORD_BYTES for number in _numbers(piece)):
            raise PoolError(Code.INVALID, f"{piece} has numbers that are no multiples of {WORD_BYTES}: use copy_blocks")
        if not 0 < piece.bytes <= min(piece.device_stride, piece.host_stride):
            raise PoolError(Code.INVALID, f"{piece} needs at least 1 byte, and strides no shorter than its bytes")


def _check_bounds(packed_bytes: int, scattered_bytes: int, pieces: Sequence[Piece], blocks: Sequence[int]) -> None:
    """Check that the blocks lie inside both memories. Raises PoolError.

    A kernel outside mapped memory would break the device's context for the whole process."""
    first, last = min(blocks), max(blocks)
    if first < 0:
        raise PoolError(Code.INVALID, f"there is no block {first}")
    for piece in pieces:
        end = piece.device_offset + last * piece.device_stride + piece.bytes
        if end > scattered_bytes:
            raise PoolError(
                Code.INVALID, f"block {last} ends at {end}, beyond the {scattered_bytes} bytes of its reservation"
            )
        end = piece.host_offset + (len(blocks) - 1) * piece.host_stride + piece.bytes
        if end > packed_bytes:
            raise PoolError(Code.INVALID, f"{len(blocks)} packed blocks end at {end}, beyond {packed_bytes} bytes")


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise CupyMissing(f"kernels that gather KV blocks need CuPy ({error}): pip install cupy-cuda13x") from error
    return cupy


@cache
def _compiled(ordinal: int, kernel: str) -> Any:
    """The compiled kernel for the current device; `ordinal`, the device's number, is only the key of the cache."""
    return _cupy().RawModule(code=SOURCE.read_text()).get_function(kernel)
