"""Clients that leave or stop reading: the answering code is stopped, and the exchange says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from gateway.inference import response as answer_module
from gateway.inference.context import RequestContext
from gateway.inference.exchange import Exchange
from gateway.inference.meter import MeteredCall
from gateway.inference.metrics import DeclaredMetrics, Tally
from gateway.inference.response import ResponseWriter
from tests.gateway.inference.test_response import EVENTS, Counted, opened
from tests.store.test_bus import usage

TALLY = Tally(DeclaredMetrics(CollectorRegistry()), ("t", "d"))
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the front


class Endless:
    """A stand-in for vLLM: streams until stopped, and remembers the stop."""

    stopped = False
    sent = 0  # messages accepted by `send`

    async def handle(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.body = (await receive())["body"]
            await send({"type": "http.response.start", "status": 200, "headers": [EVENTS]})
            while True:
                context.made_tokens += 1
                await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
                self.sent += 1
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.stopped = True
            raise


async def exchanged(receive: Receive, send: Send, fronts: Endless | None = None) -> tuple[Any, bool, list[int]]:
    """Pass a request on. Returns the stand-in, whether the answer came to its end, and the output tokens at each
    count."""
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
    fronts = fronts or Endless()
    context = opened(MeteredCall(usage("q"), 0))
    meter = Counted()
    answer = ResponseWriter(send, context, meter, {"x-staccato-cold": "none"})  # type: ignore[arg-type]
    exchange = Exchange(Request(scope, receive), send, "q", "/v1/chat/completions", b"{}")
    async with asyncio.timeout(30):
        complete = await exchange.pass_on(fronts, context, answer.send, answer.patience())  # type: ignore[arg-type]
    return fronts, complete, meter.counts


async def test_a_client_that_leaves_stops_the_answer_at_once() -> None:
    left = asyncio.Event()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            left.set()

    fronts, complete, _ = await exchanged(receive, send)
    assert not complete and fronts.stopped and fronts.body == b"{}" and fronts.sent < 10


async def test_whoever_stops_for_a_client_that_leaves_has_not_answered() -> None:
    """vLLM may notice before the exchange that the client left."""

    class Attentive(Endless):
        async def handle(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
            await receive()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError

    _, complete, counts = await exchanged(receive, send, Attentive())
    assert not complete and counts == []


async def test_what_is_written_for_a_client_that_has_left_is_not_counted() -> None:
    left, sent = asyncio.Event(), 0

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal sent
        sent += message["type"] == "http.response.body"
        if sent == 3:
            left.set()

    fronts, _, counts = await exchanged(receive, send)
    assert counts == [1, 2, 3] and fronts.sent > sent == 3


async def test_a_client_that_reads_nothing_is_dropped_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_module, "SEND_DEADLINE_S", 0.2)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # the socket's buffer is full for ever

    fronts, complete, counts = await exchanged(receive, send)
    assert not complete and fronts.sent == 0 and counts == []
