"""The idle threshold: the cheapest over a model's own gaps, within its clamps, and steady."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.device.idle import (
    GAPS_LEAST,
    GAPS_MOST,
    HYSTERESIS,
    LEAST_S,
    MEMORY_S,
    MOST_S,
    PRIOR_S,
    RECOMPUTE_S,
    IdleGaps,
    IdlePrice,
    IdleThreshold,
    threshold_s,
)

# Whole numbers: sums are exact, and equal costs compare equal.
SAMPLES = st.lists(st.integers(0, 1200), min_size=GAPS_LEAST, max_size=60)
ACTIVATIONS = st.integers(0, 400)
PRICES = st.integers(0, 2000)


def cost(gaps: list[int], price: IdlePrice, threshold: float) -> float:
    return sum(price.hold * min(gap, threshold) + price.reactivation * (gap > threshold) for gap in gaps)


def least(activation_s: float) -> float:
    return min(MOST_S, max(LEAST_S, 3 * activation_s))


@given(
    st.lists(st.floats(0, 1e9), max_size=60),
    st.floats(0, 1e6),
    st.none() | st.builds(IdlePrice, st.floats(0, 1e12), st.floats(0, 1e12)),
)
def test_it_is_never_outside_its_clamps(gaps: list[float], activation_s: float, price: IdlePrice | None) -> None:
    assert least(activation_s) <= threshold_s(gaps, activation_s, price) <= MOST_S


@given(SAMPLES, ACTIVATIONS, PRICES, PRICES)
def test_no_other_threshold_is_cheaper_and_no_shorter_one_as_cheap(
    gaps: list[int], activation_s: int, hold: int, reactivation: int
) -> None:
    price, allowed = IdlePrice(hold, reactivation), range(int(least(activation_s)), int(MOST_S) + 1)
    assert threshold_s(gaps, activation_s, price) == min(allowed, key=lambda each: cost(gaps, price, each))


@given(SAMPLES, ACTIVATIONS, PRICES, PRICES, PRICES)
def test_the_dearer_an_activation_the_longer_it_is_held(
    gaps: list[int], activation_s: int, hold: int, one: int, other: int
) -> None:
    less, more = (threshold_s(gaps, activation_s, IdlePrice(hold, price)) for price in sorted((one, other)))
    assert less <= more


@given(SAMPLES, ACTIVATIONS, PRICES, PRICES, PRICES)
def test_the_dearer_its_pages_the_sooner_it_goes(
    gaps: list[int], activation_s: int, reactivation: int, one: int, other: int
) -> None:
    cheap, dear = (threshold_s(gaps, activation_s, IdlePrice(price, reactivation)) for price in sorted((one, other)))
    assert dear <= cheap


def test_a_model_whose_requests_come_every_minute_is_held_that_long_and_one_who_comes_hourly_is_not() -> None:
    assert threshold_s([58.0, 60.0] * 20, 1.0, IdlePrice(hold=1.0, reactivation=100.0)) == 60.0
    assert threshold_s([3600.0] * 40, 1.0, IdlePrice(hold=1.0, reactivation=100.0)) == LEAST_S


def test_without_experience_it_is_the_prior_or_what_a_slow_activation_asks_for() -> None:
    few = [600.0] * (GAPS_LEAST - 1)
    assert threshold_s(few, 1.0, IdlePrice(hold=0.0, reactivation=1.0)) == PRIOR_S
    assert threshold_s(few, 20.0, None) == 60.0
    assert threshold_s([*few, 600.0], 1.0, IdlePrice(hold=0.0, reactivation=1.0)) == 600.0


def test_without_a_price_to_hold_it_for_the_prior_costs_one_activation() -> None:
    assert threshold_s([PRIOR_S - 1.0] * GAPS_LEAST, 1.0, None) == PRIOR_S - 1.0
    assert threshold_s([PRIOR_S + LEAST_S + 1.0] * GAPS_LEAST, 1.0, None) == LEAST_S


def test_gaps_are_the_latest_of_a_day_and_only_those_that_a_threshold_can_cut_short() -> None:
    gaps = IdleGaps()
    for number in range(GAPS_MOST + 2):
        gaps.add(100.0 + number, float(number))
        gaps.add(LEAST_S, float(number))
    assert gaps.recent(600.0) == [100.0 + number for number in range(2, GAPS_MOST + 2)]
    assert gaps.recent(MEMORY_S + GAPS_MOST) == [100.0 + GAPS_MOST, 101.0 + GAPS_MOST]
    assert gaps.recent(2 * MEMORY_S) == []


def visited(threshold: IdleThreshold, gap_s: float, times: int, now: float) -> float:
    """Serve `times` requests of a second each, with gaps of `gap_s`. Returns the end of the last request."""
    for _ in range(times):
        threshold.arrived(now + gap_s)
        now += gap_s + 1.0
        threshold.left(now)
    return now


def test_a_gap_lasts_from_the_last_request_that_left_to_the_first_that_came() -> None:
    one, other = IdleThreshold(), IdleThreshold()
    now = visited(one, 30.0, GAPS_LEAST + 1, 0.0)
    for turn in range(GAPS_LEAST + 1):
        other.arrived(turn * 31.0 + 30.0)
        other.arrived(turn * 31.0 + 30.5)
        other.left(turn * 31.0 + 31.0)
        other.left(turn * 31.0 + 45.0)  # told twice
    assert one.value(now, 1.0) == other.value(now, 1.0) == 30.0


def test_the_time_before_the_first_request_is_no_gap() -> None:
    threshold = IdleThreshold()
    now = visited(threshold, 30.0, GAPS_LEAST, 0.0)
    assert threshold.value(now, 1.0) == PRIOR_S


def test_it_is_computed_again_no_sooner_than_a_minute_later() -> None:
    threshold = IdleThreshold()
    assert threshold.value(0.0, 1.0) == PRIOR_S
    assert threshold.value(RECOMPUTE_S - 0.1, 100.0) == PRIOR_S
    assert threshold.value(RECOMPUTE_S, 100.0) == 300.0


@pytest.mark.parametrize(("gap_s", "moves"), [(37.0, False), (35.0, True), (53.0, False), (55.0, True)])
def test_it_moves_only_when_it_moves_far(gap_s: float, moves: bool) -> None:
    assert (abs(gap_s - PRIOR_S) > HYSTERESIS * PRIOR_S) == moves
    threshold = IdleThreshold()
    now = visited(threshold, gap_s, GAPS_LEAST + 1, 0.0)
    assert threshold.value(now, 1.0, IdlePrice(hold=1.0, reactivation=1000.0)) == (gap_s if moves else PRIOR_S)
