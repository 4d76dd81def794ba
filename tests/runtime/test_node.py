"""What a node obeys, and what it picks, without a device process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from pydantic import ByteSize

from runtime import pipe
from runtime.config import RuntimeSettings
from runtime.node import GATEWAY_SILENCE_S, Node
from runtime.quarantine import PAUSE_S_FIRST
from store import wire
from store.bus import Bus, ended
from store.settings import SettingsError, read
from store.wire import ModelState, Residency, Role
from tests.conftest import NatsServer, soon


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
    node._peers.changed(id, wire.replace(lease, **changes), time.monotonic())


def target(node: Node, model: str) -> str | None:
    """Where a stream of this model would go."""
    node.take_over(run(1, model=model), 0)
    return node._target("g", 1)


async def test_a_scheduler_of_an_earlier_term_is_not_obeyed(node: Node) -> None:
    async def told(term: int) -> wire.Reply:
        return await node._migrate(wire.encode(wire.Migrate(target="r2", term=term)))

    assert (await told(5)).refusal is None and (await told(5)).refusal is None
    refused = await told(4)
    assert refused.refusal is wire.Refusal.BUSY and "term 4 was replaced by that of term 5" in refused.reason
    assert (await told(6)).refusal is None


async def test_who_is_started_anew_begins_a_later_epoch_whatever_the_clock_says(node: Node) -> None:
    began = node.epoch
    node._begin_after(node._peers.lease("r1"))
    peer(node, "r1", epoch=began - 5)
    node._begin_after(node._peers.lease("r1"))
    assert node.epoch == began
    peer(node, "r1", epoch=began + 3_600_000)
    node._begin_after(node._peers.lease("r1"))
    assert node.epoch == node._own_lease().epoch == began + 3_600_001


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
    assert target(node, "m") is None
    peer(node, "unreached", host_cache="another:1")
    peer(node, "loopback", host_cache="another:1", receives_at="127.0.0.1:99")
    peer(node, "other", engine="another version")
    peer(node, "leaving", draining=True)
    peer(node, "broken", models={"m": ModelState(residency=Residency.FAILED)})
    peer(node, "r1")
    assert target(node, "m") is None
    peer(node, "asleep", models={"m": ModelState(residency=Residency.STAGED)})
    assert target(node, "m") == "asleep"
    peer(node, "busy", models={"m": ModelState(residency=Residency.RESIDENT, running=3)})
    peer(node, "free")
    assert target(node, "m") == "free" and target(node, "n") is None


async def test_who_computes_prompts_hands_on_to_those_who_make_tokens_alone(node: Node) -> None:
    await node._set_role(wire.encode(wire.SetRole(role=Role.PREFILL)))
    assert node._own_lease().role is Role.PREFILL
    peer(node, "like-me", role=Role.PREFILL)
    assert target(node, "m") is None
    peer(node, "decodes", role=Role.DECODE, models={"m": ModelState(residency=Residency.RESIDENT, running=9)})
    assert target(node, "m") == "decodes"
    await node._set_role(wire.encode(wire.SetRole(role=Role.BOTH)))
    node._peers.changed("decodes", None, 0.0)
    assert target(node, "m") == "like-me"  # to leave, better there than nowhere


async def test_a_runtime_of_this_host_comes_before_one_of_another_and_both_after_none_that_decodes(node: Node) -> None:
    far = {"host_cache": "another:1", "receives_at": "10.0.0.2:99"}
    peer(node, "far", **far)
    assert target(node, "m") == "far"
    peer(node, "near", models={"m": ModelState(residency=Residency.STAGED, running=9)})
    assert target(node, "m") == "near"
    peer(node, "near", role=Role.PREFILL)
    assert target(node, "m") == "far"
    peer(node, "same-machine", host_cache=f"{node.host_cache_id}0", receives_at="127.0.0.1:99")
    node._peers.changed("far", None, 0.0)
    assert target(node, "m") == "same-machine"


async def test_a_drain_waits_until_nobody_reads_what_has_left_any_more(node: Node) -> None:
    node._migrations._landing["m"] = asyncio.Event()
    draining = asyncio.create_task(node._drain())
    await asyncio.sleep(0.3)
    assert not draining.done()
    del node._migrations._landing["m"]
    await asyncio.wait_for(draining, 5)


def test_an_address_that_nobody_can_be_reached_by_is_not_told_to_others() -> None:
    with pytest.raises(ValueError, match="STACCATO_TRANSPORT_BIND=0.0.0.0 is no address to be reached by"):
        RuntimeSettings(transport_bind="0.0.0.0").check()
    RuntimeSettings(transport_bind="0.0.0.0", transport_advertise="gpu7.example.com").check()


def test_helpers_are_read_as_people_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACCATO_LOAD_HELPERS", "1, 2")
    settings = read(RuntimeSettings)
    settings.check()
    assert settings.load_helpers == (1, 2)
    for wrong in ("0", "32", "next"):
        monkeypatch.setenv("STACCATO_LOAD_HELPERS", wrong)
        with pytest.raises(SettingsError, match=f"^STACCATO_LOAD_HELPERS is '{wrong}': .+$"):
            read(RuntimeSettings)
    with pytest.raises(ValueError, match="STACCATO_LOAD_HELPERS=1,2 with STACCATO_TENSOR_PARALLEL=2"):
        RuntimeSettings(tensor_parallel=2, load_helpers=(1, 2)).check()


async def test_a_drain_can_be_called_off_and_what_an_operator_said_only_an_operator_takes_back(node: Node) -> None:
    async def told(on: bool, term: int) -> wire.Reply:
        return await node._hold(wire.encode(wire.Drain(on=on, term=term)))

    assert not (await told(True, 3)).refusal and node._own_lease().draining
    assert not (await told(False, 3)).refusal and not node._own_lease().draining
    await soon(lambda: node._emptying is None or node._emptying.done())
    assert not (await told(True, 0)).refusal
    refused = await told(False, 3)
    assert refused.refusal is wire.Refusal.DRAINING and "by an operator's word" in refused.reason
    assert node._own_lease().draining
    assert not (await told(False, 0)).refusal and not node._own_lease().draining


async def test_a_model_leaves_when_its_streams_have_ended_and_stays_if_it_is_wanted_again(node: Node) -> None:
    spec = wire.encode(limited())

    def placed(*runtimes: str) -> None:
        peer(node, "r2")
        node._places_changed("m", wire.encode(wire.Places(runtimes=list(runtimes))))

    node._spec_changed("m", spec)
    assert "m" in node._hosted
    node.take_over(run(1), 0)
    placed("r2")
    await asyncio.sleep(0.2)
    assert "m" in node._hosted and "m" in node._leaving, "a stream is open still"
    placed("r1", "r2")
    await asyncio.sleep(0.2)
    assert "m" in node._hosted and not node._leaving
    placed("r2")
    node._forget("g", [1])
    await soon(lambda: "m" not in node._hosted)
    assert not node._leaving


def limited() -> wire.EngineSpec:
    return wire.EngineSpec(
        key="m",
        path="",
        digest="",
        architecture="",
        dtype="float32",
        max_model_len=64,
        weight_bytes=0,
        kv_bytes_per_token=1,
        replicas=1,
    )


async def test_streams_of_a_gateway_that_was_not_heard_for_long_are_told_to_be_lost_for_it_may_live(
    node: Node, nats_server: NatsServer
) -> None:
    said: list[wire.Delta] = []

    async def hear(data: bytes) -> None:
        said.extend(wire.decode(wire.Frame, data).deltas)

    async with Bus.connect(nats_server.url, "g") as gateway:
        await gateway.subscribe(wire.frame_subject("g"), hear)
        await asyncio.sleep(0.05)  # the subscription reaches the server
        node.take_over(run(1), 3)
        node._gateways["g"].heard_at -= 2 * GATEWAY_SILENCE_S
        beating = asyncio.create_task(node._keep_heartbeat())
        await soon(lambda: said)
        await ended(beating)
    assert [(delta.stream, delta.at, delta.finish) for delta in said] == [(1, 3, wire.Finish.LOST)]
    assert node.stream("g", 1) is None


async def test_a_model_that_ends_the_device_process_when_it_is_loaded_is_not_given_to_it_for_a_while(
    node: Node,
) -> None:
    resident = {"m": ModelState(residency=Residency.RESIDENT, load_ms=1.0)}

    def dies(states: dict[str, ModelState], building: bool = False) -> str | None:
        if building:
            node._child.stepping.begin_build("m", 1.0)
        else:
            node._child.stepping.begin("m", 1.0)
        return node._child.autopsy(states)

    async def wake(model: str) -> wire.Reply:
        return await node._control(wire.encode(wire.Control(model=model, op="wake")))

    ours, theirs = pipe.pair()
    device = pipe.DeviceEnd(theirs)
    for key in ("m", "n"):
        node._spec_changed(key, wire.encode(wire.replace(limited(), key=key, replicas=0)))
    assert all(dies(resident) == "m" for _ in range(9)), "its requests are suspects, and it is not"
    assert (dies({}), dies({}, building=True), dies({})) == ("m", None, "m")
    node._device = await pipe.NodeEnd.open(ours)
    await node._from_device(pipe.Ready("e", 7), node._device)
    assert [command.spec.key for command in device.receive() if isinstance(command, pipe.Place)] == ["n"]
    shown, refused = node._own_lease().models["m"], node.refusal(run(1))
    assert shown.residency is Residency.FAILED and refused is not None
    assert refused.refusal is wire.Refusal.MODEL_FAILED and refused.reason == shown.error
    assert (await wake("m")).refusal is wire.Refusal.MODEL_FAILED and not (await wake("n")).refusal
    node._place(time.monotonic() + PAUSE_S_FIRST)
    assert [command.spec.key for command in device.receive() if isinstance(command, pipe.Place)] == ["m"]
    node._device.close()
    theirs.close()
    await asyncio.sleep(0)  # the other end is closed by the loop
