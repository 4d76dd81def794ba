"""Runs blocks of the documents as people run them: by a shell, in a separate folder."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.databases import programs
from tests.deploy.tools import DEPLOY
from tests.docs.documents import Block, blocks


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a link to the repository's deploy/."""
    (tmp_path / "deploy").symlink_to(DEPLOY)
    return tmp_path


def under(document: str, heading: str, mark: str) -> list[Block]:
    found = [block for block in blocks(document) if (block.heading, block.mark) == (heading, mark)]
    assert found, f"no block of {heading!r} in {document} is marked {mark!r}"
    return found


def run(commands: str, place: Path, **settings: str) -> str:
    """Run the commands; returns stdout and stderr. `settings`: variables, instead of the tests' own STACCATO_
    variables."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("STACCATO_")}
    paths = [sysconfig.get_path("scripts"), *filter(None, [str(programs() or "")]), os.environ["PATH"]]
    environment |= {"PATH": os.pathsep.join(paths), "PYTHONPATH": str(ROOT)} | settings
    command = ["bash", "-euo", "pipefail", "-c", commands]
    ran = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, f"{commands}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout + ran.stderr
