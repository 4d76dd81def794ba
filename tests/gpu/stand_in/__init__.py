"""The product over the stand-in for the GPU's driver (csrc/tests/fake_driver.cpp), on vLLM's build for CPUs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.conftest import ROOT, with_hook

HOOK = Path(__file__).parent / "hook"
SETTINGS = {"STACCATO_CUDA_GRAPHS": "0"}  # a graph holds kernels of CUDA


def environment() -> dict[str, str]:
    """Build the memory library and the stand-in. Returns: variables for the processes of a platform or of tests."""
    subprocess.run(["make", "-s", "-C", str(ROOT / "csrc"), "all", "stand-ins"], check=True, timeout=200)
    return {"LD_LIBRARY_PATH": str(ROOT / "csrc/build/found"), "PYTHONPATH": with_hook(HOOK)}
