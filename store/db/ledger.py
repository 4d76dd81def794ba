"""The ledger: the process that books usage from the bus's stream into the database.

Usage is acknowledged only once committed. Whichever process dies in between, the stream delivers the usage again, and
booking the usage again changes nothing. Now and then the ledger closes the rows of requests without news.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import structlog
import uvloop
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from store.bus import Bus, BusError, UsageBatch
from store.contract import grants
from store.contract.elapsed import KEPT_DAYS
from store.db import requests, usage
from store.db.database import Database, DatabaseError, NotMigrated, now_us
from store.settings import USAGE_DAYS, Replicas, UsageDays, read
from store.tasks import ended
from store.telemetry import observe, signs

log = structlog.get_logger()

BATCH_MOST = 2000  # an empty transaction costs as much as 500 rows
SWEEP_PERIOD_S = 60.0  # also before the first sweep: by then the usage waiting in the stream is booked
FORGETTING_MOST = 10  # transactions in a row; a transaction deletes some thousand requests
LIMIT_PERIOD_S = 600.0
RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # pauses between attempts; the last pause is repeated


class LedgerBusSettings(BaseSettings):
    """Settings of the ledger's connection to the bus, from `STACCATO_NATS_URL` and its like."""

    model_config = SettingsConfigDict(env_prefix="STACCATO_", extra="ignore")

    nats_url: str = "nats://127.0.0.1:4222"
    nats_credentials: Path | None = None
    nats_ca: Path | None = None  # PEM file of the authority of a tls:// server
    nats_replicas: Replicas = None  # also set on streams and buckets that are there


class LedgerSettings(LedgerBusSettings):
    """Settings of the ledger. `STACCATO_DATABASE_URL` may be a file in the folder STACCATO_SECRETS."""

    database_url: str
    request_days: float = Field(KEPT_DAYS, ge=0)  # breakdowns of requests are kept so long; 0: not at all
    usage_days: UsageDays = USAGE_DAYS


async def consume(bus: Bus, database: Database, request_days: float = KEPT_DAYS) -> None:
    """Endless: book batches of usage and acknowledge committed batches. `request_days` 0: keep no breakdowns."""
    async for batch in bus.usage_batches(grants.BOOKS, BATCH_MOST):
        await _book(database, batch, request_days > 0)
        try:
            await batch.ack()
        except BusError as error:  # the batch comes again, and changes nothing then
            log.warning("ledger.not_acknowledged", messages=len(batch.usages), error=str(error))


async def sweep(database: Database, period_s: float = SWEEP_PERIOD_S) -> None:
    """Endless: close the rows of requests whose gateway never came back."""
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


async def forget(database: Database, request_days: float, period_s: float = SWEEP_PERIOD_S) -> None:
    """Endless: delete requests that started more than `request_days` ago, in at most FORGETTING_MOST transactions a
    period."""
    while True:
        for _ in range(FORGETTING_MOST):
            try:
                async with database.write() as connection:
                    gone = await requests.forget(connection, now_us() - round(request_days * requests.DAY_US))
            except NotMigrated:
                raise
            except DatabaseError as error:
                log.warning("ledger.not_forgotten", error=str(error))
                break
            if gone < requests.DELETED_MOST:
                break
        await asyncio.sleep(period_s)


async def limit_stream(bus: Bus, usage_days: float, period_s: float = LIMIT_PERIOD_S) -> None:
    """Endless: keep the stream of usage from growing without end, also if a process has made the stream again."""
    age_s = usage_days * usage.DAY_US // 1_000_000  # whole seconds: the servers' answer is compared
    while True:
        try:
            if await bus.limit_usage(age_s):
                log.info("ledger.stream_limited")
        except BusError as error:
            log.warning("ledger.stream_not_limited", error=str(error))
        await asyncio.sleep(period_s)


async def _book(database: Database, batch: UsageBatch, keeps_requests: bool = True) -> None:
    """Book a batch, trying again until the transaction commits."""
    attempt = 0
    while True:
        try:
            async with database.write() as connection:
                await usage.book(connection, batch.usages, now_us())
                if keeps_requests:
                    await requests.keep(connection, batch.usages)
            return
        except NotMigrated:
            raise
        except DatabaseError as error:
            pause_s = RETRY_S[min(attempt, len(RETRY_S) - 1)]
            log.warning("ledger.retry", in_s=pause_s, messages=len(batch.usages), error=str(error))
            await asyncio.sleep(pause_s)
            attempt += 1


def _identity(settings: LedgerBusSettings) -> tuple[grants.User, Path | None, Path | None, int | None]:
    return grants.LEDGER, settings.nats_credentials, settings.nats_ca, settings.nats_replicas


async def replay(settings: LedgerBusSettings) -> None:
    """Have running ledgers, or else the next ledger, book the stream of usage from its start. Raises BusError."""
    async with Bus.connect(settings.nats_url, "replay", *_identity(settings)) as bus:
        messages = await bus.replay_usage(grants.BOOKS)
    print(f"{messages} messages of usage are booked again; usage that is booked already does not change")


async def serve(settings: LedgerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    connecting = Bus.connect(settings.nats_url, "ledger", *_identity(settings))
    async with Database.open(settings.database_url) as database, connecting as bus:
        days = settings.request_days
        jobs = (
            consume(bus, database, days),
            sweep(database),
            forget(database, days),
            limit_stream(bus, settings.usage_days),
        )
        work = [asyncio.create_task(job) for job in (*jobs, signs.give(lambda: bus.connected))]
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
        if sys.argv[1:] == ["--replay"]:
            uvloop.run(replay(read(LedgerBusSettings)))
        else:
            uvloop.run(serve(read(LedgerSettings)))
    except (ValueError, BusError, DatabaseError) as error:
        print(f"ledger: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
