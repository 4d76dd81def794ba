"""Parts of requests' time: kept for some days, written once, seen only by the request's tenant, deleted in pieces."""

from __future__ import annotations

import asyncio

import pytest

from store.bus import Bus
from store.contract import wire
from store.contract.elapsed import Elapsed
from store.db import requests, usage
from store.db.database import Database, now_us
from store.db.ledger import consume, forget
from store.db.requests import DAY_US, Past
from tests.conftest import NatsServer
from tests.store.db.test_usage import message

S = 1_000_000


def ended(id: str, total_us: int = 1000, started_us: int = 10 * S, tenant: str = "t", **more: object) -> wire.Usage:
    elapsed = Elapsed("host", total_us, 400, {"queue": 400, "decode": total_us - 400})
    said = message(id, output_tokens=3)
    return wire.replace(said, tenant_id=tenant, started_at=started_us / 1e6, elapsed=elapsed, **more)


async def kept(database: Database, *messages: wire.Usage) -> None:
    async with database.write() as connection:
        await requests.keep(connection, messages)


async def found(database: Database, id: str, tenant: str | None = None) -> Past | None:
    async with database.of(tenant).read() as connection:
        return await requests.find(connection, tenant, id)


async def listed(
    database: Database,
    tenant: str | None = None,
    deployment: str | None = None,
    slower_than_us: int = 0,
    most: int = 10,
) -> list[str]:
    async with database.of(tenant).read() as connection:
        return [past.id for past in await requests.listed(connection, tenant, deployment, slower_than_us, most)]


async def test_a_request_is_kept_once_with_where_its_time_went_and_only_its_tenant_finds_it(database: Database) -> None:
    said = ended("a")
    await kept(database, said, wire.replace(said, seq=9), message("b"))
    await kept(database, said)
    past = await found(database, "a", "t")
    assert past is not None and past == await found(database, "a")
    assert past.elapsed == said.elapsed and (past.finish, past.output_tokens) == (said.finish, 3)
    assert await found(database, "a", "another") is None
    assert await found(database, "b") is None, "no runtime was asked for this one"


async def test_the_newest_come_first_and_the_quick_are_left_out(database: Database) -> None:
    times = {"a": 5000, "b": 900, "c": 7000, "d": 8000}
    messages = [ended(id, us, (10 + n) * S) for n, (id, us) in enumerate(times.items())]
    await kept(database, *messages, ended("e", 9000, 5 * S, "u"))
    assert await listed(database) == ["d", "c", "b", "a", "e"]
    assert await listed(database, "t", slower_than_us=5000) == ["d", "c", "a"]
    assert await listed(database, "t", most=2) == ["d", "c"] and await listed(database, "u") == ["e"]
    assert await listed(database, deployment="nothing") == []


async def test_only_so_many_of_the_newest_are_looked_at(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SCANNED_MOST", 2)
    await kept(database, *(ended(f"r{n}", started_us=(10 + n) * S) for n in range(4)))
    assert await listed(database) == ["r3", "r2"]


async def test_old_ones_are_deleted_so_many_at_a_time(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "DELETED_MOST", 3)
    await kept(database, *(ended(f"r{n}", started_us=(10 + n) * S) for n in range(7)))
    gone = []
    for _ in range(3):
        async with database.write() as connection:
            gone.append(await requests.forget(connection, 15 * S))
    assert gone == [3, 2, 0] and await listed(database) == ["r6", "r5"]


async def test_the_ledger_writes_them_with_the_usage_and_deletes_them_after_their_days(
    nats_server: NatsServer, database: Database
) -> None:
    now = now_us()
    old, new = ended("old", started_us=now - 3 * DAY_US), ended("new", started_us=now)
    async with Bus.connect(nats_server.url, "test") as bus:
        work = [asyncio.create_task(consume(bus, database, 2.0))]
        for said in (old, new):
            await bus.publish_usage(said)
        async with asyncio.timeout(20):
            while await listed(database) != ["new", "old"]:
                await asyncio.sleep(0.02)
            work.append(asyncio.create_task(forget(database, 2.0, 0.05)))
            while await listed(database) != ["new"]:
                await asyncio.sleep(0.02)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


async def test_with_no_days_nothing_is_kept_beside_the_usage(nats_server: NatsServer, database: Database) -> None:
    async with Bus.connect(nats_server.url, "test") as bus:
        work = asyncio.create_task(consume(bus, database, 0.0))
        await bus.publish_usage(ended("a", started_us=now_us()))
        async with asyncio.timeout(20):
            while not await _booked(database, "a"):
                await asyncio.sleep(0.02)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert await listed(database) == []


async def _booked(database: Database, id: str) -> bool:
    async with database.read() as connection:
        return await usage.is_final(connection, id)
