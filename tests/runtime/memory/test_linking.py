"""The memory library beside other libraries of C++ in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SAYS_A_NUMBER = """
import sys
from pathlib import Path
import torch  # brings a libstdc++ of its own into the process
from runtime.memory import native
native.LIBRARY = Path(sys.argv[1])
pool = native.DevicePool(8 << 20)
try:
    pool.reserve(1 << 30).map(0, 64 << 20, 0.1)
except native.PoolError as error:
    print(error)
"""


@pytest.mark.long
def test_errors_of_a_library_with_a_libstdcxx_of_its_own_are_whole_beside_another_libstdcxx(tmp_path: Path) -> None:
    """Some compilers link libstdc++ statically. Beside torch's libstdc++, the first error with a number ended the
    process on a GPU machine: streams of the two libraries were mixed."""
    flags = ["CXXFLAGS=-O1 -static-libstdc++", f"BUILD={tmp_path}"]
    subprocess.run(["make", "-s", "-j2", "-C", str(ROOT / "csrc"), "all", *flags], check=True, timeout=200)
    command = [sys.executable, "-c", SAYS_A_NUMBER, str(tmp_path / "libstaccato_memory.so")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True).stdout
    assert said.startswith("32 pages of 2 MiB are wanted, 4 of 4 are free"), said
