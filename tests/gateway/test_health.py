from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from gateway.app import Health
from store.db import Database


async def answer(database: Database, runtimes: int = 0, connected: bool = True) -> int:
    bus: Any = SimpleNamespace(connected=connected)
    fleet: Any = SimpleNamespace(leases={})
    request: Any = None
    return (await Health(database, bus, fleet, runtimes).ready(request)).status_code


async def test_a_database_that_a_newer_version_has_migrated_is_served_from(database: Database) -> None:
    async with database.write() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    assert await answer(database) == 200


@pytest.mark.parametrize(("runtimes", "connected"), [(1, True), (0, False)])
async def test_without_what_a_request_needs_it_is_not_ready(database: Database, runtimes: int, connected: bool) -> None:
    assert await answer(database, runtimes, connected) == 503
