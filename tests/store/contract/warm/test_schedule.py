"""Schedules of warm models agree with a clock on the wall, on the nights too when the clock is put forward or back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.contract.warm.schedule import DAYS, WINDOWS_MOST, Schedule, schedule

MINUTE_S = 60.0
# Weeks in which clocks are put forward or back: by an hour, by half an hour (Lord Howe), and never (UTC).
WEEKS = {
    "Europe/Berlin": ((2026, 3, 26), (2026, 10, 22)),
    "America/New_York": ((2026, 3, 5), (2026, 10, 29)),
    "Australia/Lord_Howe": ((2026, 4, 1), (2026, 9, 30)),
    "UTC": ((2026, 3, 26),),
}


def made(*texts: str) -> Schedule:
    return schedule(texts, ZoneInfo)


def at(*when: int, zone: str = "UTC") -> float:
    return datetime(*when, tzinfo=ZoneInfo(zone)).timestamp()  # type: ignore[arg-type,misc]


def naive(days: set[int], begin: int, end: int, zone: str, instant: float) -> bool:
    """Whether a window is open, by the days and minutes of the wall's clock at `instant` alone."""
    there = datetime.fromtimestamp(instant, UTC).astimezone(ZoneInfo(zone))
    minute, today, yesterday = there.hour * 60 + there.minute, there.weekday(), (there - timedelta(days=1)).weekday()
    if begin < end:
        return today in days and begin <= minute < end
    return (today in days and minute >= begin) or (yesterday in days and minute < end)


def clock(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02}"


@st.composite
def windows(draw: st.DrawFn) -> tuple[str, set[int], int, int, str]:
    days = draw(st.sets(st.integers(0, 6), min_size=1))
    begin = draw(st.integers(0, 24 * 60 - 1) | st.integers(60, 240))
    end = draw((st.integers(0, 24 * 60) | st.integers(60, 240)).filter(lambda end: end != begin))
    zone = draw(st.sampled_from(sorted(WEEKS)))
    text = f"{','.join(DAYS[day] for day in sorted(days))} {clock(begin)}-{clock(end)} {zone}"
    return text, days, begin, end, zone


@settings(max_examples=12)
@given(given=st.lists(windows(), min_size=1, max_size=3), data=st.data())
def test_a_schedule_agrees_with_a_look_at_the_wall_every_minute_of_a_week_with_a_shift(
    given: list[tuple[str, set[int], int, int, str]], data: st.DataObject
) -> None:
    kept = made(*[text for text, *_ in given])
    began = at(*data.draw(st.sampled_from(WEEKS[given[0][4]])))
    change: float | None = began - MINUTE_S
    for minute in range(7 * 24 * 60):
        instant = began + minute * MINUTE_S
        is_open = kept.open(instant)
        assert is_open == any(naive(*rest, instant) for _, *rest in given)
        if change is not None and instant >= change:
            if minute:
                assert instant == change and is_open != kept.open(instant - MINUTE_S), "the change is no change"
            change = kept.next_change(instant)
            assert change is None or change > instant
        elif minute:
            assert is_open == kept.open(instant - MINUTE_S), f"a change at {datetime.fromtimestamp(instant, UTC)}"


def test_a_window_may_end_on_the_next_day_and_days_may_go_round_the_week() -> None:
    kept = made("Sat-Mon 22:00-6:00 UTC")
    assert [kept.open(at(2026, 6, day, 23)) for day in range(1, 8)] == [True, False, False, False, False, True, True]
    assert kept.open(at(2026, 6, 2, 5, 59)) and not kept.open(at(2026, 6, 2, 6))
    assert kept.next_change(at(2026, 6, 2, 3)) == at(2026, 6, 2, 6)


def test_a_schedule_without_windows_is_never_open_and_a_whole_week_is_always_open() -> None:
    assert not made().open(0.0) and made().next_change(0.0) is None
    whole = made("mon-sun 0:00-24:00 Asia/Tokyo")
    assert whole.open(0.0) and whole.next_change(0.0) is None


def test_a_window_within_the_hour_that_a_night_leaves_out_opens_a_week_later() -> None:
    kept = made("Sun 2:10-2:40 Europe/Berlin")
    assert kept.next_change(at(2026, 3, 28, 12)) == at(2026, 4, 5, 2, 10, zone="Europe/Berlin")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8:00-18:00", "is no window of days, times and time zone"),
        ("Mon-Fri 8-18 UTC", "'8' in the window 'Mon-Fri 8-18 UTC' is no time from 0:00 to 24:00"),
        ("Mon 8:00-24:01 UTC", "'24:01' in the window"),
        ("Mon 8:60-9:00 UTC", "'8:60' in the window"),
        ("Mon 8:00-8:00 UTC", "begins and ends at 8:00: for a whole day, write 0:00-24:00"),
        ("Mon 24:00-8:00 UTC", "write 0:00 of the next day"),
        ("Mo-Fr 8:00-18:00 UTC", "'Mo-Fr' in the window 'Mo-Fr 8:00-18:00 UTC' is no day from Mon to Sun"),
        ("Mon-Tue-Wed 8:00-18:00 UTC", "'Mon-Tue-Wed' in the window"),
        ("Mon 8:00-9:00 Europe/Bonn", "the time zone 'Europe/Bonn'"),
        ("Mon 8:00-9:00 ../../etc/passwd", "the time zone '../../etc/passwd'"),
    ],
)
def test_a_wrong_window_is_refused_with_the_fault_and_the_remedy(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=".") as refused:
        made(text)
    assert said in str(refused.value)


def test_more_windows_than_are_kept_are_refused() -> None:
    with pytest.raises(ValueError, match="17 windows, at most 16"):
        made(*["Mon 8:00-9:00 UTC"] * (WINDOWS_MOST + 1))
