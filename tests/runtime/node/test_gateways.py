"""A node takes no gateway for dead while the gateway's messages wait unread in the node's own socket."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from pydantic import ByteSize

from runtime.config import RuntimeSettings
from runtime.node.gateways import SILENCE_S, Gateways
from runtime.node.runtime import Node
from store.bus import Bus
from store.contract import wire
from store.contract.silence import Silence
from store.tasks import ended
from tests.conftest import NatsServer
from tests.runtime.node.test_node import run

ALIVE = wire.encode(wire.GatewayAlive(gateway="g"))


class Living(threading.Thread):
    """A gateway in a thread: the thread says "alive" until `stop` is set."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url, self.stop, self.said = url, threading.Event(), threading.Event()

    def run(self) -> None:
        asyncio.run(self._say())

    async def _say(self) -> None:
        async with Bus.connect(self._url, "g") as bus:
            while not self.stop.is_set():
                await bus.publish(wire.GATEWAY_ALIVE, ALIVE)
                self.said.set()
                await asyncio.sleep(0.1)


async def test_a_node_whose_own_loop_was_busy_reads_what_waits_before_it_judges(nats_server: NatsServer) -> None:
    async with Bus.connect(nats_server.url, "r1") as bus:
        node = Node(bus, RuntimeSettings(runtime_id="r1", host_cache=ByteSize(1 << 20)))
        await bus.subscribe(wire.GATEWAY_ALIVE, node._streams.gateway_alive)
        node.take_over(run(1), 3)
        gateway = Living(nats_server.url)
        gateway.start()
        await asyncio.to_thread(gateway.said.wait, 20)
        beating = asyncio.create_task(node._keep_heartbeat())
        for _ in range(3):
            await asyncio.sleep(0.1)
            time.sleep(1.5 * SILENCE_S)  # the node's loop computes
        await asyncio.sleep(0.7)
        gateway.stop.set()
        await ended(beating)
        gateway.join()
        assert node.stream("g", 1) is not None


async def test_silence_counts_only_when_the_bus_was_read(nats_server: NatsServer) -> None:
    """The gateway's message waits in the node's socket: only reading finds the message."""

    async def say() -> None:
        async with Bus.connect(nats_server.url, "g") as other:
            await other.publish(wire.GATEWAY_ALIVE, ALIVE)
            await other.catch_up(5)  # the server has the message

    async with Bus.connect(nats_server.url, "r1") as bus:
        node = Node(bus, RuntimeSettings(runtime_id="r1", host_cache=ByteSize(1 << 20)))
        await bus.subscribe(wire.GATEWAY_ALIVE, node._streams.gateway_alive)
        await bus.catch_up(5)
        node.take_over(run(1), 3)
        gateway = node._gateways["g"]
        saying = threading.Thread(target=lambda: asyncio.run(say()))
        saying.start()
        saying.join()  # the node's loop reads no message meanwhile
        gateway.silence.heard_at = time.monotonic() - 2 * SILENCE_S
        assert await node._gateways.dead(bus) == []
        gateway.silence.heard_at = time.monotonic() - 2 * SILENCE_S
        assert await node._gateways.dead(bus) == ["g"]


async def test_a_gateway_is_not_lost_while_the_bus_can_not_be_read(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.node.gateways.CATCH_UP_S", 0.2)
    gateways = Gateways()
    gateways.known("g").silence = Silence(SILENCE_S, time.monotonic() - 2 * SILENCE_S)
    gateways["g"].streams[1] = None  # type: ignore[assignment]
    async with Bus.connect(nats_server.url, "r1") as bus:
        nats_server.kill()
        assert await gateways.dead(bus) == []
        nats_server.start()
