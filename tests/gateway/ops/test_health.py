"""A gateway's answers to probes: missing parts, and processes of the platform that keep ending."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import json
from sqlalchemy import text
from starlette.requests import Request

from gateway.http.auth import Auth
from gateway.http.errors import Problem
from gateway.http.reserve import Reserve
from gateway.ops.health import Health, Ready
from gateway.ops.troubles import Troubles
from store.db.database import Database, DatabaseError


class Gateway:
    """Health of a gateway whose fleet and bus are as the test says."""

    def __init__(self, database: Database, folder: Path, runtimes: int = 0, connected: bool = True) -> None:
        bus: Any = SimpleNamespace(connected=connected)
        fleet: Any = SimpleNamespace(leases={})
        auth, reserve = Auth(database, b"pepper", "sk-st-admin"), Reserve([folder], 0)
        self.health = Health(database, bus, fleet, runtimes, auth, reserve, folder)

    async def answer(self, key: str = "") -> tuple[int, Ready]:
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        response = await self.health.ready(Request({"type": "http", "headers": headers}))
        return response.status_code, json.decode(response.body, type=Ready)


async def test_a_database_that_a_newer_version_has_migrated_is_served_from(database: Database, tmp_path: Path) -> None:
    async with database.write() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    assert (await Gateway(database, tmp_path).answer())[0] == 200


@pytest.mark.parametrize(("runtimes", "connected"), [(1, True), (0, False)])
async def test_without_what_a_request_needs_it_is_not_ready(
    database: Database, tmp_path: Path, runtimes: int, connected: bool
) -> None:
    assert (await Gateway(database, tmp_path, runtimes, connected).answer())[0] == 503


async def test_while_the_database_is_away_a_gateway_that_serves_known_keys_stays_ready(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, fails = Gateway(database, tmp_path), [True]
    revision = database.revision

    async def away() -> str | None:
        if fails[0]:
            raise DatabaseError("away")
        return await revision()

    monkeypatch.setattr(database, "revision", away)
    gateway.health.auth.kept_s = 60.0
    status, ready = await gateway.answer()  # no key is known yet
    assert (status, ready.missing) == (503, ["the database does not answer"])
    fails[0] = False
    assert (await gateway.answer())[0] == 200
    fails[0] = True
    status, ready = await gateway.answer()
    assert (status, ready.ready, ready.degraded) == (200, True, ["the database does not answer"])
    gateway.health.auth.kept_s = 0.0
    assert (await gateway.answer())[0] == 503


async def test_a_gateway_of_a_fleet_is_ready_without_a_runtime_and_says_that_there_is_none(
    database: Database, tmp_path: Path
) -> None:
    status, ready = await Gateway(database, tmp_path, runtimes=0).answer()
    assert (status, ready.runtimes) == (200, 0)


async def test_a_process_that_keeps_ending_is_named_to_all_and_its_last_line_to_the_operator_alone(
    database: Database, tmp_path: Path
) -> None:
    line = "a.native.LibraryMissing: /secret/path.so can't be loaded"
    Troubles(tmp_path, print).died("r1 device", "ended before it was ready", 3, line)
    gateway = Gateway(database, tmp_path, runtimes=1)
    status, ready = await gateway.answer()
    assert status == 503
    assert [(each.role, each.deaths, each.error) for each in ready.dying] == [("r1 device", 3, "LibraryMissing")]
    assert b"secret" not in json.encode(ready)
    _, ready = await gateway.answer("sk-st-admin")
    assert ready.dying[0].line == line


async def test_a_disk_without_the_reserve_makes_a_gateway_not_ready_and_refuses_requests(
    database: Database, tmp_path: Path
) -> None:
    gateway = Gateway(database, tmp_path)
    gateway.health.reserve = Reserve([tmp_path], 1 << 62)
    status, ready = await gateway.answer()
    assert status == 503 and "MiB free" in ready.missing[0]
    with pytest.raises(
        Problem, match=r"has \d+ MiB free, and the last \d+ MiB are kept .* freed some space"
    ) as refused:
        gateway.health.reserve.check()
    assert (refused.value.status, refused.value.code, refused.value.headers["retry-after"]) == (503, "disk_full", "10")
