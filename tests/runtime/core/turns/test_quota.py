"""Decode quotas: a round for any numbers, equal tokens for every model, and the paper's identities where valid."""

from __future__ import annotations

from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.turns.quota import STEPS_MOST, Batch, Round, once_around, paper_round, plan_round

ANY = st.floats(allow_nan=False, allow_infinity=False)
SECONDS = st.floats(1e-3, 2.0)
BATCHES = st.lists(st.builds(Batch, SECONDS, st.floats(0.01, 2.0)), min_size=1, max_size=12)
LOADS = st.lists(SECONDS, min_size=2, max_size=12)


def is_sound(round: Round, batches: list[Batch]) -> bool:
    counts = all(isinstance(steps, int) and 1 <= steps <= STEPS_MOST for steps in round.steps)
    return counts and len(round.steps) == len(batches) and isfinite(round.alpha) and round.alpha > 0


def share(batches: list[Batch]) -> float:
    return sum(batch.step_s / batch.tbt_s for batch in batches)


# ── any input ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.builds(Batch, ANY, ANY), min_size=1, max_size=6), st.lists(ANY, max_size=6), ANY, st.booleans(), ANY)
def test_any_numbers_give_a_sound_round(
    batches: list[Batch], loads: list[float], switch: float, prefetch: bool, ttft: float
) -> None:
    assert is_sound(plan_round(batches, loads, switch, prefetch, ttft), batches)


@given(st.lists(st.builds(Batch, ANY, ANY), min_size=1, max_size=6), ANY, ANY)
def test_any_numbers_give_a_sound_round_in_the_papers_form(batches: list[Batch], overhead: float, most: float) -> None:
    assert is_sound(paper_round(batches, overhead, most), batches)


@pytest.mark.parametrize("loads", [[0.0, 0.0], [0.63] * 5])
@pytest.mark.parametrize("step", [0.0, 0.01, 0.02, 0.1, 5.0])  # the sum of 1/n is 0, 0.5, 1, 5 and 250
def test_too_much_work_and_no_overhead_are_no_holes(step: float, loads: list[float]) -> None:
    batches = [Batch(step, 0.1)] * 5
    assert is_sound(plan_round(batches, loads, 0.0, True, 10.0), batches)
    assert is_sound(paper_round(batches, sum(loads)), batches)


# ── equal tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(SECONDS, min_size=2, max_size=12), st.floats(0.01, 1.0), st.booleans())
def test_with_one_objective_all_get_as_many_tokens(steps: list[float], tbt: float, prefetch: bool) -> None:
    batches = [Batch(step, tbt) for step in steps]
    for round in (plan_round(batches, [0.6] * len(batches), 0.02, prefetch, 10.0), paper_round(batches, 2.0)):
        assert len(set(round.steps)) == 1


@given(BATCHES, LOADS, st.booleans(), st.floats(0.2, 20.0))
def test_what_each_makes_lasts_its_readers_equally_long_but_for_the_rounding(
    batches: list[Batch], loads: list[float], prefetch: bool, ttft: float
) -> None:
    for round in (plan_round(batches, loads, 0.02, prefetch, ttft), paper_round(batches, sum(loads))):
        longest = min((steps + 0.5) * batch.tbt_s for steps, batch in zip(round.steps, batches, strict=True))
        for steps, batch in zip(round.steps, batches, strict=True):
            assert steps in (1, STEPS_MOST) or (steps - 0.5) * batch.tbt_s <= longest + 1e-9


# ── the paper's form ──────────────────────────────────────────────────────────────────────────────────────────────────


@given(BATCHES, SECONDS, st.floats(0.1, 10.0))
def test_in_the_papers_form_no_turn_is_longer_than_its_most(batches: list[Batch], overhead: float, most: float) -> None:
    for steps, batch in zip(paper_round(batches, overhead, most).steps, batches, strict=True):
        assert steps == 1 or (steps - 0.5) * batch.step_s <= most + 1e-9


@given(st.lists(st.floats(1e-4, 1e-3), min_size=1, max_size=40), st.floats(0.1, 5.0))
def test_in_the_papers_form_one_over_alpha_of_the_tokens_are_on_time(steps: list[float], overhead: float) -> None:
    """With short steps, a round is nearly fluid, and the rounding to whole tokens is negligible."""
    batches = [Batch(step, 0.01) for step in steps]
    round = paper_round(batches, overhead, quota_s_most=10.0)
    length = overhead + sum(n * step for n, step in zip(round.steps, steps, strict=True))
    read = round.steps[0] * 0.01
    assert min(1.0, read / length) == pytest.approx(min(1.0, 1.0 / round.alpha), rel=1.0 / round.steps[0])
    assert round.overloaded == (round.alpha > 1.0)


def test_the_papers_form_by_hand() -> None:
    """Three models, n = 10 each, S = 0.3, c = 1.9 s: alpha 0.5 suffices, so q = 1.9 / (10 * 0.2) = 0.95 s, 95 steps."""
    assert paper_round([Batch(0.01, 0.1)] * 3, 1.9) == Round([95] * 3, 0.5, overloaded=False)


# ── the form without holes ────────────────────────────────────────────────────────────────────────────────────────────


@given(BATCHES, LOADS, st.booleans(), st.floats(0.2, 20.0))
def test_a_round_that_is_not_overloaded_keeps_pace(
    batches: list[Batch], loads: list[float], prefetch: bool, ttft: float
) -> None:
    round = plan_round(batches, loads, 0.02, prefetch, ttft)
    assert round.overloaded == (share(batches) >= 0.95)
    assert round.overloaded or round.alpha <= 1.0 + 1e-9


def test_a_turn_hides_the_load_of_the_next_model() -> None:
    round = plan_round([Batch(0.01, 0.1)] * 4, [0.5] * 4, 0.02, prefetch=True, ttft_s=10.0)
    assert round.steps == [55] * 4  # 0.55 s


def test_a_round_is_no_longer_than_a_new_request_can_wait() -> None:
    batches = [Batch(0.01, 0.1)] * 6
    rounds = [plan_round(batches, [0.5] * 6, 0.02, prefetch=True, ttft_s=ttft) for ttft in (10.0, 3.0)]
    lengths = [0.42 + sum(round.steps) * 0.01 for round in rounds]
    assert lengths[0] > 0.8 * 3.0 >= lengths[1]


def test_to_keep_pace_goes_before_a_first_token_in_time() -> None:
    batches = [Batch(0.02, 0.1)] * 4
    round = plan_round(batches, [0.5] * 4, 0.02, prefetch=True, ttft_s=0.5)
    assert 0.28 + sum(round.steps) * 0.02 > 0.5 and not round.overloaded


def test_one_model_alone_has_no_quota() -> None:
    assert plan_round([Batch(0.01, 0.1)], [0.6], 0.02, prefetch=True, ttft_s=10.0).steps == [STEPS_MOST]


# ── whose turn comes when ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_current_model_comes_first_and_the_others_follow_around() -> None:
    assert once_around(["a", "b", "c", "d"], "c") == [2, 3, 0, 1]
    assert once_around(["a", "b"], "gone") == once_around(["a", "b"], None) == [0, 1]


@given(st.lists(st.sampled_from("abcd"), max_size=10), st.sampled_from("abcde"))
def test_batches_of_one_model_are_side_by_side_and_each_has_one_turn(models: list[str], current: str) -> None:
    order = once_around(models, current)
    assert sorted(order) == list(range(len(models)))
    turns = [models[place] for place in order]
    changes = sum(before != after for before, after in zip(turns, turns[1:], strict=False))
    assert changes == max(0, len(set(models)) - 1)
    assert current not in models or turns[0] == current
