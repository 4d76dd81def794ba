"""The timeline of the device: no time is lost or told twice, for any events and at any detail."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.ledgers import timeline
from runtime.core.ledgers.device_time import DeviceTime
from runtime.core.ledgers.timeline import SHARES_MOST, History, joined
from store.contract.views import Span, Stage, Timeline, Use, Why
from tests.runtime.world import request

S = 1_000_000
BEGUN = 1_000_000 * S


def steps(at_us: int, us: int, model: str = "m") -> Span:
    return Span(at_us, us, Use.STEPS, model, 1, 1)


def turns(count: int, us: int, models: int = 2) -> list[Span]:
    return [steps(BEGUN + number * us, us, f"m{number % models}") for number in range(count)]


def whole(shown: Timeline) -> bool:
    """Whether the timeline adds up, turns join, and buckets follow each other."""
    starts = [span.at_us for span in shown.spans]
    joins = shown.bucket_us or all(a.at_us + a.us == b.at_us for a, b in pairwise(shown.spans))
    return sum(span.us for span in shown.spans) == shown.to_us - shown.from_us and starts == sorted(starts) and joins


def test_the_steps_of_a_turn_are_one_span_and_a_switch_says_why() -> None:
    account = DeviceTime.open(1.0)
    one, two = request(1, "a"), request(2, "a")
    account.idle(1.5)
    account.switched(1.7, [one, two])
    account.stepped(1.8, (), [one, two], 0.0)
    one.progress.sent = two.progress.sent = 1
    account.stepped(2.0, [one], (), 0.0)
    account.platform(2.25)
    due_ms = round((one.progress.due_at - 1.7) * 1e3)
    assert joined(S, account.marks) == [
        Span(S, 500_000, Use.IDLE),
        Span(1_500_000, 200_000, Use.SWITCH, "a", 0, 2, Why(2, 2, due_ms)),
        Span(1_700_000, 300_000, Use.STEPS, "a", 2, 2),
        Span(2 * S, 250_000, Use.PLATFORM),
    ]


MARKS = st.lists(
    st.tuples(st.integers(0, 3_000_000), st.sampled_from(list(Use)), st.sampled_from("abc")), min_size=1, max_size=80
)
WINDOW = st.tuples(st.integers(-S, 200 * S), st.integers(0, 200 * S))


@settings(max_examples=300)
@given(MARKS, st.lists(st.integers(0, 80), max_size=4), WINDOW, st.integers(1, 60), st.integers(0, 9 * S))
def test_whatever_is_shown_adds_up_to_the_time_that_it_covers(
    marks: list[tuple[int, Use, str]], cuts: list[int], window: tuple[int, int], most: int, later_us: int
) -> None:
    history, at_us = History(BEGUN), BEGUN
    for first, beyond in pairwise(sorted({0, *cuts, len(marks)})):  # told in several messages
        until, told = at_us, []
        for us, use, model in marks[first:beyond]:
            told.append(((until := until + us), use, model if use is Use.STEPS else "", 1, None))
        history.add(joined(at_us, told), [], Use.OPEN)
        at_us = until
    now_us = at_us + later_us
    shown = history.shown(BEGUN, now_us, now_us, 10_000)
    assert whole(shown) and (shown.from_us, shown.to_us, shown.bucket_us) == (BEGUN, now_us, 0)
    for use in set(Use) - {Use.OPEN}:
        expected = sum(us for us, used, _ in marks if used is use)
        assert sum(span.us for span in shown.spans if span.use is use) == expected
    from_us, to_us = BEGUN + window[0], BEGUN + sum(window)
    part = history.shown(from_us, to_us, now_us, most)
    assert whole(part) and len(part.spans) <= most + 1  # an open turn comes on top
    if part.spans and not part.bucket_us:
        assert (part.from_us, part.to_us) == (max(from_us, BEGUN), min(to_us, now_us))


def test_what_is_too_much_for_one_answer_comes_in_buckets_with_the_same_sums() -> None:
    history = History(BEGUN)
    history.add(turns(9000, 10_000), [], Use.IDLE)
    shown = history.shown(BEGUN, BEGUN + 90 * S, BEGUN + 90 * S, 400)
    assert shown.bucket_us == S and len(shown.spans) == 180 and whole(shown)
    assert {span.us for span in shown.spans} == {S // 2} and {span.model for span in shown.spans} == {"m0", "m1"}
    near = history.shown(BEGUN + 80 * S, BEGUN + 81 * S, BEGUN + 90 * S, 400)
    assert near.bucket_us == 0 and len(near.spans) == 100 and whole(near)


def test_hours_are_kept_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "TURNS_MOST", 100)
    history, us = History(BEGUN), 5 * S
    spans = turns(40_000, us)  # 55 hours
    history.add(spans, [], Use.IDLE)
    now_us = BEGUN + len(spans) * us
    levels = [(level.width_us // S, len(level.buckets)) for level in history._levels]
    assert levels == list(timeline.LEVELS) and len(history._turns) == 100
    for hours, width_s in ((0.2, 1), (0.9, 4), (3.9, 15), (15, 60), (47, 240)):
        shown = history.shown(now_us - round(hours * 3600) * S, now_us, now_us, 4000)
        assert whole(shown) and shown.bucket_us == width_s * S
        assert 0 <= now_us - round(hours * 3600) * S - shown.from_us < width_s * S
    ancient = history.shown(BEGUN, now_us, now_us, 4000)
    assert whole(ancient) and ancient.from_us > BEGUN and ancient.to_us == now_us


def test_a_long_rest_takes_no_longer_to_note_than_is_kept() -> None:
    history = History(BEGUN)
    month_us = 30 * 86_400 * S
    history.add([Span(BEGUN, month_us, Use.IDLE), steps(BEGUN + month_us, S)], [], Use.IDLE)
    shown = history.shown(BEGUN, BEGUN + month_us + S, BEGUN + month_us + S, 10)
    assert [span.us for span in shown.spans] == [month_us, S]
    assert [len(level.buckets) for level in history._levels] == [kept for _, kept in timeline.LEVELS]


def test_a_device_that_is_gone_had_nobody_until_the_next_one_begins() -> None:
    history = History(BEGUN)
    history.add([steps(BEGUN + S, S)], [], Use.OPEN)
    history.lost()
    assert history.shown(0, BEGUN + 9 * S, BEGUN + 3 * S, 10).spans == [
        Span(BEGUN, S, Use.AWAY),
        steps(BEGUN + S, S),
        Span(BEGUN + 2 * S, S, Use.AWAY),
    ]
    history.add([steps(BEGUN + 5 * S, S)], [Stage(BEGUN + 4 * S, S, "m", "build")], Use.IDLE)
    shown = history.shown(0, BEGUN + 9 * S, BEGUN + 7 * S, 10)
    assert [span.use for span in shown.spans] == [Use.AWAY, Use.STEPS, Use.AWAY, Use.STEPS, Use.IDLE] and whole(shown)
    assert [stage.name for stage in shown.stages] == ["build"]


def test_a_span_that_overlaps_the_last_one_is_our_mistake() -> None:
    history = History(BEGUN)
    history.add([steps(BEGUN, S)], [], Use.IDLE)
    with pytest.raises(AssertionError, match="the last one ended"):
        history.add([steps(BEGUN, S)], [], Use.IDLE)


def test_of_many_models_in_a_bucket_the_last_to_come_are_one() -> None:
    history = History(BEGUN)
    history.add(turns(1000, 1000, models=50), [], Use.IDLE)
    shown = history.shown(BEGUN, BEGUN + S, BEGUN + S, 100)
    assert len(shown.spans) == SHARES_MOST + 1 and whole(shown)
    assert {span.model for span in shown.spans} == {"", *(f"m{number}" for number in range(SHARES_MOST))}
