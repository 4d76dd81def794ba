"""The database: SQLite (a file, embedded) or PostgreSQL, by URL; transactions, migrations, and errors with a remedy.

Writers of SQLite begin IMMEDIATE: a transaction that reads first and writes later could otherwise fail in the middle.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import aiosqlite
import uuid_utils
from sqlalchemy import URL, Row, Select, Table, event, inspect, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

BUSY_TIMEOUT_S = 5.0  # longest wait for the write lock of a different process
MIGRATION_TIMEOUT_S = 120.0
PAGE_ROWS = 200  # rows of a long answer in memory at a time, read between two turns of the event loop: some ms
MIGRATION_LOCK = 0x57ACCA70  # key of PostgreSQL's advisory lock
# PostgreSQL's policies show the rows of the tenant named by this setting. A connection begins with every tenant's rows.
TENANT_SETTING, ALL_TENANTS = "staccato.tenant", "*"
TENANT_ROLE = "staccato_tenant"  # has a tenant's rights; policies bind the role even if the user is a superuser

AnyRow: TypeAlias = "Row[*tuple[Any, ...]]"
AnySelect: TypeAlias = "Select[*tuple[Any, ...]]"

_MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"


class DatabaseError(Exception):
    """Error of a database that could not do the task; the message names the database and the remedy."""


class DatabaseLocked(DatabaseError):
    pass


class DiskFull(DatabaseError):
    pass


class DatabaseUnreachable(DatabaseError):
    pass


class NotMigrated(DatabaseError):
    pass


class Taken(Exception):
    """Error of a name that a tenant, model or deployment has already."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"there is already a {kind} {name!r}: {REMEDIES[kind].format(name=name)}")
        self.kind, self.name = kind, name


# Remedies by the kind of object that has the name; `{name}` stands for the name.
REMEDIES = {
    "tenant": "choose another name, or delete the tenant with `staccato tenant rm {name}`",
    "model": "choose another name, or remove the model with `staccato model rm {name}`",
    "deployment": "change the deployment with `staccato deploy {name} --canary PERCENT` and what is to be different, "
    "delete it with `staccato rm {name}`, or choose another name",
}


@contextlib.contextmanager
def added_once(kind: str, name: str) -> Iterator[None]:
    """Context around an insert that a unique index over the name may refuse. Raises Taken."""
    try:
        yield
    except IntegrityError as error:
        raise Taken(kind, name) from error


def insert(connection: AsyncConnection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """Return an INSERT that understands ON CONFLICT, in the dialect of the connection."""
    return insert_in(connection.dialect.name, table)


def insert_in(dialect: str, table: Table) -> sqlite.Insert | postgresql.Insert:
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)


async def pages(connection: AsyncConnection, query: AnySelect) -> AsyncIterator[Sequence[AnyRow]]:
    """Yield the answer page by page, never whole in memory. The connection must not be used otherwise meanwhile."""
    answer = await connection.stream(query, execution_options={"yield_per": PAGE_ROWS})
    async for page in answer.partitions():
        yield page


def new_id() -> str:
    """Return an id of 32 hex digits. Ids sort by the time of their making."""
    return uuid_utils.uuid7().hex


def now_us() -> int:
    return time.time_ns() // 1000


_ENTER = text(f"SELECT set_config('{TENANT_SETTING}', :tenant, true), set_config('role', '{TENANT_ROLE}', true)")


class Database:
    """Transactions on a database. `write` commits when the block ends without an exception."""

    def __init__(self, url: str, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self._url = _driver_url(url)
        self._tenant_id: str | None = None
        self._engine = _engine(self._url, busy_timeout_s)
        self._writer = self._engine.execution_options(writes=True)
        # SQLite has a single writer: waiting here in order beats SQLite's polling for the file's lock.
        self._turn: contextlib.AbstractAsyncContextManager[Any] = (
            asyncio.Lock() if self.is_sqlite else contextlib.nullcontext()
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator[Database]:
        """Open a database for the time of the context.

        Raises NotMigrated unless the database has the shape that this version needs."""
        database = cls(url)
        try:
            await database.check()
            yield database
        finally:
            await database.close()

    @property
    def is_sqlite(self) -> bool:
        return self._url.get_backend_name() == "sqlite"

    @property
    def shown_url(self) -> str:
        """URL of the database without the password."""
        return self._url.render_as_string(hide_password=True)

    def of(self, tenant_id: str | None) -> Database:
        """Return the database restricted to the rows of a tenant; None: every tenant.

        PostgreSQL then shows and changes only the tenant's rows, whatever a query asks. SQLite has no such policy."""
        theirs = copy.copy(self)
        theirs._tenant_id = tenant_id
        return theirs

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        with self._translated():
            async with self._engine.begin() as connection:
                await self._enter(connection)
                yield connection

    @contextlib.asynccontextmanager
    async def snapshot(self) -> AsyncIterator[AsyncConnection]:
        """Begin a transaction whose queries read the state of the database at a single moment."""
        with self._translated():
            async with self._engine.begin() as connection:
                if not self.is_sqlite:  # every reading transaction of SQLite is a snapshot
                    await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
                await self._enter(connection)
                yield connection

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        with self._translated():
            async with self._turn, self._writer.begin() as connection:
                await self._enter(connection)
                yield connection

    async def _enter(self, connection: AsyncConnection) -> None:
        """Restrict the connection to the tenant until the transaction ends."""
        if self._tenant_id is not None and not self.is_sqlite:
            await connection.execute(_ENTER, {"tenant": self._tenant_id})

    async def close(self) -> None:
        await self._engine.dispose()

    async def check(self) -> None:
        found, needed = await self.revision(), head()
        if found != needed:
            raise NotMigrated(
                f"the database {self.shown_url} is at revision {found or 'none'}, this version needs {needed}: "
                "start `staccato up` once, which migrates it, or upgrade staccato when the database is newer"
            )

    async def revision(self) -> str | None:
        """Return the database's revision; None: never migrated."""
        async with self.read() as connection:
            if not await connection.run_sync(lambda c: inspect(c).has_table("alembic_version")):
                return None
            found: str | None = await connection.scalar(text("SELECT version_num FROM alembic_version"))
            return found

    async def migrate(self, revision: str = "head") -> None:
        """Migrate to a revision in one transaction: completely or not at all.

        If several processes start at once, one process migrates and the other processes wait."""
        async with self.write() as connection:
            if not self.is_sqlite:
                await connection.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))
            await connection.run_sync(_upgrade, revision)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except PoolTimeout as error:
            raise DatabaseUnreachable(f"every connection to {self.shown_url} is in use: try again") from error
        except (DBAPIError, OSError) as error:
            if known := _known(error, self.shown_url):
                raise known from error
            raise


def migrate(url: str, revision: str = "head") -> None:
    """Bring the database to the shape that this version needs, or to an earlier revision.

    For code without an event loop. Raises DatabaseError."""

    async def work() -> None:
        database = Database(url, busy_timeout_s=MIGRATION_TIMEOUT_S)
        try:
            await database.migrate(revision)
        finally:
            await database.close()

    asyncio.run(work())


def revision(url: str) -> str | None:
    """Return the database's revision; None: never migrated. For code without an event loop. Raises DatabaseError."""

    async def work() -> str | None:
        database = Database(url)
        try:
            return await database.revision()
        finally:
            await database.close()

    return asyncio.run(work())


@functools.cache
def head() -> str:
    """Return the revision that this version needs."""
    from alembic.script import ScriptDirectory  # takes 0.1 s and 10 MB, and only a start needs it

    newest = ScriptDirectory(str(_MIGRATIONS)).get_current_head()
    assert newest is not None, f"no migrations in {_MIGRATIONS}"
    return newest


def _upgrade(connection: Connection, revision: str) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    move = command.upgrade if revision == "head" else command.downgrade
    try:
        move(config, revision)
    except CommandError as error:
        raise NotMigrated(f"the database was written by a newer version ({error}): upgrade staccato") from error


# ── drivers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _driver_url(url: str) -> URL:
    """Return the URL with the async driver: people write `sqlite:///file` and `postgresql://…`."""
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
    try:
        parsed = make_url(url)
        return parsed.set(drivername=drivers[parsed.drivername.split("+")[0]])
    except (ArgumentError, KeyError) as error:
        raise DatabaseUnreachable(
            "STACCATO_DATABASE_URL is not understood: write sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
        ) from error


def _engine(url: URL, busy_timeout_s: float) -> AsyncEngine:
    if url.get_backend_name() != "sqlite":
        lock_ms = f"{busy_timeout_s * 1000:.0f}"
        settings = {"lock_timeout": lock_ms, "application_name": "staccato", TENANT_SETTING: ALL_TENANTS}
        options = {"timeout": 5, "server_settings": settings}
        return create_async_engine(url, pool_pre_ping=True, pool_size=10, connect_args=options)
    engine = create_async_engine(
        url,
        pool_size=4,
        max_overflow=0,
        async_creator=functools.partial(_open_sqlite, url.database or "", busy_timeout_s),
    )
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


async def _open_sqlite(file: str, busy_timeout_s: float) -> aiosqlite.Connection:
    with contextlib.suppress(OSError):  # SQLite names the fault later; the -wal and -shm files get the mode of the file
        os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))
    connection = aiosqlite.connect(file, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
    thread = connection._thread
    thread.daemon = True  # as SQLAlchemy does: an unclosed connection does not keep the process alive
    try:
        return await connection
    except BaseException:
        # The connection's thread still reports to the event loop, and prints an error if the loop is closed before.
        while thread.is_alive():
            await asyncio.sleep(0.001)
        raise


def _prepare_sqlite(connection: Any, record: object) -> None:
    try:
        cursor = connection.cursor()
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()
    except Exception:
        connection.close()  # no other code knows the connection yet, and the thread would outlive the event loop
        raise


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_FULL = ("disk is full", "No space left", "53100")
_LOCKED = ("database is locked", "database table is locked", "55P03", "lock timeout")
_UNMIGRATED = ("no such table", "no such column", "42P01", "42703", "UndefinedTable", "UndefinedColumn")
_UNREACHABLE = (
    "unable to open",
    "not a database",
    "connection is closed",
    "Connection refused",
    "57P0",  # the server shuts down or starts
    "28P01",  # wrong password
    "3D000",  # no such database
)


def _known(error: Exception, url: str) -> DatabaseError | None:
    """Return the matching DatabaseError; None: the error is a mistake in Staccato's code, and is raised unchanged."""
    cause = getattr(error, "orig", None) or error
    said = f"{type(cause).__name__} {getattr(cause, 'sqlstate', '')} {cause}"
    short = str(cause).removeprefix(f"{type(cause)}: ").splitlines()[0] if str(cause) else type(cause).__name__
    if any(mark in said for mark in _FULL):
        return DiskFull(f"no space left for the database {url} ({short}): free some or move it")
    if any(mark in said for mark in _LOCKED):
        return DatabaseLocked(f"the database {url} is locked by another process ({short}): end it or try again")
    if any(mark in said for mark in _UNMIGRATED):
        return NotMigrated(f"the database {url} is not migrated ({short}): start `staccato up` once, which migrates it")
    lost = isinstance(error, OSError) or (isinstance(error, DBAPIError) and error.connection_invalidated)
    if lost or any(mark in said for mark in _UNREACHABLE):
        return DatabaseUnreachable(f"the database {url} is not reachable ({short}): start it or correct its URL")
    return None
