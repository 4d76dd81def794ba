"""Ledgers that die at the worst moment, and wrong ledgers, whose errors the checker must notice.

Run as a process, `python -m tests.chaos.ledgers KIND [--dies]`. A ledger does two things with a batch: booking and
acknowledging. With `--dies`, the ledger dies between the two; a right ledger has booked and not acknowledged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from nats.js.errors import NotFoundError
from sqlalchemy.dialects import postgresql, sqlite

from store.bus import Bus, UsageBatch
from store.contract import wire
from store.db import ledger as right
from store.db import usage
from store.db.database import Database, insert_in
from store.db.tables import usage as table
from tests.conftest import ROOT

CONSUMER = "ledger"  # name of the right ledger's consumer
BOOKED_S = 60.0
DROPPED = {  # statements that drop the unique constraint, in a database without bookings
    "sqlite": ["CREATE TABLE bare AS SELECT * FROM usage", "DROP TABLE usage", "ALTER TABLE bare RENAME TO usage"],
    "postgresql": ["ALTER TABLE usage DROP CONSTRAINT usage_pkey"],
}


def plain_insert(dialect: str) -> sqlite.Insert | postgresql.Insert:
    """The ledger's insert without the handling of conflicts, for a table without the unique constraint."""
    return insert_in(dialect, table)


async def acknowledge_first(bus: Bus, database: Database, request_days: float) -> None:
    async for batch in bus.usage_batches(CONSUMER, right.BATCH_MOST):
        await batch.ack()
        await right._book(database, batch, request_days > 0)


WRONG: dict[str, Callable[[], None]] = {
    "right": lambda: None,
    "doubling": lambda: setattr(usage, "_upsert", plain_insert),
    "hasty": lambda: setattr(right, "consume", acknowledge_first),
}


def dying(step: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def last(*given: Any) -> None:
        await step(*given)
        await asyncio.sleep(0.2)  # until NATS has heard of the step
        os.kill(os.getpid(), signal.SIGKILL)

    return last


@contextlib.contextmanager
def ledger(nats_url: str, database_url: str, kind: str = "right") -> Iterator[None]:
    """Run a ledger of the kind as a process until the context ends."""
    process = subprocess.Popen(command(kind), env=told(nats_url, database_url), cwd=ROOT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def command(kind: str) -> list[str]:
    return [sys.executable, "-m", "tests.chaos.ledgers", kind]


def told(nats_url: str, database_url: str) -> dict[str, str]:
    return {**os.environ, "STACCATO_NATS_URL": nats_url, "STACCATO_DATABASE_URL": database_url}


async def booked(bus: Bus) -> None:
    """Return when the ledger has acknowledged every message in the stream."""
    async with asyncio.timeout(BOOKED_S):
        while True:
            with contextlib.suppress(NotFoundError):  # the ledger has not come yet
                known = await bus._js.consumer_info(wire.USAGE_STREAM, CONSUMER)
                if known.num_pending == known.num_ack_pending == 0:
                    return
            await asyncio.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=WRONG)
    parser.add_argument("--dies", action="store_true")
    chosen = parser.parse_args()
    WRONG[chosen.kind]()
    if chosen.dies:
        right._book = dying(right._book)  # type: ignore[assignment]
        UsageBatch.ack = dying(UsageBatch.ack)  # type: ignore[method-assign,assignment]
    return right.main()


if __name__ == "__main__":
    sys.exit(main())
