"""Trace spans of a runtime: a request's time at the runtime, with spans inside for waiting and computing."""

from __future__ import annotations

import time
from dataclasses import dataclass

from store.contract.wire import Course, Delta, Finish, Run
from store.telemetry import tracing
from store.telemetry.tracing import AttributeValue, Span, SpanKind, Traces

STAGES = ("queue", "wake", "switch", "prefill")  # stages before the first token; only lengths are known, not the order


@dataclass(slots=True)
class Traced:
    span: Span
    began_ns: int
    first: Course | None = None  # use of time up to the first tokens
    first_ns: int = 0
    last: Course = Course()


class Spans:
    """Open spans of the streams with a trace context from the gateway."""

    def __init__(self, traces: Traces, runtime: str) -> None:
        self._traces, self._runtime = traces, runtime
        self._open: dict[tuple[str, int], Traced] = {}

    def began(self, run: Run, made: int) -> None:
        """Open a span for a request that arrived, or moved here, with `made` tokens; does nothing if not traced."""
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
        """Note deltas of streams before the deltas are sent to the gateway; a last delta ends the stream's span."""
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
        """Add a span for all tokens after the first; events of the request's span tell of waiting meanwhile."""
        now_ns = time.time_ns()
        for name, us in (("waited for others", last.wait_us), ("switched", last.switch_us - first.switch_us)):
            if us:
                tracing.happened(traced.span, name, {"staccato.ms": us / 1e3})
        self._traces.past("decode", traced.span, traced.first_ns, now_ns)

    def gone(self, gateway: str, streams: list[int]) -> None:
        """End the spans of streams that ended, or that no gateway wants any more."""
        for stream in streams:
            if traced := self._open.pop((gateway, stream), None):
                traced.span.end()
