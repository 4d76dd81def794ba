"""The bench with paced engines runs: a small fleet serves a few seconds of a trace, while a runtime is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.bench.fleet import bench_paced
from tests.bench.fleet.paced_gateway import ChosenRuntime
from tests.conftest import ROOT

MORE = ("--priority-share", "0.3", "--scheduler", "--mixed")
SMALL = ("--models-per-gpu", "4", "--gpus", "2", "--minutes", "0.15", "--seed", "2", *MORE)


def test_a_small_fleet_serves_a_trace_and_loses_no_request_with_a_runtime(tmp_path: Path) -> None:
    output = tmp_path / "answer.jsonl"
    command = [sys.executable, bench_paced.__file__, *SMALL, "--kill", "--output", str(output)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert output.exists(), ran.stderr
    answer = json.loads(output.read_text())
    assert answer["lost"] == [] and answer["real"]["finished"] == 1
    assert min(answer["real"]["fetches"], answer["real"]["placements"]) >= 1 and answer["noise"]["busy"] > 0


def test_a_request_beside_its_model_is_a_split_unless_every_runtime_with_the_model_is_hot() -> None:
    def came(at: float, runtime: str, hot: bool = False) -> ChosenRuntime:
        return ChosenRuntime(at, "m", runtime, True, True, hot)

    noted = [came(1, "0"), came(2, "1"), came(3, "2", hot=True), came(4, "0")]
    assert bench_paced.places_of(reversed(noted)) == (1, 1)
    left = [ChosenRuntime(5, "m", runtime, False) for runtime in ("0", "1", "2", "0")]
    assert bench_paced.places_of([*noted, *left, came(6, "1")]) == (2, 1)
    moved = ChosenRuntime(5, "m", "1", True)
    assert bench_paced.places_of([came(1, "0"), moved, came(6, "1")]) == (1, 0)
