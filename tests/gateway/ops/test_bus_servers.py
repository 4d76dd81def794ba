"""The NATS servers of `staccato up`: a single server, and a cluster, as the supervisor starts the servers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest

from gateway.config import Settings, load
from gateway.ops import bus_servers, bus_users, up
from gateway.ops.supervise import Tree
from store.bus import Bus
from store.contract import grants, wire
from store.settings import SettingsError
from tests.conftest import free_port


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = load(data=tmp_path / "data", port=free_port())
    settings.data.mkdir()
    return settings


async def greeting(url: str) -> dict[str, object]:
    """Return what the server says first to a client."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    said = await reader.readline()
    writer.close()
    return dict(json.loads(said.removeprefix(b"INFO ")))


async def test_a_server_takes_the_configuration_written_for_the_server(settings: Settings) -> None:
    tree = Tree(settings.data / "logs", print)
    url = await bus_servers.start(tree, settings, os.environ, "")
    info = await greeting(url)
    await tree.stop()
    assert (info["jetstream"], info["max_payload"], info["host"]) == (True, 8 << 20, "127.0.0.1")
    assert (settings.data / "nats" / "jetstream").is_dir()
    assert "[WRN]" not in (settings.data / "logs" / "nats.log").read_text()


async def test_three_servers_are_a_cluster_for_the_platforms_own_users(settings: Settings) -> None:
    settings = settings.model_copy(update={"nats_cluster": 3})
    tree = Tree(settings.data / "logs", print)
    authorization = bus_users.make(up.users_folder(settings), up.users(settings))
    url = await bus_servers.start(tree, settings, os.environ, authorization)
    try:
        assert len(url.split(",")) == 3
        greetings = [await greeting(each) for each in url.split(",")]
        assert {said["cluster"] for said in greetings} == {"staccato"}
        assert not any(said.get("connect_urls") for said in greetings), "a client knows the servers of the URL alone"
        seed = bus_users.seed_file(up.users_folder(settings), grants.LEDGER)
        async with Bus.connect(url, "ledger", grants.LEDGER, seed, replicas=3) as bus:
            assert (await bus._js.stream_info(wire.USAGE_STREAM)).config.num_replicas == 3
        for number in (1, 2, 3):
            assert (settings.data / f"nats-{number}.conf").stat().st_mode & 0o077 == 0, "the file has the password"
    finally:
        await tree.stop()


async def test_a_stranger_is_no_server_of_the_cluster(settings: Settings) -> None:
    """A server hears every message: a local user without the password must not join."""
    settings = settings.model_copy(update={"nats_cluster": 3})
    tree = Tree(settings.data / "logs", print)
    await bus_servers.start(tree, settings, os.environ, "")
    port = int((settings.data / "nats-1.routes.port").read_text())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b'CONNECT {"user":"routes","pass":"guessed","name":"X","cluster":"staccato"}\r\nPING\r\n')
    said = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await tree.stop()
    assert b"Authorization Violation" in said and b"PONG" not in said


def test_a_taken_port_is_left_for_another(tmp_path: Path) -> None:
    kept = tmp_path / "nats.port"
    first = bus_servers.kept_port(kept)
    assert bus_servers.kept_port(kept) == first
    with socket.create_server(("127.0.0.1", first)):
        second = bus_servers.kept_port(kept)
    assert second != first and bus_servers.kept_port(kept) == second


def test_a_server_gets_no_port_of_a_server_that_does_not_listen_yet(tmp_path: Path) -> None:
    kept = tmp_path / "nats-2.port"
    kept.write_text(f"{free_port()}\n")
    taken = int(kept.read_text())
    found = bus_servers.kept_port(kept, {taken})
    assert found != taken and bus_servers.kept_port(kept) == found


@pytest.mark.parametrize(("stored", "wanted"), ((1, 3), (3, 1), (5, 3)))
def test_a_bus_that_other_servers_would_lose_is_named(settings: Settings, stored: int, wanted: int) -> None:
    for name in bus_servers.names(settings.model_copy(update={"nats_cluster": stored})):
        (settings.data / name / "jetstream").mkdir(parents=True)
    names = bus_servers.names(settings.model_copy(update={"nats_cluster": wanted}))
    with pytest.raises(bus_servers.NoServers, match=f"start with --nats-cluster {stored} until all usage is booked"):
        bus_servers.check_store(settings.data, names)
    bus_servers.check_store(settings.data, bus_servers.names(settings.model_copy(update={"nats_cluster": stored})))


def test_an_even_number_of_servers_is_refused() -> None:
    with pytest.raises(SettingsError, match="STACCATO_NATS_CLUSTER is '2': choose 1, 3 or 5"):
        load(nats_cluster="2")


def test_the_replicas_follow_the_servers_of_up_alone() -> None:
    assert load().nats_replicas == 1
    assert load(nats_cluster=3).nats_replicas == 3
    assert load(nats_url="nats://bus:4222").nats_replicas is None
    assert load(nats_url="nats://bus:4222", nats_replicas=5).nats_replicas == 5
