"""A cluster of real NATS servers, configured as `staccato up` configures a cluster, whose servers a test may hurt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from gateway.ops.bus_servers import BusServer, config, nats_binary
from store.bus import Bus
from store.contract import wire
from store.streams import stream_of
from tests.conftest import free_ports

SERVERS = 3


class NatsCluster:
    """Servers of a cluster on loopback. `url` names all servers.

    A server that was killed may be started again, with the server's own data."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(2 * SERVERS)
        self.servers = [
            BusServer(f"nats-{number + 1}", port, routes_port)
            for number, (port, routes_port) in enumerate(zip(ports[::2], ports[1::2], strict=True))
        ]
        self.url = ",".join(server.url for server in self.servers)
        self._folder = folder
        self._running: dict[str, psutil.Popen] = {}
        for server in self.servers:
            (folder / f"{server.name}.conf").write_text(config(folder, server, self.servers, "password"))

    def start(self, name: str) -> None:
        command = [str(nats_binary()), "--config", str(self._folder / f"{name}.conf")]
        with (self._folder / f"{name}.log").open("a") as log:
            self._running[name] = psutil.Popen(command, stderr=log)

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def suspend(self, name: str) -> None:
        """Stop the process of the server by a signal: the server is cut off from servers and clients."""
        self._running[name].suspend()

    def resume(self, name: str) -> None:
        self._running[name].resume()

    @classmethod
    @contextmanager
    def running(cls, folder: Path) -> Iterator[NatsCluster]:
        cluster = cls(folder)
        try:
            for server in cluster.servers:
                cluster.start(server.name)
            yield cluster
        finally:
            for name in list(cluster._running):
                cluster.kill(name)


async def leader_of(bus: Bus, name: str) -> str:
    """Return the name of the server that leads the stream or bucket `name`."""
    stream = name if name == wire.USAGE_STREAM else stream_of(name)
    cluster = (await bus._js.stream_info(stream)).cluster
    assert cluster is not None and cluster.leader
    return cluster.leader


async def behind(bus: Bus, name: str) -> int:
    """Return how many servers do not have all messages of the stream or bucket `name`."""
    stream = name if name == wire.USAGE_STREAM else stream_of(name)
    cluster = (await bus._js.stream_info(stream)).cluster
    assert cluster is not None and cluster.replicas is not None
    return sum(not replica.current or bool(replica.offline) for replica in cluster.replicas)


def server_of(bus: Bus) -> int:
    """Return the port of the server to which the bus is connected."""
    assert bus._client.connected_url is not None and bus._client.connected_url.port is not None
    return bus._client.connected_url.port
