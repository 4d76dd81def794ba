"""Timeline of the use of a device, for hours and in bounded memory: recent turns singly, older turns in buckets. Pure.

The device's account marks the time booked, `joined` makes spans of the marks, and the node keeps the spans. A device
process that dies takes along the marks not yet sent. Detail is lost with age, time never: spans shown add up to the
time covered.

With 23 models and turns of 0.15 s for 50 hours, a timeline took 19 MiB. More memory is hardly possible, as the numbers
of turns, of buckets and of models in a bucket are limited.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from runtime.core.ledgers.device_time import Mark
from store.contract.views import Span, Stage, Timeline, Use

TURNS_MOST = 20_000
STAGES_MOST = 700  # for each kind of stage: models are fetched far more often than built
# Width of a bucket in seconds, and how many: 15 minutes, 1 hour, 4 hours, 16 hours, 2 days.
LEVELS = ((1, 900), (4, 900), (15, 960), (60, 960), (240, 720))
SHARES_MOST = 24  # pairs of use and model told apart in a bucket

Key = tuple[Use, str]


def joined(at_us: int, marks: Iterable[Mark]) -> list[Span]:
    """Spans from `at_us` to the last mark; neighbours with the same use and model are joined."""
    spans: list[Span] = []
    for until_us, use, model, requests, why in marks:
        span = Span(at_us, until_us - at_us, use, model, int(use is Use.STEPS), requests, why)
        at_us = until_us
        _append(spans, span)
    return spans


def _append(spans: list[Span] | deque[Span], span: Span) -> None:
    last = spans[-1] if spans else None
    if last is not None and last.use is span.use and last.model == span.model:
        us, steps, requests = last.us + span.us, last.steps + span.steps, max(last.requests, span.requests)
        spans[-1] = Span(last.at_us, us, last.use, last.model, steps, requests, last.why or span.why)
    elif span.us:
        spans.append(span)


@dataclass(slots=True)
class TimeBucket:
    """Microseconds by use and model of a stretch of time; the next bucket begins at `beyond_us`."""

    at_us: int
    beyond_us: int
    shares: dict[Key, int] = field(default_factory=dict)  # microseconds by use and model

    def add(self, key: Key, us: int) -> None:
        if key not in self.shares and len(self.shares) >= SHARES_MOST:
            key = (key[0], "")
        self.shares[key] = self.shares.get(key, 0) + us

    def spans(self) -> Iterator[Span]:
        return (Span(self.at_us, us, use, model) for (use, model), us in self.shares.items())


class TimelineLevel:
    """The last `kept` buckets, of equal width; the first and the last bucket may cover less."""

    def __init__(self, width_us: int, kept: int) -> None:
        self.width_us, self._kept = width_us, kept
        self.buckets: deque[TimeBucket] = deque(maxlen=kept)

    def add(self, span: Span) -> None:
        end_us = span.at_us + span.us
        at_us = max(span.at_us, end_us - self._kept * self.width_us)  # older time would not be kept
        while at_us < end_us:
            if not self.buckets or self.buckets[-1].beyond_us <= at_us:
                self.buckets.append(TimeBucket(at_us, at_us - at_us % self.width_us + self.width_us))
            bucket = self.buckets[-1]
            until_us = min(end_us, bucket.beyond_us)
            bucket.add((span.use, span.model), until_us - at_us)
            at_us = until_us

    def since(self, from_us: int, to_us: int, most: int) -> list[Span]:
        """Spans of the buckets between `from_us` and `to_us`; if more than `most`, only of the last buckets."""
        found: list[list[Span]] = []
        for bucket in reversed(self.buckets):
            if bucket.beyond_us <= from_us:
                break
            if bucket.at_us < to_us:
                most -= len(bucket.shares)
                if most < 0:
                    break
                found.append(list(bucket.spans()))
        return [span for spans in reversed(found) for span in spans]


class History:
    """History of a device since `begun_us`. Times are UNIX microseconds."""

    def __init__(self, begun_us: int) -> None:
        self.begun_us = self._end_us = begun_us
        self._turns: deque[Span] = deque(maxlen=TURNS_MOST)
        self._levels = [TimelineLevel(round(width_s * 1e6), kept) for width_s, kept in LEVELS]
        self._stages: defaultdict[str, deque[Stage]] = defaultdict(lambda: deque(maxlen=STAGES_MOST))
        self._now = Use.AWAY  # use of the time since the last span, as far as known

    def add(self, spans: Sequence[Span], stages: Iterable[Stage], now: Use) -> None:
        """Adds spans and stages since the last call. A gap before the spans had no device process: `Use.AWAY`.

        `now`: use of the time after the last span, as far as known."""
        if spans and spans[0].at_us > self._end_us:
            self._add(Span(self._end_us, spans[0].at_us - self._end_us, Use.AWAY))
        for span in spans:
            self._add(span)
        for stage in stages:
            self._stages[stage.name].append(stage)
        self._now = now

    def lost(self) -> None:
        """Notes the loss of the device process."""
        self._now = Use.AWAY

    def _add(self, span: Span) -> None:
        assert span.at_us == self._end_us, f"a span begins at {span.at_us}, and the last one ended at {self._end_us}"
        self._end_us += span.us
        _append(self._turns, span)
        for level in self._levels:
            level.add(span)

    def shown(self, from_us: int, to_us: int, now_us: int, most: int) -> Timeline:
        """Timeline from `from_us` to `to_us` in the finest detail with at most `most` spans.

        If the range takes more spans even in the coarsest detail, the timeline shows the last part of the range."""
        from_us, to_us = max(from_us, self.begun_us), min(to_us, max(now_us, self._end_us))
        if from_us >= to_us:
            return Timeline(from_us=from_us, to_us=from_us)
        bucket_us, spans = 0, self._last_turns(from_us, to_us, most)
        for level in self._levels:
            if from_us >= self._end_us or (spans and spans[0].at_us <= from_us):
                break
            bucket_us, spans = level.width_us, level.since(from_us, to_us, most)
        if to_us > self._end_us:
            at_us = max(from_us, self._end_us)
            spans.append(Span(at_us, to_us - at_us, self._now))
        known = [stage for kept in self._stages.values() for stage in kept]
        stages = sorted(stage for stage in known if stage.at_us < to_us and stage.at_us + stage.us > from_us)
        from_us = spans[0].at_us if spans else to_us
        to_us = from_us + sum(span.us for span in spans)
        return Timeline(from_us=from_us, to_us=to_us, bucket_us=bucket_us, spans=spans, stages=stages)

    def _last_turns(self, from_us: int, to_us: int, most: int) -> list[Span]:
        """Turns cut to the range; an empty list if the range has more than `most` turns."""
        found: list[Span] = []
        for span in reversed(self._turns):
            if span.at_us + span.us <= from_us:
                break
            if span.at_us >= to_us:
                continue
            if len(found) == most:
                return []
            found.append(_cut(span, from_us, to_us))
        return found[::-1]


def _cut(span: Span, from_us: int, to_us: int) -> Span:
    at_us, beyond_us = max(span.at_us, from_us), min(span.at_us + span.us, to_us)
    return span if beyond_us - at_us == span.us else replace(span, at_us=at_us, us=beyond_us - at_us)
