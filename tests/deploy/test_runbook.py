"""Every command of the runbook is run, or cannot be here; and the restore restores."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from store import db
from tests.conftest import ROOT, free_port
from tests.databases import postgres_server as postgres_server
from tests.databases import postgres_url as postgres_url
from tests.databases import programs
from tests.deploy.tools import DEPLOY
from tests.e2e.conftest import MODELS, Platform

TEXT = (DEPLOY / "RUNBOOK.md").read_text()
OUTSIDE = {"docker": "daemon", "systemctl": "root", "kubectl": "cluster", "helm": "cluster"}


@dataclass(frozen=True)
class Block:
    """One fenced block: under which heading, what it needs, what it runs."""

    heading: str
    mark: str
    commands: str


def blocks() -> list[Block]:
    found, heading = [], ""
    pattern = r"^#+ ([^\n]+)$|^(<!-- ([^\n]+) -->\n)?```\w*\n(.*?)^```$"
    for match in re.finditer(pattern, TEXT, re.MULTILINE | re.DOTALL):
        heading = match[1] or heading
        if match[4]:
            found.append(Block(heading, match[3] or "", match[4]))
    return found


def under(heading: str, mark: str) -> list[Block]:
    found = [block for block in blocks() if (block.heading, block.mark) == (heading, mark)]
    assert found, f"no block of {heading!r} is marked {mark!r}"
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that has the repository's deploy/."""
    (tmp_path / "deploy").symlink_to(DEPLOY)
    return tmp_path


def run(block: Block, place: Path, **settings: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("STACCATO_")}
    paths = [sysconfig.get_path("scripts"), *filter(None, [str(programs() or "")]), os.environ["PATH"]]
    environment |= {"PATH": os.pathsep.join(paths), "PYTHONPATH": str(ROOT)} | settings
    command = ["bash", "-euo", "pipefail", "-c", block.commands]
    ran = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, f"{block.commands}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def test_every_block_is_marked_and_what_is_not_run_cannot_be() -> None:
    assert len(blocks()) == TEXT.count("\n```") / 2
    for block in blocks():
        verb, _, what = block.mark.partition(": ")
        if verb == "run":
            assert what in ("files", "up", "stopped", "postgres"), block
        else:
            assert verb == "needs" and what in OUTSIDE, block
            assert re.search(rf"^{what} |\| {what} ", block.commands, re.MULTILINE), f"{what} is not in {block}"


def test_what_is_not_run_names_what_is_there() -> None:
    for block in blocks():
        for path in re.findall(r"(?<![\w/.])(?:/opt/staccato/)?(deploy/[\w./-]+)", block.commands):
            assert (ROOT / path).exists() or list(ROOT.glob(f"{path}*")), path
        for unit in re.findall(r"staccato-[a-z]+@?", block.commands if block.mark.endswith("systemctl") else ""):
            assert (DEPLOY / f"systemd/{unit}.service").exists(), unit


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([\w./-]+)\)", TEXT):
        assert (DEPLOY / link).exists(), link


def test_what_needs_only_files(place: Path) -> None:
    ran = [run(block, place) for block in blocks() if block.mark == "run: files"]
    assert len(ran) >= 5
    assert "runtime-r2.nk" in ran[0] and "STACCATO_DATABASE_URL" in ran[0]
    assert db.revision(f"sqlite:///{place}/upgraded.db") == db.head()


@pytest.mark.postgres
def test_a_dump_of_postgresql_is_restored(place: Path, postgres_url: str) -> None:
    dump, restore = under("PostgreSQL", "run: postgres")
    run(dump, place, STACCATO_DATABASE_URL=postgres_url)
    run(restore, place, STACCATO_DATABASE_URL=postgres_url)
    assert db.revision(postgres_url) == db.head()


# ── against a platform ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def platform(place: Path) -> Iterator[Platform]:
    started = Platform(place / "data", free_port())
    started.start()
    yield started
    started.stop()


@pytest.mark.long
def test_a_restored_database_has_what_came_after_the_backup_too(place: Path, platform: Platform) -> None:
    def told() -> dict[str, str]:
        return {"STACCATO_URL": platform.url, "STACCATO_KEY": platform.admin_key}

    def chat() -> None:
        platform.client("acme").completions.create(model="poet", prompt="The snow", max_tokens=5)

    platform.tenant("acme")
    platform.model("poet", MODELS / "poet")
    platform.deploy("acme", "poet")
    chat()
    platform.until(lambda: platform.usage("acme")["requests"] == 1)
    (backup, verify), (restore,) = under("SQLite", "run: up"), under("SQLite", "run: stopped")
    run(backup, place, **told())
    chat()
    platform.until(lambda: platform.usage("acme")["requests"] == 2)
    before = platform.usage("acme")
    assert platform.stop() == 0
    shutil.rmtree(place / "data/logs")
    run(restore, place)
    platform.start()
    platform.until(lambda: platform.usage("acme") == before, 60)
    run(verify, place, **told())
    for heading in ("Rotate keys", "Take a GPU out"):
        for block in under(heading, "run: up"):
            run(block, place, **told())
