"""The spans of one runtime: a request's time here, and in it what it waited for and what was computed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from store import tracing
from store.tracing import AttributeValue, Span, SpanKind, Traces
from store.wire import Course, Delta, Finish, Run

STAGES = ("queue", "wake", "switch", "prefill")  # before the first token; their order is not known, only their length


@dataclass(slots=True)
class Traced:
    span: Span
    began_ns: int
    first: Course | None = None  # with its first tokens
    first_ns: int = 0
    last: Course = Course()


class Spans:
    """Of the streams that some gateway wants traced."""

    def __init__(self, traces: Traces, runtime: str) -> None:
        self._traces, self._runtime = traces, runtime
        self._open: dict[tuple[str, int], Traced] = {}

    def began(self, run: Run, made: int) -> None:
        """It came, or moved here, with so many tokens."""
        if not run.trace:
            return
        attributes: dict[str, AttributeValue] = {
            "staccato.runtime": self._runtime,
            "staccato.engine_key": run.model,
            "staccato.attempt": run.attempt,
            "staccato.tokens_before": made,
        }
        span = self._traces.child("runtime", run.trace, SpanKind.CONSUMER, attributes)
        self._open[run.gateway, run.stream] = Traced(span, time.time_ns())

    def heard(self, gateway: str, deltas: list[Delta]) -> None:
        """What is told of streams, before it is sent."""
        if not self._open:
            return
        for delta in deltas:
            traced = self._open.get((gateway, delta.stream))
            if traced is not None:
                self._heard(traced, delta)
                if delta.finish is not None or delta.moved is not None:
                    self._end((gateway, delta.stream), traced, delta)

    def _heard(self, traced: Traced, delta: Delta) -> None:
        if delta.course is not None:
            traced.last = delta.course
        if traced.first is None and delta.tokens:
            traced.first, traced.first_ns = traced.last, time.time_ns()
            tracing.happened(traced.span, "first token", {})
            self._stages(traced)

    def _stages(self, traced: Traced) -> None:
        at_ns = traced.began_ns
        for stage in STAGES:
            took_ns = getattr(traced.last, f"{stage}_us") * 1000
            if took_ns:
                self._traces.past(stage, traced.span, at_ns, at_ns + took_ns)
            at_ns += took_ns

    def _end(self, key: tuple[str, int], traced: Traced, delta: Delta) -> None:
        if traced.first is not None:
            self._decode(traced, traced.first, traced.last)
        if delta.moved is not None:
            tracing.happened(traced.span, "moved", {"staccato.runtime": delta.moved.runtime})
        else:
            spent = delta.spent
            tracing.said(traced.span, {"staccato.gpu_us": spent.gpu_us, "staccato.switch_us": spent.switch_us})
        if delta.finish in (Finish.ERROR, Finish.LOST):
            tracing.failed(traced.span)
        self.gone(key[0], [key[1]])

    def _decode(self, traced: Traced, first: Course, last: Course) -> None:
        """One span for all tokens after the first; what it waited for meanwhile is said in events."""
        now_ns = time.time_ns()
        for name, us in (("waited for others", last.wait_us), ("switched", last.switch_us - first.switch_us)):
            if us:
                tracing.happened(traced.span, name, {"staccato.ms": us / 1e3})
        self._traces.past("decode", traced.span, traced.first_ns, now_ns)

    def gone(self, gateway: str, streams: list[int]) -> None:
        """They ended, or nobody wants them any more."""
        for stream in streams:
            if traced := self._open.pop((gateway, stream), None):
                traced.span.end()
