"""Blocks read by NIXL out of a second host's memory, in these tests over UCX without RDMA. Blocks arrive unchanged or
not at all, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import RuntimeSettings
from runtime.migration import nixl, transport
from runtime.migration.nixl import Agents
from runtime.migration.receiver import BlockReceiver
from runtime.migration.transport import Nixl, NotMoved
from store.contract.wire import KvForm
from tests.conftest import ROOT, soon
from tests.runtime.hosts import Fault, HostCache, Network, host_caches
from tests.runtime.migration.test_transport import SMALL, TOKENS_MOST, in_time

needs_nixl = pytest.mark.skipif(not nixl.installed(), reason=f"NIXL is not installed: {nixl.INSTALL}")
AGENTS = Agents()  # shared by the nodes: an agent costs half a second


@contextlib.asynccontextmanager
async def opened(target: HostCache, agents: Agents | None = AGENTS) -> AsyncIterator[BlockReceiver]:
    """A door to the target. In the end no connection is open and no block is taken."""
    door = BlockReceiver(target.blocks, agents)
    door.open("127.0.0.1")
    yield door
    await soon(lambda: not door._serving and not target.taken())
    await door.close()
    assert target.taken() == target.blocks.taken_bytes == 0 and not door._expected


async def carried(
    source: HostCache, door: BlockReceiver, blocks: list[int], form: KvForm = SMALL, address: str = ""
) -> None:
    """Carry blocks to the target in two batches, and let the target free the blocks. Raises NotCarried."""
    path = Nixl(source.blocks, address or door.address, form.bytes, AGENTS)
    arrival = door.expect(path.key, form, TOKENS_MOST)
    there: list[int] = []
    try:
        for batch in (blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]):
            there += await path.carry(len(there), batch)
    finally:
        if arrival.has(0, there):  # else the target's node refuses to read the blocks
            assert said(door, there, form) == source.bytes_of(blocks[: len(there)], form.bytes)
        path.close()
        await asyncio.shield(door.free(arrival))  # a cancelled move may be freeing already
    assert len(there) == len(blocks)


def said(door: BlockReceiver, blocks: Sequence[int], form: KvForm) -> list[bytes]:
    assert door._blocks._images is not None or not blocks
    images = door._blocks._images
    return [bytes(images.cache.view(block * form.bytes, form.bytes)) for block in blocks] if images else []


@needs_nixl
@settings(max_examples=30)
@given(
    block_bytes=st.sampled_from([4096, 5000, 262144, 500_000]),
    count=st.integers(1, 12),
    parcel_bytes=st.sampled_from([1, 100_000, 4 << 20]),
    seed=st.integers(0, 1 << 20),
)
def test_blocks_arrive_as_they_were(block_bytes: int, count: int, parcel_bytes: int, seed: int) -> None:
    rng, form = random.Random(seed), KvForm(16, block_bytes, "any")

    async def move(source: HostCache, target: HostCache) -> None:
        blocks = source.put(count, block_bytes, rng)
        rng.shuffle(blocks)
        async with opened(target) as door:
            await carried(source, door, blocks, form)
        source.drop(blocks, block_bytes)

    with pytest.MonkeyPatch.context() as patch, host_caches() as (source, target):
        patch.setattr(transport, "PARCEL_BYTES", parcel_bytes)
        in_time(move(source, target))


@needs_nixl
@settings(max_examples=60)
@given(
    kind=st.sampled_from(["cut", "flip", "stall"]),
    back=st.booleans(),
    at=st.integers(0, 900),
    cancelled=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_whatever_happens_to_what_is_said_blocks_arrive_whole_or_nothing_is_left(
    kind: str, back: bool, at: int, cancelled: bool, seed: int
) -> None:
    rng = random.Random(seed)

    async def move(source: HostCache, target: HostCache) -> None:
        blocks = source.put(8, SMALL.bytes, rng)
        async with opened(target) as door, Network(door.address, Fault(kind, back, at), 99) as address:
            carrying = asyncio.ensure_future(carried(source, door, blocks, address=address))
            if cancelled:
                await asyncio.sleep(rng.random() * 0.01)
                carrying.cancel()
            with contextlib.suppress(NotMoved, asyncio.CancelledError):
                await carrying
        source.drop(blocks, SMALL.bytes)

    with pytest.MonkeyPatch.context() as patch, host_caches() as (source, target):
        for name, value in {"PARCEL_BYTES": 12_000, "PARCEL_S": 0.1, "ROOM_S": 0.3, "HELLO_S": 0.1}.items():
            patch.setattr(transport, name, value)
        in_time(move(source, target))


@needs_nixl
@pytest.mark.parametrize(("times", "arrives"), [(1, True), (2, True), (3, False)])
async def test_what_comes_damaged_is_read_again_and_at_last_refused(
    monkeypatch: pytest.MonkeyPatch, times: int, arrives: bool
) -> None:
    read, damaged = nixl.Reader._read, []

    def damaging(self: nixl.Reader, agent: object, source: str, runs: object, views: Sequence[memoryview]) -> None:
        read(self, agent, source, runs, views)  # type: ignore[arg-type]
        if len(damaged) < times:
            damaged.append(source)
            views[0][7] ^= 1

    monkeypatch.setattr(nixl.Reader, "_read", damaging)
    with host_caches() as (source, target):
        blocks = source.put(2, SMALL.bytes, random.Random(1))
        async with opened(target) as door:
            if arrives:
                await carried(source, door, blocks)
            else:
                with pytest.raises(NotMoved, match="1 parcels came damaged 3 times"):
                    await carried(source, door, blocks)
        source.drop(blocks, SMALL.bytes)
    assert len(damaged) == times


@needs_nixl
async def test_what_is_lent_must_be_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer with wrong claims has the key of a single move, and only the single move is refused."""
    lies = {
        "longer": lambda lent: nixl.Lent(lent.agent, [[(at, n + 1) for at, n in run] for run in lent.runs], lent.sums),
        "fewer": lambda lent: nixl.Lent(lent.agent, [], []),
        "no sums": lambda lent: nixl.Lent(lent.agent, lent.runs, []),
        "elsewhere": lambda lent: nixl.Lent(lent.agent, [[(4096, n) for _, n in run] for run in lent.runs], lent.sums),
        "nobody": lambda lent: nixl.Lent(b"", lent.runs, lent.sums),
        "no agent": lambda lent: nixl.Lent(b"nixl" * 50, lent.runs, lent.sums),
    }
    truth = nixl.lent
    with host_caches() as (source, target):
        blocks = source.put(4, SMALL.bytes, random.Random(1))
        async with opened(target) as door:
            for lie in lies.values():

                @contextlib.contextmanager
                def lying(agent, parcels, lie=lie):  # type: ignore[no-untyped-def]
                    with truth(agent, parcels) as lent:
                        yield lie(lent)

                monkeypatch.setattr(nixl, "lent", lying)
                with pytest.raises(NotMoved, match="2 blocks can't be sent to"):
                    await carried(source, door, blocks)
                assert target.taken() == 0
            monkeypatch.setattr(nixl, "lent", truth)
            await carried(source, door, blocks)
        source.drop(blocks, SMALL.bytes)


DYING = """
import asyncio, os, random, signal, sys
from runtime.migration import nixl
from runtime.migration.transport import Nixl
from tests.runtime.hosts import HostCache

def die(agent):
    os.kill(os.getpid(), signal.SIGKILL)

async def main(address, key, block_bytes):
    source = HostCache()
    blocks = source.put(4, block_bytes, random.Random(1))
    path = Nixl(source.blocks, address, block_bytes, nixl.Agents())
    path.key = bytes.fromhex(key)
    nixl.go_on = die
    await path.carry(0, blocks)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


@needs_nixl
async def test_a_source_that_dies_while_it_lends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PARCEL_S", 2.0)
    form, key = KvForm(16, 4 << 20, "any"), bytes(range(16))
    with host_caches() as (source, target):
        async with opened(target) as door:
            arrival = door.expect(key, form, TOKENS_MOST)
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", DYING, door.address, key.hex(), str(form.bytes), cwd=ROOT, env=os.environ
            )
            assert await asyncio.wait_for(child.wait(), 60) == -signal.SIGKILL
            await soon(lambda: not door._serving)
            await door.free(arrival)
            blocks = source.put(2, form.bytes, random.Random(1))
            await carried(source, door, blocks, form)  # a further move is heard
        source.drop(blocks, form.bytes)


async def test_where_nothing_can_be_read_who_lends_is_turned_away() -> None:
    with host_caches(1) as (target,):
        async with opened(target, agents=None) as door:
            arrival = door.expect(bytes(16), SMALL, TOKENS_MOST)
            with socket.create_connection(transport.split(door.address)) as connection:
                connection.sendall(transport.GREETING.pack(transport.LENDS, bytes(16)))
                connection.setblocking(False)
                assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
            await door.free(arrival)


def test_without_the_library_a_runtime_that_is_to_use_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "installed", lambda: False)
    with pytest.raises(
        ValueError, match=r"STACCATO_TRANSPORT=nixl, and NIXL is not installed: pip install 'staccato\[n"
    ):
        RuntimeSettings(transport="nixl").check()
    RuntimeSettings(transport="tcp").check()
