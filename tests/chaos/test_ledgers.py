"""The checker notices a ledger that books a repeated message twice, and a ledger that acknowledges before the commit. A
right ledger that dies between commit and acknowledgement passes."""

from __future__ import annotations

import asyncio
import signal
import subprocess

import msgspec
from nats.js.api import AckPolicy, ConsumerConfig
from sqlalchemy import text

from store.bus import Bus
from store.contract import wire
from store.db import bill
from store.db.database import Database, now_us
from store.db.usage import period_of
from tests.chaos.checker import billed, flaws
from tests.chaos.history import Ask, End, Seen
from tests.chaos.ledgers import BOOKED_S, CONSUMER, DROPPED, booked, command, ledger, told
from tests.conftest import ROOT, NatsServer
from tests.store.db.test_usage import message

REQUESTS = 40
ACK_WAIT_S = 1.0


def seen(number: int) -> Seen:
    asked = Ask(number, "t", "/v1/completions", {"prompt": number}, "", (5,), 100)
    return Seen(asked, End.DONE, 200, f"r{number}", {0: list(range(number))})


async def booked_by(kind: str, nats_url: str, database_url: str) -> None:
    """Book usage by two ledgers of the kind: the first dies with its first batch, and the second books the rest."""
    async with Bus.connect(nats_url, "test") as bus:
        soon = ConsumerConfig(durable_name=CONSUMER, ack_wait=ACK_WAIT_S, ack_policy=AckPolicy.EXPLICIT)
        await bus._js.add_consumer(wire.USAGE_STREAM, soon)
        for n in range(REQUESTS):
            await bus.publish_usage(message(f"r{n}", output_tokens=n, prompt_tokens=5, started_us=now_us()))
        dying, environment = [*command(kind), "--dies"], told(nats_url, database_url)
        died = await asyncio.to_thread(subprocess.run, dying, env=environment, cwd=ROOT, timeout=BOOKED_S)
        assert died.returncode == -signal.SIGKILL
        with ledger(nats_url, database_url, kind):
            await booked(bus)


async def found(database: Database) -> list[str]:
    """Flaws that the checker finds in the bill in the database."""
    async with database.read() as connection:
        rows = [row async for page in bill.rows(connection, period_of(now_us()), None) for row in page]
    return list(flaws(map(seen, range(REQUESTS)), billed(map(msgspec.to_builtins, rows))))


async def unconstrained(database: Database) -> None:
    async with database.write() as connection:
        for statement in DROPPED[connection.dialect.name]:
            await connection.execute(text(statement))


async def test_a_ledger_that_dies_before_it_acknowledged_loses_and_doubles_nothing(
    nats_server: NatsServer, database_url: str
) -> None:
    await booked_by("right", nats_server.url, database_url)
    async with Database.open(database_url) as database:
        assert await found(database) == []


async def test_without_the_unique_constraint_the_checker_finds_what_was_booked_twice(
    nats_server: NatsServer, database_url: str
) -> None:
    async with Database.open(database_url) as database:
        await unconstrained(database)
        await booked_by("doubling", nats_server.url, database_url)
        said = await found(database)
    for n in range(1, REQUESTS):
        assert f"r{n}: booked twice, as attempts (1, 1)" in said
        assert f"r{n} of {n}: {n} tokens delivered (done), {2 * n} billed (stop)" in said


async def test_acknowledged_before_it_was_committed_the_checker_finds_what_is_missing(
    nats_server: NatsServer, database_url: str
) -> None:
    await booked_by("hasty", nats_server.url, database_url)
    async with Database.open(database_url) as database:
        said = await found(database)
    assert said and all("no row of the bill is its" in flaw for flaw in said)
