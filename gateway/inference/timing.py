"""Why a request was slow: the time from arrival to end, part by part, as clocked by the gateway and the runtimes.

A runtime says with the first tokens, and with the last, where the time at the runtime went
(`runtime/core/ledgers/latency.py`). The rest of the time at the gateway was transport. The parts, by the names in
`store/contract/series.py`:

*queue*, *wake*, *switch*, *prefill*, *decode*, *wait*   as on the device; queue also until a runtime has the request
*move*       the migration of the running request to a new runtime
*retry*      time at runtimes lost before telling where the time went, and the search for a new runtime
*transport*  the bus, and the gateway's work
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from gateway.inference.metrics import Tally
from store.contract.elapsed import Elapsed
from store.contract.series import PARTS
from store.contract.wire import Course, Delta, Finish

_NOTHING = Course()


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a request went, in milliseconds. For an ended request, `parts` add up to `total_ms`."""

    total_ms: float
    first_token_ms: float | None
    parts: dict[str, float]


@dataclass(slots=True, eq=False)
class Timing:
    """The timing of a stream of a request. Times are monotonic, in seconds."""

    arrived_at: float
    tally: Tally
    taken_at: float | None = None  # when the request was sent to the first runtime that took it
    first_at: float | None = None
    ended_at: float | None = None
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _last_at: float = 0.0  # when the last tokens came
    _known_at: float = field(init=False)  # the time is accounted for up to here
    _course: Course = _NOTHING  # at the present runtime
    _way: str = "queue"  # the part for time that no runtime accounts for
    _before: str = "queue"
    _untold: bool = False  # a runtime has the request, and has not said yet where the time goes

    def __post_init__(self) -> None:
        self._known_at = self.arrived_at

    def sent(self, now: float) -> None:
        """Note that the request was sent to a runtime."""
        if self._way == "queue":
            self.taken_at = now
        self._pass(now, self._way)
        self._before, self._way, self._course = self._way, "transport", _NOTHING
        self._untold = True

    def refused(self) -> None:
        """Note that the runtime did not take the request: the request waits on."""
        self._way, self._untold = self._before, False

    def lost(self) -> None:
        """Note that the runtime lost the request."""
        self._way, self._untold = "retry", False

    def moved(self) -> None:
        """Note that the request moved to a new runtime. The new runtime counts the time anew."""
        self._way, self._course, self._untold = "move", _NOTHING, True

    def came(self, delta: Delta, now: float) -> None:
        """Take note of a delta of the request. A vector, which comes without tokens, counts as a first token."""
        if delta.course is not None:
            self._told(delta.course, now)
        if not delta.tokens and (delta.finish is not Finish.STOP or self.first_at is not None):
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
        """Note that the last byte was handed over, or the client left. Without a first token, the untold time of the
        request counts as queue."""
        self._pass(max(now, self._known_at), "queue" if self._untold and self.first_at is None else self._way)
        self.ended_at = self._known_at
        for part, seconds in self.parts.items():
            if seconds > 0:
                self.tally.part(part).inc(seconds)

    def breakdown(self, now: float) -> Breakdown:
        """Where the time went up to `now`, without time that only the runtime knows of yet. For an ended request, where
        the whole time went."""
        until = max(now, self._known_at) if self.ended_at is None else self.ended_at
        passed = 0.0 if self._untold else until - self._known_at
        parts = self.parts | {self._way: self.parts[self._way] + passed}
        return Breakdown(
            total_ms=_ms(until - self.arrived_at),
            first_token_ms=None if self.first_at is None else _ms(self.first_at - self.arrived_at),
            parts={part: _ms(seconds) for part, seconds in parts.items() if seconds > 0},
        )

    def elapsed(self, cold: str) -> Elapsed:
        """The times of an ended request, for the database. `cold`: where the model was when the request came."""
        assert self.ended_at is not None
        first_us = None if self.first_at is None else _us(self.first_at - self.arrived_at)
        parts_us = {part: _us(seconds) for part, seconds in self.parts.items() if seconds > 0}
        return Elapsed(cold, _us(self.ended_at - self.arrived_at), first_us, parts_us)


def _values(course: Course) -> Iterable[int]:
    """Microseconds of a course, in the order of PARTS."""
    return (
        course.queue_us,
        course.wake_us,
        course.switch_us,
        course.prefill_us,
        course.decode_us,
        course.wait_us,
    )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def server_timing(breakdown: Breakdown, way: str) -> str:
    """The breakdown, and the way that the request took, as the value of the header `Server-Timing` (W3C)."""
    parts = [*breakdown.parts.items(), ("total", breakdown.total_ms)]
    return ", ".join([*(f"{part};dur={ms:.3f}" for part, ms in parts), f'way;desc="{way}"'])
