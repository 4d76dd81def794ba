"""The tests of a GPU's memory, run without a GPU over the stand-in for the driver (csrc/tests/fake_driver.cpp)."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes.util import find_library

import pytest

from tests.conftest import ROOT

TESTS = ("tests/gpu/test_memory.py", "tests/gpu/test_pinned.py", "tests/gpu/test_books.py")
# The second process imports pages by calls that the stand-in lacks.
COMMAND = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-k", "not second_process", *TESTS]


@pytest.mark.skipif(find_library("cuda") is not None, reason="this machine has a CUDA driver")
def test_the_tests_of_a_gpus_memory_pass_over_the_stand_in() -> None:
    subprocess.run(["make", "-s", "-C", str(ROOT / "csrc"), "all", "stand-ins"], check=True, timeout=200)
    told = os.environ | {"LD_LIBRARY_PATH": str(ROOT / "csrc/build/found")}
    ran = subprocess.run(COMMAND, cwd=ROOT, env=told, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0 and "no CUDA driver" not in ran.stdout, ran.stdout[-5000:]
