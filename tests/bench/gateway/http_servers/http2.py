"""Clients that speak HTTP/2 without TLS, in a process of their own: `python http2.py PORT CONNECTIONS STREAMS TOKENS`.

Each connection carries several streams. A line of JSON tells the events, and the percentiles of the gaps between them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import cast

import uvloop
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.bench.gateway.streams import EVENT, percentiles_ms

WINDOW_BYTES = 1 << 30


class Http2Connection(asyncio.Protocol):
    """A connection with several streams at once."""

    def __init__(self, streams: int, tokens: int, gaps: list[float]) -> None:
        self._streams, self._tokens, self._gaps = streams, tokens, gaps
        self.events = 0
        self._last_at: dict[int, float] = {}  # by stream
        self._open = streams
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._http.initiate_connection()
        self._http.increment_flow_control_window(WINDOW_BYTES)
        body = json.dumps({"max_tokens": self._tokens}).encode()
        for number in range(self._streams):
            stream = 2 * number + 1
            path = [(":method", "POST"), (":path", "/v1/chat/completions"), (":scheme", "http"), (":authority", "x")]
            self._http.send_headers(stream, path)
            self._http.send_data(stream, body, end_stream=True)
        self._transport.write(self._http.data_to_send())

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        for event in self._http.receive_data(data):
            if isinstance(event, DataReceived):
                self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                self._count(event.stream_id, event.data.count(EVENT), now)
            elif isinstance(event, StreamReset):
                self._fail(f"stream {event.stream_id} was reset with {event.error_code}")
            elif isinstance(event, ResponseReceived) and dict(event.headers)[":status"] != "200":
                self._fail(f"stream {event.stream_id} was answered with {event.headers}")
            elif isinstance(event, StreamEnded):
                self._open -= 1
        self._transport.write(self._http.data_to_send())
        if not self._open and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the server closed the connection")

    def _count(self, stream: int, events: int, now: float) -> None:
        if events:
            self.events += events
            if (last := self._last_at.get(stream)) is not None:
                self._gaps.append(now - last)
            self._last_at[stream] = now

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(why))


async def run(port: int, connections: int, streams: int, tokens: int) -> dict[str, object]:
    loop, gaps = asyncio.get_running_loop(), list[float]()
    made = [
        (await loop.create_connection(lambda: Http2Connection(streams, tokens, gaps), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    await asyncio.gather(*(connection.done for connection in made))
    percentiles = percentiles_ms(gaps)
    return {"events": sum(each.events for each in made), "gap_ms": [percentiles.p50, percentiles.p99]}


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(*map(int, sys.argv[1:5])))))
