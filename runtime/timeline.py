"""Who had the device, for hours and in bounded memory: recent turns one by one, older ones in buckets. Pure.

The device process marks where its account is told of time, `joined` makes spans of the marks, and the node keeps
them: a device that dies takes with it what it did not tell. Detail is lost with age, time never is: whatever is
shown adds up to the time that it covers.

With 23 models that had turns of 0.15 s for 50 hours all of it took 19 MiB; it can't take much more, for turns, buckets
and the models in each are limited.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from runtime.account import Mark
from store.views import Span, Stage, Timeline, Use

TURNS_MOST = 20_000
STAGES_MOST = 700  # of each kind: a model is fetched far more often than it is built
# Width of a bucket in seconds, and how many: 15 minutes, 1 hour, 4 hours, 16 hours, 2 days.
LEVELS = ((1, 900), (4, 900), (15, 960), (60, 960), (240, 720))
SHARES_MOST = 24  # models in a bucket that are told apart

Key = tuple[Use, str]


def joined(at_us: int, marks: Iterable[Mark]) -> list[Span]:
    """What passed from `at_us` to the last mark; neighbours that are alike are one."""
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
class Bucket:
    """`beyond_us` is where the next one begins."""

    at_us: int
    beyond_us: int
    shares: dict[Key, int] = field(default_factory=dict)  # what part of it went to what

    def add(self, key: Key, us: int) -> None:
        if key not in self.shares and len(self.shares) >= SHARES_MOST:
            key = (key[0], "")
        self.shares[key] = self.shares.get(key, 0) + us

    def spans(self) -> Iterator[Span]:
        return (Span(self.at_us, us, use, model) for (use, model), us in self.shares.items())


class Level:
    """The last `kept` buckets, each as wide as the others; the first and the last one may cover less."""

    def __init__(self, width_us: int, kept: int) -> None:
        self.width_us, self._kept = width_us, kept
        self.buckets: deque[Bucket] = deque(maxlen=kept)

    def add(self, span: Span) -> None:
        end_us = span.at_us + span.us
        at_us = max(span.at_us, end_us - self._kept * self.width_us)  # what is older would not be kept
        while at_us < end_us:
            if not self.buckets or self.buckets[-1].beyond_us <= at_us:
                self.buckets.append(Bucket(at_us, at_us - at_us % self.width_us + self.width_us))
            bucket = self.buckets[-1]
            until_us = min(end_us, bucket.beyond_us)
            bucket.add((span.use, span.model), until_us - at_us)
            at_us = until_us

    def since(self, from_us: int, to_us: int, most: int) -> list[Span]:
        """The last ones before `to_us`, back to `from_us` or as far as there are not too many."""
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
    """Of one device, since `begun_us`. Times are UNIX microseconds."""

    def __init__(self, begun_us: int) -> None:
        self.begun_us = self._end_us = begun_us
        self._turns: deque[Span] = deque(maxlen=TURNS_MOST)
        self._levels = [Level(round(width_s * 1e6), kept) for width_s, kept in LEVELS]
        self._stages: defaultdict[str, deque[Stage]] = defaultdict(lambda: deque(maxlen=STAGES_MOST))
        self._now = Use.AWAY  # what the time since the last span goes to, as far as is known

    def add(self, spans: Sequence[Span], stages: Iterable[Stage], now: Use) -> None:
        """What passed since the last time; what is missing between was nobody's, for there was no device process."""
        if spans and spans[0].at_us > self._end_us:
            self._add(Span(self._end_us, spans[0].at_us - self._end_us, Use.AWAY))
        for span in spans:
            self._add(span)
        for stage in stages:
            self._stages[stage.name].append(stage)
        self._now = now

    def lost(self) -> None:
        """The device process is gone."""
        self._now = Use.AWAY

    def _add(self, span: Span) -> None:
        assert span.at_us == self._end_us, f"a span begins at {span.at_us}, and the last one ended at {self._end_us}"
        self._end_us += span.us
        _append(self._turns, span)
        for level in self._levels:
            level.add(span)

    def shown(self, from_us: int, to_us: int, now_us: int, most: int) -> Timeline:
        """The finest detail with which all of this time takes no more than `most` spans; if it is too long for any,
        the last part of it."""
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
        """Cut to this time; none if there are too many."""
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
