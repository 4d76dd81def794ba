"""Running processes after the NATS server lost streams and buckets: a real server with a deleted folder."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from store import bus as bus_module
from store.bus import Bus, BusError
from store.contract import wire
from store.streams import LEASE_TTL_S
from tests.conftest import NatsServer, soon
from tests.store.test_bus import usage

STORED = "js"  # NatsServer's folder for JetStream


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    async with Bus.connect(nats_server.url, "test") as bus:
        yield bus


async def restarted_empty(server: NatsServer, bus: Bus, folder: Path) -> None:
    """Restart the server with an empty store. Returns when `bus` is connected again."""
    server.kill()
    shutil.rmtree(folder / "nats" / STORED)
    await soon(lambda: not bus.connected)
    server.start()
    await soon(lambda: bus.connected)


async def stored(bus: Bus, bucket: str, key: str) -> None:
    """Returns once a value could be put."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(BusError):
                await bus.put(bucket, key, wire.GatewayAlive(gateway="g"), 1.0)
                return
            await asyncio.sleep(0.1)


async def test_what_a_server_has_lost_is_made_again_by_a_running_process(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    lost: set[str] = set()
    bus.on_lost(lost.update)
    await restarted_empty(nats_server, bus, tmp_path)
    buckets = {wire.LEASES, wire.LEASE_BASES, wire.MODELS, wire.PLACES, wire.LEADER, wire.QUOTAS}
    await soon(lambda: lost == {*buckets, wire.USAGE_STREAM})
    for bucket in buckets:
        await stored(bus, bucket, "k")
        assert await bus.keys(bucket) == ["k"]
    await bus.publish_usage(usage("q"))


async def test_what_somebody_deletes_of_a_server_that_runs_is_made_again(bus: Bus) -> None:
    """No process reconnects: the first message not stored tells of the loss."""
    await bus.watch(wire.LEASES, lambda key, value: None)  # hears a message even if no stream keeps the message
    for name in (f"KV_{wire.LEASES}", wire.USAGE_STREAM):
        await bus._js.delete_stream(name)
    await stored(bus, wire.LEASES, "r1")
    with contextlib.suppress(BusError):
        await bus.publish_usage(usage("q0"))
    await soon(lambda: not bus._doubt.is_set())
    await bus.publish_usage(usage("q1"))


async def test_a_server_that_kept_everything_has_lost_nothing(bus: Bus, nats_server: NatsServer) -> None:
    lost: set[str] = set()
    bus.on_lost(lost.update)
    nats_server.kill()
    await soon(lambda: not bus.connected)
    nats_server.start()
    await soon(lambda: bus.connected)
    await stored(bus, wire.LEASES, "k")
    await soon(lambda: not (bus._behind or bus._doubt.is_set()))
    assert lost == set()


async def test_a_lost_key_is_not_taken_for_a_deleted_one_until_there_was_time_to_put_it_again(
    bus: Bus, nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a node would end the streams of a model as if the model were not wanted any more."""
    monkeypatch.setattr(bus_module, "REFILL_S", 2.0)
    seen: dict[str, bytes | None] = {}
    for key in ("kept", "forgotten"):
        await bus.put(wire.MODELS, key, wire.GatewayAlive(gateway="g"))
    await bus.watch(wire.MODELS, seen.__setitem__)
    lost: set[str] = set()
    bus.on_lost(lost.update)
    await restarted_empty(nats_server, bus, tmp_path)
    await soon(lambda: wire.MODELS in lost)
    await soon(lambda: not bus._lost)
    assert seen["kept"] and seen["forgotten"], "missing, and not deleted"
    await stored(bus, wire.MODELS, "kept")
    await soon(lambda: seen["forgotten"] is None)
    assert seen["kept"]


async def taking_usage(bus: Bus) -> tuple[list[str], asyncio.Task[None]]:
    """Take usage of the stream. Returns the requests taken, the request `before` among them, and the taking task."""
    taken: list[str] = []

    async def take() -> None:
        async for batch in bus.usage_batches("ledger", 100):
            await batch.ack()
            taken.extend(usage.request for usage in batch.usages)

    taking = asyncio.create_task(take())
    await bus.publish_usage(usage("before"))
    await soon(lambda: taken == ["before"])
    return taken, taking


async def test_usage_is_taken_from_the_stream_and_consumer_that_were_made_again(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    taken, taking = await taking_usage(bus)
    await restarted_empty(nats_server, bus, tmp_path)
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(BusError):
                await bus.publish_usage(usage("after"))
                break
            await asyncio.sleep(0.1)
    await soon(lambda: "after" in taken)
    await bus_module.ended(taking)


async def test_a_term_is_higher_than_any_before_in_a_bucket_that_was_made_again(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    """Runtimes obey no leader with a lower term."""
    first = await bus.take_lead("scheduler", "a")
    assert first
    last: int | None = first.last
    for _ in range(30):
        assert last
        last = await bus.keep_lead("scheduler", wire.Leader(holder="a", term=first.term), last)
    await asyncio.sleep(2.5)  # revisions come no faster than TERMS_PER_S
    lost: set[str] = set()
    bus.on_lost(lost.update)
    await restarted_empty(nats_server, bus, tmp_path)
    await soon(lambda: wire.LEADER in lost)
    second = await bus.take_lead("scheduler", "b")
    assert second and second.term > first.term


async def test_a_lease_of_this_moment_is_not_taken_for_deleted_by_a_look_at_the_bucket(bus: Bus) -> None:
    """A cluster that elects a leader passes leases on to watchers and does not store the leases. Here a wrong revision
    keeps the server from storing."""
    seen: dict[tuple[str, str], bytes | None] = {}
    for bucket in (wire.LEASES, wire.MODELS):
        await bus.watch(bucket, lambda key, value, bucket=bucket: seen.__setitem__((bucket, key), value))  # type: ignore[misc]
        assert await bus.swap(bucket, "k", wire.GatewayAlive(gateway="g"), 99) is None
    await soon(lambda: len(seen) == 2)

    async def looked() -> None:
        bus._behind = True
        bus._doubt.set()
        await soon(lambda: not (bus._behind or bus._doubt.is_set()))

    await looked()
    assert seen[wire.LEASES, "k"] and seen[wire.MODELS, "k"] is None
    await asyncio.sleep(LEASE_TTL_S)
    await looked()
    assert seen[wire.LEASES, "k"] is None


async def test_a_ledger_whose_consumer_has_no_leader_for_a_while_takes_usage_again(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers of a cluster answer no question about a consumer that lost its leader: here the question times out
    once, in the middle of making the subscription anew."""
    taken, taking = await taking_usage(bus)
    asked, subscribe = 0, bus._js.pull_subscribe

    async def late_once(*arguments: object, **named: object) -> object:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise TimeoutError
        return await subscribe(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(bus._js, "pull_subscribe", late_once)
    await bus._js.delete_consumer(wire.USAGE_STREAM, "ledger")  # the next pull fails
    await soon(lambda: asked >= 1)
    await bus.publish_usage(usage("after"))
    await soon(lambda: "after" in taken)
    await bus_module.ended(taking)
