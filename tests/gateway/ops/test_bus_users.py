"""The users of NATS as `staccato up` and `staccato nats-users` make them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from gateway.config import Settings, load
from gateway.ops import bus_servers, bus_users, certificates, up
from gateway.ops.supervise import Tree
from store.bus import Bus, BusError
from store.contract import grants
from tests.conftest import ROOT, NatsServer, free_port


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(data=tmp_path / "data", port=free_port(), runtimes=2)


async def test_up_lets_its_own_processes_in_and_nobody_else(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.data.mkdir()
    tree = Tree(settings.data / "logs", print)
    authorization = bus_users.make(up.users_folder(settings), up.users(settings))
    url = await bus_servers.start(tree, settings, os.environ, authorization)
    try:
        for user in up.users(settings):
            seed = bus_users.seed_file(up.users_folder(settings), user)
            async with Bus.connect(url, user.name, user, seed) as bus:
                assert bus.connected
        monkeypatch.setattr("store.bus.CONNECT_TIMEOUT_S", 2.0)
        with pytest.raises(BusError, match="refuses the user gateway"):
            async with Bus.connect(url, "stranger", grants.GATEWAY):
                pass
    finally:
        await tree.stop()
    assert "[WRN]" not in (settings.data / "logs" / "nats.log").read_text()


def test_each_process_is_told_of_its_own_seed_alone(settings: Settings) -> None:
    settings.data.mkdir()
    bus_users.make(up.users_folder(settings), up.users(settings))
    settings = settings.model_copy(
        update={"nats_url": "nats://127.0.0.1:1", "nats_credentials": settings.data / "nats-users"}
    )
    told: dict[str, str] = {}

    class Told:
        def start(self, *children: object) -> None:
            told.update({child.name: child.environment["STACCATO_NATS_CREDENTIALS"] for child in children})  # type: ignore[attr-defined]

    up.start_roles(Told(), settings, print, [])  # type: ignore[arg-type]
    names = {role: Path(file).name for role, file in told.items()}
    assert names == {
        "ledger": "ledger.nk",
        "r1": "runtime-r1.nk",
        "r2": "runtime-r2.nk",
        "scheduler": "scheduler.nk",
        "gateway": "gateway.nk",
    }
    assert all(Path(file).is_file() for file in told.values())


def test_credentials_of_another_nats_are_handed_on(settings: Settings, tmp_path: Path) -> None:
    settings = settings.model_copy(update={"nats_url": "nats://bus:1", "nats_credentials": tmp_path / "ours.creds"})
    assert up.credentials(settings, grants.LEDGER) == {"STACCATO_NATS_CREDENTIALS": str(tmp_path / "ours.creds")}
    assert up.credentials(settings.model_copy(update={"nats_credentials": None}), grants.LEDGER) == {}


async def test_the_configuration_for_a_fleet_takes_the_users_and_certificates_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "staccato"
    made = CliRunner().invoke(app, ["nats-users", str(folder), "--runtime", "a", "--runtime", "b"])
    assert made.exit_code == 0
    certificates.make(tmp_path / "strange", [], [])
    server = NatsServer(tmp_path)
    text = (ROOT / "deploy" / "nats" / "nats.conf").read_text()
    assert "tls {" in text
    text = text.replace("/etc/nats/staccato", str(folder))
    text = text.replace("0.0.0.0:4222", f"127.0.0.1:{server.port}").replace('"/data"', f'"{tmp_path}/data"')
    (tmp_path / "nats.conf").write_text(text)
    server.start()
    try:
        user = grants.runtime("b")
        seed = bus_users.seed_file(tmp_path / "staccato", user)
        secured = server.url.replace("nats://", "tls://")
        async with asyncio.timeout(30), Bus.connect(secured, "b", user, seed, folder / "ca.crt") as bus:
            assert bus.connected
        monkeypatch.setattr("store.bus.CONNECT_TIMEOUT_S", 2.0)
        for authority in (tmp_path / "strange" / "ca.crt", None):
            with pytest.raises(BusError, match="certificate that is not believed .*STACCATO_NATS_CA"):
                async with asyncio.timeout(30), Bus.connect(secured, "b", user, seed, authority):
                    pass
        with pytest.raises(BusError, match="nothing.crt: No such file.*name ca.crt"):
            async with Bus.connect(secured, "b", user, seed, tmp_path / "nothing.crt"):
                pass
    finally:
        server.kill()
