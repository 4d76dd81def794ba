from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.device.request import Objective
from runtime.core.ledgers.costs import load_profile
from runtime.sim.capacity import FINALISTS, SCANNED, CapacityRun, Scenario, Search, largest, processes, tunings_of
from runtime.sim.workload import base
from runtime.sim.world import SimulationResult
from tests.conftest import ROOT

PROFILE = load_profile((ROOT / "deploy" / "profiles" / "h100.json").read_bytes(), "h100.json")
SHORT = Scenario(partial(base, duration_s=40.0), PROFILE, "slack", 2, Objective())


@given(st.integers(0, 400), st.integers(1, 500), st.integers(1, 400))
def test_the_largest_number_up_to_which_all_hold_is_found_wherever_the_search_begins(
    bound: int, first: int, most: int
) -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number <= bound

    assert largest(holds, first, most) == min(bound, most)
    assert len(set(asked)) <= 20 + SCANNED


@given(st.sets(st.integers(1, 60)), st.integers(1, 80), st.integers(1, 60))
def test_what_is_found_holds_and_nothing_just_above_does(holding: set[int], first: int, most: int) -> None:
    found = largest(holding.__contains__, first, most)
    assert found == 0 or found in holding
    assert not holding & set(range(found + 1, min(found + SCANNED, most) + 1))


def test_a_dip_does_not_end_the_search() -> None:
    assert largest({1, 2, 3, 4, 6, 7}.__contains__, first=4, most=100) == 7


@dataclass(frozen=True)
class Told(Scenario):
    """A scenario: attainment falls by a tenth with each model per GPU beyond five, and depends on tuning and seed."""

    made: list[CapacityRun] = field(default_factory=list)

    def simulate(self, run: CapacityRun) -> SimulationResult:
        self.made.append(run)
        quota = dict(run.tuning).get("quota", 0.0)
        attained = min(1.0, 1.5 - run.models / self.gpus / 10) - 0.1 * abs(quota - 2.0) + 0.01 * run.seed
        return SimulationResult(attained, attained - 0.05, attained - 0.05, 0, 0, 1, 1, 1, 1, 1, 1)


def told(policy: str) -> Told:
    return Told(SHORT.workload, PROFILE, policy, 8, Objective())


def test_capacity_is_where_the_mean_over_seeds_crosses_the_bar() -> None:
    search = Search(told("slack"), seeds=(20, 21, 22))
    assert search.capacity("token_attainment", 0.9) == 6.0  # 1.5 - 0.6 - 0.2 + 0.21 = 0.91; 0.86 at 6.5
    assert search.capacity("min", 0.9) == 5.5


def test_a_curve_has_what_each_seed_attained_at_all_points() -> None:
    search = Search(told("slack"), seeds=(20, 21, 22))
    capacity = search.capacity("min", 0.9)
    curve = {point.models_per_gpu: point for point in search.curve("min")}
    assert curve[capacity].attained >= 0.9 > curve[capacity + 0.5].attained
    assert all(len(point.by_seed) == 3 and point.by_seed[0] < point.by_seed[2] for point in curve.values())


def test_no_run_is_made_twice_whatever_is_asked() -> None:
    scenario = told("aegaeon")
    search = Search(scenario, seeds=(0, 1))
    for bar in (0.9, 0.99):
        search.capacity("token_attainment", bar)
        search.capacity("min", bar)
    assert len(scenario.made) == len(set(scenario.made))


def test_runs_that_are_known_already_are_not_made_again() -> None:
    first = Search(told("slack"), seeds=(0, 1))
    capacity = first.capacity("min", 0.7)
    scenario = told("slack")
    assert Search(scenario, seeds=(0, 1), known=first.known).capacity("min", 0.7) == capacity
    assert not scenario.made


def test_the_best_tuning_is_found_at_every_point_and_only_the_best_run_with_all_seeds() -> None:
    scenario = told("aegaeon")
    search = Search(scenario, seeds=(0, 1, 2))
    search.capacity("token_attainment", 0.9)
    assert all(dict(point.tuning)["quota"] == 2.0 for point in search.curve("token_attainment"))
    by_models: dict[int, set[object]] = {}
    for run in scenario.made:
        if run.seed == 2:
            by_models.setdefault(run.models, set()).add(run.tuning)
    assert {len(tunings) for tunings in by_models.values()} == {FINALISTS}


@pytest.mark.parametrize("gpus", [1, 2, 3, 8, 32])
def test_every_tuning_of_aegaeon_leaves_a_device_for_decode(gpus: int) -> None:
    tunings = [dict(tuning) for tuning in tunings_of("aegaeon", gpus)]
    assert all(tuning.get("prefill", 0) < gpus for tuning in tunings)
    assert len({tuple(tuning.items()) for tuning in tunings}) == len(tunings) >= 5


@pytest.fixture
def searched() -> Iterator[Search]:
    with processes() as each:
        yield Search(SHORT, seeds=(0, 1), each=each)


def test_other_processes_find_the_same_as_this_one(searched: Search) -> None:
    here = Search(SHORT, seeds=(0, 1))
    runs = [CapacityRun(8, 0), CapacityRun(8, 1), CapacityRun(16, 0)]
    assert searched._results(runs) == here._results(runs)
