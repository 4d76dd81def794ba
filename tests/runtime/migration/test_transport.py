"""Blocks sent from a host's cache to a second host's cache. Blocks arrive unchanged or not at all. After any fault, no
side waits for ever and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvloop
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.migration import transport
from runtime.migration.host_blocks import RECEIVED_PART
from runtime.migration.receiver import Arrival, BlockReceiver
from runtime.migration.transport import NotMoved, Shared, Tcp
from store.contract.wire import KvForm
from tests.conftest import ROOT, soon
from tests.runtime.hosts import CACHE_BYTES, Fault, HostCache, Network, host_caches

SMALL = KvForm(16, 5000, "any")  # a size unrelated to pages
TOKENS_MOST = 64 * 16


def in_time(job: Coroutine[Any, Any, None]) -> None:
    """Run the job within 60 s, on the event loop of nodes (uvloop)."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(job, 60))


@contextlib.asynccontextmanager
async def opened(target: HostCache) -> AsyncIterator[BlockReceiver]:
    """A door to the target. In the end no connection is open and no block is taken."""
    door = BlockReceiver(target.blocks)
    door.open("127.0.0.1")
    yield door
    await soon(lambda: not door._serving)
    await door.close()
    assert target.taken() == target.blocks.taken_bytes == 0 and not door._expected and not door._strangers


# ── what arrives ──────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60)
@given(
    block_bytes=st.sampled_from([4096, 5000, 65536, 262144, 500_000]),
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    parcel_bytes=st.sampled_from([1, 100_000, 4 << 20]),
    seed=st.integers(0, 1 << 20),
)
def test_blocks_arrive_as_they_were_in_any_batches(
    block_bytes: int, counts: list[int], parcel_bytes: int, seed: int
) -> None:
    rng, form = random.Random(seed), KvForm(16, block_bytes, "any")

    async def move(source: HostCache, target: HostCache) -> None:
        blocks = source.put(sum(counts), block_bytes, rng)
        rng.shuffle(blocks)
        async with opened(target) as door:
            path = Tcp(source.blocks, door.address, block_bytes)
            arrival = door.expect(path.key, form, TOKENS_MOST)
            there: list[int] = []
            for count in counts:
                batch = blocks[len(there) : len(there) + count]
                there += await path.carry(len(there), batch)
                assert arrival.has(len(there) - count, there[len(there) - count :])
            assert target.bytes_of(there, block_bytes) == source.bytes_of(blocks, block_bytes)
            assert arrival.has(0, there) and target.blocks.taken_bytes == len(there) * block_bytes
            path.close()
            await door.free(arrival)
            await door.free(arrival)
        source.drop(blocks, block_bytes)

    with pytest.MonkeyPatch.context() as patch, host_caches() as (source, target):
        patch.setattr(transport, "PARCEL_BYTES", parcel_bytes)
        in_time(move(source, target))


async def test_within_a_host_numbers_are_passed_on_as_they_are() -> None:
    path = Shared()
    assert await path.carry(0, [5, 3]) == [5, 3] and path.key == b""
    path.close()


# ── what the network does ─────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=150)
@given(
    kind=st.sampled_from(["cut", "flip", "stall"]),
    back=st.booleans(),
    at=st.one_of(st.integers(0, 60), st.integers(0, 60_000)),
    times=st.sampled_from([1, 99]),
    cancelled=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
@example(kind="flip", back=True, at=47, times=1, cancelled=False, seed=0)  # the word "Damaged" is no UTF-8 any more
def test_whatever_the_network_does_blocks_arrive_whole_or_nothing_is_left(
    kind: str, back: bool, at: int, times: int, cancelled: bool, seed: int
) -> None:
    rng = random.Random(seed)

    async def move(source: HostCache, target: HostCache) -> None:
        blocks = source.put(8, SMALL.bytes, rng)
        async with opened(target) as door, Network(door.address, Fault(kind, back, at), times) as address:
            path = Tcp(source.blocks, address, SMALL.bytes)
            arrival = door.expect(path.key, SMALL, TOKENS_MOST)
            there: list[int] = []
            carrying = asyncio.ensure_future(_carry_all(path, blocks, there))
            if cancelled:
                await asyncio.sleep(rng.random() * 0.01)
                carrying.cancel()
            with contextlib.suppress(NotMoved, asyncio.CancelledError):
                await carrying
            if arrival.has(0, there):  # else the target's node refuses to read the blocks
                sent = source.bytes_of(blocks[: len(there)], SMALL.bytes)
                assert target.bytes_of(there, SMALL.bytes) == sent
            path.close()
            await door.free(arrival)
        source.drop(blocks, SMALL.bytes)

    with pytest.MonkeyPatch.context() as patch, host_caches() as (source, target):
        for name, value in {"PARCEL_BYTES": 12_000, "PARCEL_S": 0.1, "ROOM_S": 0.3, "HELLO_S": 0.1}.items():
            patch.setattr(transport, name, value)
        in_time(move(source, target))


async def _carry_all(path: Tcp, blocks: list[int], there: list[int]) -> None:
    for first in range(0, len(blocks), 4):
        there += await path.carry(first, blocks[first : first + 4])


HEADERS = 24 + 8  # bytes of a connection's head, and of the first batch's


@pytest.mark.parametrize(("times", "arrives"), [(1, True), (2, True), (3, False)])
async def test_what_comes_damaged_is_sent_again_and_at_last_refused(
    monkeypatch: pytest.MonkeyPatch, times: int, arrives: bool
) -> None:
    send, damaged = transport._send, []

    def damaging(connection: socket.socket, view: memoryview, deadline: float) -> None:
        """Flip a bit of a block after the checksum was computed."""
        if len(view) > transport.SUM.size and len(damaged) < times:
            damaged.append(view)
            view = memoryview(bytes([*view[:7], view[7] ^ 1, *view[8:]]))
        send(connection, view, deadline)

    monkeypatch.setattr(transport, "_send", damaging)
    with host_caches() as (source, target):
        blocks = source.put(1, SMALL.bytes, random.Random(1))
        async with opened(target) as door:
            path = Tcp(source.blocks, door.address, SMALL.bytes)
            arrival = door.expect(path.key, SMALL, TOKENS_MOST)
            if arrives:
                there = await path.carry(0, blocks)
                assert target.bytes_of(there, SMALL.bytes) == source.bytes_of(blocks, SMALL.bytes)
            else:
                with pytest.raises(NotMoved, match="1 parcels came damaged 3 times"):
                    await path.carry(0, blocks)
                assert target.taken() == 0
            path.close()
            await door.free(arrival)
        source.drop(blocks, SMALL.bytes)
    assert len(damaged) == times


async def test_a_byte_that_the_network_turned_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with host_caches() as (source, target):
        blocks = source.put(4, SMALL.bytes, random.Random(1))
        said = []
        say = transport.say

        async def heard(connection: socket.socket, answer: transport.Answer) -> None:
            said.append(answer)
            await say(connection, answer)

        monkeypatch.setattr(transport, "say", heard)
        async with opened(target) as door, Network(door.address, Fault("flip", False, HEADERS + 4711)) as address:
            path = Tcp(source.blocks, address, SMALL.bytes)
            arrival = door.expect(path.key, SMALL, TOKENS_MOST)
            there = await path.carry(0, blocks)
            assert target.bytes_of(there, SMALL.bytes) == source.bytes_of(blocks, SMALL.bytes)
            assert said[1:] == [transport.Again([0]), transport.Again([])]
            path.close()
            await door.free(arrival)
        source.drop(blocks, SMALL.bytes)


async def test_who_reads_slowly_slows_the_sender_and_who_does_not_read_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    form = KvForm(16, 1 << 20, "any")
    with host_caches() as (source, target):
        blocks = source.put(12, form.bytes, random.Random(1))
        receive = transport._receive

        def slowly(connection: socket.socket, view: memoryview, deadline: float) -> None:
            time.sleep(0.005)
            receive(connection, view, deadline)

        monkeypatch.setattr(transport, "PARCEL_BYTES", form.bytes)
        monkeypatch.setattr(transport, "_receive", slowly)
        async with opened(target) as door:
            path = Tcp(source.blocks, door.address, form.bytes)
            arrival = door.expect(path.key, form, TOKENS_MOST)
            started = time.monotonic()
            await path.carry(0, blocks)
            assert time.monotonic() - started > 12 * 4 * 0.005
            path.close()
            await door.free(arrival)

            silent = socket.create_server(("127.0.0.1", 0))
            monkeypatch.setattr(transport, "ROOM_S", 0.2)
            path = Tcp(source.blocks, f"127.0.0.1:{silent.getsockname()[1]}", form.bytes)
            with pytest.raises(NotMoved, match="takes too long to receive 12 blocks"):
                await path.carry(0, blocks)
            path.close()
            silent.close()
        source.drop(blocks, form.bytes)


async def test_a_source_that_stops_in_the_middle_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target does not wait, even while the source's offer stands and the connection is open."""
    monkeypatch.setattr(transport, "PARCEL_S", 0.2)
    with host_caches(1) as (target,):
        async with opened(target) as door:
            for stop in (0, 7, 8 + SMALL.bytes // 2):
                arrival = door.expect(bytes(16), SMALL, TOKENS_MOST)
                reader, writer = await asyncio.open_connection(*transport.split(door.address))
                writer.write(transport.GREETING.pack(transport.SENDS, bytes(16)) + transport.BATCH.pack(0, 2))
                writer.write(bytes(stop))
                await soon(lambda: target.taken() == 2)
                await soon(lambda: target.taken() == 0)
                await asyncio.wait_for(reader.read(), 5)  # to the end
                writer.close()
                await door.free(arrival)


# ── what the other side does ──────────────────────────────────────────────────────────────────────────────────────────


async def test_without_room_it_is_refused_and_the_next_may_come() -> None:
    form = KvForm(16, 1 << 20, "any")
    most = CACHE_BYTES // RECEIVED_PART // form.bytes
    with host_caches() as (source, target):
        blocks = source.put(most + 1, form.bytes, random.Random(1))
        async with opened(target) as door:
            for count, match in ((most + 1, f"{most + 1} blocks of 1048576 bytes find no room"), (most, "")):
                path = Tcp(source.blocks, door.address, form.bytes)
                arrival = door.expect(path.key, form, TOKENS_MOST)
                if match:
                    with pytest.raises(NotMoved, match=match):
                        await path.carry(0, blocks[:count])
                    assert target.taken() == 0
                else:
                    assert len(await path.carry(0, blocks[:count])) == most
                path.close()
                await door.free(arrival)
        source.drop(blocks, form.bytes)


async def test_no_more_is_received_than_a_request_can_have_and_nothing_out_of_turn() -> None:
    with host_caches() as (source, target):
        blocks = source.put(9, SMALL.bytes, random.Random(1))
        async with opened(target) as door:
            for first, count, match in (
                (0, 9, "9 blocks from 0 on: it has 0, and 8 are the most"),
                (1, 2, "2 blocks from 1 on: it has 0"),
                (4, 5, "5 blocks from 4 on: it has 4, and 8 are the most"),
            ):
                path = Tcp(source.blocks, door.address, SMALL.bytes)
                arrival = door.expect(path.key, SMALL, 8 * SMALL.tokens - 3)
                if first == 4:
                    await path.carry(0, blocks[:4])
                with pytest.raises(NotMoved, match=match):
                    await path.carry(first, blocks[first : first + count])
                path.close()
                await door.free(arrival)
        source.drop(blocks, SMALL.bytes)


async def test_a_stranger_is_told_nothing_and_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HELLO_S", 0.2)
    with host_caches() as (source, target):
        blocks = source.put(1, SMALL.bytes, random.Random(1))
        async with opened(target) as door:
            arrival = door.expect(bytes(16), SMALL, TOKENS_MOST)
            path = Tcp(source.blocks, door.address, SMALL.bytes)
            with pytest.raises(NotMoved, match="1 blocks can't be sent to"):
                await path.carry(0, blocks)
            path.close()
            for hello in (b"", b"GET / HTTP/1.1\r\n", transport.GREETING.pack(b"stackv 2", bytes(16))):
                reader, writer = await asyncio.open_connection(*transport.split(door.address))
                writer.write(hello)
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.wait_for(reader.read(), 5) == b""
                writer.close()
            assert target.blocks._images is None, "the cache was not even looked at"
            await door.free(arrival)
        source.drop(blocks, SMALL.bytes)


async def test_strangers_are_few_at_a_time_and_keep_nobody_out_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HELLO_S", 0.5)
    with host_caches() as (source, target):
        blocks = source.put(1, SMALL.bytes, random.Random(1))
        async with opened(target) as door:
            connections = [socket.create_connection(transport.split(door.address)) for _ in range(50)]
            await soon(lambda: door._strangers == transport.STRANGERS_MOST)
            path = Tcp(source.blocks, door.address, SMALL.bytes)
            arrival = door.expect(path.key, SMALL, TOKENS_MOST)
            await soon(lambda: door._strangers == 0)
            await path.carry(0, blocks)
            assert len(door._serving) == 1
            path.close()
            await door.free(arrival)
            for connection in connections:
                connection.close()
        source.drop(blocks, SMALL.bytes)


async def test_a_key_is_for_one_move_and_for_one_connection() -> None:
    with host_caches() as (source, target):
        blocks = source.put(2, SMALL.bytes, random.Random(1))
        async with opened(target) as door:
            path, thief = (Tcp(source.blocks, door.address, SMALL.bytes) for _ in range(2))
            thief.key = path.key
            arrival = door.expect(path.key, SMALL, TOKENS_MOST)
            for key, form in ((path.key, SMALL), (b"short", SMALL), (bytes(16), KvForm(0, 1, "any"))):
                with pytest.raises(NotMoved, match="needs a key of its own of 16 bytes"):
                    door.expect(key, form, TOKENS_MOST)
            await path.carry(0, blocks[:1])
            with pytest.raises(NotMoved):
                await thief.carry(1, blocks[1:])
            await path.carry(1, blocks[1:])
            await door.free(arrival)
            await soon(lambda: not door._serving)  # the target closes the connection
            with pytest.raises(NotMoved):
                await path.carry(2, blocks[:1])
            path.close()
            thief.close()
        source.drop(blocks, SMALL.bytes)


def answered(*answers: transport.Answer | bytes) -> Callable[[socket.socket], None]:
    """A target that sends `answers` to any message."""

    def say(connection: socket.socket) -> None:
        for answer in answers:
            data = answer if isinstance(answer, bytes) else transport._encoder.encode(answer)
            connection.sendall(struct.pack("<I", len(data)) + data)

    return say


@pytest.mark.parametrize(
    ("lies", "match"),
    [
        (answered(transport.Room([1])), "says nothing of where 2 blocks may be"),
        (answered(transport.Again([])), "says nothing of where 2 blocks may be"),
        (answered(transport.No("it is tired")), "it is tired"),
        (answered(b"\xc1"), "can't be sent"),
        (answered(transport.Room([1, 2]), transport.Again([7])), "wants parcels that there are not"),
        (answered(transport.Room([1, 2]), *[transport.Again([0])] * 4), "wants 1 parcels more than 3 times"),
        (answered(transport.Room([1, 2]), transport.Room([1, 2])), "wants parcels that there are not"),
        (lambda connection: connection.sendall(struct.pack("<I", 1 << 30)), "answers with 1073741824 bytes"),
        (lambda connection: connection.shutdown(socket.SHUT_WR), "closed the connection"),
    ],
)
async def test_a_target_that_lies_is_believed_nothing(lies: Callable[[socket.socket], None], match: str) -> None:
    with host_caches(1) as (source,), socket.create_server(("127.0.0.1", 0)) as listener:
        blocks = source.put(2, SMALL.bytes, random.Random(1))
        path = Tcp(source.blocks, f"127.0.0.1:{listener.getsockname()[1]}", SMALL.bytes)
        carrying = asyncio.ensure_future(path.carry(0, blocks))
        connection, _ = await asyncio.to_thread(listener.accept)
        with connection:
            lies(connection)
            with pytest.raises(NotMoved, match=match):
                await carrying
        path.close()
        source.drop(blocks, SMALL.bytes)


async def test_what_is_over_while_it_is_received_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step of a batch the target's node forgets the move."""
    with host_caches() as (source, target):
        blocks = source.put(4, SMALL.bytes, random.Random(1))
        async with opened(target) as door:
            for step in ("take", "views", "receiving"):
                path = Tcp(source.blocks, door.address, SMALL.bytes)
                arrival = door.expect(path.key, SMALL, TOKENS_MOST)
                monkeypatch.setattr(target.blocks, step, _ending(door, arrival, getattr(target.blocks, step)))
                with pytest.raises(NotMoved):
                    await path.carry(0, blocks)
                monkeypatch.undo()
                assert arrival.over and not arrival.host
                path.close()
                await soon(lambda: target.taken() == 0)
        source.drop(blocks, SMALL.bytes)


def _ending(door: BlockReceiver, arrival: Arrival, step: Callable[..., Any]) -> Callable[..., Any]:
    def ended(*arguments: Any) -> Any:
        door.end(arrival)
        return step(*arguments)

    return ended


async def test_a_move_that_is_broken_off_lets_go_of_its_socket_when_nobody_writes_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The socket's number could belong to a new socket by then."""
    begun, go_on, send = threading.Event(), threading.Event(), transport._send

    def waiting(connection: socket.socket, view: memoryview, deadline: float) -> None:
        begun.set()
        go_on.wait(5)
        send(connection, view, deadline)

    monkeypatch.setattr(transport, "_send", waiting)
    with host_caches() as (source, target):
        blocks = source.put(1, SMALL.bytes, random.Random(1))
        async with opened(target) as door:
            path = Tcp(source.blocks, door.address, SMALL.bytes)
            arrival = door.expect(path.key, SMALL, TOKENS_MOST)
            carrying = asyncio.ensure_future(path.carry(0, blocks))
            await soon(begun.is_set)
            connection = path._connection
            assert connection is not None
            carrying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await carrying
            path.close()
            assert connection.fileno() >= 0
            go_on.set()
            await soon(lambda: connection.fileno() < 0)
            await door.free(arrival)
        source.drop(blocks, SMALL.bytes)


async def test_an_address_that_can_not_be_had_is_said() -> None:
    with host_caches(1) as (cache,), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"STACCATO_TRANSPORT_BIND=127.0.0.1, port {port}: .*=0 for any"):
            BlockReceiver(cache.blocks).open("127.0.0.1", port)
        door = BlockReceiver(cache.blocks)
        with pytest.raises(NotMoved, match="receives nothing from other hosts"):
            door.expect(bytes(16), SMALL, TOKENS_MOST)
        door.open("127.0.0.1", advertise="gpu7.example.com")
        assert door.address.startswith("gpu7.example.com:") and not transport.is_loopback(door.address)
        await door.close()
    assert all(map(transport.is_loopback, ("127.0.0.1:5", "[::1]:5", "localhost:5")))
    assert transport.split("[::1]:5") == ("::1", 5)


def test_a_node_starts_without_torch_and_without_vllm() -> None:
    code = "import runtime.node, sys; sys.exit(bool({'torch', 'vllm', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
