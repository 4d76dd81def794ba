"""Errors keep their promise: a status code before the first token, after it the last event of the stream."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message

from gateway.answer import Answer
from gateway.front import Served
from gateway.meter import Call
from gateway.metrics import Made, Tally
from gateway.timing import Timing
from runtime.request import Objective
from tests.store.test_bus import usage

TALLY = Tally(Made(CollectorRegistry()), ("t", "d"))
pytestmark = pytest.mark.filterwarnings("ignore")  # of vLLM and torch, which the front imports

EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
ERROR = b'data: {"error":{"message":"the runtime was lost","type":"Service Unavailable","param":null,"code":503}}\n\n'
DONE = b"data: [DONE]\n\n"


class Counted:
    """A meter that only notes what was counted."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def count(self, call: Call) -> None:
        self.counts.append(call.output_tokens)


async def answered(
    status: int, header: tuple[bytes, bytes], *bodies: bytes, made: int = 0, timed: bool = False
) -> tuple[Any, ...]:
    """(status, headers, body, output tokens counted) of what goes to the socket."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    call, meter = Call(usage("q"), 0), Counted()
    served = Served("faq", "", call, 0.0, 0.0, 0.0, Objective(), TALLY)
    served.timing = Timing(time.monotonic(), TALLY)
    headers = {"x-request-id": "q", "x-staccato-cold": "none"}
    answer = Answer(send, served, meter, headers, timed)  # type: ignore[arg-type]
    await answer.send({"type": "http.response.start", "status": status, "headers": [header]})
    assert sent == [], "the head waits for the body"
    for body in bodies:
        served.made_tokens = made
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
    assert re.fullmatch(rb"queue;dur=[0-9.]+, total;dur=[0-9.]+", headers[b"server-timing"])
    told, _, comment = body.partition(b": x-staccato-timing: ")
    assert told == b"".join(events) and re.fullmatch(rb"queue;dur=[0-9.]+, total;dur=[0-9.]+\n\n", comment)


async def test_an_error_before_the_first_token_has_a_real_status() -> None:
    status, headers, body, _ = await answered(200, EVENTS, ERROR, DONE)
    assert status == 503 and headers[b"content-type"] == b"application/json" and headers[b"retry-after"]
    assert json.loads(body)["error"]["message"] == "the runtime was lost"


async def test_an_error_in_mid_stream_is_its_last_event_and_there_is_no_done() -> None:
    status, _, body, _ = await answered(200, EVENTS, b"data: 1\n\n", ERROR, DONE)
    assert status == 200 and body == b"data: 1\n\n" + ERROR


async def test_a_whole_response_is_counted_when_its_last_byte_is_handed_over() -> None:
    json_kind = (b"content-type", b"application/json")
    assert (await answered(200, json_kind, b"{}", made=7))[3] == [7]
    assert (await answered(400, json_kind, b"{}", made=7))[3] == []
