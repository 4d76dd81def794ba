"""Traces (OpenTelemetry), off by default: OTEL_EXPORTER_OTLP_ENDPOINT names an endpoint for spans, STACCATO_TRACES_TO a
file to which spans are appended, a JSON object a line.

The trace of a request has the request's id: the `x-request-id` that a client sees names the trace, the usage row and
the log line. A client's own trace is linked, not joined: clients do not decide which spans are kept. No attribute holds
text of a prompt or an answer, since only the names in ATTRIBUTES are allowed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import UUID

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue as AttributeValue

__all__ = ["AttributeValue", "Span", "SpanKind", "Traces", "configured"]

# The only attributes of spans. Names follow the conventions for HTTP and generative AI, as far as these have names.
ATTRIBUTES = frozenset(
    {
        "gen_ai.operation.name",
        "gen_ai.request.model",
        "gen_ai.response.finish_reasons",
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.output_tokens",
        "http.response.status_code",
        "staccato.attempt",
        "staccato.cold",
        "staccato.deployment_id",
        "staccato.engine_key",
        "staccato.gpu_us",
        "staccato.ms",
        "staccato.runtime",
        "staccato.switch_us",
        "staccato.tenant_id",
        "staccato.tokens_before",
    }
)


class TracesError(ValueError):
    """Error of wanted traces that cannot be made; the message names the variable and the remedy."""


_PROPAGATOR = TraceContextTextMapPropagator()
_RANDOM_BITS = 32  # the last bits of a request id (UUIDv7): earlier bits hold a time, a counter and fixed values


class Traces:
    """Maker of the spans of a process."""

    def __init__(self, process: str, processor: SpanProcessor, share: float = 1.0) -> None:
        """`share`: share of the requests that are traced, 0 to 1."""
        self._ids = _Ids()
        resource = Resource.create({"service.name": f"staccato-{process}"})
        self._provider = TracerProvider(ParentBased(_Share(share)), resource, id_generator=self._ids)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("staccato")

    def root(self, name: str, request: str, client: str) -> Span:
        """Begin the root span of a request. `client`: traceparent from the client, or empty."""
        linked = _remote(client)
        links = [Link(linked)] if linked.is_valid else []
        self._ids.next_trace = UUID(request).int
        return self._tracer.start_span(
            name, trace.set_span_in_context(trace.INVALID_SPAN), SpanKind.SERVER, links=links
        )

    def child(self, name: str, parent: str, kind: SpanKind, attributes: dict[str, AttributeValue]) -> Span:
        """Begin a span below the span with the traceparent `parent`."""
        context = _PROPAGATOR.extract({"traceparent": parent})
        return self._tracer.start_span(name, context, kind, allowed(attributes))

    def past(self, name: str, within: Span, began_ns: int, ended_ns: int, **attributes: AttributeValue) -> None:
        """Record a part of the span `within` that has ended already."""
        context = trace.set_span_in_context(within)
        span = self._tracer.start_span(name, context, start_time=began_ns, attributes=allowed(attributes))
        span.end(ended_ns)

    def close(self) -> None:
        """Send the remaining spans; waits some seconds at most."""
        self._provider.shutdown()


def allowed(attributes: dict[str, AttributeValue]) -> dict[str, AttributeValue]:
    unknown = attributes.keys() - ATTRIBUTES
    assert not unknown, f"{sorted(unknown)} may not be in a trace: think about it in store.tracing.ATTRIBUTES"
    return attributes


def said(span: Span, attributes: dict[str, AttributeValue]) -> None:
    span.set_attributes(allowed(attributes))


def happened(span: Span, name: str, attributes: dict[str, AttributeValue]) -> None:
    span.add_event(name, allowed(attributes))


def failed(span: Span) -> None:
    span.set_status(Status(StatusCode.ERROR))


def traceparent(span: Span | None) -> str:
    """Return the W3C traceparent to pass on with a request; empty if the span is not recorded."""
    if span is None or not span.is_recording():
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier["traceparent"]


def unix_ns(monotonic_s: float) -> int:
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)


def _remote(traceparent: str) -> SpanContext:
    context = _PROPAGATOR.extract({"traceparent": traceparent})
    return trace.get_current_span(context).get_span_context()


class _Ids(RandomIdGenerator):
    """Generator of ids that gives the next root span the trace id `next_trace`."""

    next_trace = 0

    def generate_trace_id(self) -> int:
        return self.next_trace or super().generate_trace_id()


class _Share(Sampler):
    """Sampler by the random end of the trace id. The SDK's sampler reads bits that are equal in every UUID."""

    def __init__(self, share: float) -> None:
        self._below = round(share * (1 << _RANDOM_BITS))

    def should_sample(  # type: ignore[no-untyped-def]
        self, parent_context, trace_id, name, kind=None, attributes=None, links=None, trace_state=None
    ) -> SamplingResult:
        taken = trace_id & ((1 << _RANDOM_BITS) - 1) < self._below
        return SamplingResult(Decision.RECORD_AND_SAMPLE if taken else Decision.DROP, attributes)

    def get_description(self) -> str:
        return f"share of {self._below / (1 << _RANDOM_BITS):g}"


# ── where they go ─────────────────────────────────────────────────────────────────────────────────────────────────────


class ToFile(SpanExporter):
    """Exporter to a file. Several processes may append to the file: each line is a single write."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            os.write(self._file, span.to_json(indent=None).encode() + b"\n")
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        os.close(self._file)


@contextlib.contextmanager
def configured(process: str) -> Iterator[Traces | None]:
    """Make the traces that the environment asks for; None: no traces are wanted. Raises TracesError."""
    made = _configured(process)
    try:
        yield made
    finally:
        if made is not None:
            made.close()


def _configured(process: str) -> Traces | None:
    path, endpoint = os.environ.get("STACCATO_TRACES_TO"), os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if path:
        exporter: SpanExporter = ToFile(Path(path))
    elif endpoint:
        exporter = _otlp()
    else:
        return None
    share = float(os.environ.get("OTEL_TRACES_SAMPLER_ARG", "1"))
    if not 0 <= share <= 1:
        raise TracesError(f"OTEL_TRACES_SAMPLER_ARG={share:g} is not a share: give 0 to 1")
    return Traces(process, BatchSpanProcessor(exporter), share)


def _otlp() -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        needed = "opentelemetry-exporter-otlp-proto-http"
        raise TracesError(f"OTEL_EXPORTER_OTLP_ENDPOINT is set, and {needed} is missing: install it") from error
    return OTLPSpanExporter()
