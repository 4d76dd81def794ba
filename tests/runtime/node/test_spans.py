"""The spans of a runtime: a span for each traced request, with stages, events and an end."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from uuid_utils import uuid7

from runtime.node.spans import Spans
from store.contract.wire import Course, Delta, Finish, Moved, Run, Spent
from store.telemetry.tracing import traceparent
from tests.store.telemetry.test_tracing import InMemorySpanExporter, made


def traced(run_trace: str = "yes") -> tuple[Spans, InMemorySpanExporter, Run]:
    traces, kept = made()
    root = traces.root("inference", str(uuid7()), "")
    run = Run(
        **dict(gateway="g", stream=1, model="m", request="q", attempt=1, prompt_tokens=3, max_tokens=9),
        **dict(payload=b"", engine="test", trace=traceparent(root) if run_trace else ""),
    )
    return Spans(traces, "r1"), kept, run


def by_name(kept: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in kept.get_finished_spans()}


def events(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


def test_stages_before_the_first_token_and_one_span_for_all_that_follow() -> None:
    spans, kept, run = traced()
    spans.began(run, 0)
    waited = Course(queue_us=5000, wake_us=7000, prefill_us=2000)
    spans.heard("g", [Delta(1, [8], 0, course=waited)])
    spans.heard("g", [Delta(1, [9], 1)])
    ended = Course(5000, 7000, 300, 2000, 4000, 900)
    spans.heard("g", [Delta(1, [], 2, Finish.STOP, spent=Spent(77, 5), course=ended)])
    found = by_name(kept)
    assert set(found) == {"queue", "wake", "prefill", "decode", "runtime"}, "a stage that took no time has no span"
    lengths = {name: span.end_time - span.start_time for name, span in found.items()}
    assert (lengths["queue"], lengths["wake"], lengths["prefill"]) == (5_000_000, 7_000_000, 2_000_000)
    assert found["wake"].start_time == found["queue"].end_time
    assert all(found[stage].parent == found["runtime"].context for stage in ("queue", "wake", "prefill", "decode"))
    assert events(found["runtime"]) == ["first token", "waited for others", "switched"]
    assert found["runtime"].attributes["staccato.gpu_us"] == 77


def test_a_request_that_moves_ends_here_with_where_it_went() -> None:
    spans, kept, run = traced()
    spans.began(run, 0)
    spans.heard("g", [Delta(1, [8], 0, course=Course(prefill_us=1))])
    spans.heard("g", [Delta(1, [], 1, moved=Moved("r2", 1, 0))])
    runtime = by_name(kept)["runtime"]
    assert runtime.events[-1].name == "moved" and runtime.events[-1].attributes == {"staccato.runtime": "r2"}
    spans.heard("g", [Delta(1, [9], 1)])
    assert len(kept.get_finished_spans()) == 3, "runtime, prefill, decode; then it is nobody's here"


def test_one_that_is_lost_or_left_alone_ends_too() -> None:
    spans, kept, run = traced()
    spans.began(run, 4)
    spans.heard("g", [Delta(1, [], 4, Finish.LOST)])
    assert (
        not by_name(kept)["runtime"].status.is_ok and by_name(kept)["runtime"].attributes["staccato.tokens_before"] == 4
    )
    kept.clear()
    spans.began(run, 0)
    spans.gone("g", [1])
    spans.gone("g", [1, 2])
    assert set(by_name(kept)) == {"runtime"}


def test_who_is_not_traced_has_no_spans() -> None:
    spans, kept, run = traced(run_trace="")
    spans.began(run, 0)
    spans.heard("g", [Delta(1, [8], 0, Finish.STOP)])
    assert kept.get_finished_spans() == ()
