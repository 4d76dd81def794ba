"""The audit log can only grow, and tampering with the log is found."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from store.db import audit
from store.db.audit import GENESIS, Link, Verdict
from store.db.database import Database
from store.db.tables import audit as log
from store.db.tables import audit_head

TENANTS = (None, "t1", "t2")


async def record(connection: AsyncConnection, number: int, tenant_id: str | None) -> None:
    old = {"weight": number / 3} if number % 2 else None
    await audit.record(connection, "tenant.changed", f"s{number}", tenant_id, "admin", f"r{number}", old, {"n": number})


async def filled(database: Database, tenants: list[str | None]) -> None:
    async with database.write() as connection:
        for number, tenant_id in enumerate(tenants, 1):
            await record(connection, number, tenant_id)


async def verdict(database: Database, tenant_id: str | None = None, noted: Link | None = None) -> Verdict:
    async with database.snapshot() as connection:
        return await audit.verify(connection, tenant_id, noted)


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_row_is_hashed_as_never_changes() -> None:
    """Otherwise earlier rows could no longer be verified."""
    said = {"id": "i", "at_us": 1, "kind": "é", "new": audit.canonical({"b": 1, "a": 2.5})}
    row = dict.fromkeys(audit.FIELDS, None) | said
    assert audit.digest(row) == "1aaf0f90b7a36a29c9a381aba9a13536d8dda6bfbd0669f5169d2cee9a8e8a48"
    assert Link().then("d").hash == "c66744a50389616e9073854c051ec23198f5f798e143aaf9d03fa47a9c489eee"


async def test_rows_form_one_chain_and_one_for_each_tenant(database: Database) -> None:
    await filled(database, [None, "t1", "t2", "t1"])
    async with database.read() as connection:
        rows = await audit.listed(connection, None, "", 10)
        theirs = await audit.listed(connection, "t1", "", 10)
        assert await audit.listed(connection, None, rows[1].id, 10) == rows[2:]
        assert await audit.listed(connection, "t1", theirs[0].id, 10) == theirs[1:]
        assert await audit.listed(connection, "t2", theirs[0].id, 10) == []  # a place in a foreign chain is no place
        assert await audit.head(connection, None) == rows[-1].link
        assert await audit.head(connection, "t1") == theirs[-1].tenant_link
    assert [(row.seq, row.tenant_seq) for row in rows] == [(1, None), (2, 1), (3, 1), (4, 2)]
    assert [row.subject_id for row in theirs] == ["s2", "s4"]
    assert (rows[2].old, rows[2].new, rows[2].request_id) == ('{"weight":1.0}', '{"n":3}', "r3")
    assert [(await verdict(database, tenant)).rows for tenant in TENANTS] == [4, 2, 1]


async def test_a_deed_that_fails_leaves_no_row_and_no_gap(database: Database) -> None:
    await filled(database, ["t1"])
    with pytest.raises(ZeroDivisionError):
        async with database.write() as connection:
            await record(connection, 2, "t1")
            raise ZeroDivisionError
    await filled(database, ["t1"])
    checked = await verdict(database)
    assert (checked.rows, checked.flaw) == (2, None)


async def test_gateways_that_write_at_once_do_not_fork_the_chain(database_url: str) -> None:
    """Every database has connections of its own, as processes have."""
    async with contextlib.AsyncExitStack() as stack:
        several = [await stack.enter_async_context(Database.open(database_url)) for _ in range(4)]

        async def work(database: Database) -> None:
            for number in range(10):
                async with database.write() as connection:
                    await connection.execute(select(log.c.seq).limit(1))  # the transaction has read before
                    await record(connection, number, TENANTS[number % 3])

        await asyncio.gather(*map(work, several))
        checked = await verdict(several[0])
    assert (checked.rows, checked.head.seq, checked.flaw) == (40, 40, None)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET kind = 'other' WHERE seq = 1",
        "DELETE FROM audit WHERE seq = 1",
        "UPDATE audit_head SET seq = 0",
        "UPDATE audit_head SET hash = 'x'",
        "DELETE FROM audit_head",
        "INSERT INTO audit_head (seq, hash) VALUES (9, 'x')",
    ],
)
async def test_the_database_refuses_to_change_it(database: Database, statement: str) -> None:
    await filled(database, ["t1", None])
    with pytest.raises(DBAPIError, match="the audit log"):
        async with database.write() as connection:
            await connection.execute(text(statement))
    assert (await verdict(database)).flaw is None


@pytest.mark.postgres
async def test_postgresql_refuses_to_empty_it(postgres_url: str) -> None:
    async with Database.open(postgres_url) as database:
        await filled(database, ["t1"])
        for table in ("audit", "audit_head"):
            with pytest.raises(DBAPIError, match="the audit log"):
                async with database.write() as connection:
                    await connection.execute(text(f"TRUNCATE {table}"))


# ── tampering ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def unguarded(sqlite_url: str) -> AsyncIterator[Database]:
    """The log in the hands of an attacker who may drop the triggers; ten rows."""
    async with Database.open(sqlite_url) as database:
        await filled(database, [TENANTS[n % 3] for n in range(10)])
        async with database.write() as connection:
            for name in (await connection.scalars(text("SELECT name FROM sqlite_master WHERE type = 'trigger'"))).all():
                await connection.execute(text(f"DROP TRIGGER {name}"))
        yield database


class Undone(Exception):
    pass


COLUMNS = [column for column in log.c if column.name != "seq"]


@given(data=st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_row_that_was_changed_removed_moved_or_put_in_is_found(
    unguarded: Database, data: st.DataObject
) -> None:
    row = data.draw(st.integers(1, 10), "row")
    with contextlib.suppress(Undone):
        async with unguarded.write() as connection:
            found = await _tampered(connection, row, data)
            checked = await audit.verify(connection, None)
            assert checked.flaw is not None and checked.row == found, checked
            raise Undone
    assert (await verdict(unguarded)).flaw is None


async def _tampered(connection: AsyncConnection, row: int, data: st.DataObject) -> int:
    """Tamper with a row; returns the number of the first wrong row."""
    match data.draw(st.sampled_from(["change", "remove", "swap", "insert", "cut"])):
        case "change":
            column = data.draw(st.sampled_from(COLUMNS))
            was = (await connection.execute(select(column).where(log.c.seq == row))).scalar_one()
            now = data.draw(st.none() | st.text() | st.just("{}") if column.name != "at_us" else st.integers(0, 2**60))
            now = f"{was}x" if now == was else now
            if now is None and not column.nullable:
                now = "x"
            if column.name == "tenant_seq" and now is not None:
                now = 999
            await connection.execute(update(log).where(log.c.seq == row).values({column: now}))
            return row
        case "remove":
            await connection.execute(delete(log).where(log.c.seq == row))
            return row
        case "swap":
            other = data.draw(st.integers(1, 10).filter(lambda other: other != row))
            for frm, to in ((row, 999), (other, row), (999, other)):
                await connection.execute(update(log).where(log.c.seq == frm).values(seq=to))
            return min(row, other)
        case "insert":
            for seq in range(10, row - 1, -1):
                await connection.execute(update(log).where(log.c.seq == seq).values(seq=seq + 1))
            made = {
                "seq": row,
                "hash": GENESIS,
                "id": "forged",
                "at_us": 1,
                "kind": "k",
                "subject_id": "s",
                "by": "admin",
            }
            await connection.execute(log.insert().values(**made))
            return row
        case _:
            await connection.execute(delete(log).where(log.c.seq >= row))
            return row


async def test_a_log_that_was_written_anew_is_told_by_a_head_that_was_noted(unguarded: Database) -> None:
    """Every hash fits: only a reader with a noted hash can know."""
    noted = (await verdict(unguarded)).head
    async with unguarded.write() as connection:
        await connection.execute(delete(log))
        await connection.execute(update(audit_head).values(seq=0, hash=GENESIS))
    await filled(unguarded, ["t1"] * 11)
    assert (await verdict(unguarded)).flaw is None
    assert (await verdict(unguarded, noted=noted)).flaw == "row 10 is another one than when it was noted"
    later = Link(12, "x")
    assert (await verdict(unguarded, noted=later)).flaw == "row 12 was noted, and 11 are there"


async def test_a_tenant_finds_what_was_done_to_its_own_rows(unguarded: Database) -> None:
    async with unguarded.write() as connection:
        await connection.execute(delete(log).where(log.c.seq == 2))
    seen = [(await verdict(unguarded, tenant)).flaw for tenant in ("t1", "t2")]
    assert seen == ["row 1 is missing", None]
