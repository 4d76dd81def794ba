"""The runbook's commands that need only files or a database."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.db import database
from tests.databases import postgres_server as postgres_server
from tests.databases import postgres_url as postgres_url
from tests.docs.documents import blocks
from tests.docs.shell import place as place
from tests.docs.shell import run, under

RUNBOOK = "deploy/RUNBOOK.md"


def test_what_needs_only_files(place: Path) -> None:
    ran = [run(block.text, place) for block in blocks(RUNBOOK) if block.mark == "run: files"]
    assert len(ran) >= 5
    assert "runtime-r2.nk" in ran[0] and "STACCATO_DATABASE_URL" in ran[0]
    assert database.revision(f"sqlite:///{place}/upgraded.db") == database.head()


@pytest.mark.postgres
def test_a_dump_of_postgresql_is_restored(place: Path, postgres_url: str) -> None:
    dump, restore = under(RUNBOOK, "PostgreSQL", "run: postgres")
    run(dump.text, place, STACCATO_DATABASE_URL=postgres_url)
    run(restore.text, place, STACCATO_DATABASE_URL=postgres_url)
    assert database.revision(postgres_url) == database.head()
