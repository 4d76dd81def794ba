"""How do KV blocks of many small pieces cross the link fastest: piece by piece, or packed by a kernel?

`python tests/bench/gpu/bench_gather.py [ROUNDS]`: 5 rounds, about a minute. A block is 16 tokens of 32 layers with keys
and values apart, in total 64 pieces. Every second block moves, in random order: no block travels with a neighbour.
Three ways take turns, out to the pinned cache and back: `pieces` copies every piece by itself
(Reservation.copy_blocks), `staged` packs the pieces into a buffer on the device and copies the buffer at once, `direct`
has the kernel itself write and read the cache. `gb_s` counts to the end, `call_ms` is how long the calling thread is
busy.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import cupy
import numpy

from runtime.memory.kernels import gather, scatter
from runtime.memory.native import Backend, CacheMemory, DevicePool, Direction, Piece, TransferTicket
from tests.bench.gpu.report import FOREVER, MIB, emit, emit_conditions, gb_s, spread

PIECES = 64
PIECES_KIB = (4, 8, 16, 32, 64)
SIZES_MIB = (16, 64, 256)
PAGE = 32 * MIB
SEED = 1


class Case:
    """Blocks to move, and three ways to move the blocks; a way is a call that begins the copies."""

    def __init__(self, device: DevicePool, cache: CacheMemory, piece_bytes: int, size: int) -> None:
        count = size // (PIECES * piece_bytes)
        layer, block = 2 * count * piece_bytes, PIECES * piece_bytes
        self.pieces = [Piece(n * layer, piece_bytes, n * piece_bytes, block, piece_bytes) for n in range(PIECES)]
        self.places = list(range(count))
        self.blocks = [2 * place for place in self.places]
        random.Random(SEED).shuffle(self.blocks)
        self.device, self.cache, self.size = device, cache, size
        self.kv, self.staging = device.reserve(2 * size), device.reserve(size)
        self.kv.map(0, self.kv.bytes, FOREVER)
        self.staging.map(0, self.staging.bytes, FOREVER)
        self.cupy_stream = cupy.cuda.Stream(non_blocking=True)
        self.stream = self.cupy_stream.ptr

    def release(self) -> None:
        self.kv.release()
        self.staging.release()

    def so_far(self) -> TransferTicket:
        return self.device.stream_ticket(self.stream)

    def out_pieces(self) -> TransferTicket:
        return self.kv.copy_blocks(self.cache, self.pieces, self.blocks, self.places, Direction.TO_HOST)

    def back_pieces(self) -> TransferTicket:
        return self.kv.copy_blocks(self.cache, self.pieces, self.blocks, self.places, Direction.TO_DEVICE)

    def pack(self) -> TransferTicket:
        gather(self.kv, self.staging, self.pieces, self.blocks, self.stream)
        return self.so_far()

    def out_staged(self) -> TransferTicket:
        return self.staging.copy(0, self.cache, 0, self.size, Direction.TO_HOST, after=self.pack())

    def back_staged(self) -> TransferTicket:
        self.staging.copy(0, self.cache, 0, self.size, Direction.TO_DEVICE).hold_stream(self.stream, FOREVER)
        scatter(self.staging, self.kv, self.pieces, self.blocks, self.stream)
        return self.so_far()

    def out_direct(self) -> TransferTicket:
        gather(self.kv, self.cache, self.pieces, self.blocks, self.stream)
        return self.so_far()

    def back_direct(self) -> TransferTicket:
        scatter(self.cache, self.kv, self.pieces, self.blocks, self.stream)
        return self.so_far()

    def ways(self) -> list[tuple[str, Callable[[], TransferTicket], Callable[[], TransferTicket]]]:
        return [
            ("pieces", self.out_pieces, self.back_pieces),
            ("staged", self.out_staged, self.back_staged),
            ("direct", self.out_direct, self.back_direct),
        ]


def main(rounds: int = 5) -> None:
    emit_conditions()
    largest = max(SIZES_MIB) * MIB
    device = DevicePool(3 * largest, backend=Backend.CUDA, page_bytes=PAGE)
    cache = CacheMemory(largest)
    cache.commit(0, largest)
    cache.pin(device, 0, largest)
    for size_mib in SIZES_MIB:
        for piece_kib in PIECES_KIB:
            case = Case(device, cache, piece_kib << 10, size_mib * MIB)
            compare(case)
            answer = measure(case, rounds)
            emit("gather", size_mib=size_mib, piece_kib=piece_kib, blocks=len(case.blocks), rounds=rounds, **answer)
            case.release()
            device.settle(FOREVER)
    cache.close()
    device.close()


def measure(case: Case, rounds: int) -> dict[str, object]:
    moves = {"pack": case.pack}
    for name, out, back in case.ways():
        moves |= {f"out_{name}": out, f"back_{name}": back}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in moves}
    for _ in range(rounds):
        for name, move in moves.items():
            times[name].append(timed(move))
    answer: dict[str, object] = {}
    for name, pairs in times.items():
        answer[name] = {
            "gb_s": gb_s(case.size, [whole_s for _, whole_s in pairs]),
            "call_ms": spread([call_s * 1e3 for call_s, _ in pairs]),
        }
    return answer


def timed(move: Callable[[], TransferTicket]) -> tuple[float, float]:
    """Seconds until the call returned, and until the copies were complete."""
    started = time.perf_counter()
    ticket = move()
    called = time.perf_counter()
    ticket.wait(FOREVER)
    return called - started, time.perf_counter() - started


def compare(case: Case) -> None:
    """Check every way: blocks brought to the device come out unchanged, by plain copies and by the way itself."""
    packed = numpy.frombuffer(case.cache.view(0, case.size), "u8")
    for number, (name, out, back) in enumerate(case.ways()):
        content = numpy.arange(packed.size, dtype="u8") + (number << 40)  # distinct words
        packed[:] = content
        back().wait(FOREVER)
        for way_out in (case.out_pieces, out):
            packed[:] = 0
            way_out().wait(FOREVER)
            if not numpy.array_equal(packed, content):
                sys.exit(f"blocks that were moved {name!r} are not what they were: these times are worth nothing")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
