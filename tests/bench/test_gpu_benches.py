"""Benches for GPUs fail without a measurement: a skipped bench must not look like an answer."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.gpu import bench_engine
from tests.conftest import ROOT


def test_without_a_gpu_every_bench_fails_and_says_why() -> None:
    for bench in sorted((ROOT / "tests/bench/gpu").glob("bench_*.py")):
        ran = subprocess.run([sys.executable, bench], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert ran.returncode != 0 and ("no GPU answers" in ran.stderr or "No module named 'cupy'" in ran.stderr), bench


def test_without_a_vllm_for_gpus_the_bench_of_engines_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_engine, "emit_conditions", lambda: None)
    assert bench_engine.main() == 1
    assert "not built for CUDA" in capsys.readouterr().out


def test_a_question_that_takes_too_long_is_a_failure_that_keeps_its_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench = tmp_path / "tests/bench/runtime/bench_slow.py"
    bench.parent.mkdir(parents=True)
    bench.write_text("import time\nprint('first answer', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setattr(bench_engine, "ROOT", tmp_path)
    began = time.monotonic()
    assert not bench_engine.answered("slow", limit_s=5)
    assert time.monotonic() - began < 50
    said = capsys.readouterr().out
    assert "timed_out_s" in said and "first answer" in said
