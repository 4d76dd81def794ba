"""A check by NVIDIA's compiler, on any machine with nvcc and without a GPU: the CUDA sources are sound."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.bench.gpu import bench_driver_calls
from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")


def test_our_view_of_the_driver_is_nvidias() -> None:
    subprocess.run(["make", "-C", str(ROOT / "csrc"), "cuda"], check=True, timeout=200)


def test_the_bench_of_the_drivers_calls_compiles_and_says_how_it_is_used(tmp_path: Path) -> None:
    program = tmp_path / "driver_calls"
    bench_driver_calls.build(program)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "usage: driver_calls GIB ROUNDS, both 1 or more\n")
