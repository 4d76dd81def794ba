"""On one platform, a newcomer follows the README in order, and an operator follows the runbook."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as arrow_parquet
import pytest

from tests.conftest import free_port
from tests.deploy.tools import DEPLOY
from tests.docs.documents import Block, blocks, uncommented, words
from tests.docs.shell import run, under
from tests.e2e.conftest import MODELS, Platform

RUNBOOK = "deploy/RUNBOOK.md"
NEWCOMER = "run: newcomer"
pytestmark = pytest.mark.timeout(600)  # the platform is started twice
TRACE = pa.table({"t": [0.0, 4.0, 9.0], "model": ["a", "b", "a"], "inp": [900, 200, 60], "out": [40, 90, 20]})


@dataclass(frozen=True)
class Followed:
    """A platform on which the README was followed to the end."""

    place: Path
    platform: Platform
    printed: str

    def operate(self, block: Block) -> str:
        return run(block.text, self.place, STACCATO_URL=self.platform.url, STACCATO_KEY=self.platform.admin_key)


def the_readmes_up() -> list[str]:
    """The arguments after the port in `make up  # or: staccato up …`."""
    (line,) = [line for block in blocks("README.md") for line in block.text.splitlines() if line.startswith("make up")]
    command = words(uncommented(line.partition("# or: ")[2]))
    assert command[0].endswith("staccato") and command[1:4] == ["up", "--port", "8080"]
    return command[4:]


def script() -> str:
    """Every command that a newcomer types in a terminal, with Python where the README has Python."""
    marked = [block for block in blocks("README.md") if block.mark == NEWCOMER]
    texts = [f"python - <<'END'\n{b.text}END\n" if b.language == "python" else b.text for b in marked]
    return "set -x\n" + "".join(texts)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Followed]:
    place = tmp_path_factory.mktemp("newcomer")
    (place / "deploy").symlink_to(DEPLOY)
    arrow_parquet.write_table(TRACE, place / "usage.parquet")
    with pa.CompressedOutputStream(place / "trace.csv.zst", "zstd") as file:
        arrow_csv.write_csv(TRACE, file)
    platform = Platform(place / "data", free_port())
    try:
        platform.start(*the_readmes_up())
        text = script().replace("/path/to/folder", str(MODELS / "poet")).replace("127.0.0.1:8080", platform.url[7:])
        settings = {"STACCATO_DATA": str(platform.data), "STACCATO_PORT": str(platform.port)}
        yield Followed(place, platform, run(text, place, **settings))
    finally:
        assert platform.stop() == 0


def test_the_readme_leads_a_newcomer_to_an_answer(followed: Followed) -> None:
    assert f"{followed.platform.url}/t/acme/v1" in followed.printed
    assert re.search(r"^\[(warm|cold start).*tokens", followed.printed, re.MULTILINE), followed.printed
    followed.platform.until(lambda: usage(followed)["requests"] == 2, 60)
    assert "<svg" in (followed.place / "timeline.svg").read_text()
    assert re.search(r"^gpus_needed +1$", followed.printed, re.MULTILINE)


def test_the_runbook_rotates_a_key_and_takes_a_gpu_out(followed: Followed) -> None:
    said = {
        heading: "\n".join(followed.operate(block) for block in under(RUNBOOK, heading, "run: up"))
        for heading in ("Rotate keys", "Take a GPU out")
    }
    assert re.search(r"^sk-st-", said["Rotate keys"], re.MULTILINE)
    assert "DEVICE" in said["Take a GPU out"]


def test_the_runbook_changes_the_root_key(followed: Followed) -> None:
    platform, (block,) = followed.platform, under(RUNBOOK, "Rotate keys", "run: root")
    write, tell = block.commands
    assert tell == "pkill --full gateway.app --signal TERM"
    old, gateway = platform.admin_key, platform.child("gateway.app")
    run(write, followed.place)
    gateway.terminate()  # this platform's gateway alone: the command would end the gateways of other tests, too
    platform.until(lambda: platform.get("/api/v1/tenants").status_code == 200)
    assert platform.get("/api/v1/tenants", key=old).status_code == 401


def test_a_restored_database_has_what_came_after_the_backup_too(followed: Followed) -> None:
    """The last test: the platform is started anew."""
    platform = followed.platform

    def chat() -> None:
        before = usage(followed)["requests"]
        run('staccato chat mine "Hello!" --tenant acme', followed.place, **told(followed))
        platform.until(lambda: usage(followed)["requests"] == before + 1, 60)

    (backup, verify), (restore,) = under(RUNBOOK, "SQLite", "run: up"), under(RUNBOOK, "SQLite", "run: stopped")
    followed.operate(backup)
    chat()
    before = usage(followed)
    assert platform.stop() == 0
    shutil.rmtree(platform.data / "logs")
    run(restore.text, followed.place)
    platform.start()
    assert usage(followed) != before
    followed.operate(verify)
    platform.until(lambda: usage(followed) == before, 60)


def told(followed: Followed) -> dict[str, str]:
    return {"STACCATO_URL": followed.platform.url, "STACCATO_KEY": followed.platform.admin_key}


def usage(followed: Followed) -> dict[str, int]:
    rows = followed.platform.get("/api/v1/usage?tenant=acme&group_by=deployment").json()["data"]
    return {name: sum(int(row[name]) for row in rows) for name in ("requests", "prompt_tokens", "output_tokens")}
