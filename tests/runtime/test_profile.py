"""Measuring and fitting: a fit finds the coefficients that made the times, and real engines give a whole profile."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli.profile import show
from runtime import profile
from runtime.config import RuntimeSettings
from runtime.core.ledgers.costs import Law, ModelSize, load_profile
from runtime.profile import MeasuredTimes, fit, law, model_costs, model_folders
from tests.conftest import ROOT

SIZES = [
    ModelSize(name, weight_bytes, kv, weight_bytes / 2)
    for name, weight_bytes, kv in (("small", 10**6, 1e3), ("middle", 10**7, 8e3), ("large", 10**8, 2e4))
]
TRUE = Law(  # a prompt of one token takes as long as a step of one request
    step_s=5e-3,
    step_s_per_weight_byte=1e-10,
    step_s_per_request=1e-3,
    step_s_per_parameter=1e-10,
    step_s_per_kv_byte=2e-10,
    prefill_s=6e-3,
    prefill_s_per_parameter=3e-10 - 1e-14,
    prefill_s_per_parameter2=1e-14,
    load_s=1e-3,
    load_s_per_byte=1e-10,
    switch_s=2e-4,
    copy_s_per_byte=5e-10,
)
DEMO = ROOT / "deploy/demo/models"

coefficients = st.floats(1e-6, 1)


# ── fitting ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.tuples(coefficients, coefficients, coefficients))
def test_coefficients_come_back_from_what_they_said(true: tuple[float, float, float]) -> None:
    columns = {"fixed": [1.0] * 6, "each": [1, 2, 4, 8, 16, 32], "square": [1, 4, 16, 64, 256, 1024]}
    said = [sum(a * b for a, b in zip(true, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    found = fit(columns, said)
    again = [
        sum(a * b for a, b in zip(found.coefficients.values(), row, strict=True))
        for row in zip(*columns.values(), strict=True)
    ]
    assert again == pytest.approx(said, rel=1e-3)
    assert found.residual < 1e-3


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(1e-4, 10)), min_size=2, max_size=20))
def test_a_fit_is_never_negative_and_nothing_that_is_not_negative_fits_better(
    rows: list[tuple[int, int, float]],
) -> None:
    """The fit meets the conditions of Karush, Kuhn and Tucker: no coefficient can be moved to advantage."""
    columns = {"fixed": [1.0] * len(rows), "a": [row[0] for row in rows], "b": [row[1] for row in rows]}
    took_s = np.array([row[2] for row in rows])
    found = fit(columns, took_s.tolist())
    scaled = np.column_stack(list(columns.values())) / took_s[:, None]
    values = np.array(list(found.coefficients.values()))
    assert (values >= 0).all() and np.isfinite(values).all()
    norms = np.maximum(np.linalg.norm(scaled, axis=0), 1e-12)
    slope = (scaled.T @ (scaled @ values - 1)) / norms
    assert (slope >= -1e-4 * len(rows)).all()
    assert (np.abs(slope[values > 0]) <= 1e-4 * len(rows)).all()
    assert all(np.isfinite(error) and error >= 0 for error in found.errors.values())


def times_of(size: ModelSize) -> MeasuredTimes:
    """Times as measured on a machine with the law `TRUE`."""
    true, times = TRUE.costs(size), MeasuredTimes()
    for requests, prompt in ((1, 0), (2, 32), (4, 32), (8, 32), (16, 32), (1, 1000), (2, 1000)):
        times.step[requests, requests * prompt] = [true.step(requests, requests * prompt)]
    times.prefill = {tokens: [true.prefill(tokens)] for tokens in (16, 64, 256, 1024, 2000)}
    times.load = {missing: [true.load(missing)] for missing in (size.weight_bytes // 2, size.weight_bytes)}
    times.copy = {moved: [true.copy_s_per_byte * moved] for moved in (10**5, 10**6)}
    times.switch = [true.switch_s]
    return times


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_the_costs_of_a_model_come_back_from_its_times(size: ModelSize) -> None:
    found, fitted = model_costs(size, times_of(size))
    true = msgspec.to_builtins(TRUE.costs(size))
    assert msgspec.to_builtins(found) == pytest.approx(true, rel=1e-4)
    assert max(fitted.residuals.values()) < 1e-6
    assert set(fitted.errors) >= {"step_s", "prefill_s_per_token", "load_fixed_s", "switch_s", "copy_s_per_byte"}


def test_the_law_comes_back_from_the_times_of_all_models() -> None:
    found, fitted = law([(size, times_of(size)) for size in SIZES])
    other = ModelSize("other", 3 * 10**7, 5e3, 2e7)
    true = msgspec.to_builtins(TRUE.costs(other))
    assert msgspec.to_builtins(found.costs(other)) == pytest.approx(true, rel=1e-4)
    assert max(fitted.residuals.values()) < 1e-6


def test_one_time_in_three_that_is_wild_changes_nothing() -> None:
    size = SIZES[0]
    times = times_of(size)
    for measured in times.all():
        measured[:] = [measured[0], 50 * measured[0], measured[0]]
    assert msgspec.to_builtins(model_costs(size, times)[0]) == pytest.approx(
        msgspec.to_builtins(TRUE.costs(size)), rel=1e-4
    )


# ── models ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_of_models_stands_for_all_of_them() -> None:
    assert [path.name for path in model_folders([DEMO])] == ["faq", "music", "poet", "weather"]
    assert model_folders([DEMO / "poet"]) == [DEMO / "poet"]


def test_a_folder_without_a_model_and_two_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no model and holds none: give folders with a config.json"):
        model_folders([tmp_path])
    (tmp_path / "poet").mkdir()
    (tmp_path / "poet/config.json").write_text("{}")
    with pytest.raises(ValueError, match="two folders are named poet.*rename one"):
        model_folders([DEMO, tmp_path])


# ── the whole ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_real_engines_give_a_profile_that_says_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rounds of small models give a rough profile, but a whole profile."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other take minutes on a busy machine
    monkeypatch.setattr(profile, "SHAPES", ((128, 1), (512, 4)))
    monkeypatch.setattr(profile, "RANDOM_CONTEXT", 128)
    monkeypatch.setattr(profile, "PROMPTS", (64,))  # the larger model takes many times as long, on a busy machine too
    monkeypatch.setattr(profile, "ROUNDS_LEAST", 1)
    monkeypatch.setattr(profile, "ROUNDS_MOST", 1)
    settings = RuntimeSettings(device_memory=256 << 20, host_cache=512 << 20)  # type: ignore[arg-type]
    said: list[str] = []
    found = profile.profile("here", [DEMO / "faq"], settings, said.append)

    assert load_profile(msgspec.json.encode(found), "here") == found
    assert found.kind == "measured" and found.memory_bytes == 256 << 20
    assert list(found.models) == ["faq", "random-128x1", "random-512x4"]
    assert set(found.fits) == {"law", *found.models}
    little, more = found.models["random-128x1"], found.models["random-512x4"]
    assert more.weight_bytes > 6 * little.weight_bytes
    assert more.prefill(100) > little.prefill(100)
    assert 0 < found.costs(ModelSize("other", 10**7, 1e3, 5e6)).step(1, 100) < 10
    assert len(said) == 3 + 2


def test_a_profile_is_shown_with_each_model_its_law_and_its_conditions(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "deploy/profiles/cpu.json").read_text()
    show(load_profile(text, "cpu.json"))
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("faq", "random-512x8", "step_s_per_weight_byte", "prefill", "spread"))


def staccato(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = Path(sysconfig.get_path("scripts")) / "staccato"
    return subprocess.run([command, "profile", *arguments], capture_output=True, text=True)


def test_the_command_says_in_one_sentence_why_nothing_was_measured(tmp_path: Path) -> None:
    refused = staccato("--models", str(tmp_path))
    assert refused.returncode != 0 and "is no model and holds none" in refused.stderr.splitlines()[-1]
    refused = staccato("--out", str(tmp_path / "nowhere/cpu.json"))
    assert refused.returncode != 0 and "there is no folder" in refused.stderr.splitlines()[-1]


@pytest.mark.long
def test_the_command_measures_this_machine(tmp_path: Path) -> None:
    done = staccato("--json", "--out", str(tmp_path / "cpu.json"), "--models", str(DEMO / "poet"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "cpu.json").read_text())
    assert "poet" in load_profile(done.stdout, "cpu.json").models
