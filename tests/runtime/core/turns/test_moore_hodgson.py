"""Moore-Hodgson: as many on time as any order could have, the late lane served last, and not left there for ever."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.device.request import RequestId
from runtime.core.turns.moore_hodgson import PROMOTED_AFTER, PendingPrefill, on_time


def job(name: str, due_s: float, work_s: float, weight: float = 1.0, arrived_at: float = 0.0) -> PendingPrefill:
    return PendingPrefill(RequestId(name), arrived_at, due_s, work_s, weight)


def names(jobs: list[PendingPrefill]) -> str:
    return "".join(job.request for job in jobs)


def count_on_time(order: list[PendingPrefill] | tuple[PendingPrefill, ...], start: float) -> int:
    count, at = 0, start
    for each in order:
        if at + each.work_s <= each.due_at:
            at, count = at + each.work_s, count + 1
    return count


def jobs(most: int) -> st.SearchStrategy[list[PendingPrefill]]:
    """Whole numbers: sums are exact."""
    tuples = st.tuples(st.integers(0, 9), st.integers(0, 20), st.integers(1, 8))
    made = st.lists(tuples, max_size=most)
    return made.map(lambda rows: [PendingPrefill(RequestId(str(n)), *map(float, row)) for n, row in enumerate(rows)])


@settings(max_examples=150)
@given(jobs(most=7), st.integers(0, 12), st.integers(0, 5))
def test_no_order_has_more_on_time(jobs: list[PendingPrefill], now: int, running_s: int) -> None:
    dispatched, _ = on_time(jobs, now, running_s)
    best = max(count_on_time(order, now + running_s) for order in permutations(jobs))
    assert len(dispatched) == best


@given(jobs(most=40), st.integers(0, 40), st.integers(0, 5), st.lists(st.floats(0.1, 9.0), min_size=40, max_size=40))
def test_who_is_dispatched_is_on_time_whatever_the_weights_and_nobody_is_lost(
    jobs: list[PendingPrefill], now: int, running_s: int, weights: list[float]
) -> None:
    weighted = [job._replace(weight=weight) for job, weight in zip(jobs, weights, strict=False)]
    dispatched, late = on_time(weighted, now, running_s)
    assert count_on_time(dispatched, now + running_s) == len(dispatched)
    assert sorted(dispatched + late) == sorted(weighted)
    assert [each.due_at for each in dispatched] == sorted(each.due_at for each in dispatched)
    assert [each.arrived_at for each in late] == sorted(each.arrived_at for each in late)


@given(jobs(most=12), st.integers(0, 40), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(jobs: list[PendingPrefill], now: int, random) -> None:  # type: ignore[no-untyped-def]
    shuffled = random.sample(jobs, len(jobs))
    assert on_time(jobs, now, promote=1) == on_time(shuffled, now, promote=1)


def test_the_longest_is_given_up_and_the_others_go_by_deadline() -> None:
    dispatched, late = on_time([job("c", 6, 2), job("a", 3, 2), job("b", 5, 4)], 0.0)
    assert (names(dispatched), names(late)) == ("ac", "b")


def test_who_is_late_already_makes_nobody_else_late() -> None:
    dispatched, late = on_time([job("a", 1, 2), job("b", 3, 3)], 0.0)
    assert (names(dispatched), names(late)) == ("b", "a")


def test_what_runs_delays_all() -> None:
    waiting = [job("a", 3, 2), job("b", 5, 2)]
    assert names(on_time(waiting, 0.0)[0]) == "ab"
    assert names(on_time(waiting, 0.0, running_s=1.5)[0]) == "b"


def test_weight_keeps_long_work_that_matters_more() -> None:
    assert names(on_time([job("a", 4, 1), job("b", 4, 4)], 0.0)[0]) == "a"
    assert names(on_time([job("a", 4, 1), job("b", 4, 4, weight=9)], 0.0)[0]) == "b"


def test_one_that_was_late_for_long_goes_first_and_what_it_takes_counts() -> None:
    old, older = job("o", 1, 2, arrived_at=1.0), job("p", 1, 2)
    now = 1.0 + PROMOTED_AFTER * 1.0
    waiting = [job("a", 3, 2, arrived_at=now), job("b", 5, 2, arrived_at=now), old, older]
    assert tuple(map(names, on_time(waiting, now))) == ("ab", "po")
    assert tuple(map(names, on_time(waiting, now, promote=2))) == ("pb", "oa")
    assert tuple(map(names, on_time(waiting, now + 0.1, promote=2))) == ("po", "ab")
