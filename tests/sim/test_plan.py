from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.device.request import Objective
from runtime.core.ledgers.costs import ModelSize, load_profile
from runtime.sim.dispatch.sight import Sight
from runtime.sim.plan import Question, _needed, as_it_is, plan, read_sizes
from runtime.sim.trace import Trace
from runtime.sim.workload import BASE_SIZES
from tests.conftest import ROOT

PROFILE = load_profile((ROOT / "deploy" / "profiles" / "h100.json").read_bytes(), "h100.json")


def trace(models: int, each: int = 10, prompt: int = 50, output: int = 20) -> Trace:
    """A trace that asks every model `each` times, once a second, the models at the same moment."""
    return Trace(
        names=tuple(f"model-{index}" for index in range(models)),
        at_s=np.repeat(np.arange(each, dtype=np.float64), models),
        model=np.tile(np.arange(models, dtype=np.int32), each),
        prompt_tokens=np.full(models * each, prompt, np.int32),
        output_tokens=np.full(models * each, output, np.int32),
    )


def question(of: Trace, ttft_s: float = 10.0, tbt_s: float = 0.1) -> Question:
    return Question(as_it_is(of, None), PROFILE, "slack", Objective(ttft_s, tbt_s))


def test_a_few_models_need_one_gpu() -> None:
    answer = plan(question(trace(models=2)), gpus_most=2, attainment=0.99)
    assert answer.needed == 1
    assert [result.min for result in answer.results] == [1.0, 1.0]


def test_more_models_need_more_gpus_and_all_requests_count() -> None:
    # All models are asked at the same moment: gateways with old reports would place many models on one GPU.
    crowded = replace(question(trace(models=16, each=2), ttft_s=2.0), sight=Sight(exact=True))
    answer = plan(crowded, gpus_most=10, attainment=0.99)
    assert answer.needed is not None and 1 < answer.needed <= 10
    assert answer.results[answer.needed - 1].min >= 0.99 > answer.results[answer.needed - 2].min
    assert all(result.requests == 32 for result in answer.results)


def test_even_the_most_gpus_may_be_too_few() -> None:
    assert plan(question(trace(models=24), ttft_s=0.7), gpus_most=1, attainment=0.99).needed is None


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_needed_is_the_smallest_number_from_which_on_all_are_enough(enough: list[bool]) -> None:
    from_here = [gpus for gpus in range(1, len(enough) + 1) if all(enough[gpus - 1 :])]
    assert _needed(enough) == min(from_here, default=None)


def test_one_request_is_a_workload() -> None:
    assert plan(question(trace(models=1, each=1)), gpus_most=1, attainment=1.0).needed == 1


# ── a model alone ─────────────────────────────────────────────────────────────────────────────────────────────────────


def why(of: Question) -> str | None:
    return plan(of, gpus_most=1, attainment=0.9).alone[0].unmeetable


def test_objectives_that_can_be_met_alone_are_not_complained_about() -> None:
    assert why(question(trace(models=1))) is None


def test_loading_and_the_longest_prompt_may_take_longer_than_the_first_token_may() -> None:
    costs = PROFILE.costs(BASE_SIZES[0])
    exactly = costs.load_s + costs.prefill(50)
    assert why(question(trace(models=1), ttft_s=exactly * 1.001)) is None
    found = why(question(trace(models=1), ttft_s=exactly * 0.999))
    assert found is not None and "50 tokens" in found and "raise --ttft" in found


def test_a_long_prompt_is_computed_in_as_many_steps_as_it_takes() -> None:
    tokens = 3 * PROFILE.batched_tokens + 5
    costs = PROFILE.costs(BASE_SIZES[0])
    alone = plan(question(trace(models=1, each=1, prompt=tokens)), gpus_most=1, attainment=0.9).alone[0]
    steps = 3 * costs.prefill(PROFILE.batched_tokens) + costs.prefill(5)
    assert alone.ttft_s == pytest.approx(costs.load_s + steps)


def test_a_step_may_take_longer_than_a_token_may() -> None:
    costs = PROFILE.costs(BASE_SIZES[0])
    found = why(question(trace(models=1), tbt_s=costs.step(1, 70) * 0.999))
    assert found is not None and "70 tokens" in found and "raise --tbt" in found
    assert why(question(trace(models=1), tbt_s=costs.step(1, 70) * 1.001)) is None


def test_a_model_that_does_not_fit_is_said_to_be_too_large() -> None:
    small = msgspec.structs.replace(PROFILE, memory_bytes=10 * 10**9)
    workload = as_it_is(trace(models=1, each=1), None)
    found = why(Question(workload, small, "slack", Objective()))
    assert found is not None and "10 GB" in found and "larger GPU" in found


def test_a_profile_that_misses_a_model_says_so() -> None:
    costs = PROFILE.costs(BASE_SIZES[0])
    measured = msgspec.structs.replace(PROFILE, law=None, models={"other": costs})
    with pytest.raises(ValueError, match="no costs of model 'model-0'"):
        plan(Question(as_it_is(trace(models=1), None), measured, "slack", Objective()), gpus_most=1, attainment=0.9)


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sizes_of_the_base_mix_are_taken_in_turns_where_none_are_stated() -> None:
    models = as_it_is(trace(models=9), None).models
    assert [size.name for size in models] == [f"model-{index}" for index in range(9)]
    assert [size.weight_bytes for size in models[:7]] == [size.weight_bytes for size in BASE_SIZES]
    assert models[7].weight_bytes == models[0].weight_bytes


def test_sizes_are_read_from_json_and_from_csv_alike(tmp_path: Path) -> None:
    as_json, as_csv = tmp_path / "sizes.json", tmp_path / "sizes.csv"
    as_json.write_text(
        '{"a": {"parameters": 1000, "kv_bytes_per_token": 8}, "b": {"weight_bytes": 600, "kv_bytes_per_token": 16}}'
    )
    as_csv.write_text("model,parameters,weight_bytes,kv_bytes_per_token\na,1000,,8\nb,,600,16\n")
    assert (
        read_sizes(as_json)
        == read_sizes(as_csv)
        == {
            "a": ModelSize("a", 2000, 8, 1000),
            "b": ModelSize("b", 600, 16, 300),
        }
    )


def test_a_model_of_the_trace_without_a_size_is_named() -> None:
    with pytest.raises(ValueError, match="'model-1'.*--sizes"):
        as_it_is(trace(models=2), {"model-0": BASE_SIZES[0]})


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("sizes.json", "{", "no sizes"),
        ("sizes.json", '{"a": {"kv_bytes_per_token": 8}}', "'a' has neither"),
        ("sizes.json", '{"a": {"parameters": -1, "kv_bytes_per_token": 8}}', "parameters"),
        ("sizes.csv", "name,parameters\na,1\n", "row 2"),
        ("sizes.csv", "model,parameters,kv_bytes_per_token\na,many,8\n", "row 2.*parameters"),
        ("sizes.csv", "model,parameters,kv_bytes_per_token\na,7,8,9\n", "row 2"),
    ],
)
def test_sizes_that_are_none_are_refused_with_their_place(tmp_path: Path, name: str, text: str, named: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{name}.*{named}"):
        read_sizes(path)
