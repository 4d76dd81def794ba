"""Only the platform's user can read the files of `staccato up`, and `up` tells the truth about the admin key."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.config import Settings
from store.db.database import Database
from tests.gateway.ops.test_up import Platform
from tests.gateway.ops.test_up import platform as platform
from tests.gateway.ops.test_up import settings as settings

PRIVATE = {"staccato.db", "nats.conf", "up.lock", "admin.key", "pepper"}


@pytest.fixture(autouse=True)
def open_to_all() -> Iterator[None]:
    """Set the umask of most users for a test."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_files(folder: Path) -> list[str]:
    """Names of files in `folder` that a second user could read if the folder were open."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path.relative_to(folder)) for path in found if stat.S_IMODE(path.stat().st_mode) & 0o077]


def test_no_file_of_a_running_platform_is_open_to_others(platform: Platform) -> None:
    platform.ready()
    data = platform.settings.data
    assert {path.name for path in data.iterdir()} >= PRIVATE
    assert open_files(data) == []


def test_files_that_an_earlier_version_left_open_are_closed(settings: Settings) -> None:
    settings.data.mkdir(mode=0o755)
    for name in ("up.lock", "nats.conf", "staccato.db"):
        (settings.data / name).touch(0o644)
    started = Platform(settings)
    try:
        started.ready()
        assert open_files(settings.data) == []
    finally:
        started.process.terminate()
        started.end()


async def test_a_database_file_and_what_sqlite_keeps_beside_it_are_closed_to_others(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'staccato.db'}")
    await database.migrate()
    async with database.read():
        assert {path.name for path in tmp_path.iterdir()} >= {"staccato.db", "staccato.db-wal", "staccato.db-shm"}
        assert open_files(tmp_path) == []
    await database.close()


def said(settings: Settings, **environment: str) -> str:
    started = Platform(settings, environment=environment, for_people=True)
    line = ""
    try:
        assert started.process.stderr is not None
        while "Ctrl-C stops" not in line:
            line = started.process.stderr.readline()
            assert line, "the platform ended"
    finally:
        started.process.terminate()
        started.end()
    return line


def test_up_names_the_file_of_the_admin_key_where_there_is_one(settings: Settings) -> None:
    assert f"admin key in {settings.admin_key_file}, logs in" in said(settings)
    assert settings.admin_key_file.exists()


def test_up_says_that_the_admin_key_came_from_the_environment(settings: Settings) -> None:
    line = said(settings, STACCATO_ADMIN_KEY="sk-st-admin-given")
    assert "admin key from STACCATO_ADMIN_KEY, logs in" in line and "admin.key" not in line
    assert not settings.admin_key_file.exists()
