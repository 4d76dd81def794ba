"""Both databases for the tests: SQLite files, and a PostgreSQL server for the session, if PostgreSQL is installed.

Each test gets its own database, a copy of a database migrated once.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from store.db.database import Database
from tests.conftest import free_port

TEMPLATE = "migrated"


class Postgres:
    """A server in a temporary folder, which ends with the session."""

    def __init__(self, programs: Path, folder: Path, user: str) -> None:
        self._user, self._folder, self._port = user, folder, free_port()
        self._run(
            [programs / "initdb", "-D", folder / "data", "-U", "staccato", "-A", "trust", "--no-sync", "-E", "UTF8"]
        )
        options = f"-p {self._port} -h 127.0.0.1 -k {folder} -F -c max_connections=200 -c log_min_messages=panic"
        self._command = [programs / "postgres", "-D", folder / "data", *options.split()]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL, **self._identity())  # type: ignore[call-overload]
        self._wait()

    def kill(self) -> None:
        """End the server at once. After the next start, the server recovers from its log."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        self._end(signal.SIGINT)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(20)

    def _identity(self) -> dict[str, object]:
        """Arguments of `subprocess` that run a program as a user other than root: initdb and postgres refuse root."""
        if os.geteuid() != 0:
            return {"cwd": self._folder}
        account = pwd.getpwnam(self._user)
        os.chown(self._folder, account.pw_uid, account.pw_gid)
        return {"cwd": self._folder, "user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    def _run(self, command: list[str | Path]) -> None:
        subprocess.run(command, check=True, capture_output=True, **self._identity())  # type: ignore[call-overload]

    def _wait(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 0.2):
                return
            time.sleep(0.05)
        raise RuntimeError("postgres did not start")

    def url(self, name: str) -> str:
        return f"postgresql://staccato@127.0.0.1:{self._port}/{name}"

    async def create(self, name: str, template: str) -> str:
        deadline = time.monotonic() + 30
        while True:
            try:
                connection = await asyncpg.connect(self.url("postgres"))
                break
            except asyncpg.CannotConnectNowError:
                assert time.monotonic() < deadline, "postgres is still starting"
                time.sleep(0.05)
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        await connection.close()
        return self.url(name)


def programs() -> Path | None:
    found = shutil.which("initdb")
    places = [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return places[-1] if places else None


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    found = programs()
    if found is None:
        pytest.skip("no PostgreSQL: neither initdb in PATH nor /usr/lib/postgresql (install Debian's `postgresql`)")
    server = Postgres(found, Path(tempfile.mkdtemp(prefix="staccato-pg-")), account())
    yield server
    server.stop()


def account() -> str:
    """Name of the account that runs the server."""
    return getpass.getuser() if os.geteuid() else next(n for n in ("postgres", "nobody") if _has_account(n))


def _has_account(name: str) -> bool:
    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam(name))
    return False


_migrated: set[str] = set()
_count = iter(range(1 << 30))


async def _migrate_once(url: str) -> None:
    if url not in _migrated:
        database = Database(url)
        await database.migrate()
        await database.close()
        _migrated.add(url)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sqlite") / "template.db"


@pytest.fixture
async def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    await _migrate_once(f"sqlite:///{sqlite_template}")
    shutil.copy(sqlite_template, tmp_path / "staccato.db")
    return f"sqlite:///{tmp_path / 'staccato.db'}"


@pytest.fixture
async def postgres_url(postgres_server: Postgres) -> str:
    if postgres_server.url(TEMPLATE) not in _migrated:
        await postgres_server.create(TEMPLATE, "template0")
        await _migrate_once(postgres_server.url(TEMPLATE))
    return await postgres_server.create(f"test_{next(_count)}", TEMPLATE)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that was never migrated."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.db'}"
    server: Postgres = request.getfixturevalue("postgres_server")
    return await server.create(f"test_{next(_count)}", "template0")


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with Database.open(database_url) as opened:
        yield opened
