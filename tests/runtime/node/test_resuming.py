"""A node keeps the streams of a dead gateway for clients that come back, and gives the streams to the next gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from pydantic import ByteSize

from runtime.config import RuntimeSettings
from runtime.node.gateways import SILENCE_S
from runtime.node.runtime import Node
from store.bus import Bus
from store.contract import wire
from store.contract.resumption import Resume, ResumeAnswer
from store.contract.wire import Delta, Finish, Frame, Resumable
from tests.conftest import NatsServer, soon
from tests.runtime.node.test_node import run

KEEP_S = 5.0
MARK = Resumable(b"owner", b"body", KEEP_S, started_at=1.0)
KEPT = wire.replace(run(1), resumable=MARK)


@pytest.fixture
async def node(nats_server: NatsServer) -> AsyncIterator[Node]:
    async with Bus.connect(nats_server.url, "r1") as bus:
        yield Node(bus, RuntimeSettings(runtime_id="r1", host_cache=ByteSize(1 << 20)))


async def ask(
    node: Node, gateway: str = "h", stream: int = 0, owner: bytes = b"owner", request: str = "q"
) -> ResumeAnswer:
    asked = Resume(gateway=gateway, request=request, owner=owner, model="m", stream=stream)
    return await node._resuming.resume(wire.encode(asked))


async def frames(node: Node, gateway: str) -> list[Delta]:
    """The deltas that come for a gateway, a list that grows."""
    heard: list[Delta] = []

    async def hear(data: bytes) -> None:
        heard.extend(wire.decode(Frame, data).deltas)

    await node._bus.subscribe(wire.frame_subject(gateway), hear)
    return heard


async def made(node: Node, *deltas: Delta) -> None:
    """Let the node hear deltas by the names that the device knows."""
    for gateway, each in node._gateways.named({"g": list(deltas)}):
        await node._streams.publish(gateway, each)


def silence(node: Node, gateway: str, seconds: float) -> None:
    node._gateways[gateway].silence.heard_at = time.monotonic() - seconds


async def test_a_stream_goes_on_at_the_gateway_that_takes_it_up(node: Node) -> None:
    old, new = await frames(node, "g"), await frames(node, "h")
    node._streams.open(KEPT)
    await made(node, Delta(1, [5, 6], 0, cached_tokens=2))
    found = await ask(node)
    assert (found.tokens, found.ended, found.made) == (2, False, None)
    taken = await ask(node, stream=9)
    assert taken.made is not None and taken.resumable is not None
    assert (taken.made.stream, taken.made.tokens, taken.made.cached_tokens) == (9, [5, 6], 2)
    assert (taken.resumable.taken, taken.resumable.started_at) == (1, 1.0)
    await made(node, Delta(1, [7], 2), Delta(1, [8], 3, Finish.LENGTH))
    await soon(lambda: len(new) == 2)
    assert [(delta.stream, delta.tokens, delta.at) for delta in new] == [(9, [7], 2), (9, [8], 3)]
    assert [delta.finish for delta in old] == [None, Finish.ERROR]
    again = await ask(node, gateway="i", stream=3)
    assert again.made is not None and (again.made.tokens, again.made.finish) == ([5, 6, 7, 8], Finish.LENGTH)
    assert again.ended and again.resumable is not None and again.resumable.taken == 2


async def test_another_owner_and_another_request_find_nothing(node: Node) -> None:
    node._streams.open(KEPT)
    assert await ask(node, owner=b"other") == await ask(node, request="p") == ResumeAnswer()
    assert await ask(node, stream=4, owner=b"other") == ResumeAnswer()
    assert node.stream("g", 1) is not None


async def test_a_dead_gateway_loses_a_kept_stream_later_than_other_streams(node: Node) -> None:
    node._streams.open(KEPT)
    node._streams.open(run(2))
    silence(node, "g", SILENCE_S + 0.5)
    await node._streams.beat(time.monotonic())
    assert node.stream("g", 1) is not None and node.stream("g", 2) is None
    silence(node, "g", SILENCE_S + KEEP_S + 0.5)
    await node._streams.beat(time.monotonic())
    assert node.stream("g", 1) is None and (await ask(node)).resumable is None


async def test_a_cancelled_stream_is_forgotten_unless_its_text_has_ended(node: Node) -> None:
    for number, keep in ((1, False), (2, True)):
        node._streams.open(wire.replace(KEPT, stream=number, request=f"q{number}"))
        await made(node, Delta(number, [5], 0))
        await node._streams.cancel(wire.Cancel(gateway="g", streams=[number], keep=keep))
    assert (await ask(node, request="q1")).resumable is None
    ended = await ask(node, request="q2", stream=7)
    assert ended.made is not None and (ended.made.tokens, ended.made.finish) == ([5], Finish.ABORT)


async def test_a_stream_that_was_taken_up_moves_to_no_other_runtime(node: Node) -> None:
    node._streams.open(KEPT)
    assert node._moves.movable("m") == [("g", 1)]
    await ask(node, stream=9)
    assert node._moves.movable("m") == [] and node.stream("h", 9) is not None


async def test_a_stream_on_the_move_is_not_taken_up(node: Node) -> None:
    stream, _ = node._streams.open(KEPT)
    stream.moving = True
    assert await ask(node, stream=9) == ResumeAnswer()
    stream.moving = False
    await node.hand_over("g", 1, wire.Moved("r2", 1, 0))
    assert await ask(node, stream=9) == ResumeAnswer()
    node.take_over(wire.replace(KEPT, stream=3), 2, [5, 6])
    back = await ask(node, stream=9)
    assert back.made is not None and back.made.tokens == [5, 6]


async def test_names_of_ended_streams_are_forgotten(node: Node) -> None:
    node._streams.open(KEPT)
    await ask(node, stream=9)
    await node._streams.beat(time.monotonic())
    assert node._gateways._names
    await made(node, Delta(1, [], 0, Finish.STOP))
    await node._streams.beat(time.monotonic())
    assert not node._gateways._names
    await asyncio.sleep(0)
