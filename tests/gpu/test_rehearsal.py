"""The first minutes on a GPU machine, rehearsed without a GPU, if `make gpu-rehearsal` has fetched the builds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

BUILDS = ROOT / "build/gpu-rehearsal"
TORCHES = sorted(BUILDS.glob("torch-*[0-9]"))


@pytest.mark.long
@pytest.mark.skipif(not TORCHES, reason="no builds for CUDA in build/gpu-rehearsal: `make gpu-rehearsal` fetches them")
@pytest.mark.parametrize("torch", TORCHES, ids=lambda torch: torch.name)
def test_an_engine_is_built_to_its_first_kernel(torch: Path) -> None:
    subprocess.run(["make", "-s", "-C", str(ROOT / "csrc"), "all", "stand-ins"], check=True, timeout=200)
    paths = [str(BUILDS / "vllm-0.32.0"), str(torch)]
    told = os.environ | {"LD_LIBRARY_PATH": str(ROOT / "csrc/build/found"), "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run(
        [sys.executable, "tests/gpu/rehearsal.py"], cwd=ROOT, env=told, capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0 and ran.stdout.endswith("PASS\n"), ran.stdout + ran.stderr[-3000:]
