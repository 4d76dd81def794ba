"""Schedules of warm models: windows of the week, such as "Mon-Fri 8:00-18:00 Europe/Berlin". Pure.

A window is open while a clock on the wall of its time zone shows a day and a time within the window. So a window from
2:00 to 3:00 is open for two hours on the night when that hour comes twice, and not at all on the night without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from typing import NamedTuple

WINDOWS_MOST = 16
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
EXAMPLE = "write it as 'Mon-Fri 8:00-18:00 Europe/Berlin'"
_WINDOW = re.compile(r"(?P<days>[A-Za-z,-]+) +(?P<begin>[0-9:]+)-(?P<end>[0-9:]+) +(?P<zone>\S+)")
_TIME = re.compile(r"([0-9]{1,2}):([0-9]{2})")
_DAY_MINUTES = 24 * 60
_AHEAD_DAYS = 15  # a window of an hour that a night leaves out opens a week later, or a week after that

Zone = Callable[[str], tzinfo]  # finds a time zone by its name; raises an Exception for an unknown name


class Window(NamedTuple):
    """A window of the week. Minutes count from midnight; a window whose end is not after its begin ends a day later."""

    days: frozenset[int]  # days on which the window begins; 0: Monday
    begin: int
    end: int
    zone: tzinfo

    def open(self, at: datetime) -> bool:
        """Whether the window is open at an instant."""
        there = at.astimezone(self.zone)
        day, minute = there.weekday(), there.hour * 60 + there.minute
        if self.begin < self.end:
            return day in self.days and self.begin <= minute < self.end
        return (day in self.days and minute >= self.begin) or ((day - 1) % 7 in self.days and minute < self.end)


class Schedule(NamedTuple):
    """Windows of a deployment. The model is warm while any window is open."""

    windows: tuple[Window, ...]

    def open(self, at: float) -> bool:
        """Whether the model is warm at `at`, in UNIX seconds."""
        instant = datetime.fromtimestamp(at, UTC)
        return any(window.open(instant) for window in self.windows)

    def next_change(self, at: float) -> float | None:
        """Time after `at`, both in UNIX seconds, when `open` changes next; None: `open` never changes."""
        now = self.open(at)
        changes = {change for window in self.windows for change in _changes(window, at)}
        return next((change for change in sorted(changes) if change > at and self.open(change) != now), None)


def schedule(texts: Sequence[str], zone: Zone) -> Schedule:
    """The schedule written in `texts`, a window in each. Raises ValueError with the fault and the remedy."""
    if len(texts) > WINDOWS_MOST:
        raise ValueError(f"{len(texts)} windows, at most {WINDOWS_MOST} are kept: join days, as in 'Mon,Wed,Fri'")
    return Schedule(tuple(_window(text, zone) for text in texts))


def _window(text: str, zone: Zone) -> Window:
    said = _WINDOW.fullmatch(text.strip())
    if said is None:
        raise ValueError(f"{text[:80]!r} is no window of days, times and time zone: {EXAMPLE}")
    begin, end = _minutes(said["begin"], text), _minutes(said["end"], text)
    if begin == end:
        raise ValueError(f"the window {text!r} begins and ends at {said['begin']}: for a whole day, write 0:00-24:00")
    if begin == _DAY_MINUTES:
        raise ValueError(f"the window {text!r} begins at 24:00: write 0:00 of the next day")
    try:
        there = zone(said["zone"])
    except Exception as error:  # ZoneInfo raises KeyError, ValueError or OSError
        raise ValueError(
            f"the time zone {said['zone'][:80]!r} of the window {text[:80]!r} is not known here: take a name such as "
            "Europe/Berlin or UTC"
        ) from error
    return Window(frozenset(_days(said["days"], text)), begin, end, there)


def _minutes(text: str, window: str) -> int:
    said = _TIME.fullmatch(text)
    minutes = int(said[1]) * 60 + int(said[2]) if said else _DAY_MINUTES + 1
    if said is None or int(said[2]) > 59 or minutes > _DAY_MINUTES:
        raise ValueError(f"{text!r} in the window {window[:80]!r} is no time from 0:00 to 24:00: {EXAMPLE}")
    return minutes


def _days(text: str, window: str) -> Iterator[int]:
    for part in text.split(","):
        names = [name.capitalize() for name in part.split("-")]
        if len(names) > 2 or any(name not in DAYS for name in names):
            raise ValueError(f"{part!r} in the window {window[:80]!r} is no day from Mon to Sun: {EXAMPLE}")
        first, last = DAYS.index(names[0]), DAYS.index(names[-1])
        yield from ((first + day) % 7 for day in range((last - first) % 7 + 1))


def _changes(window: Window, at: float) -> Iterable[float]:
    """Instants within _AHEAD_DAYS days of `at` when the window may open or close."""
    noon = datetime.fromtimestamp(at, UTC).astimezone(window.zone).replace(hour=12, minute=0, second=0, microsecond=0)
    for number in range(-2, _AHEAD_DAYS):
        day = (noon + timedelta(days=number)).replace(tzinfo=None, hour=0)
        for minute in (window.begin, window.end):
            there = (day + timedelta(minutes=minute)).replace(tzinfo=window.zone)
            yield there.timestamp()
            yield there.replace(fold=1).timestamp()
        yield from _shifts(window.zone, day.replace(tzinfo=window.zone).timestamp())


def _shifts(zone: tzinfo, since: float) -> Iterable[float]:
    """The instant within 25 hours of `since` when clocks on the wall are put forward or back, if clocks are.

    Clocks are put forward or back at whole seconds."""

    def shift(at: int) -> timedelta | None:
        return datetime.fromtimestamp(at, UTC).astimezone(zone).utcoffset()

    before, after = int(since), int(since) + 25 * 3600
    if shift(before) == shift(after):
        return
    while after - before > 1:
        middle = (before + after) // 2
        before, after = (middle, after) if shift(middle) == shift(before) else (before, middle)
    yield float(after)
