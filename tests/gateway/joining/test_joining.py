"""Runtimes join by proof, at a real nats-server: with a token once, then by their keys alone, until revoked."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sqlite3
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.ops import bus_users
from store.bus import Bus, BusError
from store.contract import grants, wire
from store.contract.joining import claims, proofs
from store.contract.wire import Lease
from store.keypairs import SigningKey, new_seed
from tests.conftest import soon
from tests.gateway.joining.fleet import CONFIGURED, JoinFleet, fleet_of
from tests.gateway.joining.fleet import fleet as fleet

REFUSED = "refuses the user runtime-"
EVICTED_S = 5.0


def lease(runtime: str) -> Lease:
    return Lease(runtime=runtime, epoch=1, engine="test")


async def refusal(fleet: JoinFleet, id: str, token: str | None = None, key: str | None = None) -> str:
    """Return the logged reason for which a runtime stays outside; the log never has a token."""
    with capture_logs() as said:
        with pytest.raises(BusError, match=REFUSED):
            async with fleet.connect(id, token, key):
                pass
    assert not token or token not in str(said)
    last = [line for line in said if line["event"] == "join.refused"][-1]  # an attempt before may end late
    assert (last["runtime"], last["public_key"]) == (id, fleet.key(key or id).public_key)
    return str(last["reason"])


# ── in ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_runtime_joins_with_a_token_and_then_by_its_key_after_restarts_of_service_and_server(
    fleet: JoinFleet,
) -> None:
    token = await fleet.token("r1")
    with capture_logs() as said:
        async with fleet.connect("r1", token) as bus:
            await bus.put(wire.LEASES, "r1", lease("r1"))
    joined = [line for line in said if line["event"] == "join.joined"]
    assert [line["runtime"] for line in joined] == ["r1"] and token not in str(said)
    assert await fleet.bindings() == {"r1": fleet.key("r1").public_key}
    async with fleet.connect("r1") as bus:
        await bus.put(wire.LEASES, "r1", lease("r1"))
        await fleet.stop_service()
        await fleet.start_service()
        fleet.server.kill()
        await soon(lambda: not bus.connected)
        fleet.server.start()
        await soon(lambda: bus.connected)
        await bus.put(wire.LEASES, "r1", lease("r1"))
    async with fleet.connect("r1", token) as bus:  # a token left in the settings does no harm
        await bus.put(wire.LEASES, "r1", lease("r1"))


async def test_after_a_change_of_issuer_and_service_joined_runtimes_come_again_by_their_keys(fleet: JoinFleet) -> None:
    """The step of the runbook, with the files that the step's command makes."""
    async with fleet.connect("r1", await fleet.token("r1")) as bus:
        before = fleet.own.signing_key().public_key
        for name in (bus_users.ISSUER_FILE, "join.nk"):
            (fleet.users / name).unlink()
        users = bus_users.make_joining(fleet.users, CONFIGURED)
        assert fleet.own.signing_key().public_key != before
        fleet.server.kill()
        await soon(lambda: not bus.connected)
        fleet.server.configure(users)
        fleet.server.start()  # nats-server 2.15 refuses to reload users while logins are asked for
        await fleet.stop_service()
        await fleet.start_service()
        await soon(lambda: bus.connected)
        await bus.put(wire.LEASES, "r1", lease("r1"))


async def test_a_joined_runtime_has_the_rights_of_a_configured_runtime_and_no_more(fleet: JoinFleet) -> None:
    async with fleet.connect("r1", await fleet.token()) as bus, fleet.as_gateway() as gateway:

        async def answered(order: bytes) -> wire.Reply:
            return wire.Reply()

        await bus.respond(wire.control_subject("r1"), answered)
        await bus.put(wire.LEASES, "r1", lease("r1"))
        order = wire.Control(model="m", op="wake")
        assert wire.decode(wire.Reply, await gateway.request(wire.control_subject("r1"), order)) == wire.Reply()
        for forbidden in (grants.key(wire.LEASES, "r2"), grants.key(wire.MODELS, "m"), grants.LOGINS):
            with capture_logs() as said:
                await bus.publish(forbidden, b"x")
                await soon(lambda: any("permissions violation" in str(line).lower() for line in said))
        with capture_logs() as said:
            await bus._client.subscribe("rt.r2.run")
            await soon(lambda: any("permissions violation" in str(line).lower() for line in said))
        async with fleet.connect("r2", await fleet.token()) as other:
            await other.put(wire.LEASES, "r2", lease("r2"))
            assert set(await gateway.keys(wire.LEASES)) == {"r1", "r2"}


async def test_the_users_of_the_configuration_are_let_in_without_the_service(fleet: JoinFleet) -> None:
    await fleet.stop_service()
    async with fleet.as_gateway() as gateway:
        assert gateway.connected


async def test_a_runtime_without_a_service_is_told_so(fleet: JoinFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.bus.CONNECT_TIMEOUT_S", 3.0)
    await fleet.stop_service()
    with pytest.raises(BusError, match="if runtimes join by token, `staccato join-service` runs and logs the reason"):
        async with fleet.connect("r1"):
            pass


async def test_two_services_share_the_questions_and_one_is_enough(fleet: JoinFleet) -> None:
    await fleet.start_service()
    with capture_logs() as said:
        for id in ("a", "b", "c", "d"):
            async with fleet.connect(id, await fleet.token(id)):
                pass
        await fleet.stop_service()
        for id in ("e", "f"):
            async with fleet.connect(id, await fleet.token(id)):
                pass
    assert [line["runtime"] for line in said if line["event"] == "join.joined"] == list("abcdef")


# ── out ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_stranger_without_a_token_is_refused(fleet: JoinFleet) -> None:
    assert await refusal(fleet, "r1") == "the key is unknown, and no join token came"


async def test_a_made_up_token_is_refused(fleet: JoinFleet) -> None:
    made_up = f"{proofs.TOKEN_PREFIX}{'0' * 32}-{'0' * 48}"
    assert await refusal(fleet, "r1", made_up) == "the join token is unknown"
    assert await refusal(fleet, "r1", "please") == "the join token is malformed"


async def test_a_token_is_used_once(fleet: JoinFleet) -> None:
    token = await fleet.token()
    async with fleet.connect("r1", token):
        pass
    assert await refusal(fleet, "r2", token) == "the join token was used before"


async def test_an_expired_token_is_refused(fleet: JoinFleet) -> None:
    assert await refusal(fleet, "r1", await fleet.token(lasts_us=-1)) == "the join token has expired"


async def test_a_token_of_another_runtime_is_refused(fleet: JoinFleet) -> None:
    assert await refusal(fleet, "r2", await fleet.token("r1")) == "the join token is for a different runtime"


async def test_a_taken_id_and_a_bound_key_are_refused_even_with_a_good_token(fleet: JoinFleet) -> None:
    async with fleet.connect("r1", await fleet.token()):
        pass
    token = await fleet.token()
    assert await refusal(fleet, "r1", token, key="thief") == "the id is bound to a different key"
    assert await refusal(fleet, "r2", token, key="r1") == "the key is bound to the runtime r1"
    async with fleet.connect("r2", token):  # neither attempt used the token
        pass


@pytest.mark.parametrize("name", ("runtime-*", "runtime-a.b", "runtime->", "r1", "runtime-", "", "runtime-" + "a" * 64))
async def test_a_name_that_would_reach_beyond_a_runtime_is_refused(fleet: JoinFleet, name: str) -> None:
    heard = await Raw(fleet).says(fleet.key("r1"), name=name, auth_token=await fleet.token())
    assert b"Authorization Violation" in heard and b"PONG" not in heard
    assert await fleet.bindings() == {}


# ── the connection itself ─────────────────────────────────────────────────────────────────────────────────────────────


class Raw:
    """A client that writes the protocol by hand."""

    def __init__(self, fleet: JoinFleet) -> None:
        self._port = fleet.server.port
        self.sent = b""

    async def says(self, key: SigningKey, line: bytes = b"", **said: str) -> bytes:
        """Connect with the recorded line, or with a CONNECT by the key and with the fields `said`; subscribe to all
        leases, and return all that the server sent until the server closed the connection or answered the ping."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            nonce = json.loads((await reader.readline()).removeprefix(b"INFO "))["nonce"]
            signature = base64.b64encode(key.sign(nonce.encode())).decode()
            options: dict[str, Any] = {"verbose": False, "pedantic": False, "lang": "raw", "version": "1"}
            options |= {"nkey": key.public_key, "sig": signature, **said}
            self.sent = line or b"CONNECT " + json.dumps(options).encode() + b"\r\n"
            writer.write(self.sent + b"SUB $KV.leases.> 1\r\nPING\r\n")
            heard = b""
            async with asyncio.timeout(60):
                while b"PONG" not in heard and (some := await reader.read(4096)):
                    heard += some
            return heard
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def test_a_recorded_signature_is_refused_on_a_new_connection(fleet: JoinFleet) -> None:
    """A signature is of a server's nonce, which each connection has anew."""
    raw = Raw(fleet)
    token = await fleet.token()
    assert b"PONG" in await raw.says(fleet.key("r1"), name="runtime-r1", auth_token=token)
    recorded = raw.sent
    assert token.encode() in recorded
    async with fleet.connect("r1") as bus:
        await bus.put(wire.LEASES, "r1", lease("r1"))
        with capture_logs() as said:
            heard = await raw.says(fleet.key("r1"), line=recorded)
    assert b"Authorization Violation" in heard and b"MSG" not in heard and b"PONG" not in heard
    reasons = {line["reason"] for line in said if line["event"] == "join.refused"}
    assert reasons == {"the signature is not of this connection's nonce"} and token not in str(said)


async def test_a_key_without_its_seed_is_refused(fleet: JoinFleet) -> None:
    async with fleet.connect("r1", await fleet.token()):
        pass
    thief = SigningKey(new_seed("user"))
    heard = await Raw(fleet).says(thief, name="runtime-r1", nkey=fleet.key("r1").public_key)
    assert b"Authorization Violation" in heard and b"PONG" not in heard


async def test_a_token_without_a_key_is_refused_and_stays_unused(fleet: JoinFleet) -> None:
    token = await fleet.token()
    heard = await Raw(fleet).says(SigningKey(new_seed("user")), name="runtime-r1", auth_token=token, nkey="", sig="")
    assert b"Authorization Violation" in heard
    async with fleet.connect("r1", token):
        pass


async def test_a_stranger_who_tries_again_and_again_fills_no_log(
    fleet: JoinFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.joining.desk.LINES_PERIOD_S", 0.5)
    key = fleet.key("r1")
    with capture_logs() as said:
        for _ in range(8):
            await Raw(fleet).says(key, name="runtime-r1")
        await asyncio.sleep(0.6)
        await Raw(fleet).says(key, name="runtime-r1")
    lines = [line for line in said if line["event"] == "join.refused"]
    left_out = sum(line["requests"] for line in said if line["event"] == "join.refusals_left_out")
    assert left_out > 0 and len(lines) + left_out == 9


# ── revoked ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_revoked_runtime_is_disconnected_within_seconds_and_refused_until_a_new_token(
    fleet: JoinFleet,
) -> None:
    async with fleet.connect("r1", await fleet.token()) as bus, fleet.connect("r2", await fleet.token()) as other:
        await fleet.revoke("r1")
        began_s = time.monotonic()
        async with asyncio.timeout(EVICTED_S):
            while bus.connected:
                await asyncio.sleep(0.01)
        assert time.monotonic() - began_s < EVICTED_S
        assert other.connected and await _stays_away(bus)
    assert await refusal(fleet, "r1") == "the runtime was revoked"
    async with fleet.connect("r1", await fleet.token(), key="new"), fleet.connect("r2"):
        assert set(await fleet.bindings()) == {"r1", "r2"}
    assert await refusal(fleet, "r1") == "the id is bound to a different key"


async def _stays_away(bus: Bus) -> bool:
    """Whether the client, which tries again ten times a second, gets in again within a second."""
    for _ in range(20):
        await asyncio.sleep(0.05)
        if bus.connected:
            return False
    return True


async def test_a_revocation_while_no_service_runs_counts_once_a_service_runs(fleet: JoinFleet) -> None:
    async with fleet.connect("r1", await fleet.token()) as bus:
        await fleet.stop_service()
        await fleet.revoke("r1")
        await asyncio.sleep(0.1)
        assert bus.connected
        await fleet.start_service()
        await soon(lambda: not bus.connected)


# ── the database away ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_locked_database_keeps_new_runtimes_waiting_and_joined_runtimes_connected(fleet: JoinFleet) -> None:
    token = await fleet.token()
    async with fleet.connect("r1", await fleet.token()) as bus:
        assert fleet.settings.database_file is not None
        with contextlib.closing(sqlite3.connect(fleet.settings.database_file, isolation_level=None)) as locking:
            locking.execute("BEGIN IMMEDIATE")
            assert (await refusal(fleet, "r2", token)).startswith("the database does not answer: the database ")
            await bus.put(wire.LEASES, "r1", lease("r1"))
            locking.execute("ROLLBACK")
        async with fleet.connect("r2", token):
            assert bus.connected


@pytest.mark.postgres
async def test_a_dead_database_keeps_new_runtimes_outside_and_joined_runtimes_connected(
    request: pytest.FixtureRequest, postgres_url: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = request.getfixturevalue("postgres_server")
    monkeypatch.setattr("store.bus.CONNECT_TIMEOUT_S", 2.0)
    monkeypatch.setattr("gateway.joining.desk.DELAY_S", 0.05)
    async with fleet_of(postgres_url, tmp_path) as fleet, fleet.connect("r1", await fleet.token()) as bus:
        token = await fleet.token()
        server.kill()
        try:
            for id in ("r1", "r2"):
                with capture_logs() as said, pytest.raises(BusError, match=REFUSED):
                    async with fleet.connect(id, token):
                        pass
                reasons = [line["reason"] for line in said if line["event"] == "join.refused"]
                assert reasons and all(reason.startswith("the database does not answer") for reason in reasons)
            await bus.put(wire.LEASES, "r1", lease("r1"))
        finally:
            server.start()
        async with asyncio.timeout(30):
            while "r2" not in await _tried(fleet, token):
                await asyncio.sleep(0.1)
        assert bus.connected


async def _tried(fleet: JoinFleet, token: str) -> dict[str, str]:
    """Try to join as r2, and return the bindings: a server that has just started refuses for a while."""
    with contextlib.suppress(BusError):
        async with fleet.connect("r2", token):
            return await fleet.bindings()
    return {}


# ── questions that no server asked ────────────────────────────────────────────────────────────────────────────────────


async def test_the_join_service_alone_hears_who_connects(fleet: JoinFleet) -> None:
    async with fleet.as_gateway() as gateway:
        with capture_logs() as said:
            await gateway._client.subscribe(grants.LOGINS)
            await soon(lambda: any("permissions violation" in str(line).lower() for line in said))


def test_the_name_of_a_connection_is_no_name_of_the_configuration() -> None:
    assert claims.GLOBAL_ACCOUNT == "$G" and grants.runtime("r1").name == f"{proofs.NAME_PREFIX}r1"
