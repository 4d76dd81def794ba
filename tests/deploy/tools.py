"""Shared by the tests of deploy/: the command, and the programs that read the files of deploy/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"
INSTALL = "`make deploy-tools` installs it"


def staccato(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `staccato`, with no STACCATO_ settings but `environment`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STACCATO_")}
    command = [sys.executable, "-c", "from gateway.cli import main; main()", *arguments]
    return subprocess.run(command, env=inherited | environment, cwd=ROOT, capture_output=True, text=True, timeout=120)


def program(name: str) -> Path:
    """The program's path in the virtual environment or in PATH; without the program, the test is skipped."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here: {INSTALL}")
    return Path(found)
