"""How much does PostgreSQL's row-level security cost?

A tenant's transaction with a small query, and with a sum over the tenant's part of the usage, as the tenant and as the
platform, in turns. Also the ledger's booking in a database with the policies and in a database without policies, in
turns; the database's owner is no superuser, because policies do not hold for superusers.

`python tests/bench/gateway/bench_row_security.py [--rows 100000]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import asyncpg
from sqlalchemy import func, select

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from store.db import tables, usage  # noqa: E402
from store.db.database import Database  # noqa: E402
from tests.bench.gateway.bench_ledger import NOVEMBER_US, batches, book, message, postgres, set_prices  # noqa: E402
from tests.bench.timing import load, milliseconds, ratios, spread  # noqa: E402
from tests.databases import Postgres  # noqa: E402

TRANSACTIONS, ROUNDS = 300, 9
BEFORE = "0005"  # the last migration without policies


async def measure(server: Postgres, rows: int) -> None:
    database = await owned(server, "asked")
    await asking(database, rows)
    await database.close()
    await booking(server, rows)


async def owned(server: Postgres, name: str) -> Database:
    url = await server.create(name, "template0")
    connection = await asyncpg.connect(url)
    await connection.execute(f"CREATE ROLE {name} LOGIN CREATEROLE; ALTER SCHEMA public OWNER TO {name}")
    await connection.close()
    database = Database(url.replace("staccato@", f"{name}@"))
    await database.migrate()
    await set_prices(database)
    return database


async def asking(database: Database, rows: int) -> None:
    for start in range(0, rows, 5000):
        async with database.write() as connection:
            await usage.book(connection, [message(n, True) for n in range(start, start + 5000)], NOVEMBER_US)
    u = tables.usage.c
    queries = {
        "small": (select(tables.tenants).where(tables.tenants.c.id == "t1"), TRANSACTIONS),
        "sum": (select(func.sum(u.output_tokens)).where(u.tenant_id == "t1"), 10),
    }
    for name, (query, times) in queries.items():
        took: dict[str | None, list[float]] = {None: [], "t1": []}
        for _ in range(ROUNDS):
            for who in took:
                began = time.perf_counter()
                for _ in range(times):
                    async with database.of(who).read() as connection:
                        await connection.execute(query)
                took[who].append((time.perf_counter() - began) / times)
        figures = {"platform_ms": milliseconds(took[None]), "tenant_ms": milliseconds(took["t1"])}
        print(json.dumps({"query": name, "rows": rows, **figures, "ratio": ratios(took["t1"], took[None])}), flush=True)


async def booking(server: Postgres, messages: int) -> None:
    sent, took = batches(messages), {True: list[float](), False: list[float]()}
    for n in range(3):
        for policies in took:
            database = await owned(server, f"booked_{n}_{policies}".lower())
            if not policies:
                await database.migrate(BEFORE)
            took[policies].append(messages / await book(database, sent))
            await database.close()
    figures = {"with_per_s": spread(took[True], 0), "without_per_s": spread(took[False], 0)}
    print(json.dumps({"booking": messages, **figures, "ratio": ratios(took[True], took[False]), "load": load()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    rows = parser.parse_args().rows
    with postgres() as server:
        assert server is not None
        asyncio.run(measure(server, rows))


if __name__ == "__main__":
    main()
