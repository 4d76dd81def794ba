"""Why a request was slow: its time from arrival to end, part by part, as the gateway and the runtimes clock it.

A runtime says with the first tokens, and with the last, where the time there went (`runtime/course.py`); what passed
here meanwhile and is not in it was the way. The parts are those of `store/series.py`:

*queue*, *wake*, *switch*, *prefill*, *decode*, *wait*   as on the device; queue also until a runtime has the request
*move*       to another runtime, while it ran
*retry*      runtimes that were lost with what they knew, and the search for another one
*transport*  the bus, and this gateway's work
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from gateway.metrics import Tally
from store.series import PARTS
from store.wire import Course, Delta

_NOTHING = Course()


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Of a request, milliseconds; when it has ended, `parts` add up to `total_ms`."""

    total_ms: float
    first_token_ms: float | None
    parts: dict[str, float]


@dataclass(slots=True, eq=False)
class Timing:
    """One stream of a request. Times are monotonic, in seconds."""

    arrived_at: float
    tally: Tally
    taken_at: float | None = None  # by its first runtime
    first_at: float | None = None
    ended_at: float | None = None
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _last_at: float = 0.0  # tokens came
    _known_at: float = field(init=False)  # up to here it is known where the time went
    _course: Course = _NOTHING  # of the present runtime
    _way: str = "queue"  # what time is that nobody accounts for
    _before: str = "queue"
    _untold: bool = False  # a runtime has it, which has not said yet where the time goes

    def __post_init__(self) -> None:
        self._known_at = self.arrived_at

    def sent(self, now: float) -> None:
        """To a runtime."""
        if self._way == "queue":
            self.taken_at = now
        self._pass(now, self._way)
        self._before, self._way, self._course = self._way, "transport", _NOTHING
        self._untold = True

    def refused(self) -> None:
        """The runtime did not take it: it waits on."""
        self._way, self._untold = self._before, False

    def lost(self) -> None:
        """By its runtime."""
        self._way, self._untold = "retry", False

    def moved(self) -> None:
        """To another runtime, which counts anew."""
        self._way, self._course, self._untold = "move", _NOTHING, True

    def came(self, delta: Delta, now: float) -> None:
        """Something of it did."""
        if delta.course is not None:
            self._told(delta.course, now)
        if not delta.tokens:
            return
        if self.first_at is None:
            self.first_at = now
            self.tally.ttft.observe(now - self.arrived_at)
            self.tally.queue.observe(self.parts["queue"])
        else:
            self.tally.itl.observe(now - self._last_at)
        self._last_at = now

    def _told(self, course: Course, now: float) -> None:
        before, there_s = self._course, 0.0
        for name, until, since in zip(PARTS, _values(course), _values(before), strict=False):
            self.parts[name] += (until - since) / 1e6
            there_s += (until - since) / 1e6
        self._known_at += there_s
        self._pass(max(now, self._known_at), self._way)
        self._way, self._course, self._untold = "transport", course, False

    def _pass(self, now: float, part: str) -> None:
        self.parts[part] += now - self._known_at
        self._known_at = now

    def end(self, now: float) -> None:
        """Its last byte was handed over, or its client left. Before its first token it waited until then."""
        self._pass(max(now, self._known_at), "queue" if self._untold and self.first_at is None else self._way)
        self.ended_at = self._known_at
        for part, seconds in self.parts.items():
            if seconds > 0:
                self.tally.part(part).inc(seconds)

    def breakdown(self, now: float) -> Breakdown:
        """Up to now, and without what only its runtime knows yet; or, when it ended, of all of it."""
        until = max(now, self._known_at) if self.ended_at is None else self.ended_at
        passed = 0.0 if self._untold else until - self._known_at
        parts = self.parts | {self._way: self.parts[self._way] + passed}
        return Breakdown(
            total_ms=_ms(until - self.arrived_at),
            first_token_ms=None if self.first_at is None else _ms(self.first_at - self.arrived_at),
            parts={part: _ms(seconds) for part, seconds in parts.items() if seconds > 0},
        )


def _values(course: Course) -> Iterable[int]:
    """In the order of PARTS."""
    return (
        course.queue_us,
        course.wake_us,
        course.switch_us,
        course.prefill_us,
        course.decode_us,
        course.wait_us,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def server_timing(breakdown: Breakdown) -> str:
    """As the header of that name says it (W3C)."""
    parts = [*breakdown.parts.items(), ("total", breakdown.total_ms)]
    return ", ".join(f"{part};dur={ms:.3f}" for part, ms in parts)
