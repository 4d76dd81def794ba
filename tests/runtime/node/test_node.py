"""Orders that a node obeys, and the node's choice of targets, without a device process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from pydantic import ByteSize

from runtime import ipc
from runtime.config import RuntimeSettings
from runtime.core.fleet.crash_backoff import PAUSE_S_FIRST
from runtime.node import parting
from runtime.node.gateways import SILENCE_S
from runtime.node.runtime import Node
from store.bus import Bus
from store.contract import grants, wire
from store.contract.priorities import Priority
from store.contract.reports import Report, report_subject
from store.contract.wire import ModelState, Residency, Role
from store.leases import watch_leases
from store.settings import SettingsError, read
from store.tasks import ended
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
    """Let the node hear the lease of a second runtime."""
    here = {"m": ModelState(residency=Residency.RESIDENT)}
    lease = wire.Lease(runtime=id, epoch=1, engine="", host_cache=node.host_cache_id, models=here)
    node._peers.changed(id, wire.replace(lease, **changes), time.monotonic())


def target(node: Node, model: str) -> str | None:
    """The runtime to which the node would move a stream of the model; None without a target."""
    node.take_over(run(1, model=model), 0)
    return node._moves.target("g", 1)


async def test_a_scheduler_of_an_earlier_term_is_not_obeyed(node: Node) -> None:
    async def told(term: int) -> wire.Reply:
        return await node._moves.migrate(wire.encode(wire.Migrate(target="r2", term=term)))

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
    assert node.epoch == node._lease.lease().epoch == began + 3_600_001


async def test_a_reader_has_the_states_of_all_models_from_leases_that_hold_what_changed(node: Node) -> None:
    states = {f"m{number}": ModelState(residency=Residency.STAGED) for number in range(200)}
    node._own.state = ipc.State(models=states)
    whole: dict[str, wire.Lease] = {}
    sent: list[wire.Lease] = []

    async def published(data: bytes) -> None:
        sent.append(wire.decode(wire.Lease, data))

    await watch_leases(node._bus, lambda id, lease: whole.update({id: lease} if lease else {}))
    await node._bus.subscribe(grants.key(wire.LEASES, "r1"), published)
    keeping = asyncio.create_task(node._lease.keep())
    await soon(lambda: "r1" in whole and whole["r1"].models == states)
    changed = states | {"m7": ModelState(residency=Residency.RESIDENT, running=1)}
    node._own.state = ipc.State(models=changed)
    node._own.lease_due.set()
    await soon(lambda: whole["r1"].models == changed)
    assert sent[-1].base == 1 and sent[-1].models.keys() == {"m7"}
    node._lease._lost(frozenset({wire.LEASE_BASES}))
    node._own.lease_due.set()
    await soon(lambda: sent[-1].base == 2)
    await soon(lambda: whole["r1"].models == changed)
    await ended(keeping)


async def test_the_least_urgent_and_of_these_the_shortest_move_first(node: Node) -> None:
    for asked in (run(1, 50), run(2, 10), run(3, 99, patience_s=0.0), run(4, 1, patience_s=6.0), run(5, model="n")):
        node.take_over(asked, 0)
    assert [number for _, number in node._moves.movable("m")] == [3, 2, 1, 4]
    assert ("g", 5) in node._moves.movable() and ("g", 5) not in node._moves.movable("m")
    moving = node.stream("g", 3)
    assert moving is not None
    moving.moving = True
    assert [number for _, number in node._moves.movable("m")] == [2, 1, 4]


async def test_high_priority_moves_last_however_patient_other_streams_are(node: Node) -> None:
    node.take_over(wire.replace(run(1), priority=Priority.HIGH, patience_s=6.0), 0)
    node.take_over(run(2, patience_s=15.0), 0)
    node.take_over(wire.replace(run(3), priority=Priority.BATCH, patience_s=0.0), 0)
    assert [number for _, number in node._moves.movable("m")] == [3, 2, 1]


async def test_a_request_goes_to_the_runtime_of_this_host_where_the_model_has_requests_else_where_it_is(
    node: Node,
) -> None:
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
    peer(node, "free")
    assert target(node, "m") == "free" and target(node, "n") is None
    peer(node, "runs-it", models={"m": ModelState(residency=Residency.STAGED, running=3)})  # parked between two turns
    assert target(node, "m") == "runs-it"


async def test_reports_of_peers_are_heard_from_the_first_time_on_that_the_node_gives_streams_away(node: Node) -> None:
    peer(node, "a")
    peer(node, "b")
    chosen = target(node, "m")
    assert chosen is not None
    leaving = Report(runtime=chosen, epoch=1, seq=1, draining=True)
    await node._bus.publish(report_subject(chosen), wire.encode(leaving))
    await node._bus.catch_up(5)
    assert target(node, "m") == chosen
    await node._moves.move_off_all()
    await node._bus.publish(report_subject(chosen), wire.encode(leaving))
    await soon(lambda: target(node, "m") not in (chosen, None))


async def test_who_computes_prompts_hands_on_to_those_who_make_tokens_alone(node: Node) -> None:
    await node._moves.set_role(wire.encode(wire.SetRole(role=Role.PREFILL)))
    assert node._lease.lease().role is Role.PREFILL
    peer(node, "like-me", role=Role.PREFILL)
    assert target(node, "m") is None
    peer(node, "decodes", role=Role.DECODE, models={"m": ModelState(residency=Residency.RESIDENT, running=9)})
    assert target(node, "m") == "decodes"
    await node._moves.set_role(wire.encode(wire.SetRole(role=Role.BOTH)))
    node._peers.changed("decodes", None, 0.0)
    assert target(node, "m") == "like-me"  # for a drain, better than no target


async def test_a_scheduler_gives_and_takes_back_its_own_roles_alone(node: Node) -> None:
    async def told(role: Role, term: int) -> wire.Refusal | None:
        return (await node._moves.set_role(wire.encode(wire.SetRole(role=role, term=term)))).refusal

    assert await told(Role.PREFILL, 3) is None
    assert (node._lease.lease().role, node._lease.lease().role_given) == (Role.PREFILL, True)
    assert await told(Role.BOTH, 2) is wire.Refusal.BUSY  # a scheduler that was replaced
    assert await told(Role.BOTH, 3) is None
    assert (node._lease.lease().role, node._lease.lease().role_given) == (Role.BOTH, False)
    assert await told(Role.DECODE, 0) is None
    assert await told(Role.PREFILL, 3) is wire.Refusal.BUSY
    assert (node._lease.lease().role, node._lease.lease().role_given) == (Role.DECODE, False)
    assert await told(Role.BOTH, 0) is None and await told(Role.PREFILL, 3) is None


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
    node._migrations._releasing["m"] = asyncio.Event()
    draining = asyncio.create_task(node._drain())
    await asyncio.sleep(0.3)
    assert not draining.done()
    del node._migrations._releasing["m"]
    await asyncio.wait_for(draining, 30)


def test_an_address_that_nobody_can_be_reached_by_is_not_told_to_others() -> None:
    with pytest.raises(ValueError, match="STACCATO_TRANSPORT_BIND=0.0.0.0 is no address to be reached by"):
        RuntimeSettings(transport_bind="0.0.0.0").check()
    named = RuntimeSettings(transport_bind="0.0.0.0", transport_advertise="gpu7.example.com", transport_plaintext=True)
    named.check()


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
        return await node._moves.drain(wire.encode(wire.Drain(on=on, term=term)))

    assert not (await told(True, 3)).refusal and node._lease.lease().draining and node._lease.lease().surplus
    assert not (await told(False, 3)).refusal and not node._lease.lease().draining
    assert not node._lease.lease().surplus
    await soon(lambda: node._moves.emptying is None or node._moves.emptying.done())
    assert not (await told(True, 0)).refusal
    refused = await told(False, 3)
    assert refused.refusal is wire.Refusal.DRAINING and "by an operator's word" in refused.reason
    assert node._lease.lease().draining and not node._lease.lease().surplus
    assert not (await told(False, 0)).refusal and not node._lease.lease().draining


async def test_an_operator_may_take_over_a_drain_by_the_scheduler_and_may_call_that_drain_off(node: Node) -> None:
    for on, term, draining, surplus in ((True, 3, True, True), (True, 0, True, False), (False, 0, False, False)):
        assert not (await node._moves.drain(wire.encode(wire.Drain(on=on, term=term)))).refusal
        lease = node._lease.lease()
        assert (lease.draining, lease.surplus) == (draining, surplus)
    await node._moves.drain(wire.encode(wire.Drain(on=True, term=4)))
    await node._moves.drain(wire.encode(wire.Drain(on=False, term=0)))
    assert not node._lease.lease().draining


async def test_a_runtime_about_to_end_is_surplus_only_if_the_scheduler_drained_the_runtime(node: Node) -> None:
    node._own.ending = True
    assert (node._lease.lease().draining, node._lease.lease().surplus) == (True, False)
    await node._moves.drain(wire.encode(wire.Drain(on=True, term=1)))
    assert (node._lease.lease().draining, node._lease.lease().surplus) == (True, True)


async def test_a_model_leaves_when_its_streams_have_ended_and_stays_if_it_is_wanted_again(node: Node) -> None:
    spec = limited()

    def placed(*runtimes: str) -> None:
        peer(node, "r2")
        node._serving.places_changed("m", wire.encode(wire.Places(runtimes=list(runtimes))))

    node._serving.spec_changed("m", spec)
    assert "m" in node._serving.hosted
    node.take_over(run(1), 0)
    placed("r2")
    await asyncio.sleep(0.2)
    assert "m" in node._serving.hosted and "m" in node._serving.leaving, "a stream is open still"
    placed("r1", "r2")
    await asyncio.sleep(0.2)
    assert "m" in node._serving.hosted and not node._serving.leaving
    placed("r2")
    node.give_back(run(1))
    await soon(lambda: "m" not in node._serving.hosted)
    assert not node._serving.leaving


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
        node._gateways["g"].silence.heard_at -= 2 * SILENCE_S
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
        return await node._serving.control(wire.encode(wire.Control(model=model, op="wake")))

    ours, theirs = ipc.pair()
    device = ipc.DeviceEnd(theirs)
    for key in ("m", "n"):
        node._serving.spec_changed(key, wire.replace(limited(), key=key, replicas=0))
    assert all(dies(resident) == "m" for _ in range(9)), "its requests are suspects, and it is not"
    assert (dies({}), dies({}, building=True), dies({})) == ("m", None, "m")
    pipe = node._own.device = await ipc.NodeEnd.open(ours)
    await node._from_device(ipc.DeviceReady("e", 7), pipe)
    assert [command.spec.key for command in device.receive() if isinstance(command, ipc.Place)] == ["n"]
    shown, refused = node._lease.lease().models["m"], node.refusal(run(1))
    assert shown.residency is Residency.FAILED and refused is not None
    assert refused.refusal is wire.Refusal.MODEL_FAILED and refused.reason == shown.error
    assert (await wake("m")).refusal is wire.Refusal.MODEL_FAILED and not (await wake("n")).refusal
    node._serving.place(time.monotonic() + PAUSE_S_FIRST)
    assert [command.spec.key for command in device.receive() if isinstance(command, ipc.Place)] == ["m"]
    pipe.close()
    theirs.close()
    await asyncio.sleep(0)  # the other end is closed by the loop


class Told:
    """An end of a device's pipe that notes the messages sent."""

    def __init__(self) -> None:
        self.sent: list[ipc.ToDevice] = []

    def send(self, message: ipc.ToDevice) -> None:
        self.sent.append(message)


async def test_a_cancelled_stream_ends_with_the_last_words_of_its_device(node: Node, nats_server: NatsServer) -> None:
    said: list[wire.Delta] = []

    async def hear(data: bytes) -> None:
        said.extend(wire.decode(wire.Frame, data).deltas)

    async with Bus.connect(nats_server.url, "g") as gateway:
        await gateway.subscribe(wire.frame_subject("g"), hear)
        await asyncio.sleep(0.05)  # the subscription reaches the server
        cancel = wire.encode(wire.Cancel(gateway="g", streams=[1, 7]))
        device = Told()
        node._own.device = device  # type: ignore[assignment]
        node.take_over(run(1), 3)
        for _ in range(2):
            await node._cancel(cancel)
        assert device.sent == [ipc.Stop("g", [1])] and node.stream("g", 1) is None and not node._moves.movable()
        made = ipc.Made({"g": [wire.Delta(1, [5], 3), wire.Delta(1, [], 4, wire.Finish.ABORT)]})
        await node._from_device(made, device)  # type: ignore[arg-type]
        await soon(lambda: len(said) == 2)
        assert [(delta.at, delta.finish) for delta in said] == [(3, None), (4, wire.Finish.ABORT)]
        assert not node._gateways["g"].streams

        node.take_over(run(1), 6)
        node._own.device = None
        await node._cancel(cancel)
        await soon(lambda: len(said) == 3)
        assert (said[-1].at, said[-1].finish) == (6, wire.Finish.ABORT), "a device that is gone says nothing"


async def test_a_device_that_says_nothing_of_a_cancelled_stream_is_not_waited_for_without_end(node: Node) -> None:
    node._own.device = Told()  # type: ignore[assignment]
    node.take_over(run(1), 3)
    await node._cancel(wire.encode(wire.Cancel(gateway="g", streams=[1])))
    beating = asyncio.create_task(node._keep_heartbeat())
    await asyncio.sleep(0.7)
    assert node._gateways["g"].streams, "it builds an engine, perhaps"
    stream = node._gateways["g"].streams[1]
    assert stream.left_at is not None
    stream.left_at -= parting.ANSWER_S
    await soon(lambda: not node._gateways["g"].streams)
    await ended(beating)


async def test_the_device_hears_which_models_a_schedule_keeps_warm_and_a_new_device_hears_it_again(node: Node) -> None:
    always = wire.replace(limited(), replicas=0, warm=("Mon-Sun 0:00-24:00 UTC",))
    node._serving.spec_changed("m", always)
    node._serving.spec_changed("n", wire.replace(limited(), key="n", replicas=0))
    for _ in range(2):
        ours, theirs = ipc.pair()
        device = ipc.DeviceEnd(theirs)
        pipe = node._own.device = await ipc.NodeEnd.open(ours)
        await node._from_device(ipc.DeviceReady("e", 7), pipe)
        node._serving.host()
        node._serving.host()
        said = [command for command in device.receive() if isinstance(command, ipc.Warm)]
        assert said == [ipc.Warm("m", True)]
        node._own.device_lost()
        node._serving.device_lost()
        pipe.close()
        theirs.close()
    await asyncio.sleep(0)  # the other ends are closed by the loop


async def test_the_device_hears_which_models_return_and_which_are_new(node: Node) -> None:
    node._serving.spec_changed("m", wire.replace(limited(), replicas=0))
    ours, theirs = ipc.pair()
    device = ipc.DeviceEnd(theirs)
    pipe = node._own.device = await ipc.NodeEnd.open(ours)
    await node._from_device(ipc.DeviceReady("e", 7), pipe)
    node._serving.spec_changed("n", wire.replace(limited(), key="n", replicas=0))
    node._serving.spec_changed("m", None)
    node._serving.spec_changed("m", wire.replace(limited(), replicas=0))
    places = [command for command in device.receive() if isinstance(command, ipc.Place)]
    assert [(place.spec.key, place.returns) for place in places] == [("m", True), ("n", False), ("m", False)]
    pipe.close()
    theirs.close()
    await asyncio.sleep(0)  # the other end is closed by the loop
