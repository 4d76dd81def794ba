"""How fast is usage booked, and does an export of a million rows need memory for a million rows?

Booking: messages as sent by gateways (a checkpoint and a final message of each request, two tenants in three with a
price of their own), in the ledger's batches, a transaction per batch, on SQLite and, where installed, PostgreSQL.
`again` books the messages once more, without any effect. Export: every format of a month with as many rows, and the
export's verification; memory is the process's largest growth meanwhile, sampled every 20 ms.

`python tests/bench/gateway/bench_ledger.py [--messages 100000] [--rows 1000000] [--profile]`; with --profile where the
time goes, and no figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import pstats
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from gateway.billing.formats import FORMATS, ExportQuery, write  # noqa: E402
from store.contract.wire import Usage  # noqa: E402
from store.db import (  # noqa: E402
    billing,
    tables,
    usage,
)
from store.db.database import Database  # noqa: E402
from store.db.ledger import BATCH_MOST  # noqa: E402
from store.db.verify import verify  # noqa: E402
from tests.bench.timing import load, spread  # noqa: E402
from tests.databases import Postgres, account, programs  # noqa: E402

NOVEMBER_US = round(datetime(2026, 11, 1, tzinfo=UTC).timestamp() * 1e6)
PERIOD, TENANTS, ROUNDS, MONTH_S = "2026-11", 12, 3, 30 * 86_400
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--profile", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="staccato-bench-") as folder, postgres() as server:
        asyncio.run(measure(Path(folder), server, chosen.messages, chosen.rows, chosen.profile))


@contextlib.contextmanager
def postgres() -> Iterator[Postgres | None]:
    found = programs()
    if found is None:
        print("PostgreSQL: left out, it is not installed", file=sys.stderr)
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="staccato-pg-"))
    server = Postgres(found, folder, account())
    yield server
    server.process.terminate()
    server.process.wait(20)
    shutil.rmtree(folder, ignore_errors=True)


async def measure(folder: Path, server: Postgres | None, messages: int, rows: int, profiled: bool) -> None:
    for kind in ("sqlite", "postgres") if server else ("sqlite",):
        async with databases(folder, server, kind) as fresh:
            if profiled:
                await profile(fresh, messages, rows)
                continue
            print(json.dumps({"booking": kind, **await booking(fresh, messages), "load": load()}), flush=True)
            database = await fresh()
            await fill(database, rows)
            for name, detail in [(format, detail) for format in FORMATS for detail in FORMATS[format].details]:
                answer = await exporting(database, ExportQuery(PERIOD, None, name, detail), rows)
                print(json.dumps({"export": name, "detail": detail, "database": kind, **answer}), flush=True)
            print(json.dumps({"verify": kind, **await verifying(database, rows)}), flush=True)


Fresh = Callable[[], Awaitable[Database]]


@contextlib.asynccontextmanager
async def databases(folder: Path, server: Postgres | None, kind: str) -> AsyncIterator[Fresh]:
    """Yields a function that makes a new database with tenants and prices; the databases are closed at the end."""
    made: list[Database] = []

    async def fresh() -> Database:
        name = f"bench_{len(made)}"
        url = f"sqlite:///{folder}/{name}.db"
        if kind == "postgres":
            assert server is not None
            url = await server.create(name, "template0")
        database = Database(url)
        made.append(database)
        await database.migrate()
        await set_prices(database)
        return database

    yield fresh
    for database in made:
        await database.close()


async def set_prices(database: Database) -> None:
    rates = {name: 10**6 + n for n, name in enumerate(billing.RATES)}
    async with database.write() as connection:
        await billing.add_price(connection, None, None, "USD", rates, 1, 1)
        for n in range(TENANTS):
            await connection.execute(tables.tenants.insert().values(id=f"t{n}", name=f"tenant-{n}", created_us=1))
            if n % 3:
                await billing.add_price(connection, f"t{n}", None, "USD", rates, 1, 1)


# ── booking ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def message(n: int, final: bool) -> Usage:
    """A usage message of request n: a checkpoint, or the final message."""
    started_at = NOVEMBER_US / 1e6 + n % MONTH_S
    tokens = 200 if final else 90
    return Usage(
        request=f"{n * 2654435761 % 2**32:08x}-{n:024x}",  # as unsorted as request ids are
        attempt=1,
        seq=2 if final else 1,
        final=final,
        tenant_id=f"t{n % TENANTS}",
        key_id=f"k{n % TENANTS}",
        deployment_id=f"d{n % 40}",
        deployment="chat",
        revision=1,
        model="engine",
        prompt_tokens=512,
        cached_tokens=128,
        output_tokens=tokens,
        started_at=started_at,
        ended_at=started_at + 5,
        finish="stop" if final else "open",
        gpu_us=tokens * 1000,
        kv_byte_s=tokens * 10**7,
    )


def batches(messages: int) -> list[list[Usage]]:
    """Messages in batches; the checkpoint of a request comes some hundred requests before the final message."""
    order = []
    for n in range(messages // 2 + 300):
        order += [message(n, False)] if n < messages // 2 else []
        order += [message(n - 300, True)] if n >= 300 else []
    return [order[start : start + BATCH_MOST] for start in range(0, len(order), BATCH_MOST)]


async def book(database: Database, sent: list[list[Usage]]) -> float:
    """Book the batches; returns seconds."""
    began = time.perf_counter()
    for batch in sent:
        async with database.write() as connection:
            await usage.book(connection, batch, NOVEMBER_US)
    return time.perf_counter() - began


async def booking(fresh: Fresh, messages: int) -> dict[str, object]:
    sent = batches(messages)
    first, again = [], []
    for _ in range(ROUNDS):
        database = await fresh()
        first.append(messages / await book(database, sent))
        again.append(messages / await book(database, sent))
    return {"messages": messages, "batch": BATCH_MOST, "per_s": spread(first, 0), "again_per_s": spread(again, 0)}


# ── exports ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def fill(database: Database, rows: int) -> None:
    for start in range(0, rows, 5000):
        async with database.write() as connection:
            sent = [message(n, True) for n in range(start, min(start + 5000, rows))]
            await usage.book(connection, sent, NOVEMBER_US)


async def exporting(database: Database, asked: ExportQuery, rows: int) -> dict[str, object]:
    with tempfile.TemporaryFile() as file, grown() as growth_mib:
        began = time.perf_counter()
        async with database.snapshot() as connection:
            digest = await write(connection, asked, file)
        took_s = time.perf_counter() - began
    size = {"mib": round(digest.size / MIB, 1), "grown_mib": growth_mib()}
    return {"rows": rows, "s": round(took_s, 1), "rows_per_s": round(rows / took_s), **size, "load": load()}


async def verifying(database: Database, rows: int) -> dict[str, object]:
    with grown() as growth_mib:
        began = time.perf_counter()
        async with database.snapshot() as connection:
            report = await verify(connection, PERIOD, NOVEMBER_US)
        took_s = time.perf_counter() - began
    assert report.rows == rows and not report.flawed, report
    return {"rows": rows, "s": round(took_s, 1), "grown_mib": growth_mib(), "load": load()}


@contextlib.contextmanager
def grown() -> Iterator[Callable[[], float]]:
    """Yields a function that returns the largest growth of the process's memory until now, in MiB."""
    process, over = psutil.Process(), threading.Event()
    before = most = process.memory_info().rss

    def watch() -> None:
        nonlocal most
        while not over.wait(0.02):
            most = max(most, process.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield lambda: round((most - before) / MIB, 1)
    finally:
        over.set()
        watching.join()


async def profile(fresh: Fresh, messages: int, rows: int) -> None:
    database, sent = await fresh(), batches(messages)
    profiler = cProfile.Profile()
    with profiler:
        await book(database, sent)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)
    full = await fresh()
    await fill(full, rows)
    profiler = cProfile.Profile()
    with profiler, tempfile.TemporaryFile() as file:
        async with full.snapshot() as connection:
            await write(connection, ExportQuery(PERIOD, None, "csv", "rows"), file)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
