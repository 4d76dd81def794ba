from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runtime.core.ledgers import attainment
from runtime.core.ledgers.attainment import LABELS_MOST, AttainedShares, Attainment, ObjectiveProgress, add, shares
from store.contract.wire import Attained

# Multiples of 1/64 s: sums and products are exact, and equal values compare equal.
TICK_S = 1 / 64
ticks = st.integers(0, 200).map(lambda n: n * TICK_S)
SEGMENT = st.tuples(ticks, st.integers(0, 40), ticks)  # pause before it, steps, seconds a step
Segment = tuple[float, int, float]


def delivered(progress: ObjectiveProgress, times: list[float]) -> ObjectiveProgress:
    """Deliver each token as a separate segment."""
    for at in times:
        progress.deliver(at, 1, 0.0)
    return progress


def shares_of(progress: ObjectiveProgress, now: float = 0.0, owed: int = 0) -> AttainedShares:
    totals = Attainment()
    totals.end("", progress, now, owed)
    found = shares(totals.totals.values())
    assert found is not None
    return found


def token_by_token(times: list[float], ttft_s: float, tbt_s: float) -> Attained:
    """The attainment by the definitions, token by token, of a request that arrived at 0."""
    on_time = [at <= ttft_s + k * tbt_s for k, at in enumerate(times)]
    on_time_rebased, due_at = 0, ttft_s
    for at in times:
        on_time_rebased += at <= due_at
        due_at = due_at + tbt_s if at <= due_at else at + tbt_s
    covered_s, started_at, readable_s = 0.0, 0.0, 0.0
    for k, at in enumerate(times):
        budget_s = ttft_s + k * tbt_s
        if at - started_at <= budget_s:
            readable_s = budget_s
        else:
            covered_s, started_at, readable_s = covered_s + readable_s, at, 0.0
    covered_s += times[-1] - started_at
    return Attained(
        requests=1,
        first_on_time=int(on_time[0]),
        tokens=len(times),
        on_time=sum(on_time),
        on_time_rebased=on_time_rebased,
        time_shares=covered_s / times[-1] if times[-1] else 1.0,
    )


@given(st.lists(SEGMENT, min_size=1, max_size=8), ticks, ticks)
@example([(10.0, 3, 1.0), (0.0, 30, 0.25)], 1.0, 0.5)  # far behind, then catching up
@example([(0.0, 30, 3.0)], 1.0, 0.5)  # slower than TBT from the start
@example([(0.0, 3, 0.0), (0.0, 0, 1.0), (9.0, 3, 0.0)], 1.0, 0.0)
def test_segments_are_counted_as_their_tokens_would_be(segments: list[Segment], ttft_s: float, tbt_s: float) -> None:
    progress, times, clock = ObjectiveProgress(0.0, ttft_s, tbt_s), [], 0.0
    for pause_s, steps, step_s in segments:
        began = clock + pause_s
        progress.deliver(began, steps, step_s)
        times += [began + j * step_s for j in range(1, steps + 1)]
        clock = began + steps * step_s
    if not times:
        return
    totals = Attainment()
    totals.end("a", progress, clock)
    assert totals.totals["a"] == token_by_token(times, ttft_s, tbt_s)
    assert progress.due_at == ttft_s + len(times) * tbt_s


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 500), st.floats(0, 20)), min_size=1, max_size=8),
    st.floats(0, 20),
    st.floats(0, 1),
)
@example([(0.0, 1, 5e-324)], 1.0, 0.0)
def test_any_numbers_give_shares_from_0_to_1(segments: list[Segment], ttft_s: float, tbt_s: float) -> None:
    progress, clock = ObjectiveProgress(1e9, ttft_s, tbt_s), 1e9
    for pause_s, steps, step_s in segments:
        progress.deliver(clock + pause_s, steps, step_s)
        clock += pause_s + steps * step_s
    for owed in (0, 5):
        found = shares_of(progress, clock, owed)
        for share in (found.token, found.token_rebased, found.token_time_weighted, found.first_token):
            assert 0.0 <= share <= 1.0 + 1e-9


def test_the_published_example_scores_two_thirds_by_time_and_one_fifth_by_tokens() -> None:
    progress = delivered(ObjectiveProgress(0.0, 3.0, 2.0), [3.0, 6.0, 12.0, 18.0, 24.0])
    found = shares_of(progress)
    assert found.token == found.token_rebased == 0.2
    assert found.token_time_weighted == pytest.approx(16 / 24)
    assert found.first_token == 1.0 and found.least == 0.2


def test_the_example_beside_the_published_definition_is_covered_for_five_of_eight_seconds() -> None:
    progress = delivered(ObjectiveProgress(0.0, 3.0, 2.0), [3.0, 6.0, 7.0, 8.0])
    assert shares_of(progress).token_time_weighted == pytest.approx(5 / 8)


def test_after_one_pause_strict_stays_late_and_rebased_does_not() -> None:
    progress = ObjectiveProgress(100.0, 1.0, 0.1)
    progress.deliver(100.5, 10, 0.1)
    progress.deliver(110.0, 10, 0.1)
    assert (progress.late, progress.late_rebased) == (10, 1)


def test_a_slower_step_than_tbt_is_late_once_the_lead_is_used_up() -> None:
    progress = ObjectiveProgress(0.0, 1.0, 0.25)
    progress.deliver(0.0, 4, 0.5)  # at 0.5, 1, 1.5, 2; due at 1, 1.25, 1.5, 1.75
    assert (progress.late, progress.late_rebased, progress.first_late) == (1, 1, False)


def test_owed_tokens_are_late_and_their_time_is_not_covered() -> None:
    progress = ObjectiveProgress(0.0, 1.0, 0.5)
    progress.deliver(0.0, 2, 0.5)
    found = shares_of(progress, now=1.0, owed=2)
    assert found.token == found.token_rebased == 0.5
    assert found.token_time_weighted == pytest.approx(1.5 / 2.5)  # tokens to read until 1.5, the last token due at 2.5


def test_a_request_that_failed_without_a_token_has_missed_everything() -> None:
    for ttft_s, now in ((1.0, 0.1), (-1.0, 0.0)):  # the second request was late on arrival
        found = shares_of(ObjectiveProgress(0.0, ttft_s, 0.5), now, owed=2)
        assert found == AttainedShares(
            token=0.0, token_rebased=0.0, token_time_weighted=0.0, first_token=0.0, requests=1
        )


@pytest.mark.parametrize(("now", "requests"), [(1.0, 0), (1.01, 1)])
def test_a_client_that_leaves_without_a_token_counts_if_one_was_overdue(now: float, requests: int) -> None:
    totals = Attainment()
    totals.end("a", ObjectiveProgress(0.0, 1.0, 0.5), now)
    assert sum(total.requests for total in totals.totals.values()) == requests


def test_labels_are_kept_apart_and_the_least_recently_ended_is_forgotten() -> None:
    totals = Attainment()
    for n in range(LABELS_MOST):
        totals.end(f"{n}", delivered(ObjectiveProgress(0.0, 1.0, 0.5), [0.5]), 0.5)
    totals.end("0", delivered(ObjectiveProgress(0.0, 1.0, 0.5), [2.0]), 2.0)
    totals.end("new", delivered(ObjectiveProgress(0.0, 1.0, 0.5), [0.5]), 0.5)
    assert len(totals.totals) == LABELS_MOST and totals.forgotten == 1
    assert "1" not in totals.totals
    assert (totals.totals["0"].requests, totals.totals["0"].on_time) == (2, 1)


def test_shares_of_several_runtimes_are_weighted_by_tokens_and_by_requests() -> None:
    many = Attained(requests=3, first_on_time=3, tokens=30, on_time=30, on_time_rebased=30, time_shares=3.0)
    one = Attained(requests=1, first_on_time=0, tokens=10, on_time=0, on_time_rebased=2, time_shares=0.2)
    assert shares([many, one]) == AttainedShares(
        token=0.75, token_rebased=0.8, token_time_weighted=0.8, first_token=0.75, requests=4
    )
    assert shares([]) is None and shares([attainment.NOTHING]) is None
    assert add(many, attainment.NOTHING) == many


def test_a_request_that_moved_here_and_ended_before_it_made_a_token_leaves_shares() -> None:
    assert shares([Attained(requests=1, first_on_time=1, time_shares=1.0)]) == AttainedShares(
        token=1.0, token_rebased=1.0, token_time_weighted=1.0, first_token=1.0, requests=1
    )
