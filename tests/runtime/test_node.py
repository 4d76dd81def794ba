"""What a node obeys, and what it picks, without a device process."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
from pydantic import ByteSize

from runtime.config import RuntimeSettings
from runtime.node import Node
from store import wire
from store.bus import Bus
from store.wire import ModelState, Residency, Role
from tests.conftest import NatsServer


@pytest.fixture
async def node(nats_server: NatsServer) -> AsyncIterator[Node]:
    async with Bus.connect(nats_server.url, "r1") as bus:
        yield Node(bus, RuntimeSettings(runtime_id="r1", host_cache=ByteSize(1 << 20)))


def run(stream: int, prompt_tokens: int = 1, patience_s: float = 1.5, model: str = "m") -> wire.Run:
    return wire.Run(
        gateway="g",
        stream=stream,
        model=model,
        request="q",
        attempt=1,
        prompt_tokens=prompt_tokens,
        max_tokens=9,
        payload=b"",
        engine="e",
        patience_s=patience_s,
    )


def peer(node: Node, id: str, **changes: object) -> None:
    """Another runtime's lease."""
    here = {"m": ModelState(residency=Residency.RESIDENT)}
    lease = wire.Lease(runtime=id, epoch=1, engine="", host_cache=node.host_cache_id, models=here)
    node._peers[id] = wire.replace(lease, **changes), time.monotonic()


async def test_a_scheduler_of_an_earlier_term_is_not_obeyed(node: Node) -> None:
    async def told(term: int) -> wire.Reply:
        return await node._migrate(wire.encode(wire.Migrate(target="r2", term=term)))

    assert (await told(5)).refusal is None and (await told(5)).refusal is None
    refused = await told(4)
    assert refused.refusal is wire.Refusal.BUSY and "term 4 was replaced by that of term 5" in refused.reason
    assert (await told(6)).refusal is None


async def test_the_least_urgent_and_of_these_the_shortest_move_first(node: Node) -> None:
    for asked in (run(1, 50), run(2, 10), run(3, 99, patience_s=0.0), run(4, 1, patience_s=6.0), run(5, model="n")):
        node.take_over(asked, 0)
    assert [number for _, number in node._movable("m")] == [3, 2, 1, 4]
    assert ("g", 5) in node._movable() and ("g", 5) not in node._movable("m")
    moving = node.stream("g", 3)
    assert moving is not None
    moving.moving = True
    assert [number for _, number in node._movable("m")] == [2, 1, 4]


async def test_a_request_goes_to_the_runtime_of_this_host_that_has_the_model_and_least_to_do(node: Node) -> None:
    assert node._peer("m") is None
    peer(node, "far", host_cache="another host")
    peer(node, "other", engine="another version")
    peer(node, "leaving", draining=True)
    peer(node, "broken", models={"m": ModelState(residency=Residency.FAILED)})
    peer(node, "r1")
    assert node._peer("m") is None
    peer(node, "asleep", models={"m": ModelState(residency=Residency.STAGED)})
    assert node._peer("m") == "asleep"
    peer(node, "busy", models={"m": ModelState(residency=Residency.RESIDENT, running=3)})
    peer(node, "free")
    assert node._peer("m") == "free" and node._peer("n") is None


async def test_who_computes_prompts_hands_on_to_those_who_make_tokens_alone(node: Node) -> None:
    await node._set_role(wire.encode(wire.SetRole(role=Role.PREFILL)))
    assert node._lease().role is Role.PREFILL
    peer(node, "like-me", role=Role.PREFILL)
    assert node._peer("m") is None
    peer(node, "decodes", role=Role.DECODE, models={"m": ModelState(residency=Residency.RESIDENT, running=9)})
    assert node._peer("m") == "decodes"
    await node._set_role(wire.encode(wire.SetRole(role=Role.BOTH)))
    del node._peers["decodes"]
    assert node._peer("m") == "like-me"  # to leave, better there than nowhere
