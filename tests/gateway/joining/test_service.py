"""The join service as a process, and its settings."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.config import load
from gateway.joining.desk import LINES_MOST, LINES_PERIOD_S, RefusalLines, SeenClient
from gateway.joining.evicting import intruders
from gateway.joining.service import JoinSettings, shared_pepper
from gateway.ops import bus_users
from store.contract import wire
from store.contract.joining.proofs import JoinedRuntime
from store.keypairs import new_seed
from store.settings import SettingsError, read
from store.system import OpenConnection
from tests.conftest import ROOT
from tests.gateway.joining.fleet import JoinFleet
from tests.gateway.joining.fleet import fleet as fleet

READY_S = 60.0


async def test_the_process_lets_the_process_of_a_runtime_join(fleet: JoinFleet, tmp_path: Path) -> None:
    """The runtime's process makes its key and joins by a token in a file; the lease comes before the device is up."""
    await fleet.stop_service()
    token, key = tmp_path / "token", tmp_path / "r9" / "own.nk"
    token.write_text(await fleet.token("r9"))
    settings = {
        "STACCATO_NATS_URL": fleet.server.url,
        "STACCATO_DATABASE_URL": fleet.settings.database_url,
        "STACCATO_DATA": str(fleet.settings.data),
        "STACCATO_NATS_CREDENTIALS": str(fleet.settings.nats_credentials),
        "STACCATO_JOIN_ISSUER": str(fleet.own.join_issuer),
    }
    joins = {"STACCATO_NATS_URL": fleet.server.url, "STACCATO_RUNTIME_ID": "r9"} | {
        "STACCATO_NATS_CREDENTIALS": str(key),
        "STACCATO_JOIN_TOKEN_FILE": str(token),
        "STACCATO_FORK_SERVER": "false",
        "STACCATO_HOST_CACHE": "16MiB",
    }
    service = await _started("gateway.joining", settings)
    assert service.stderr is not None
    try:
        async with asyncio.timeout(READY_S):
            assert json.loads(await service.stderr.readline())["event"] == "join.ready"
            runtime = await _started("runtime.node", joins)
            async with fleet.as_gateway() as gateway:
                while "r9" not in await gateway.keys(wire.LEASES):
                    await asyncio.sleep(0.1)
            runtime.send_signal(signal.SIGTERM)
            await runtime.communicate()
            service.send_signal(signal.SIGTERM)
            _, said = await service.communicate()
    finally:
        for process in (service, runtime):
            if process.returncode is None:
                process.kill()
    assert service.returncode == 0 and b'"join.joined"' in said and token.read_text().encode() not in said
    assert list(await fleet.bindings()) == ["r9"] and key.exists()


async def _started(module: str, settings: dict[str, str]) -> asyncio.subprocess.Process:
    """Start a module as a process with the settings, and with no other setting."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STACCATO_")}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module),
        env=inherited | {"PYTHONPATH": str(ROOT)} | settings,
        stderr=asyncio.subprocess.PIPE,
    )


def test_the_issuer_is_an_accounts_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="^STACCATO_JOIN_ISSUER is not set: the setting is needed$"):
        read(JoinSettings)
    file = tmp_path / bus_users.ISSUER_FILE
    monkeypatch.setenv("STACCATO_JOIN_ISSUER", str(file))
    with pytest.raises(SettingsError, match="No such file"):
        read(JoinSettings).signing_key()
    for seed, reason in (("nonsense", "no seed of an nkey"), (new_seed("user"), "the seed is of a user")):
        file.write_text(seed)
        with pytest.raises(SettingsError, match=reason) as raised:
            read(JoinSettings).signing_key()
        assert seed not in str(raised.value)
    file.write_text(new_seed("account"))
    assert read(JoinSettings).signing_key().public_key.startswith("A")


def test_a_service_makes_no_pepper_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="pepper is not there: copy the gateway's"):
        shared_pepper(load(data=tmp_path))
    assert not (tmp_path / "pepper").exists()


def test_connections_without_a_living_binding_are_the_intruders() -> None:
    def bound(id: str, key: str, revoked_us: int | None = None) -> JoinedRuntime:
        return JoinedRuntime(id, key, "t", 1, revoked_us)

    users = ("runtime-a/U1", "runtime-b/U2", "runtime-c/U3", "runtime-a/U9", "UGATEWAY", "", "runtime-a")
    open_now = [OpenConnection("S", number, user) for number, user in enumerate(users)]
    found = intruders(open_now, [bound("a", "U1"), bound("b", "U2", 5)])
    assert [each.user for each in found] == ["runtime-b/U2", "runtime-c/U3", "runtime-a/U9"]


def test_a_client_that_tries_on_hides_no_other_client_and_many_clients_fill_no_log() -> None:
    lines = RefusalLines()
    loud, quiet = SeenClient("r1", "U1", "a"), SeenClient("r2", "U2", "b")
    with capture_logs() as said:
        for _ in range(100):
            lines.say(loud, "no", 1.0)
        lines.say(quiet, "no", 1.5)
        for number in range(100):
            lines.say(SeenClient("", f"U{number}", "c"), "no", 2.0)
        lines.say(quiet, "no", 1.0 + LINES_PERIOD_S)
    refused = [line["runtime"] for line in said if line["event"] == "join.refused"]
    assert refused == ["r1", "r2", *[""] * (LINES_MOST - 2), "r2"]
    (left_out,) = [line["requests"] for line in said if line["event"] == "join.refusals_left_out"]
    assert left_out == 99 + 100 - (LINES_MOST - 2)
