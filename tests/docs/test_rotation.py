"""The runbook's chapter on keys, followed at a real NATS server and a real PostgreSQL server: the old secret ends."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import asyncpg
import pytest

from store.bus import Bus, BusError
from store.contract.grants import LEDGER
from tests.conftest import NatsServer, soon
from tests.databases import Postgres
from tests.databases import postgres_server as postgres_server
from tests.databases import postgres_url as postgres_url
from tests.docs.shell import place as place
from tests.docs.shell import run, under

RUNBOOK = "deploy/RUNBOOK.md"
USER, CERTIFICATE, AUTHORITY = range(3)  # the chapter's blocks about files, in order

Connect = Callable[[Path], AbstractAsyncContextManager[Bus]]


@pytest.fixture
async def server(place: Path) -> AsyncIterator[NatsServer]:
    """A server with the users and certificates of the runbook's chapter on secrets."""
    run(under(RUNBOOK, "Secrets", "run: files")[0].text, place)
    made = place / "secrets/nats"
    tls = f'tls {{ cert_file: "{made}/nats.crt", key_file: "{made}/nats.key" }}\n'
    server = NatsServer(place / "nats", tls + f'include "{os.path.relpath(made / "users.conf", place / "nats")}"\n')
    server.start()
    yield server
    server.kill()


@pytest.fixture
def connect(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> Connect:
    monkeypatch.setattr("store.bus.CONNECT_TIMEOUT_S", 2.0)

    def connected(secrets: Path) -> AbstractAsyncContextManager[Bus]:
        url = server.url.replace("nats://", "tls://")
        return Bus.connect(url, "ledger", LEDGER, secrets / "ledger.nk", secrets / "ca.crt")

    return connected


async def rotated(block: int, place: Path, server: NatsServer) -> tuple[Path, Path]:
    """Follow a block of the chapter, and signal the server. Returns the folders of the new and of the old files."""
    new, old = place / "secrets/nats", place / "old"
    shutil.copytree(new, old)
    await asyncio.to_thread(run, under(RUNBOOK, "Rotate keys", "run: files")[block].text, place)
    server.reload()
    return new, old


async def test_a_new_seed_cuts_off_the_old(place: Path, server: NatsServer, connect: Connect) -> None:
    async with connect(place / "secrets/nats") as bus:
        new, old = await rotated(USER, place, server)
        await soon(lambda: not bus.connected)
        with pytest.raises(BusError, match="refuses the user ledger"):
            async with connect(old):
                pass
        async with connect(new):
            pass


async def test_the_server_shows_a_new_certificate(place: Path, server: NatsServer, connect: Connect) -> None:
    async def serial(secrets: Path) -> str:
        async with connect(secrets) as bus:
            stream = bus._client._transport._io_writer  # type: ignore[union-attr]
            return str(stream.get_extra_info("ssl_object").getpeercert()["serialNumber"])

    before = await serial(place / "secrets/nats")
    new, old = await rotated(CERTIFICATE, place, server)
    async with asyncio.timeout(10):
        while await serial(new) == before:
            await asyncio.sleep(0.1)
    await serial(old)  # the authority is the same


async def test_processes_with_the_former_authority_are_left_outside(
    place: Path, server: NatsServer, connect: Connect
) -> None:
    new, old = await rotated(AUTHORITY, place, server)
    server.kill()
    server.start()
    async with connect(new):
        pass
    with pytest.raises(BusError, match="certificate that is not believed"):
        async with connect(old):
            pass


@pytest.mark.postgres
async def test_a_new_password_of_the_database_ends_the_old(
    place: Path, postgres_server: Postgres, postgres_url: str
) -> None:
    (block,) = under(RUNBOOK, "Rotate keys", "run: postgres")
    (place / "secrets/platform").mkdir(parents=True)
    known = await asyncpg.connect(postgres_url)
    await known.execute("ALTER ROLE staccato PASSWORD 'before'")
    rules = Path(await known.fetchval("SHOW hba_file"))
    trusting = rules.read_text()
    try:
        rules.write_text("host all staccato 127.0.0.1/32 scram-sha-256\n" + trusting)
        await known.execute("SELECT pg_reload_conf()")
        before = postgres_url.replace("staccato@", "staccato:before@")
        async with asyncio.timeout(30):
            while await opens(postgres_url):  # the rules are not read yet
                await asyncio.sleep(0.05)
        assert await opens(before)
        await asyncio.to_thread(run, block.text, place, STACCATO_DATABASE_URL=before)
        after = (place / "secrets/platform/STACCATO_DATABASE_URL").read_text().strip()
        assert await opens(after) and not await opens(before)
        assert (await known.fetchval("SELECT 1")) == 1  # open connections go on
    finally:
        rules.write_text(trusting)
        await known.execute("SELECT pg_reload_conf()")
        await known.close()


async def opens(url: str) -> bool:
    """Whether the database lets the URL's role in."""
    try:
        await (await asyncpg.connect(url)).close()
    except (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError):
        return False
    return True
