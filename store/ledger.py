"""The process that books usage: from the bus's stream into the database, acknowledged only once it is committed.

Whatever dies in between, the stream delivers again and booking again changes nothing. Now and then it closes the rows
of requests that nobody speaks of any more.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import structlog
import uvloop
from pydantic_settings import BaseSettings, SettingsConfigDict

from store import grants, observe, signs, usage
from store.bus import Bus, BusError, UsageBatch, ended
from store.db import Database, DatabaseError, NotMigrated, now_us
from store.settings import read

log = structlog.get_logger()

BATCH_MOST = 2000  # what a transaction costs besides its rows is as much as 500 rows do
SWEEP_PERIOD_S = 60.0  # the first comes so late, too: what waits in the stream is booked by then
RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # between attempts; the last one again and again


class LedgerSettings(BaseSettings):
    """`STACCATO_NATS_URL`, `STACCATO_DATABASE_URL`; the latter may be a file in the folder STACCATO_SECRETS."""

    model_config = SettingsConfigDict(env_prefix="STACCATO_", extra="ignore")

    nats_url: str = "nats://127.0.0.1:4222"
    nats_credentials: Path | None = None
    database_url: str


async def consume(bus: Bus, database: Database) -> None:
    """Endless."""
    async for batch in bus.usage_batches(grants.BOOKS, BATCH_MOST):
        await _book(database, batch)
        try:
            await batch.ack()
        except BusError as error:  # it comes again, and changes nothing then
            log.warning("ledger.not_acknowledged", messages=len(batch.usages), error=str(error))


async def sweep(database: Database, period_s: float = SWEEP_PERIOD_S) -> None:
    """Endless. Requests whose gateway never came back end by rule."""
    while True:
        await asyncio.sleep(period_s)
        try:
            async with database.write() as connection:
                closed = await usage.close_lost(connection, now_us())
        except NotMigrated:
            raise
        except DatabaseError as error:
            log.warning("ledger.not_swept", error=str(error))
            continue
        if closed:
            log.warning("ledger.lost", requests=closed, silent_s=usage.LEASE_US // 1_000_000)


async def _book(database: Database, batch: UsageBatch) -> None:
    """Until it is committed."""
    attempt = 0
    while True:
        try:
            async with database.write() as connection:
                await usage.book(connection, batch.usages, now_us())
            return
        except NotMigrated:
            raise
        except DatabaseError as error:
            pause_s = RETRY_S[min(attempt, len(RETRY_S) - 1)]
            log.warning("ledger.retry", in_s=pause_s, messages=len(batch.usages), error=str(error))
            await asyncio.sleep(pause_s)
            attempt += 1


async def serve(settings: LedgerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    connecting = Bus.connect(settings.nats_url, "ledger", grants.LEDGER, settings.nats_credentials)
    async with Database.open(settings.database_url) as database, connecting as bus:
        jobs = (consume(bus, database), sweep(database), signs.give(lambda: bus.connected))
        work = [asyncio.create_task(job) for job in jobs]
        stopping = asyncio.create_task(stop.wait())
        log.info("ledger.ready", database=database.shown_url)
        await asyncio.wait([*work, stopping], return_when=asyncio.FIRST_COMPLETED)
        failed = [task for task in work if task.done()]
        for task in (*work, stopping):
            await ended(task)
        for task in failed:
            task.result()


def main() -> int:
    observe.configure_logs("ledger")
    try:
        settings = read(LedgerSettings)
        uvloop.run(serve(settings))
    except (ValueError, BusError, DatabaseError) as error:
        print(f"ledger: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
