from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from runtime.sim.__main__ import main
from tests.conftest import ROOT
from tests.sim.traces import written

QUICK = ["--gpus", "2", "--models-per-gpu", "4", "--duration", "40s"]
TRACE = [[f"{at * 0.9:g}", f"model-{at % 3}", "40", "20"] for at in range(40)]


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    main([*arguments, "--json"])
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


def test_a_run_tells_what_was_attained(capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, "sim", *QUICK)
    promised = {"token_attainment", "first_token_attainment", "min", "requests", "events", "events_per_s"}
    assert promised <= answer.keys()
    assert answer["models"] == 8
    assert answer["min"] == min(answer["token_attainment"], answer["first_token_attainment"]) == 1.0  # type: ignore[type-var]


def test_a_run_is_a_function_of_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    once, again, other = (told(capsys, "sim", *QUICK, "--seed", seed) for seed in ("3", "3", "4"))
    assert once.pop("events_per_s") and again.pop("events_per_s")
    assert once == again
    assert once["events"] != other["events"]


def test_checks_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    plain, checked = told(capsys, "sim", *QUICK), told(capsys, "sim", *QUICK, "--check")
    del plain["events_per_s"], checked["events_per_s"]
    assert plain == checked


def test_a_trace_is_replicated_to_as_many_models_as_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = written(tmp_path / "trace.csv", TRACE)
    answer = told(capsys, "sim", "--workload", str(path), "--gpus", "1", "--models-per-gpu", "6")
    assert answer["models"] == 6
    assert answer["workload"] == str(path)


def test_tenants_are_told_apart_and_one_of_them_floods(capsys: pytest.CaptureFixture[str]) -> None:
    calm, flood = (told(capsys, "sim", *QUICK, "--tenants", "1,2", "--flood", times) for times in ("1", "5"))
    of = [{row["tenant"]: row["requests"] for row in answer["tenants"]} for answer in (calm, flood)]  # type: ignore[attr-defined]
    assert sum(of[0].values()) == calm["requests"] and of[1]["t1"] == of[0]["t1"]
    assert of[1]["t0"] > 3 * of[0]["t0"]
    assert told(capsys, "sim", *QUICK, "--tenants", "1")["tenants"] == []


def test_a_flood_without_tenants_is_the_callers_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sim", *QUICK, "--flood", "5"])
    assert "--tenants" in capsys.readouterr().err


def test_a_fleet_that_changes_is_a_function_of_its_arguments_too(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--migrate", "--scale", "1:4", "--faults", "3", "--check"]
    for dispatch in ("gateways", "freest", "in-turns"):
        once, again = (told(capsys, "sim", *QUICK, "--dispatch", dispatch, *changes) for _ in range(2))
        assert once.pop("events_per_s") and again.pop("events_per_s")
        assert once == again
        assert once["finished"] == 1.0
        assert once["dispatch"] == dispatch


def test_gateways_and_the_age_of_their_reports_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    usual, exact = told(capsys, "sim", *QUICK), told(capsys, "sim", *QUICK, "--exact")
    few = told(capsys, "sim", *QUICK, "--gateways", "2", "--report-period", "1s")
    assert (usual["gateways"], usual["report_period_s"]) == (4, 0.25)
    assert (few["gateways"], few["report_period_s"]) == (2, 1.0)
    large = told(capsys, "sim", "--gpus", "512", "--models-per-gpu", "0.02", "--duration", "2s")
    assert large["report_period_s"] == 0.5, "as nodes of a fleet of that size report"
    assert exact["exact"] is True and "gateways" not in exact
    assert exact["events"] < few["events"] < usual["events"]  # type: ignore[operator]


def test_attainment_is_told_by_priority(capsys: pytest.CaptureFixture[str]) -> None:
    usual, mixed = told(capsys, "sim", *QUICK), told(capsys, "sim", *QUICK, "--priority-share", "0.5")
    high, normal = mixed["priorities"]  # type: ignore[misc]
    assert (high["priority"], normal["priority"]) == ("high", "normal") and usual["priorities"] == []
    assert high["requests"] + normal["requests"] == usual["requests"]
    with pytest.raises(SystemExit):
        main(["sim", *QUICK, "--priority-share", "0.5", "--capacity", "0.9"])
    assert "--priority-share" in capsys.readouterr().err


def test_pictures_and_traces_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture, trace = tmp_path / "run.svg", tmp_path / "run.json"
    told(capsys, "sim", *QUICK, "--picture", str(picture), "--chrome-trace", str(trace))
    assert picture.read_text().startswith("<svg")
    assert {event["pid"] for event in json.loads(trace.read_bytes())["traceEvents"]} == {0, 1}


def test_a_search_tells_the_capacity_and_the_curve(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "curve.svg"
    fast = ["--gpus", "1", "--duration", "30s", "--seeds", "2", "--rate", "0.5", "--picture", str(picture)]
    answer = told(capsys, "sim", "--capacity", "0.9", *fast)
    capacity, curve = answer["models_per_gpu"], answer["curve"]
    assert isinstance(capacity, float) and isinstance(curve, list)
    attained = {point["models_per_gpu"]: point["attained"] for point in curve}
    assert attained[capacity] >= 0.9 > attained[capacity + 1]
    assert all(len(point["by_seed"]) == 2 for point in curve)
    assert picture.read_text().startswith("<svg")


def test_the_command_works_in_any_folder_and_prints_a_table(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "staccato"), "sim", *QUICK]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "token_attainment        1\n" in answer.stdout


def test_a_profile_is_found_by_its_path_too(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "deploy" / "profiles" / "h200.json"
    by_path, by_name = (told(capsys, "sim", *QUICK, "--gpu", gpu) for gpu in (str(path), "h200"))
    assert by_path["min"] == by_name["min"] and by_path["gpu"] == by_name["gpu"]


def test_two_models_at_once_are_worth_the_fixed_part_of_a_step_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    steps = cast(list[dict[str, Any]], told(capsys, "sim", "--overlap", "--gpu", "h200")["steps"])
    worth = {(step["step"], step["beside"]): step["worth_at_most"] for step in steps}
    assert worth["1 of 0.6B", "1 of 0.6B"] == 2.0, "launches are most of the step"
    assert 1 < worth["1 of 14B", "1 of 14B"] < worth["1 of 8B", "1 of 8B"] < 1.5, "the memory is most of the step"
    assert worth["1 of 0.6B", "a prompt of 14B"] < 1.1, "the arithmetic is most of both"
    assert all(step["at_once_ms"] <= step["in_turn_ms"] for step in steps)


def test_what_two_models_at_once_are_worth_needs_a_law(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(json.loads((ROOT / "deploy/profiles/cpu.json").read_text()) | {"law": None}))
    with pytest.raises(SystemExit):
        main(["sim", "--overlap", "--gpu", str(path)])
    assert "has no law of costs" in capsys.readouterr().err


def test_plan_tells_how_many_gpus_are_needed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, picture = written(tmp_path / "usage.csv", TRACE), tmp_path / "plan.svg"
    answer = told(capsys, "plan", "--trace", str(trace), "--gpus", "h100:2", "--picture", str(picture))
    assert answer["gpus_needed"] == 1
    assert [point["gpus"] for point in answer["curve"]] == [1, 2]  # type: ignore[attr-defined]
    assert answer["unmeetable"] == []
    assert str(answer["sizes"]).startswith("assumed")
    assert picture.read_text().startswith("<svg")


def test_plan_knows_a_host_cache_with_room_for_some_images(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = written(tmp_path / "trace.csv", [[f"{at * 5:g}", f"model-{at % 3}", "40", "20"] for at in range(30)])
    roomy, short = (
        told(capsys, "plan", "--trace", str(trace), "--gpus", "h100:1", *more)["curve"][0]  # type: ignore[index]
        for more in ([], ["--host-cache", "32", "--disk", "4", "--build", "1s"])
    )
    assert "disk_loads_per_min" not in roomy and short["disk_loads_per_min"] > 0
    assert short["ttft_p50_s"] > roomy["ttft_p50_s"] + 1.0


def test_plan_says_when_the_most_gpus_are_too_few(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = written(tmp_path / "usage.csv", TRACE)
    arguments = ["plan", "--trace", str(trace), "--gpus", "h100:2", "--ttft", "100ms", "--attainment", "1"]
    assert told(capsys, *arguments)["gpus_needed"] is None
    main(arguments)
    shown = capsys.readouterr().out
    assert "more than 2" in shown
    assert "model-0" in shown and "raise --ttft" in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["sim", "--policy", "fastest"], "slack"),
        (["sim", "--gpu", "abacus"], "h100"),
        (["sim", "--workload", "nowhere.csv"], "nowhere.csv"),
        (["sim", "--ttft", "soon"], "100ms"),
        (["sim", "--gpus", "0"], "at least 1"),
        (["sim", "--rate", "0"], "more than 0"),
        (["sim", "--zipf", "-1"], "zipf"),
        (["sim", "--capacity", "90"], "0.9"),
        (["sim", "--set", "colour=3"], "colour"),
        (["sim", "--capacity", "0.9", "--check"], "--check"),
        (["sim", "--workload", "nowhere.csv", "--cv", "4"], "--cv"),
        (["sim", "--picture", "/nowhere/at/all.svg", *QUICK], "/nowhere/at/all.svg"),
        (["sim", "--scale", "4:2"], "2:16"),
        (["sim", "--scale", "4:8", "--gpus", "2"], "--gpus 2"),
        (["sim", "--migrate", "--policy", "aegaeon"], "gateways"),
        (["sim", "--faults", "3", "--capacity", "0.9"], "--faults"),
        (["sim", "--exact", "--gateways", "4"], "--report-period"),
        (["plan", "--trace", "x.csv", "--gpus", "h100:2", "--report-period", "1"], "100ms"),
        (["plan", "--trace", "nowhere.parquet", "--gpus", "h100:2"], "nowhere.parquet"),
        (["plan", "--trace", "nowhere.parquet", "--gpus", "h100"], "h200:4"),
        (["plan", "--gpus", "h100:2"], "--trace"),
        (["sim", "--stage"], "--stage is about images on disk: say with --host-cache"),
        (["plan", "--trace", "x.csv", "--gpus", "h100:2", "--disk", "2"], "--disk is about images on disk"),
        ([], "COMMAND"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1
    assert named in error


def test_a_wrong_cell_of_a_trace_is_named_with_its_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path / "trace.csv", [*TRACE, ["99", "model-0", "many", "20"]])
    with pytest.raises(SystemExit):
        main(["sim", "--workload", str(path)])
    error = capsys.readouterr().err
    assert f"row {len(TRACE) + 2}, column inp: 'many'" in error
