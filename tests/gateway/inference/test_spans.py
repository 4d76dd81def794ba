"""The span of a request at the gateway: the request, the outcome, and the wait for a runtime."""

from __future__ import annotations

import pytest
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry
from uuid_utils import uuid7

from gateway.inference.meter import MeteredCall
from gateway.inference.metrics import DeclaredMetrics, Tally
from gateway.inference.spans import begin, end, tell
from gateway.inference.timing import Timing
from tests.gateway.inference.test_response import opened
from tests.store.telemetry.test_tracing import CLIENT, made
from tests.store.test_bus import usage

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the front


def test_a_span_says_what_was_asked_and_what_it_took() -> None:
    traces, kept = made()
    scope = {"type": "http", "headers": [(b"traceparent", CLIENT.encode())]}
    span = begin(traces, str(uuid7()), scope)
    tally = Tally(DeclaredMetrics(CollectorRegistry()), ("t", "d"))
    call = MeteredCall(usage("q"), 0, prompt_tokens=3, output_tokens=7, finish="stop")
    context = opened(call)
    context.timing = Timing(10.0, tally)
    context.timing.sent(12.5)
    tell(traces, span, "/v1/chat/completions", context)
    end(span, 200)
    queue, root = kept.get_finished_spans()
    assert (queue.name, root.name) == ("queue", "chat faq") and queue.parent == root.context
    assert queue.end_time - queue.start_time == pytest.approx(2.5e9, abs=1e7)
    assert root.attributes["gen_ai.usage.output_tokens"] == 7 and root.attributes["http.response.status_code"] == 200
    assert root.status.status_code is StatusCode.UNSET and len(root.links) == 1


def test_a_failure_of_ours_is_an_error_and_one_of_the_clients_is_not() -> None:
    traces, kept = made()
    for status in (404, 503):
        end(begin(traces, str(uuid7()), {"type": "http", "headers": []}), status)
    assert [span.status.status_code for span in kept.get_finished_spans()] == [StatusCode.UNSET, StatusCode.ERROR]
