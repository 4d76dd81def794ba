"""The ledger as a process: real NATS and a real database, with losses of both."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog
from sqlalchemy import delete

from store.bus import Bus
from store.contract import wire
from store.db import tables, usage
from store.db.database import Database, now_us
from store.db.ledger import consume, sweep
from tests.conftest import NatsServer
from tests.store.db.test_usage import message

ROOT = Path(__file__).parents[3]
STACCATO = Path(sys.executable).with_name("staccato")


class Ledger:
    """A process `python -m store.db.ledger`."""

    def __init__(self, nats_url: str, database_url: str, **settings: str) -> None:
        settings |= {"STACCATO_NATS_URL": nats_url, "STACCATO_DATABASE_URL": database_url}
        command = [sys.executable, "-m", "store.db.ledger"]
        self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, stderr=subprocess.PIPE)

    def end(self, number: int) -> tuple[int, str]:
        """Send the signal; returns the exit status and stderr."""
        self.process.send_signal(number)
        said = self.process.communicate(timeout=60)[1].decode()
        return self.process.returncode, said


async def _output_tokens(database: Database) -> int:
    async with database.read() as connection:
        totals = await usage.totals(connection, None, 0, 1 << 60, ())
    return sum(total.counts.output_tokens for total in totals)


async def _until(found: Callable[[], Awaitable[int]], wanted: int) -> None:
    deadline = time.monotonic() + 60
    while (seen := await found()) != wanted:
        assert time.monotonic() < deadline, f"{seen}, not {wanted}"
        await asyncio.sleep(0.05)


async def test_usage_is_booked_once_through_kills_of_ledger_and_nats(
    nats_server: NatsServer, database_url: str
) -> None:
    async with Database.open(database_url) as database:
        first = Ledger(nats_server.url, database_url)
        async with Bus.connect(nats_server.url, "test") as bus:
            for n in range(50):
                await bus.publish_usage(message(f"r{n}", output_tokens=1, final=False))
            await _until(lambda: _output_tokens(database), 50)
            first.end(signal.SIGKILL)
            for n in range(50):
                await bus.publish_usage(message(f"r{n}", seq=2, output_tokens=3))
        second = Ledger(nats_server.url, database_url)
        try:
            await _until(lambda: _output_tokens(database), 150)
            nats_server.kill()
            nats_server.start()
            async with Bus.connect(nats_server.url, "test") as bus:
                await bus.publish_usage(message("r50", output_tokens=7))
            await _until(lambda: _output_tokens(database), 157)
        finally:
            status, said = second.end(signal.SIGTERM)
    assert status == 0 and "Traceback" not in said, said


async def test_usage_that_a_restored_database_lacks_is_booked_again(nats_server: NatsServer, database_url: str) -> None:
    async with Database.open(database_url) as database, Bus.connect(nats_server.url, "test") as bus:
        ledger = Ledger(nats_server.url, database_url)
        try:
            for n in range(30):
                await bus.publish_usage(message(f"r{n}", output_tokens=n))
            await _until(lambda: _output_tokens(database), 435)
            async with database.write() as connection:  # the backup was older
                await connection.execute(delete(tables.usage).where(tables.usage.c.output_tokens >= 10))
            command = [STACCATO, "ledger", "--replay"]
            told = os.environ | {"STACCATO_NATS_URL": nats_server.url}
            said = await asyncio.to_thread(subprocess.run, command, env=told, check=True, capture_output=True)
            assert said.stdout.startswith(b"30 messages of usage are booked again")
            await _until(lambda: _output_tokens(database), 435)
            await bus.publish_usage(message("r30", output_tokens=5))  # usage goes on as before
            await _until(lambda: _output_tokens(database), 440)
        finally:
            ledger.end(signal.SIGTERM)


async def test_the_stream_of_usage_has_a_limit_that_the_ledger_keeps(nats_server: NatsServer, sqlite_url: str) -> None:
    async with Bus.connect(nats_server.url, "test") as bus:

        async def age_s() -> int:
            return int((await bus._js.stream_info(wire.USAGE_STREAM)).config.max_age or 0)

        assert await age_s() == 0  # as made by any process
        for settings, days in (({}, 35), ({"STACCATO_USAGE_DAYS": "2"}, 2), ({"STACCATO_USAGE_DAYS": "0"}, 0)):
            ledger = Ledger(nats_server.url, sqlite_url, **settings)
            try:
                await _until(age_s, days * 86_400)
            finally:
                ledger.end(signal.SIGTERM)


def test_a_limit_that_deletes_what_is_not_booked_is_refused(sqlite_url: str) -> None:
    status, said = Ledger("nats://127.0.0.1:1", sqlite_url, STACCATO_USAGE_DAYS="0.5").end(signal.SIGCONT)
    assert status == 1 and "STACCATO_USAGE_DAYS" in said and "1 day or more, or 0 for no end" in said


async def test_a_locked_database_is_waited_for_with_a_line_in_the_log(nats_server: NatsServer, sqlite_url: str) -> None:
    database = Database(sqlite_url, busy_timeout_s=0.05)
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    async with Bus.connect(nats_server.url, "test") as bus:
        with structlog.testing.capture_logs() as said:
            consuming = asyncio.create_task(consume(bus, database))
            await bus.publish_usage(message("r1", output_tokens=1))
            await asyncio.sleep(0.5)
            assert await _output_tokens(database) == 0
            other.close()
            await _until(lambda: _output_tokens(database), 1)
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)
    assert "is locked by another process" in said[0]["error"] and said[0]["event"] == "ledger.retry"
    await database.close()


async def test_a_request_that_nobody_speaks_of_is_closed_by_the_ledger_through_a_lock(sqlite_url: str) -> None:
    database = Database(sqlite_url, busy_timeout_s=0.05)
    async with database.write() as connection:
        await usage.book(connection, [message("r1", final=False, output_tokens=4)], now_us())
        await connection.execute(tables.usage.update().values(started_us=now_us(), ended_us=1, period="2999-01"))

    async def is_open() -> int:
        async with database.read() as connection:
            return await usage.unreconciled(connection, now_us())

    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with structlog.testing.capture_logs() as said:
        sweeping = asyncio.create_task(sweep(database, period_s=0.05))
        await asyncio.sleep(0.5)
        assert await is_open() == 1
        other.close()
        await _until(is_open, 0)
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
    assert said[0]["event"] == "ledger.not_swept" and "is locked by another process" in said[0]["error"]
    assert said[-1] == {"event": "ledger.lost", "log_level": "warning", "requests": 1, "silent_s": 900}
    await database.close()


async def test_a_database_that_is_not_migrated_ends_the_ledger_with_one_sentence(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    ledger = Ledger(nats_server.url, f"sqlite:///{tmp_path}/empty.db")
    said = ledger.process.communicate(timeout=60)[1].decode()
    assert ledger.process.returncode == 1
    assert "is at revision none" in said and "Traceback" not in said
