"""The bus against a real NATS server: refusals at the start, refusals to carry, and survival of a restart."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from nats.aio.client import Client

from store import bus as bus_module
from store import parts
from store.bus import Bus, BusError, NoAnswer, TooLarge
from store.contract import wire
from store.contract.limits import Account
from store.parts import REQUEST_MOST
from store.tasks import ended, within
from tests.conftest import NatsServer, free_port, soon


def usage(request: str, seq: int = 1) -> wire.Usage:
    return wire.Usage(
        request=request,
        attempt=1,
        seq=seq,
        final=True,
        tenant_id="t",
        key_id="k",
        deployment_id="d",
        deployment="d",
        revision=1,
        model="m",
        prompt_tokens=1,
        cached_tokens=0,
        output_tokens=2,
        started_at=0.0,
        ended_at=1.0,
        finish="stop",
    )


async def test_a_server_that_is_not_there_is_named_with_the_remedy() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(BusError, match=f"{url} is not reachable: .*STACCATO_NATS_URL"):
        async with Bus.connect(url, "test"):
            pass


async def test_a_server_without_jetstream_or_with_tiny_messages_is_refused(tmp_path: Path) -> None:
    bare = NatsServer(tmp_path / "bare")
    config = tmp_path / "bare" / "nats.conf"
    for text, complaint in (
        ("", "no usable JetStream"),
        ("max_payload: 64KB", "max_payload 65536, at least 1048576 are needed"),
    ):
        config.write_text(f'listen: "127.0.0.1:{bare.port}"\n{text}\n')
        bare.start()
        try:
            with pytest.raises(BusError, match=complaint):
                async with Bus.connect(bare.url, "test"):
                    pass
        finally:
            bare.kill()


async def test_what_is_too_large_is_refused_with_the_numbers(nats_server: NatsServer) -> None:
    async with Bus.connect(nats_server.url, "test") as bus:
        with pytest.raises(TooLarge) as caught:
            await bus.publish("anywhere", bytes(bus.max_payload + 1))
        assert caught.value.most == bus.max_payload and str(caught.value.size) in str(caught.value)
        with pytest.raises(TooLarge) as caught:
            await bus.request("anywhere", wire.Control(model="m" * REQUEST_MOST, op="wake"))
        assert caught.value.most == REQUEST_MOST and str(caught.value.size) in str(caught.value)


async def test_a_request_larger_than_a_message_arrives_whole_and_once(nats_server: NatsServer) -> None:
    heard: list[wire.Control] = []

    async def hear(data: bytes) -> wire.Reply:
        heard.append(wire.decode(wire.Control, data))
        return wire.Reply(reason=heard[-1].op)

    async with Bus.connect(nats_server.url, "test") as bus, Bus.connect(nats_server.url, "other") as other:
        await bus.respond("somewhere", hear)
        large = [wire.Control(model=str(n) * (bus.max_payload + n), op=f"op {n}") for n in range(4)]
        small = [wire.Control(model="m", op=f"small {n}") for n in range(20)]
        asked = [*large, *small]
        answers = await asyncio.gather(*(other.request("somewhere", control) for control in asked))
        assert [wire.decode(wire.Reply, answer).reason for answer in answers] == [control.op for control in asked]
        assert sorted(control.op for control in heard) == sorted(control.op for control in asked)
        assert {control.op: control.model for control in heard} == {control.op: control.model for control in asked}
        assert heard[-1].model != "m", "small requests pass between the parts of large requests"


async def test_a_large_request_without_a_listener_ends_at_the_first_part(nats_server: NatsServer) -> None:
    async with Bus.connect(nats_server.url, "test") as bus:
        with pytest.raises(NoAnswer):
            await bus.request("nobody", wire.Control(model="m" * (4 << 20), op="wake"))


async def test_a_process_without_room_for_a_large_request_says_so(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hear(data: bytes) -> wire.Reply:
        raise AssertionError("the request is refused before the request is whole")

    monkeypatch.setattr(parts, "JOINED_MOST", 3 << 20)
    async with Bus.connect(nats_server.url, "test") as bus:
        await bus.respond("somewhere", hear)
        answer = wire.decode(wire.Reply, await bus.request("somewhere", wire.Control(model="m" * (4 << 20), op="wake")))
        assert answer.refusal is wire.Refusal.BUSY and "would be above 3145728" in answer.reason


async def test_nobody_there_is_known_at_once(nats_server: NatsServer) -> None:
    async with Bus.connect(nats_server.url, "test") as bus:
        started = asyncio.get_running_loop().time()
        with pytest.raises(NoAnswer):
            await bus.request("nobody", wire.Control(model="m", op="wake"))
        assert asyncio.get_running_loop().time() - started < 1.0


async def test_a_request_that_does_not_decode_is_answered_and_the_next_is_served(nats_server: NatsServer) -> None:
    async with Bus.connect(nats_server.url, "test") as bus:

        async def answer(data: bytes) -> wire.Reply:
            return wire.Reply(reason=wire.decode(wire.Control, data).op)

        await bus.respond("ask", answer)
        reply = wire.decode(wire.Reply, await bus.request("ask", wire.GatewayAlive(gateway="g")))
        assert reply.refusal is wire.Refusal.BAD_MESSAGE and "Control" in reply.reason
        assert wire.decode(wire.Reply, await bus.request("ask", wire.Control(model="m", op="wake"))).reason == "wake"


async def test_a_watcher_sees_all_there_is_every_change_and_what_happened_while_it_was_away(
    nats_server: NatsServer,
) -> None:
    async with Bus.connect(nats_server.url, "watcher") as bus:
        seen: dict[str, bytes | None] = {}
        await bus.put(wire.MODELS, "before", wire.GatewayAlive(gateway="1"))
        await bus.watch(wire.MODELS, lambda key, value: seen.__setitem__(key, value))
        assert set(seen) == {"before"}
        await bus.put(wire.MODELS, "after", wire.GatewayAlive(gateway="2"))
        await bus.delete(wire.MODELS, "before")
        await asyncio.sleep(0.1)
        assert seen["before"] is None and seen["after"]
        await bus.put(wire.MODELS, "gone", wire.GatewayAlive(gateway="3"))
        await asyncio.sleep(0.1)
        nats_server.kill()
        nats_server.start()
        async with Bus.connect(nats_server.url, "other") as other:  # while the watcher is away
            await other.delete(wire.MODELS, "gone")
        while not bus.connected:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        assert seen["after"] and seen["gone"] is None, "the snapshot after a reconnect"


async def test_a_lease_that_is_not_renewed_is_gone(nats_server: NatsServer) -> None:
    async with Bus.connect(nats_server.url, "test") as bus:
        await bus.put(wire.LEASES, "r1", wire.GatewayAlive(gateway="1"))
        assert await bus.keys(wire.LEASES) == ["r1"]
        await asyncio.sleep(4.2)
        assert await bus.keys(wire.LEASES) == []


async def test_of_those_who_swap_one_wins_and_the_others_read_again(nats_server: NatsServer) -> None:
    async with Bus.connect(nats_server.url, "a") as one, Bus.connect(nats_server.url, "b") as other:
        assert await one.read(wire.QUOTAS, "t", Account) == (None, 0)
        first, second = Account(month="2026-11"), Account(month="2026-12")
        revision = await one.swap(wire.QUOTAS, "t", first, 0)
        assert revision and await other.swap(wire.QUOTAS, "t", second, 0) is None
        assert await other.read(wire.QUOTAS, "t", Account) == (first, revision)
        later = await other.swap(wire.QUOTAS, "t", second, revision)
        assert later and await one.swap(wire.QUOTAS, "t", first, revision) is None
        await other.delete(wire.QUOTAS, "t")
        gone, mark = await one.read(wire.QUOTAS, "t", Account)
        assert gone is None and await one.swap(wire.QUOTAS, "t", first, mark)


async def test_usage_survives_a_killed_server_and_comes_again_until_it_is_acknowledged(
    nats_server: NatsServer,
) -> None:
    async with Bus.connect(nats_server.url, "test") as bus:
        for n in range(3):
            await bus.publish_usage(usage(f"q{n}"))
        await bus.publish_usage(usage("q0"))  # a repeated message counts once
        nats_server.kill()
        with pytest.raises(BusError):
            await bus.publish_usage(usage("q3"))
        nats_server.start()
        while not bus.connected:
            await asyncio.sleep(0.05)
        await bus.publish_usage(usage("q3"))
        batches = bus.usage_batches("ledger", 10)
        first = await anext(batches)
        await first.ack()
        got = [u.request for u in first.usages]
        while len(got) < 4:
            batch = await anext(batches)
            await batch.ack()
            got += [u.request for u in batch.usages]
        assert sorted(got) == ["q0", "q1", "q2", "q3"]
        await batches.aclose()


async def test_usage_of_another_version_waits_for_who_understands_it(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "USAGE_AGAIN_S", 1)
    async with Bus.connect(nats_server.url, "test") as bus:
        await bus.publish_usage(usage("q0"))
        await bus.publish_usage(wire.replace(usage("q1"), v=wire.VERSION + 1))
        await bus._js.publish(wire.usage_subject("t"), b"no message at all")
        batches = bus.usage_batches("ledger", 10)
        first = await anext(batches)
        await first.ack()
        assert [u.request for u in first.usages] == ["q0"]
        monkeypatch.setattr(wire, "VERSION", wire.VERSION + 1)  # as after an upgrade
        while not (later := await anext(batches)).usages:
            await later.ack()
        await later.ack()
        assert [u.request for u in later.usages] == ["q1"]
        assert len(later.messages) == 1, "what nobody can read came again"
        await batches.aclose()


def test_a_message_of_another_version_is_refused_by_name() -> None:
    data = wire.encode(wire.GatewayAlive(gateway="g", v=2))
    with pytest.raises(wire.WireError, match="GatewayAlive has version 2, this process speaks 1"):
        wire.decode(wire.GatewayAlive, data)


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.tasks.CANCEL_AGAIN_S", 0.1)

    async def swallows_one() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    tasks = [asyncio.create_task(swallows_one()), asyncio.create_task(asyncio.sleep(60))]
    await asyncio.sleep(0)
    await asyncio.wait_for(ended(*tasks), 5)
    assert all(task.cancelled() for task in tasks)


async def test_a_connection_that_swallows_its_cancellation_is_given_up_in_time() -> None:
    """The NATS client waits with the wait_for of Python 3.11, which can swallow a cancellation and try for ever."""

    async def stubborn() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await within(stubborn(), 0.05)


async def test_a_closed_connection_does_not_look_for_a_server(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was told to leave while the bus was away did not end: nats-py went on connecting.

    Each cancellation finds nats-py at the end of an attempt to connect, so `wait_for` of Python 3.11 swallows each."""
    tried = 0
    before = asyncio.all_tasks()

    async def refused(*_: object) -> None:
        nonlocal tried
        tried += 1
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.1)
        raise ConnectionRefusedError

    async with Bus.connect(nats_server.url, "test") as bus:
        monkeypatch.setattr(Client, "_connect_to_server", refused)
        nats_server.kill()
        await soon(lambda: tried > 2 and not bus.connected)
    await soon(lambda: asyncio.all_tasks() == before)


async def test_the_server_knows_a_subscription_once_the_connection_has_caught_up(nats_server: NatsServer) -> None:
    heard: list[bytes] = []

    async def hear(data: bytes) -> None:
        heard.append(data)

    async with Bus.connect(nats_server.url, "says") as says, Bus.connect(nats_server.url, "hears") as hears:
        for number in range(200):  # the race was lost once in twenty times
            await hears.subscribe(f"gw.{number}.frames", hear)
            await hears.catch_up(5)
            await says.publish(f"gw.{number}.frames", b"%d" % number)
        await soon(lambda: len(heard) == 200)
