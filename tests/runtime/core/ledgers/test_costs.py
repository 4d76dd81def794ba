"""Costs by a profile, corrected by experience: never nonsense, and right in the end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.ledgers.costs import Law, ModelCosts, ModelSize, Profile, load_profile, model_size, unknown
from runtime.core.ledgers.estimate import CostEstimate, StepTimes
from store.contract.kv_curve import KeptLayers, KvCurve, LayerKind, curve_of
from store.contract.wire import EngineSpec
from tests.conftest import ROOT

LLAMA = ModelSize("llama-7b", weight_bytes=14 * 10**9, kv_bytes_per_token=0.5e6, parameters=7e9)
PROFILES = sorted((ROOT / "deploy/profiles").glob("*.json"))

seconds = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 10**12)
coefficients = st.floats(0, 1e18)
positive = st.floats(1e-300, 1e18)
costs = st.builds(
    ModelCosts,
    weight_bytes=st.integers(1, 10**18),
    kv_bytes_per_token=coefficients,
    step_s=positive,
    step_s_per_request=coefficients,
    step_s_per_token=coefficients,
    prefill_s=positive,
    prefill_s_per_token=coefficients,
    prefill_s_per_token2=coefficients,
    load_s=positive,
    switch_s=coefficients,
    copy_s_per_byte=coefficients,
)


def profile(name: str) -> Profile:
    path = ROOT / "deploy/profiles" / f"{name}.json"
    return load_profile(path.read_bytes(), str(path))


# ── profiles ──────────────────────────────────────────────────────────────────────────────────────────────────────────


FULL, WINDOW, _, STATE = LayerKind
KEPT = (KeptLayers(WINDOW, 3, 100, 50), KeptLayers(FULL, 3, 100), KeptLayers(STATE, 3, 900))


@pytest.mark.parametrize(("requests", "context"), [(1, 10), (1, 5000), (4, 100), (4, 9000)])
def test_a_step_reads_what_the_requests_hold(requests: int, context: int) -> None:
    line, size = ModelSize("m", 10**9, 600, 5e8), ModelSize("m", 10**9, 600, 5e8, KEPT)
    law = profile("h100").law
    assert law is not None
    costs, straight = law.costs(size), law.costs(line)
    read_s = law.step_s_per_kv_byte * (size.kv.bytes(context, requests) - line.kv.bytes(context, requests))
    assert costs.step(requests, context) == pytest.approx(straight.step(requests, context) + read_s)
    assert StepTimes(costs).step(requests, context) == costs.step(requests, context)
    assert size.kv == curve_of(KEPT) == costs.kv and straight.kv == KvCurve(600, 0)
    assert "kv_layers" not in msgspec.to_builtins(straight)  # as in profiles and journals of earlier versions


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_profile_of_ours_says_what_any_model_costs(path: Path) -> None:
    found = load_profile(path.read_bytes(), path.name)
    assert found.name == path.stem
    said = found.costs(LLAMA)
    assert 0 < said.step(1, 0) < said.step(64, 64_000) < math.inf
    assert 0 < said.prefill(16) < said.prefill(4096) < math.inf
    assert 0 < said.load(LLAMA.weight_bytes) < math.inf


def test_h100_is_what_operators_were_measured_to_take() -> None:
    """Vidur's operators of Llama-2-7B sum to 5.7 ms at batch 1; 22 and 87 ms for 1024 and 4096 tokens."""
    said = profile("h100").costs(ModelSize("llama-2-7b", 2 * 6_738_000_000, 2 * 32 * 4096 * 2, 6.738e9))
    assert said.step(1, 0) - 2e-3 == pytest.approx(5.7e-3, rel=0.02)
    assert said.prefill(1024) - 10e-3 == pytest.approx(22.0e-3, rel=0.03)
    assert said.prefill(4096) - 10e-3 == pytest.approx(87e-3, rel=0.03)


def test_h200_steps_faster_and_loads_as_fast() -> None:
    h100, h200 = profile("h100").costs(LLAMA), profile("h200").costs(LLAMA)
    assert h200.step(1, 1000) < h100.step(1, 1000)
    assert h200.load_s == h100.load_s == pytest.approx(0.10 + 14 / 30, rel=1e-3)


def test_a_load_is_the_fixed_part_and_the_share_of_bytes_that_is_missing() -> None:
    said = profile("h100").costs(LLAMA)
    assert said.load(0) == 0
    assert said.load(LLAMA.weight_bytes) == pytest.approx(said.load_s)
    assert said.load(LLAMA.weight_bytes // 2) == pytest.approx(0.10 + 7 / 30, rel=1e-3)


def test_a_measured_model_goes_before_the_law_unless_its_weights_are_others() -> None:
    law = profile("h100")
    assert law.law is not None
    row = msgspec.structs.replace(law.law.costs(LLAMA), step_s=1.0)
    both = msgspec.structs.replace(law, models={LLAMA.name: row})
    assert both.costs(LLAMA).step_s == 1.0
    assert both.costs(msgspec.structs.replace(LLAMA, name="other")).step_s < 1.0
    quantised = msgspec.structs.replace(LLAMA, weight_bytes=LLAMA.weight_bytes // 2)
    assert both.costs(quantised) == law.law.costs(quantised)


def test_a_model_that_was_not_measured_is_refused_where_there_is_no_law() -> None:
    law = profile("h100")
    rows = msgspec.structs.replace(law, law=None, models={LLAMA.name: law.costs(LLAMA)})
    with pytest.raises(ValueError, match=r"profile 'h100' has no costs of model 'other'.*`staccato profile --models"):
        rows.costs(msgspec.structs.replace(LLAMA, name="other"))


def test_a_profile_comes_back_as_it_was_written() -> None:
    law = profile("h100")
    whole = msgspec.structs.replace(law, models={LLAMA.name: law.costs(LLAMA)})
    assert load_profile(msgspec.json.encode(whole), "h100.json") == whole


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["law", "step_s"], 0, r"> 0.0 - at `\$.law.step_s`"),
        (["law", "step_s"], -1, r"> 0.0 - at `\$.law.step_s`"),
        (["law", "load_s_per_byte"], -1e-9, r">= 0.0 - at `\$.law.load_s_per_byte`"),
        (["law", "switch_s"], "soon", r"Expected `float`, got `str` - at `\$.law.switch_s`"),
        (["law", "swich_s"], 1, r"unknown field `swich_s` - at `\$.law`"),
        (["law", "step_s"], None, r"got `null` - at `\$.law.step_s`"),
        (["memory_bytes"], 0, r"at `\$.memory_bytes`"),
        (["page_bytes"], 2.5, r"at `\$.page_bytes`"),
        (["host_bytes_per_s"], 1e300, r"at `\$.host_bytes_per_s`"),
        (["kind"], "guessed", r"at `\$.kind`"),
        (["law"], None, "has neither `law` nor `models`"),
        (["models", "m", "load_fixed_s"], 9, r"is more than load_s, 0.5\S*, of which it is a part - at `\$.models.m`"),
        (["models", "m", "step_s"], 0, r"> 0.0 - at `\$.models\[...\].step_s`"),
    ],
)
def test_a_wrong_profile_is_refused_by_file_and_field(path: list[str], value: object, said: str) -> None:
    text = json.loads((ROOT / "deploy/profiles/h100.json").read_text())
    if path[0] == "models":
        text["models"]["m"] = msgspec.to_builtins(profile("h100").costs(LLAMA))
    at: Any = text
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    with pytest.raises(ValueError, match=said) as refused:
        load_profile(json.dumps(text), "my.json")
    assert "my.json" in str(refused.value) and "staccato profile" in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe", '{"law": {"step_s": NaN}}', '{"memory_bytes": 1e999}', "[]"])
def test_what_is_no_profile_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"my\.json is no profile: .*staccato profile"):
        load_profile(text, "my.json")


@given(st.integers(0, 10**13), st.floats(0, 1e9), st.floats(0, 1e13))
def test_costs_are_known_on_a_device_that_nobody_measured(weights: int, kv: float, parameters: float) -> None:
    said = unknown(ModelSize("m", weights, kv, parameters))
    for s in (said.step(1, 1), said.prefill(1), said.load(1), said.load_s):
        assert 0 < s < math.inf


@pytest.mark.parametrize(("dtype", "parameters"), [("auto", 50), ("bfloat16", 50), ("float32", 25)])
def test_a_model_is_named_by_its_folder_and_has_as_many_parameters_as_its_bytes_hold(
    dtype: str, parameters: float
) -> None:
    spec = EngineSpec(
        key="k",
        path="models/faq/",
        digest="",
        architecture="",
        dtype=dtype,
        max_model_len=1,
        weight_bytes=100,
        kv_bytes_per_token=8,
    )
    assert model_size(spec) == ModelSize("faq", 100, 8, parameters)


# ── estimates ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(costs, st.integers(1, 4096), st.integers(0, 4096))
def test_a_prompt_found_in_the_prefix_cache_does_not_make_prefill_look_cheap(
    said: ModelCosts, computed: int, cached: int
) -> None:
    """A step takes the time that the model says for the computed tokens: the estimates stay as the model says."""
    estimate, tokens = CostEstimate(said), computed + cached
    took_s = StepTimes(said).prefill(computed, tokens * tokens - cached * cached)
    for _ in range(20):
        estimate.observe_prefill([(tokens, cached)], 0, 0, took_s)
    assert estimate.prefill(tokens) == pytest.approx(CostEstimate(said).prefill(tokens), rel=1e-6)


@given(costs, st.lists(st.tuples(counts, counts, counts, seconds), max_size=60))
def test_whatever_is_observed_estimates_stay_finite_and_not_negative(
    said: ModelCosts, seen: list[tuple[int, int, int, float]]
) -> None:
    estimate = CostEstimate(said)
    for tokens, requests, context, took_s in seen:
        estimate.observe_step(requests, context, took_s)
        estimate.observe_prefill([(tokens, tokens // 2)], requests, context, took_s)
        estimate.observe_load(tokens, took_s)
        for s in (
            estimate.step(requests, context),
            estimate.prefill(tokens),
            estimate.load(tokens),
            estimate.copy(tokens),
            estimate.switch_s,
        ):
            assert 0 <= s < math.inf
        assert estimate.step(0, 0) > 0 and estimate.prefill(0) > 0


@given(costs, counts, counts, counts)
def test_who_has_the_numbers_at_hand_says_what_the_costs_say(
    known: ModelCosts, requests: int, context: int, tokens: int
) -> None:
    times = StepTimes(known)
    assert times.step(requests, context) == known.step(requests, context)
    assert times.prefill(tokens) == known.prefill(tokens)


@given(st.floats(0.002, 500), st.lists(st.tuples(st.integers(1, 4096), st.integers(1, 64)), min_size=150, max_size=200))
def test_an_estimate_converges_to_a_machine_some_times_slower(slower: float, work: list[tuple[int, int]]) -> None:
    said = unknown(ModelSize("m", 10**9, 1e5, 5e8))
    estimate = CostEstimate(said)
    for tokens, requests in work:
        context = tokens * requests
        decode_s = slower * said.step(requests, context)
        estimate.observe_step(requests, context, decode_s)
        beside_s = slower * (said.step(requests, context) - said.step(0, 0))
        estimate.observe_prefill([(tokens, 0)], requests, context, slower * said.prefill(tokens) + beside_s)
        estimate.observe_load(tokens * 10**5, slower * said.load(tokens * 10**5))
    assert estimate.step(7, 777) == pytest.approx(slower * said.step(7, 777), rel=0.01)
    assert estimate.load(10**8) == pytest.approx(slower * said.load(10**8), rel=0.01)
    assert estimate.prefill(500) == pytest.approx(slower * said.prefill(500), rel=0.15)


def test_each_kind_of_work_is_corrected_by_itself() -> None:
    said = unknown(LLAMA)
    estimate = CostEstimate(said)
    for _ in range(100):
        estimate.observe_step(1, 100, 3 * said.step(1, 100))
    assert estimate.step(1, 100) == pytest.approx(3 * said.step(1, 100), rel=1e-3)
    assert estimate.prefill(100) == said.prefill(100)
    assert estimate.load(10**9) == said.load(10**9)


def test_the_first_observations_weigh_more_and_one_outlier_little() -> None:
    said = unknown(LLAMA)
    estimate = CostEstimate(said)
    estimate.observe_step(1, 1, 2 * said.step(1, 1))
    assert estimate.step(1, 1) == pytest.approx(1.5 * said.step(1, 1))
    for _ in range(100):
        estimate.observe_step(1, 1, said.step(1, 1))
    estimate.observe_step(1, 1, 1000 * said.step(1, 1))
    assert estimate.step(1, 1) < 2 * said.step(1, 1)
    before = estimate.step(1, 1)
    estimate.observe_step(1, 1, 0.0)
    assert estimate.step(1, 1) > 0.9 * before


def test_a_prefill_is_told_apart_from_the_decodes_of_its_step() -> None:
    said = unknown(LLAMA)
    estimate = CostEstimate(said)
    beside_s = said.step(64, 10**6) - said.step(0, 0)
    for _ in range(100):
        estimate.observe_prefill([(16, 0)], 64, 10**6, said.prefill(16) + beside_s)
    assert estimate.prefill(16) == pytest.approx(said.prefill(16))


def test_prompts_of_one_step_pay_attention_to_themselves_only() -> None:
    said = msgspec.structs.replace(unknown(LLAMA), prefill_s_per_token=1e-4, prefill_s_per_token2=1e-7)
    times, estimate = StepTimes(said), CostEstimate(said)
    attention_s = 8 * (said.prefill(500) - said.prefill_s - 500 * 1e-4)
    took_s = said.prefill_s + 8 * 500 * 1e-4 + attention_s
    assert times.prefill(8 * 500, 8 * 500**2) == pytest.approx(took_s) and said.prefill(8 * 500) > 2 * took_s
    for _ in range(100):
        estimate.observe_prefill([(500, 0)] * 8, 0, 0, took_s)
    assert estimate.prefill(500) == pytest.approx(said.prefill(500))


def test_a_load_of_nothing_teaches_nothing() -> None:
    estimate = CostEstimate(unknown(LLAMA))
    estimate.observe_load(0, 5.0)
    assert estimate.load(10**9) == unknown(LLAMA).load(10**9)


def test_a_law_is_linear_in_what_a_model_is() -> None:
    law = Law(
        step_s=1,
        step_s_per_weight_byte=2,
        step_s_per_request=3,
        step_s_per_parameter=0.5,
        step_s_per_kv_byte=4,
        prefill_s=5,
        prefill_s_per_parameter=6,
        prefill_s_per_parameter2=7,
        load_s=8,
        load_s_per_byte=9,
        switch_s=10,
        copy_s_per_byte=11,
    )
    said = law.costs(ModelSize("m", weight_bytes=100, kv_bytes_per_token=10, parameters=1000))
    assert said.step(2, 3) == 1 + 2 * 100 + (3 + 0.5 * 1000) * 2 + 4 * 10 * 3
    assert said.prefill(2) == 5 + 6 * 1000 * 2 + 7 * 1000 * 4
    assert said.load(50) == 8 + 9 * 50
    assert (said.switch_s, said.copy_s_per_byte) == (10, 11)
