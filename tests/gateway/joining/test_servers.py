"""Joining at a cluster of servers, and with the configuration and the certificates of an installation."""

from __future__ import annotations

import asyncio
from pathlib import Path

from typer.testing import CliRunner

from gateway.cli import app
from gateway.ops import bus_users
from store.contract import grants, wire
from store.contract.wire import Lease
from tests.conftest import ROOT, NatsServer
from tests.gateway.joining.fleet import CONFIGURED, served
from tests.store.clusters import NatsCluster


async def test_a_runtime_joins_and_is_revoked_at_servers_other_than_the_services_server(
    sqlite_url: str, tmp_path: Path
) -> None:
    users = tmp_path / "users"
    block = bus_users.make_joining(users, CONFIGURED)
    cluster = NatsCluster(tmp_path)
    first, *others = cluster.servers
    for server in cluster.servers:
        with (tmp_path / f"{server.name}.conf").open("a") as file:
            file.write(block)
    try:
        for server in cluster.servers:
            cluster.start(server.name)
        url = ",".join(server.url for server in others)
        async with served(sqlite_url, tmp_path, users, first.url, url) as fleet:
            async with fleet.connect("r1", await fleet.token()) as bus:
                await bus.put(wire.LEASES, "r1", Lease(runtime="r1", epoch=1, engine="test"))
                await fleet.revoke("r1")
                async with asyncio.timeout(30):
                    while bus.connected:
                        await asyncio.sleep(0.01)
    finally:
        for server in cluster.servers:
            cluster.kill(server.name)


async def test_the_configuration_of_an_installation_takes_the_users_of_the_command(
    sqlite_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "staccato"
    assert CliRunner().invoke(app, ["nats-users", str(folder), "--join"]).exit_code == 0
    server = NatsServer(tmp_path)
    text = (ROOT / "deploy" / "nats" / "nats.conf").read_text().replace("/etc/nats/staccato", str(folder))
    text = text.replace("0.0.0.0:4222", f"127.0.0.1:{server.port}").replace('"/data"', f'"{tmp_path}/js"')
    (tmp_path / "nats.conf").write_text(text)
    server.start()
    secured = server.url.replace("nats://", "tls://")
    try:
        async with served(sqlite_url, tmp_path, folder, secured, secured, folder / "ca.crt") as fleet:
            async with fleet.connect("r1", await fleet.token("r1")) as bus, fleet.as_gateway() as gateway:
                await bus.put(wire.LEASES, "r1", Lease(runtime="r1", epoch=1, engine="test"))
                assert await gateway.keys(wire.LEASES) == ["r1"]
    finally:
        server.kill()
    assert (folder / f"{grants.JOIN.name}.nk").exists()
