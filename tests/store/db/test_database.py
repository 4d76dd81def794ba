"""Transactions, migrations, and the messages to a person when the database does not answer."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import insert, inspect, select, text

from store.db import database as db
from store.db.database import Database, DatabaseLocked, DatabaseUnreachable, DiskFull, NotMigrated
from store.db.tables import metadata, tenants

ROOT = Path(__file__).parents[3]


async def test_a_migrated_database_has_exactly_the_tables_of_the_code(database: Database) -> None:
    def differences(connection: object) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    async with database.read() as connection:
        assert await connection.run_sync(differences) == []


async def test_migrations_go_up_and_down_and_up_again(empty_url: str) -> None:
    database = Database(empty_url)
    assert await database.revision() is None
    await database.migrate()
    await database.migrate("base")
    async with database.read() as connection:
        assert await connection.run_sync(lambda c: inspect(c).get_table_names()) == ["alembic_version"]
    await database.migrate()
    assert await database.revision() == db.head()
    await database.close()


async def test_of_two_processes_that_start_at_once_both_find_it_migrated(empty_url: str) -> None:
    code = "import sys; from store.db import database as db; db.migrate(sys.argv[1]); print(db.revision(sys.argv[1]))"
    started = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, empty_url, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(3)
    ]
    said = [await process.communicate() for process in started]
    assert [out.decode().strip() for out, _ in said] == [db.head()] * 3, said


async def test_a_database_that_was_never_migrated_is_refused_with_the_remedy(empty_url: str) -> None:
    with pytest.raises(NotMigrated, match=r"is at revision none.*start `staccato up`"):
        async with Database.open(empty_url):
            pass


async def test_a_database_of_a_newer_version_is_refused(database: Database) -> None:
    async with database.write() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(NotMigrated, match="9999"):
        await database.check()
    with pytest.raises(NotMigrated, match="upgrade staccato"):
        await database.migrate()


async def test_what_fails_in_the_middle_leaves_nothing(database: Database) -> None:
    with pytest.raises(ZeroDivisionError):
        async with database.write() as connection:
            await connection.execute(insert(tenants).values(id="t", name="acme", created_us=1))
            raise ZeroDivisionError
    async with database.read() as connection:
        assert (await connection.execute(select(tenants))).all() == []


async def test_writers_that_read_first_lose_no_update(database: Database) -> None:
    async with database.write() as connection:
        await connection.execute(insert(tenants).values(id="t", name="0", created_us=0))

    async def add_one() -> None:
        async with database.write() as connection:
            query = select(tenants.c.created_us).with_for_update()
            seen = (await connection.execute(query)).scalar_one()
            await connection.execute(tenants.update().values(created_us=seen + 1))

    await asyncio.gather(*(add_one() for _ in range(40)))
    async with database.read() as connection:
        assert await connection.scalar(select(tenants.c.created_us)) == 40


async def test_sqlite_is_opened_so_that_a_commit_survives_a_power_cut(sqlite_url: str) -> None:
    async with Database.open(sqlite_url) as database, database.read() as connection:
        said = [await connection.scalar(text(f"PRAGMA {name}")) for name in ("journal_mode", "synchronous")]
        assert said == ["wal", 2]
        assert await connection.scalar(text("PRAGMA foreign_keys")) == 1


async def test_a_locked_database_is_one_sentence(sqlite_url: str) -> None:
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    database = Database(sqlite_url, busy_timeout_s=0.05)
    with pytest.raises(DatabaseLocked, match="is locked by another process"):
        async with database.write():
            pass
    async with database.read() as connection:  # readers are not stopped by a writer
        await connection.execute(select(tenants))
    other.close()
    await database.close()


@pytest.mark.postgres
async def test_a_row_that_another_holds_is_one_sentence(postgres_url: str) -> None:
    holder, waiter = Database(postgres_url), Database(postgres_url, busy_timeout_s=0.05)
    async with holder.write() as connection:
        await connection.execute(insert(tenants).values(id="t", name="acme", created_us=1))
        with pytest.raises(DatabaseLocked, match="is locked by another process"):
            async with waiter.write() as other:
                await other.execute(insert(tenants).values(id="t", name="acme", created_us=1))
    await holder.close()
    await waiter.close()


@pytest.mark.postgres
async def test_a_server_that_ends_our_connections_is_one_sentence_and_then_goes_on(postgres_url: str) -> None:
    async with Database.open(postgres_url) as database, Database.open(postgres_url) as other:
        with pytest.raises(DatabaseUnreachable, match="start it or correct its URL"):
            async with database.read() as connection:
                pid = await connection.scalar(text("SELECT pg_backend_pid()"))
                async with other.read() as killer:
                    await killer.execute(text(f"SELECT pg_terminate_backend({pid})"))
                await connection.execute(select(tenants))
        await database.check()


async def test_a_full_disk_is_one_sentence(sqlite_url: str) -> None:
    async with Database.open(sqlite_url) as database:
        with pytest.raises(DiskFull, match="no space left for the database"):
            async with database.write() as connection:
                await connection.execute(text("PRAGMA max_page_count = 1"))
                rows = [{"id": f"{n:05d}", "name": "x" * 200 + str(n), "created_us": 0} for n in range(5000)]
                await connection.execute(insert(tenants), rows)


async def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/none/staccato.db")
    with pytest.raises(DatabaseUnreachable, match="none/staccato.db is not reachable"):
        await database.revision()
    await database.close()


def test_a_connection_that_failed_leaves_no_thread_that_speaks_to_a_closed_loop(tmp_path: Path) -> None:
    before = threading.active_count()
    for _ in range(50):  # the thread loses the race against the end of the loop now and then
        with pytest.raises(DatabaseUnreachable):
            db.revision(f"sqlite:///{tmp_path}/none/staccato.db")
        assert threading.active_count() == before


async def test_a_file_that_is_no_database_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "staccato.db").write_text("these are my holiday plans, " * 100)
    database = Database(f"sqlite:///{tmp_path}/staccato.db")
    with pytest.raises(DatabaseUnreachable, match="not a database"):
        await database.revision()
    await database.close()


async def test_a_server_that_is_not_there_is_one_sentence_without_the_password() -> None:
    database = Database("postgresql://me:secret@127.0.0.1:1/staccato")
    with pytest.raises(DatabaseUnreachable, match="start it or correct its URL") as caught:
        await database.revision()
    assert "secret" not in str(caught.value)
    await database.close()


@pytest.mark.parametrize("url", ["mysql://x/y", "staccato.db", ""])
def test_another_kind_of_url_is_refused_with_the_kinds_there_are(url: str) -> None:
    with pytest.raises(DatabaseUnreachable, match="sqlite:///FILE or postgresql://"):
        Database(url)


def test_ids_sort_by_the_time_they_were_made() -> None:
    made = [db.new_id() for _ in range(1000)]
    assert sorted(made) == made
