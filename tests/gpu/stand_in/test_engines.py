"""Engines whose weights and KV cache lie in the memory of the stand-in for the GPU's driver answer as bare vLLM does.

The memory library's backend for CUDA, the transfers and the builder's way for a GPU run whole; vLLM's kernels are those
of the build for CPUs, and read what the copies have brought: a copy that comes too late, from memory that is not
registered or to a page that is not mapped changes tokens or ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes.util import find_library

import pytest

from tests.conftest import ROOT
from tests.gpu.stand_in import environment

BUILD_BYTES = 128 << 20  # memory of the pool for builds, beside the memory that a test gives the pool
pytestmark = pytest.mark.skipif(find_library("cuda") is not None, reason="this machine has a CUDA driver")


LONG = ("test_conformance.py", "test_forms.py", "test_resume.py")
# Tests of what is left at once: on a GPU pages leave beside the steps, and an image's memory after the registration.
LEFT_OUT = "not self_check and not unused_memory and not map_of_the_pool and not changed_is_noticed"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tests", ["test_engine.py", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_engines_answer_as_bare_vllm_does(tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "not long", "-k", LEFT_OUT]
    told = os.environ | environment() | {"STAND_IN_BUILD_BYTES": str(BUILD_BYTES)}
    ran = subprocess.run(
        [*command, f"tests/runtime/engine/{tests}"], cwd=ROOT, env=told, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
