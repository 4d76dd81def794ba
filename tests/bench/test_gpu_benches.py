"""Benches for GPUs fail without a measurement: a skipped bench must not look like an answer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.gpu import all as gpu_benches
from tests.conftest import ROOT


def test_without_a_gpu_every_bench_fails_and_says_why() -> None:
    for bench in sorted((ROOT / "tests/bench/gpu").glob("bench_*.py")):
        ran = subprocess.run([sys.executable, bench], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert ran.returncode != 0 and ("no GPU answers" in ran.stderr or "No module named 'cupy'" in ran.stderr), bench


def test_a_part_that_takes_too_long_is_a_failure_that_keeps_its_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = [sys.executable, "-c", "import time; print('first answer', flush=True); time.sleep(60)"]
    monkeypatch.setitem(gpu_benches.PARTS, "slow", gpu_benches.Part(slow, 2, "slow.txt"))
    began = time.monotonic()
    assert gpu_benches.main(tmp_path, ["slow"]) == 1
    assert time.monotonic() - began < 50
    assert (tmp_path / "slow.txt").read_text() == "first answer\n"
    assert "failed" in (tmp_path / "summary.txt").read_text()


@pytest.mark.filterwarnings("ignore")
def test_the_bench_of_engines_answers_every_question_of_tiny_models(tmp_path: Path) -> None:
    command = [sys.executable, "tests/bench/gpu/bench_shapes.py", "tiny", "tiny"]
    told = {"STACCATO_BENCH_MODELS": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    ran = subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    answers = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    asked = [answer["measure"] for answer in answers]
    assert asked == ["self-check", *["build"] * 2, *["cold", "park"] * 2, *["turns"] * 2, "end"]
    assert answers[-1]["failed"] == [] and answers[-1]["pages_free"] == answers[-1]["pages_total"]
