"""The tree of 71e32b0, from git's history."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

COMMIT = "71e32b0"


def unpacked(folder: Path) -> Path:
    """Unpack the tree below `folder`, and build the tree's memory library. Returns the tree's folder.

    Skips the test if git's history lacks the commit, or if the tree's packages are no longer installed."""
    packed = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True) if shutil.which("git") else None
    if packed is None or packed.returncode:
        pytest.skip(f"the history of git lacks {COMMIT}: fetch the whole history")
    folder = folder / COMMIT
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    if lacking := _pins(folder) - _pins(ROOT):
        pytest.skip(f"{COMMIT} needs packages that are not installed: {', '.join(sorted(lacking))}")
    subprocess.run(["make", "--silent", "-C", folder / "csrc"], check=True, stdout=subprocess.DEVNULL)
    return folder


def _pins(tree: Path) -> set[str]:
    """Locked packages as NAME==VERSION, with names as indexes write names."""
    found = re.findall(r"^([\w.-]+)==([\w.+-]+)", (tree / "requirements.lock").read_text(), re.MULTILINE)
    return {f"{name.lower().replace('_', '-')}=={version}" for name, version in found}
