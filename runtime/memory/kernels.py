"""KV blocks of many small pieces, packed into one buffer by the GPU and back, so that they cross the link as one copy.

The kernels are csrc/kernels.cu, compiled at their first use by NVRTC, through CuPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from runtime.memory.native import Backend, Cache, Code, Piece, PoolError, Reservation

SOURCE = Path(__file__).parents[2] / "csrc/kernels.cu"
THREADS = 256
WORD_BYTES = 16  # what a thread moves at once
PIECES_MOST = 65_535  # the second dimension of a grid


class CupyMissing(Exception):
    """CuPy compiles and launches the kernels, and this Python has none."""


def gather(
    source: Reservation, packed: Reservation | Cache, pieces: Sequence[Piece], blocks: Sequence[int], stream: int
) -> None:
    """Put a kernel on a CUDA stream that packs these blocks of `source`.

    Block i of the list goes to where host block i of `copy_blocks` would be, with `packed` as the host. That is memory
    of the same device, or a pinned cache, which the kernel then writes over the link. All that it touches stays mapped
    until it is over: `Device.stream_ticket` is what unmaps and copies wait for.
    """
    _launch("gather_blocks", packed, source, pieces, blocks, stream)


def scatter(
    packed: Reservation | Cache, target: Reservation, pieces: Sequence[Piece], blocks: Sequence[int], stream: int
) -> None:
    """The way back of `gather`: what lies packed as block i goes to block `blocks[i]` of `target`."""
    if len(set(blocks)) < len(blocks):
        raise PoolError(Code.INVALID, f"{len(blocks)} blocks have only {len(set(blocks))} targets: name each one once")
    _launch("scatter_blocks", packed, target, pieces, blocks, stream)


def _launch(
    kernel: str,
    packed: Reservation | Cache,
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
        # CuPy takes the tables back when we let go of them, and gives them to nobody but later work of this stream.
        table = cupy.asarray([_numbers(piece) for piece in pieces], "u8")
        arguments = (cupy.uint64(packed.address), cupy.uint64(scattered.address), table, cupy.asarray(blocks, "u4"))
        _compiled(device.ordinal, kernel)((len(blocks), len(pieces)), (THREADS,), arguments)


def _numbers(piece: Piece) -> tuple[int, ...]:
    """In the order of `Piece` in csrc/kernels.cu."""
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
    """A kernel that leaves its memory breaks the device's context for everybody in the process."""
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
    """For the device that is current, which is number `ordinal`."""
    return _cupy().RawModule(code=SOURCE.read_text()).get_function(kernel)
