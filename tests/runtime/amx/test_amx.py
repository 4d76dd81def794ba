"""Models on a processor with Intel's matrix instructions (AMX): vLLM then uses other kernels for int8 and MXFP4.

The code is vLLM's, torch's and oneDNN's for such processors; the instructions themselves are emulated (`amx.c`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.runtime.amx.emulated import environment

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="this processor has AMX: the other tests use it"),
    pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's build with AMX needs AVX-512"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is missing: install binutils"),
]
# Rounded to 8 bits of a fraction: 2 ** -8, and the same for activations of int8 with a scale.
MOST_ERROR = 0.01


@pytest.fixture(scope="module")
def emulation() -> dict[str, str]:
    return os.environ | environment()


def test_emulated_products_are_right(emulation: dict[str, str]) -> None:
    command = [sys.executable, "-m", "tests.runtime.amx.products"]
    ran = subprocess.run(command, cwd=ROOT, env=emulation, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout)
    assert told["amx"] and all(told[f"{name} by AMX"] > 0 for name in ("bf16", "int8", "vllm")), told
    assert told["int8"] == 0 and told["bf16"] < MOST_ERROR and told["vllm"] < MOST_ERROR, told


def test_an_unknown_instruction_ends_the_process(emulation: dict[str, str], tmp_path: Path) -> None:
    """Nothing that the emulator does not know passes for computed."""
    (tmp_path / "undefined.c").write_text("void run(void) { __builtin_trap(); }")
    library = tmp_path / "undefined.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, library.with_suffix(".c")], check=True, timeout=60)
    command = [sys.executable, "-c", f"import ctypes; ctypes.CDLL('{library}').run()"]
    ran = subprocess.run(command, cwd=ROOT, env=emulation, capture_output=True, text=True, timeout=120)
    assert ran.returncode < 0 and "amx: unknown instruction" in ran.stderr


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("tests", ["test_forms.py", "test_conformance.py", "test_golden.py", "test_hybrids.py"])
def test_models_answer_as_bare_vllm_does(emulation: dict[str, str], tests: str) -> None:
    """The tests of a file pass, bare vLLM being asked under the same emulation."""
    options = ["-q", "-rs", "-p", "no:faulthandler", "-p", "no:cacheprovider", "-m", "not long"]
    command = [sys.executable, "-m", "pytest", *options, f"tests/runtime/engine/{tests}"]
    ran = subprocess.run(command, cwd=ROOT, env=emulation, capture_output=True, text=True, timeout=1200)
    assert ran.returncode == 0 and "AMX only" not in ran.stdout, ran.stdout[-5000:]
