"""Where a request's time went: the whole time counts, under the right part, for any fate of the runtimes."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from gateway.inference.metrics import DeclaredMetrics, Tally
from gateway.inference.timing import Timing, server_timing
from store.contract.wire import Course, Delta, Finish


@pytest.fixture
def timing() -> Timing:
    return Timing(100.0, Tally(DeclaredMetrics(CollectorRegistry()), ("t", "d")))


def tokens(course: Course | None = None) -> Delta:
    return Delta(1, [7], 0, course=course)


def test_what_the_runtime_does_not_account_for_is_the_way(timing: Timing) -> None:
    timing.sent(101.0)
    timing.came(tokens(Course(queue_us=500_000, wake_us=2_000_000, prefill_us=300_000)), 104.0)
    timing.came(tokens(), 105.0)
    timing.came(tokens(Course(500_000, 2_000_000, 0, 300_000, 1_500_000, 400_000)), 106.0)
    timing.end(106.5)
    breakdown = timing.breakdown(999.0)
    assert breakdown.parts == {
        "queue": 1500.0,
        "wake": 2000.0,
        "prefill": 300.0,
        "decode": 1500.0,
        "wait": 400.0,
        "transport": 800.0,
    }
    assert breakdown.total_ms == 6500.0 == sum(breakdown.parts.values()) and breakdown.first_token_ms == 4000.0


def test_a_vector_counts_as_a_first_token(timing: Timing) -> None:
    timing.sent(101.0)
    timing.came(Delta(1, [], 0, Finish.STOP, course=Course(queue_us=500_000, prefill_us=300_000)), 102.0)
    timing.end(102.5)
    breakdown = timing.breakdown(999.0)
    assert breakdown.parts == {"queue": 1500.0, "prefill": 300.0, "transport": 700.0}
    assert (breakdown.total_ms, breakdown.first_token_ms) == (2500.0, 2000.0)


def test_an_end_without_tokens_is_no_further_token(timing: Timing) -> None:
    timing.sent(101.0)
    timing.came(tokens(), 102.0)
    timing.came(Delta(1, [], 1, Finish.STOP), 103.0)
    assert timing.breakdown(103.0).first_token_ms == 2000.0
    assert sum(timing.tally.itl.counts) == 0


def test_a_cancel_before_a_vector_is_no_first_token(timing: Timing) -> None:
    timing.sent(101.0)
    timing.came(Delta(1, [], 0, Finish.ABORT), 102.0)
    assert timing.breakdown(103.0).first_token_ms is None


def test_a_refusal_is_a_queue_and_no_way(timing: Timing) -> None:
    timing.sent(101.0)
    timing.refused()
    timing.sent(103.0)
    assert timing.breakdown(103.0).parts == {"queue": 3000.0}


def test_what_only_the_runtime_knows_yet_is_not_said(timing: Timing) -> None:
    timing.sent(101.0)
    breakdown = timing.breakdown(107.0)
    assert (breakdown.parts, breakdown.total_ms) == ({"queue": 1000.0}, 7000.0)


def test_who_leaves_before_a_first_token_has_waited(timing: Timing) -> None:
    timing.sent(101.0)
    timing.end(107.0)
    assert timing.breakdown(999.0).parts == {"queue": 7000.0}


def test_time_at_a_runtime_that_was_lost_is_a_retry(timing: Timing) -> None:
    timing.sent(100.0)
    timing.came(tokens(Course(prefill_us=1_000_000)), 101.0)
    timing.lost()
    timing.sent(105.0)
    timing.came(tokens(Course(prefill_us=2_000_000)), 107.5)
    assert timing.breakdown(107.5).parts == {"prefill": 3000.0, "retry": 4000.0, "transport": 500.0}


def test_a_runtime_that_says_what_it_knew_before_it_lost_the_request_is_believed(timing: Timing) -> None:
    timing.sent(100.0)
    timing.came(Delta(1, [], 0, course=Course(queue_us=2_000_000)), 102.0)
    timing.lost()
    timing.sent(103.0)
    assert timing.breakdown(103.0).parts == {"queue": 2000.0, "retry": 1000.0}


def test_a_move_is_what_passes_between_two_runtimes(timing: Timing) -> None:
    timing.sent(100.0)
    timing.came(tokens(Course(prefill_us=1_000_000)), 101.0)
    timing.came(Delta(1, [], 1, course=Course(prefill_us=1_000_000, decode_us=2_000_000)), 103.0)
    timing.moved()
    timing.came(tokens(Course(wait_us=200_000, decode_us=300_000)), 104.0)
    assert timing.breakdown(104.0).parts == {"prefill": 1000.0, "decode": 2300.0, "wait": 200.0, "move": 500.0}


def test_a_clock_that_runs_ahead_makes_no_part_negative(timing: Timing) -> None:
    timing.sent(100.0)
    timing.came(tokens(Course(prefill_us=1_000_100)), 101.0)
    timing.end(101.0)
    breakdown = timing.breakdown(101.0)
    assert min(breakdown.parts.values()) >= 0 and breakdown.total_ms == sum(breakdown.parts.values())


def test_histograms_hear_first_tokens_and_the_gaps_between_later_ones(timing: Timing) -> None:
    timing.sent(100.5)
    for at in (101.0, 101.05, 101.3):
        timing.came(tokens(), at)
    ttft, itl = {s.name: s.value for s in timing.tally.ttft._child_samples()}, timing.tally.itl
    assert (ttft["_sum"], ttft["_count"]) == (1.0, 1.0)
    assert (round(itl.total_s, 6), sum(itl.counts)) == (0.3, 2)


def test_the_header_is_server_timing(timing: Timing) -> None:
    timing.sent(100.25)
    timing.came(tokens(Course(prefill_us=500_000)), 101.0)
    said = server_timing(timing.breakdown(101.0), "fast")
    assert said == 'queue;dur=250.000, prefill;dur=500.000, transport;dur=250.000, total;dur=1000.000, way;desc="fast"'
