"""The runbook's chapter about losses: a runtime, NATS with its disk, and the database are lost under a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from tests.databases import Postgres
from tests.databases import postgres_server as postgres_server
from tests.docs.shell import run, under
from tests.e2e.fleet import MANY_TOKENS, Fleet

RUNBOOK = "deploy/RUNBOOK.md"
AWAY_S = 5.0
pytestmark = [pytest.mark.timeout(600), pytest.mark.postgres]


@dataclass(frozen=True)
class Operated:
    """A platform with two runtimes on PostgreSQL, and a model of the tenant acme."""

    fleet: Fleet
    database: Postgres

    async def follow(self, heading: str) -> str:
        """Run the commands of the runbook below the heading. Returns what the commands print."""
        platform = self.fleet.platform
        settings = {"STACCATO_URL": platform.url, "STACCATO_KEY": platform.admin_key}
        commands = "".join(block.text for block in under(RUNBOOK, heading, "run: lost"))
        return await asyncio.to_thread(run, commands, platform.data.parent, **settings)

    @contextlib.asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        """Within the context a stream runs. The stream has all tokens of an undisturbed stream, and they are booked."""
        fleet = self.fleet
        undisturbed = await fleet.stream(fleet.models[0], 0, MANY_TOKENS)
        stream = asyncio.create_task(fleet.stream(fleet.models[0], 0, MANY_TOKENS))
        assert await fleet.past(fleet.tokens + 50, stream)
        yield
        assert await stream == undisturbed
        await fleet.booked(fleet.tokens, 60)


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory, postgres_server: Postgres) -> Iterator[Operated]:
    settings = {"STACCATO_DATABASE_URL": asyncio.run(postgres_server.create("operated", "template0"))}
    with Fleet.running(tmp_path_factory.mktemp("operated"), models=1, runtimes=2, settings=settings) as fleet:
        yield Operated(fleet, postgres_server)


async def test_a_lost_runtime_is_nothing_to_do(operated: Operated) -> None:
    async with operated.streaming():
        (busy,) = await operated.fleet.busy()
        process = operated.fleet.platform.runtime(busy)
        assert process is not None
        process.kill()
        said = await operated.follow("A node")
    assert "DEVICE" in said and operated.fleet.models[0] in said


async def test_nats_that_lost_its_disk_is_filled_again(operated: Operated) -> None:
    async with operated.streaming():
        folder = operated.fleet.platform.data / "nats"
        folder.rename(folder.with_name("lost"))
        operated.fleet.platform.child("nats-server").kill()
    assert '{"ready":true,' in await operated.follow("NATS lost")


async def test_a_database_that_is_away_costs_no_request_of_a_known_key(operated: Operated) -> None:
    platform = operated.fleet.platform
    async with operated.streaming():
        operated.database.kill()
        try:
            await asyncio.sleep(AWAY_S)
            assert await operated.fleet.stream(operated.fleet.models[0], 1, 5)
            refused = await asyncio.to_thread(platform.request, "POST", "/api/v1/tenants", {"name": "globex"})
            assert refused.status_code == 503, refused.text
            ready = await asyncio.to_thread(platform.get, "/readyz")
            assert ready.status_code == 200 and ready.json()["degraded"], ready.text
        finally:
            operated.database.start()
        await asyncio.to_thread(platform.until, lambda: platform.get("/api/v1/tenants").status_code == 200)
    platform.post("/api/v1/tenants", {"name": "globex"})
