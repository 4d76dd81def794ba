"""How fast do blocks travel between the caches of two hosts over TCP? Beside a bare socket, NIXL and a shared cache.

Two processes play two nodes, with a host cache per process, over loopback. Each round sends the same blocks in turns:
by runtime/migration/transport.py (`tcp`: connection, key, room, checksums, answers), by a single `sendall` into
`recv_into` of as many bytes, from and to the memory of the same caches (`bare`, the roof), within a host (`shared`,
where only numbers are passed on), and read by the target where NIXL is installed (`nixl`; on one machine UCX copies
from process to process, so the rest of the time is the summing, on both sides). `late` is the longest wait of any
further task on the target's loop meanwhile, beside the wait without a transfer.

`python tests/bench/runtime/bench_transport.py`
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import uvloop  # noqa: E402

from runtime.memory.images import Images  # noqa: E402
from runtime.memory.slabs import Slabs  # noqa: E402
from runtime.migration import nixl  # noqa: E402
from runtime.migration.host_blocks import HostBlocks  # noqa: E402
from runtime.migration.receiver import Arrival, BlockReceiver  # noqa: E402
from runtime.migration.transport import PIECE_BYTES, Nixl, Shared, Tcp  # noqa: E402
from store.contract.wire import KvForm  # noqa: E402
from tests.bench.timing import gb_s, load, milliseconds, ratios  # noqa: E402

MIB = 1 << 20
CACHE_BYTES = 1024 * MIB
FORM = KvForm(16, 2 * MIB, "any")  # the form of an 8 B model with grouped queries, in 16 bits
SIZES_MIB = (2, 16, 64, 192)
ROUNDS = 15
TICK_S = 1e-3


class Target:
    """The target's process, as the parent knows it: a line to the process, a line back."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "target"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.door, self.bare = self._line().split()

    def tell(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


async def be_target() -> None:
    """The target: obeys the lines `expect KEY`, `free`, `bare BYTES` and `late` on stdin."""
    fd = os.memfd_create("target")
    os.ftruncate(fd, CACHE_BYTES)
    blocks = HostBlocks(fd)
    door = BlockReceiver(blocks, nixl.Agents() if nixl.installed() else None)
    door.open("127.0.0.1")
    arrival: Arrival | None = None
    late: list[float] = [0.0]
    ticking = asyncio.create_task(_tick(late))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(door.address, f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
        while words := (await asyncio.to_thread(sys.stdin.readline)).split():
            answer = "done"
            match words:
                case ["expect", key]:
                    arrival = door.expect(bytes.fromhex(key), FORM, CACHE_BYTES)
                case ["free"]:
                    assert arrival is not None
                    await door.free(arrival)
                case ["bare", size]:
                    taken = await blocks.take(int(size) // FORM.bytes, FORM.bytes)
                    (view, *more) = await blocks.views(taken, FORM.bytes)
                    assert not more, "its blocks are not neighbours"
                    receiving = asyncio.create_task(asyncio.to_thread(_receive, listener, view))
                    print("ready", flush=True)
                    await receiving
                    await blocks.free(taken, FORM.bytes)
                    continue
                case ["late"]:
                    answer = f"{late[0]}"
                    late[0] = 0.0
            print(answer, flush=True)
    ticking.cancel()
    await door.close()
    blocks.close()


def _receive(listener: socket.socket, view: memoryview) -> None:
    connection, _ = listener.accept()
    with connection:
        while view:
            view = view[connection.recv_into(view[:PIECE_BYTES]) :]
        connection.sendall(b"!")


async def _tick(late: list[float]) -> None:
    while True:
        due = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        late[0] = max(late[0], time.perf_counter() - due)


def bare_s(target: Target, view: memoryview) -> float:
    assert target.tell(f"bare {len(view)}") == "ready"
    host, _, port = target.bare.rpartition(":")
    started = time.perf_counter()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(view)
        assert connection.recv(1) == b"!"
    return time.perf_counter() - started


async def carried_s(path: Tcp | Shared, blocks: list[int]) -> float:
    started = time.perf_counter()
    assert len(await path.carry(0, blocks)) == len(blocks)
    return time.perf_counter() - started


async def moved_s(path: Tcp, target: Target, blocks: list[int]) -> float:
    target.tell(f"expect {path.key.hex()}")
    took_s = await carried_s(path, blocks)
    path.close()
    target.tell("free")
    return took_s


async def measure(target: Target, cache: HostBlocks, blocks: list[int], agents: nixl.Agents) -> dict[str, object]:
    (view,) = await cache.views(blocks, FORM.bytes)
    tcp_s, bares_s, shared_s, late_s, quiet_s = [], [], [], [], []
    nixl_s: list[float] = []
    for number in range(-1, ROUNDS):  # the first round gets memory, and stands apart
        bare = bare_s(target, view)
        target.tell("late")
        time.sleep(0.02)
        quiet = float(target.tell("late"))
        tcp = await moved_s(Tcp(cache, target.door, FORM.bytes), target, blocks)
        late = float(target.tell("late"))
        if nixl.installed():
            nixl_s.append(await moved_s(Nixl(cache, target.door, FORM.bytes, agents), target, blocks))
        if number < 0:
            first = tcp
            continue
        tcp_s.append(tcp)
        bares_s.append(bare)
        late_s.append(late)
        quiet_s.append(quiet)
        shared_s.append(await carried_s(Shared(), blocks))
    size = len(view)
    return {
        "mib": size // MIB,
        "tcp_ms": milliseconds(tcp_s),
        "bare_ms": milliseconds(bares_s),
        "shared_ms": milliseconds(shared_s),
        "tcp_gb_s": gb_s(size, tcp_s),
        "bare_gb_s": gb_s(size, bares_s),
        "of_bare": ratios(bares_s, tcp_s),
        "late_ms": milliseconds(late_s),
        "quiet_ms": milliseconds(quiet_s),
        "first_ms": round(1e3 * first, 2),
        "nixl_ms": milliseconds(nixl_s[1:]),
        "nixl_gb_s": gb_s(size, nixl_s[1:]),
        "nixl_over_tcp": ratios(tcp_s, nixl_s[1:]),
        "nixl_first_ms": round(1e3 * nixl_s[0], 2) if nixl_s else None,
        "load": load(),
    }


async def main() -> None:
    fd = os.memfd_create("source")
    os.ftruncate(fd, CACHE_BYTES)
    device, cache, target, agents = Images.open(fd), HostBlocks(fd), Target(), nixl.Agents()
    try:
        for size in SIZES_MIB:
            slabs = Slabs(device.parked, FORM.bytes)
            blocks = slabs.take(size * MIB // FORM.bytes)
            assert blocks is not None
            for block in blocks:
                device.cache.view(block * FORM.bytes, FORM.bytes)[:] = os.urandom(FORM.bytes)
            print(json.dumps(await measure(target, cache, blocks, agents)), flush=True)
            slabs.free(blocks)
    finally:
        target.close()
        cache.close()
        device.close()


if __name__ == "__main__":
    uvloop.run(be_target() if sys.argv[1:] == ["target"] else main())
