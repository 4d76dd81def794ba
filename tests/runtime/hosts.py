"""Several hosts on one machine: host caches, the blocks in the caches, and the network between the hosts."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

from runtime.memory.images import Images
from runtime.memory.slabs import Slabs
from runtime.migration import transport
from runtime.migration.host_blocks import HostBlocks

CACHE_BYTES = 64 << 20


class HostCache:
    """A host's cache, as seen by the node (`blocks`) and by the device (`device`)."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("host-cache")
        os.ftruncate(self.fd, CACHE_BYTES)
        self.device = Images.open(self.fd)
        self.blocks = HostBlocks(self.fd)
        self._slabs: dict[int, Slabs] = {}

    def put(self, count: int, block_bytes: int, rng: random.Random) -> list[int]:
        """Let the device write `count` blocks with random bytes. Returns the blocks, which need not be neighbours."""
        slabs = self._slabs.setdefault(block_bytes, Slabs(self.device.parked, block_bytes))
        blocks = slabs.take(2 * count)
        assert blocks is not None
        kept = sorted(rng.sample(blocks, count))
        slabs.free(set(blocks) - set(kept))
        for block in kept:
            self.view(block, block_bytes)[:] = rng.randbytes(block_bytes)
        return kept

    def drop(self, blocks: Sequence[int], block_bytes: int) -> None:
        self._slabs[block_bytes].free(blocks)

    def view(self, block: int, block_bytes: int) -> memoryview:
        return self.device.cache.view(block * block_bytes, block_bytes)

    def bytes_of(self, blocks: Sequence[int], block_bytes: int) -> list[bytes]:
        return [bytes(self.view(block, block_bytes)) for block in blocks]

    def taken(self) -> int:
        """Number of blocks taken by node and device."""
        slabs = [*self._slabs.values(), *self.blocks._slabs.values()]
        return sum(each.taken for each in slabs)

    def close(self) -> None:
        self.blocks.close()
        assert self.device.stats().parked_bytes == sum(
            extent.bytes for slabs in self._slabs.values() for extent in slabs._extents
        ), "the node has left something behind"
        self.device.close()
        os.close(self.fd)


@contextmanager
def host_caches(count: int = 2) -> Iterator[list[HostCache]]:
    caches = [HostCache() for _ in range(count)]
    yield caches
    for cache in caches:
        cache.close()


@dataclass
class Fault:
    """A fault of the network at the byte `at`, counted from the beginning of a direction."""

    kind: str  # cut | flip | stall
    back: bool  # from target to source
    at: int


class Network:
    """A network between a source and the target at `address`. The fault hits the first `times` connections."""

    def __init__(self, address: str, fault: Fault, times: int = 1) -> None:
        self._to, self._fault, self._times = transport.split(address), fault, times
        self._pipes: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in self._pipes:
            task.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection(*self._to)
        for back, (end, out) in enumerate(((reader, to_there), (there, writer))):
            self._pipes.add(asyncio.create_task(self._pass_on(end, out, bool(back))))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, back: bool) -> None:
        passed = 0
        with closing(writer), suppress(ConnectionError):
            while data := bytearray(await reader.read(1 << 16)):
                fault = self._fault
                if self._times and fault.back == back and passed <= fault.at < passed + len(data):
                    self._times -= 1
                    if fault.kind == "cut":
                        return
                    if fault.kind == "stall":
                        await asyncio.sleep(60)
                    data[fault.at - passed] ^= 1 << fault.at % 8
                passed += len(data)
                writer.write(data)
                await writer.drain()
