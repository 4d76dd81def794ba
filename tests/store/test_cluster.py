"""The bus over a cluster of three real servers: stored messages survive the loss of any server, once and no more."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.ops.bus_servers import BusServer
from store import bus as bus_module
from store.bus import Bus, BusError
from store.contract import grants, wire
from store.tasks import ended
from tests.conftest import soon
from tests.store.clusters import NatsCluster, behind, leader_of, server_of
from tests.store.test_bus import usage

STREAMS = (*grants.BUCKETS, wire.USAGE_STREAM)
CUT_S = 10.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    with NatsCluster.running(tmp_path) as running:
        yield running


@pytest.fixture
async def bus(cluster: NatsCluster) -> AsyncIterator[Bus]:
    async with Bus.connect(cluster.url, "test", replicas=3) as bus:
        yield bus


async def published(bus: Bus, request: str) -> None:
    """Publish usage as the meter does: again, until JetStream has the usage."""
    while True:
        with contextlib.suppress(BusError):
            return await bus.publish_usage(usage(request))
        await asyncio.sleep(0.1)


class CountingLedger:
    """A ledger that counts the booked requests, and acknowledges a batch after the booking."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.booked: Counter[str] = Counter()

    async def run(self) -> None:
        async for batch in self._bus.usage_batches(grants.BOOKS, 100):
            self.booked.update(usage.request for usage in batch.usages)
            with contextlib.suppress(BusError):
                await batch.ack()


async def test_every_stream_and_bucket_has_three_replicas(bus: Bus) -> None:
    await caught_up(bus)  # a server may have begun after the making of a stream
    for name in STREAMS:
        stream = name if name == wire.USAGE_STREAM else f"KV_{name}"
        assert (await bus._js.stream_info(stream)).config.num_replicas == 3


async def test_usage_survives_the_loss_of_each_server_in_turn(cluster: NatsCluster, bus: Bus) -> None:
    async with Bus.connect(cluster.url, "ledger", replicas=3) as other:
        ledger = CountingLedger(other)
        booking = asyncio.create_task(ledger.run())
        requests = []
        for server in cluster.servers:
            cluster.kill(server.name)
            for number in range(20):
                requests.append(f"{server.name} {number}")
                await published(bus, requests[-1])
            cluster.start(server.name)
            await caught_up(bus)
        await soon(lambda: len(ledger.booked) == len(requests))
        await ended(booking)
    assert ledger.booked.keys() == set(requests)
    stored = (await bus._js.stream_info(wire.USAGE_STREAM)).state.messages
    assert stored == len(requests), "a usage published again is stored once"


def at_server(cluster: NatsCluster, bus: Bus) -> BusServer:
    """Return the server to which the bus is connected."""
    (found,) = (server for server in cluster.servers if server.port == server_of(bus))
    return found


async def caught_up(bus: Bus) -> None:
    """Return when every server has every message of every stream; fail after 60 s."""
    async with asyncio.timeout(60):
        for name in STREAMS:
            while True:
                with contextlib.suppress(Exception):  # the stream has no leader for some seconds
                    if not await behind(bus, name):
                        break
                await asyncio.sleep(0.1)


async def test_a_server_cut_off_for_ten_seconds_books_nothing_twice(cluster: NatsCluster, bus: Bus) -> None:
    """The leader of the usage is cut off in the middle of messages, and comes back with messages of its own."""
    async with Bus.connect(cluster.url, "ledger", replicas=3) as other:
        ledger = CountingLedger(other)
        booking = asyncio.create_task(ledger.run())
        cut = await leader_of(bus, wire.USAGE_STREAM)
        publishing = [asyncio.create_task(published(bus, f"q{number}")) for number in range(200)]
        await asyncio.sleep(0)
        cluster.suspend(cut)
        publishing += [asyncio.create_task(published(bus, f"later {number}")) for number in range(50)]
        await asyncio.sleep(CUT_S)
        cluster.resume(cut)
        await asyncio.gather(*publishing)
        await caught_up(bus)
        await soon(lambda: len(ledger.booked) == len(publishing))
        await ended(booking)
    assert (await bus._js.stream_info(wire.USAGE_STREAM)).state.messages == len(publishing)


async def test_clients_of_a_silent_server_go_on_at_another(cluster: NatsCluster, bus: Bus) -> None:
    silent = at_server(cluster, bus)
    cluster.suspend(silent.name)
    await soon(lambda: bus.connected and server_of(bus) != silent.port)
    cluster.resume(silent.name)


async def test_watchers_hear_of_no_deletion_through_the_loss_of_any_server(cluster: NatsCluster, bus: Bus) -> None:
    """A bucket has no leader for some seconds after a loss. Leases of those seconds are heard, and may not be stored:
    then a reader that connects again does not take the runtimes for gone."""
    gone: list[str] = []
    heard: Counter[str] = Counter()

    def watcher(key: str, value: bytes | None) -> None:
        heard.update([key])
        if value is None:
            gone.append(key)

    async def renew(renewing: Bus) -> None:
        while True:
            with contextlib.suppress(BusError):
                await renewing.put(wire.LEASES, "r1", wire.GatewayAlive(gateway="g"), 1.0)
            await asyncio.sleep(1.0)

    async with Bus.connect(cluster.url, "runtime", replicas=3) as runtime:
        renewing = asyncio.create_task(renew(runtime))
        await bus.watch(wire.LEASES, watcher)
        for _ in range(2):
            leader = await leader_of(bus, wire.LEASES)
            while at_server(cluster, bus).name != leader:
                await bus._client.force_reconnect()
                await soon(lambda: bus.connected)
            lost = at_server(cluster, bus)
            before = heard["r1"]
            cluster.kill(lost.name)
            await soon(lambda lost=lost: bus.connected and server_of(bus) != lost.port)
            await soon(lambda before=before: heard["r1"] >= before + 12)
            await soon(lambda: not (bus._behind or bus._doubt.is_set()))
            cluster.start(lost.name)
            await caught_up(bus)
        await ended(renewing)
    assert gone == []


async def test_the_ledger_gives_streams_that_are_there_the_replicas_of_the_setting(cluster: NatsCluster) -> None:
    async with Bus.connect(cluster.url, "one") as one:
        await one.put(wire.MODELS, "m", wire.GatewayAlive(gateway="g"))
        await one.publish_usage(usage("q"))
        before = {name: (await one._js.stream_info(f"KV_{name}")).config for name in grants.BUCKETS}
        assert {config.num_replicas for config in before.values()} == {1}
        async with Bus.connect(cluster.url, "gateway", grants.GATEWAY, replicas=3):
            assert (await one._js.stream_info(wire.USAGE_STREAM)).config.num_replicas == 1, "the ledger's task"
        async with Bus.connect(cluster.url, "ledger", grants.LEDGER, replicas=3):
            for name, config in before.items():
                now = (await one._js.stream_info(f"KV_{name}")).config
                assert now == config.evolve(num_replicas=3)
            await caught_up(one)
        assert await one.keys(wire.MODELS) == ["m"]
        async with Bus.connect(cluster.url, "ledger", grants.LEDGER):
            assert (await one._js.stream_info(wire.USAGE_STREAM)).config.num_replicas == 3, "no setting, no change"


async def test_more_replicas_than_servers_are_refused_with_the_setting(
    cluster: NatsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "ELECT_S", 12.0)
    with pytest.raises(BusError, match="STACCATO_NATS_REPLICAS=5 needs as many servers in a cluster"):
        async with Bus.connect(cluster.url, "test", replicas=5):
            pass
