"""Errors before the first token have a status code; a later error is the last event of the stream."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message

from gateway.http.vllm_errors import PLAIN, Wording, unavailable
from gateway.inference.context import RequestContext
from gateway.inference.meter import MeteredCall
from gateway.inference.metrics import DeclaredMetrics, Tally
from gateway.inference.response import ResponseWriter, waiting
from gateway.inference.timing import Timing
from runtime.core.device.request import Objective
from tests.store.test_bus import usage

TALLY = Tally(DeclaredMetrics(CollectorRegistry()), ("t", "d"))
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the front

EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
ERROR = b'data: {"error":{"message":"the runtime was lost","type":"Service Unavailable","param":null,"code":503}}\n\n'
DONE = b"data: [DONE]\n\n"


class Counted:
    """A meter that only notes the counts."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def count(self, call: MeteredCall) -> None:
        self.counts.append(call.output_tokens)


def opened(call: MeteredCall) -> RequestContext:
    """The context of a request for the deployment `faq`, with a slot in the usage journal."""
    context = RequestContext(call.opened.request, TALLY)
    context.name = "faq"
    context.opened(call, Objective(), "", None)
    return context


async def answered(
    status: int, header: tuple[bytes, bytes], *bodies: bytes, made: int = 0, timed: bool = False, **more: Any
) -> tuple[Any, ...]:
    """Send a response. Returns (status, headers, body, output tokens counted), as sent to the socket."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    call, meter = MeteredCall(usage("q"), 0), Counted()
    context = opened(call)
    context.timing = Timing(time.monotonic(), TALLY)
    headers = {"x-request-id": "q", "x-staccato-cold": "none"}
    context.failure = more.get("failure")
    answer = ResponseWriter(send, context, meter, headers, timed, more.get("wording", PLAIN))  # type: ignore[arg-type]
    await answer.send({"type": "http.response.start", "status": status, "headers": [header]})
    assert sent == [], "the head waits for the body"
    for body in bodies:
        context.made_tokens = made
        await answer.send({"type": "http.response.body", "body": body, "more_body": True})
    await answer.send({"type": "http.response.body", "body": b"", "more_body": False})
    head, rest = sent[0], sent[1:]
    assert all(message["type"] == "http.response.body" for message in rest)
    assert [m["more_body"] for m in rest].count(False) == 1 and not rest[-1]["more_body"]
    return head["status"], dict(head["headers"]), b"".join(m["body"] for m in rest), meter.counts


async def test_a_stream_passes_as_it_is_with_our_headers() -> None:
    status, headers, body, _ = await answered(200, EVENTS, b"data: 1\n\n", b"data: 2\n\n", DONE)
    assert status == 200 and body == b"data: 1\n\ndata: 2\n\n" + DONE
    assert headers[b"x-request-id"] == b"q" and headers[b"x-staccato-cold"] == b"none"


async def test_where_its_time_went_is_in_a_header_and_at_the_end_of_a_stream_if_that_is_wished() -> None:
    events = b"data: 1\n\n", DONE
    _, headers, body, _ = await answered(200, EVENTS, *events, timed=True)
    assert re.fullmatch(rb'queue;dur=[0-9.]+, total;dur=[0-9.]+, way;desc="vllm"', headers[b"server-timing"])
    told, _, comment = body.partition(b": x-staccato-timing: ")
    assert told == b"".join(events) and re.fullmatch(
        rb'queue;dur=[0-9.]+, total;dur=[0-9.]+, way;desc="vllm"\n\n', comment
    )


async def test_an_error_before_the_first_token_has_a_real_status() -> None:
    status, headers, body, _ = await answered(200, EVENTS, ERROR, DONE)
    assert status == 503 and headers[b"content-type"] == b"application/json" and headers[b"retry-after"]
    assert json.loads(body)["error"]["message"] == "the runtime was lost"


async def test_an_error_in_mid_stream_is_its_last_event_and_there_is_no_done() -> None:
    status, _, body, _ = await answered(200, EVENTS, b"data: 1\n\n", ERROR, DONE)
    before, _, event = body.partition(b"\n\n")
    assert (status, before) == (200, b"data: 1")
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert error == {"message": "the runtime was lost", "type": "server_error", "param": None, "code": "unavailable"}


async def test_an_error_of_a_stream_of_messages_says_what_happened_and_not_what_vllm_makes_of_it() -> None:
    wording, lost = Wording("/v1/messages"), unavailable(503, "the runtime was lost")
    vllms = (
        b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"2 validation errors"}}\n\n'
    )
    status, headers, body, _ = await answered(200, EVENTS, vllms, wording=wording, failure=lost)
    said = {"type": "error", "error": {"type": "overloaded_error", "message": "the runtime was lost"}}
    assert (status, json.loads(body)) == (503, said) and headers[b"retry-after"]
    status, _, body, _ = await answered(200, EVENTS, b"data: 1\n\n", vllms, wording=wording, failure=lost)
    assert (status, body.startswith(b"data: 1\n\nevent: error\ndata: ")) == (200, True)
    assert json.loads(body.split(b"data: ")[2]) == said


async def test_a_whole_response_is_counted_when_its_last_byte_is_handed_over() -> None:
    json_kind = (b"content-type", b"application/json")
    assert (await answered(200, json_kind, b"{}", made=7))[3] == [7]
    assert (await answered(400, json_kind, b"{}", made=7))[3] == []


def test_a_client_that_waits_hears_how_long_the_model_takes_to_be_built() -> None:
    assert waiting(None) == b": waiting for the model\n\n"
    assert waiting(39.2) == b": waiting for the model, which takes about 40 s more to be built\n\n"
