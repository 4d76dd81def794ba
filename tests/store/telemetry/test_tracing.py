"""Traces: named like their requests, linked to the client's trace, without a text, and only if asked for."""

from __future__ import annotations

import gzip
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from uuid_utils import uuid7

from store.telemetry import tracing
from store.telemetry.tracing import Traces, TracesError, configured, traceparent

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def made(share: float = 1.0) -> tuple[Traces, InMemorySpanExporter]:
    kept = InMemorySpanExporter()
    return Traces("test", SimpleSpanProcessor(kept), share), kept


def test_a_trace_has_the_id_of_its_request_and_a_link_to_the_clients() -> None:
    traces, kept = made()
    request = str(uuid7())
    root = traces.root("inference", request, CLIENT)
    child = traces.child("runtime", traceparent(root), SpanKind.CONSUMER, {"staccato.attempt": 1})
    child.end()
    root.end()
    runtime, inference = kept.get_finished_spans()
    assert f"{inference.context.trace_id:032x}" == request.replace("-", "")
    assert runtime.context.trace_id == inference.context.trace_id
    assert runtime.parent.span_id == inference.context.span_id
    (link,) = inference.links
    assert (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") == (CLIENT[3:35], CLIENT[36:52])
    assert inference.parent is None, "whose spans are kept is not the client's choice"


@pytest.mark.parametrize("client", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_what_is_no_traceparent_is_no_link(client: str) -> None:
    traces, kept = made()
    traces.root("inference", str(uuid7()), client).end()
    assert kept.get_finished_spans()[0].links == ()


def test_a_share_of_the_requests_is_kept_and_the_rest_is_not_passed_on() -> None:
    traces, kept = made(0.25)
    told = [traceparent(traces.root("inference", str(uuid7()), "")) for _ in range(2000)]
    assert 350 < sum(map(bool, told)) < 650


def test_an_attribute_that_nobody_thought_about_is_refused() -> None:
    traces, _ = made()
    root = traces.root("inference", str(uuid7()), "")
    for name in ("gen_ai.input.messages", "prompt"):
        with pytest.raises(AssertionError, match="may not be in a trace"):
            tracing.said(root, {name: "secret"})
        with pytest.raises(AssertionError, match="may not be in a trace"):
            tracing.happened(root, "event", {name: "secret"})
        with pytest.raises(AssertionError, match="may not be in a trace"):
            traces.past("part", root, 1, 2, **{name: "secret"})


def test_nothing_is_made_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STACCATO_TRACES_TO", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with configured("test") as traces:
        assert traces is None
    assert traceparent(None) == ""


def test_a_file_gets_a_line_for_each_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACCATO_TRACES_TO", str(tmp_path / "spans"))
    for process in ("one", "two"):
        with configured(process) as traces:
            assert traces is not None
            traces.root("inference", str(uuid7()), "").end()
    lines = [json.loads(line) for line in (tmp_path / "spans").read_text().splitlines()]
    assert [line["resource"]["attributes"]["service.name"] for line in lines] == ["staccato-one", "staccato-two"]


def test_a_collector_gets_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spans arrive as OTLP over HTTP, as for any collector."""
    service = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="the extra otlp is not installed"
    )
    got = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            got.append((self.path, service.ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        monkeypatch.delenv("STACCATO_TRACES_TO", raising=False)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        request = uuid7()
        with configured("test") as traces:
            assert traces is not None
            traces.root("inference", str(request), CLIENT).end()
        server.shutdown()
    ((path, said),) = got
    (resource,) = said.resource_spans
    (span,) = resource.scope_spans[0].spans
    assert (path, span.name, span.trace_id) == ("/v1/traces", "inference", request.bytes)
    assert [link.trace_id.hex() for link in span.links] == [CLIENT.split("-")[1]]


def test_a_collector_that_is_away_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STACCATO_TRACES_TO", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with configured("test") as traces:
        assert traces is not None
        began = time.monotonic()
        for _ in range(2000):
            traces.root("inference", str(uuid7()), "").end()
        assert time.monotonic() - began < 60, "one that waited for an answer would take 2000 s"


def test_a_share_that_is_none_is_one_clear_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACCATO_TRACES_TO", str(tmp_path / "spans"))
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "7")
    with pytest.raises(TracesError, match="OTEL_TRACES_SAMPLER_ARG=7 is not a share"), configured("test"):
        pass
