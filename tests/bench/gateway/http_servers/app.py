"""An ASGI application for comparing HTTP servers: streams with an event every PERIOD_S, as the gateway sends them.

Paths: `/v1/chat/completions` streams `max_tokens` events to a client; `/flood` sends as much as the server takes;
`/noted` tells what the application has noted. Standard library alone, so that every server pays for the same program.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PERIOD_S = 0.02
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1764400000,"model":"tiny",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
USAGE = 'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
FLOOD = bytes(1 << 16)
FLOOD_MOST = 1 << 30  # bytes

noted: dict[str, float] = {"flooded_bytes": 0, "flood_over_at": 0.0, "left_at": 0.0}
_ticks: dict[int, asyncio.Event] = {}  # by stream


class Pacer:
    """Wakes all streams every PERIOD_S, from the first stream on."""

    running: asyncio.Task[None] | None = None

    @classmethod
    def begin(cls) -> None:
        if cls.running is None:
            cls.running = asyncio.create_task(cls._tick())

    @staticmethod
    async def _tick() -> None:
        due = time.monotonic()
        while True:
            due = max(due + PERIOD_S, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            for tick in list(_ticks.values()):
                tick.set()


async def app(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await _live(receive, send)
    elif scope["path"] == "/v1/chat/completions":
        await _stream(json.loads(await _body(receive))["max_tokens"], receive, send)
    elif scope["path"] == "/flood":
        await _flood(receive, send)
    else:
        await _answer(send, json.dumps(noted).encode())


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


async def _stream(tokens: int, receive: Receive, send: Send) -> None:
    Pacer.begin()
    tick, leaving = asyncio.Event(), asyncio.create_task(_left(receive))
    _ticks[id(tick)] = tick
    try:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        for _ in range(tokens):
            await tick.wait()
            tick.clear()
            if leaving.done():
                return
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": (USAGE % tokens).encode(), "more_body": False})
    finally:
        del _ticks[id(tick)]
        leaving.cancel()


async def _left(receive: Receive) -> None:
    """Wait until the client has left, and note the time."""
    while (await receive())["type"] != "http.disconnect":
        pass
    noted["left_at"] = time.time()


async def _flood(receive: Receive, send: Send) -> None:
    """Note how many bytes the server takes for a client, until the server or the client ends the connection."""
    noted["flooded_bytes"] = 0
    leaving = asyncio.create_task(_left(receive))
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    with suppress(Exception):
        while noted["flooded_bytes"] < FLOOD_MOST:
            await send({"type": "http.response.body", "body": FLOOD, "more_body": True})
            await asyncio.sleep(0)
            if leaving.done():
                break
            noted["flooded_bytes"] += len(FLOOD)
    leaving.cancel()
    noted["flood_over_at"] = time.time()


async def _answer(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
