"""What a client may cost before it said what it wants: bytes and seconds of headers and body (uvicorn bounds none)."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_BYTES_MOST = 64 << 10


class Disconnected(Exception):
    """The client went away."""


class TooSlow(Exception):
    """The body did not come in time."""


class TooLong(Exception):
    """The body has more bytes than allowed."""


async def read_body(receive: Receive, most: int, deadline_s: float) -> bytes:
    """The whole body. Raises TooLong (before buffering more than `most` bytes), TooSlow, Disconnected."""
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > most:
                    raise TooLong(f"the body has more than {most} bytes, the most this gateway takes: send less")
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise TooSlow(f"the body was not complete after {deadline_s:g} s: {size} bytes came") from None


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol with a deadline and a size for the headers of each request."""

    header_deadline_s = 10.0
    _deadline: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._start_deadline()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > HEADER_BYTES_MOST:
            self._refuse(b"431 Request Header Fields Too Large")
            return
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_deadline()
        if not self.transport.is_closing():
            super().on_headers_complete()

    def _start_deadline(self) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(self.header_deadline_s, self._refuse, b"408 Request Timeout")

    def _stop_deadline(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()


def protocol(header_deadline_s: float) -> type[Any]:
    """The class for uvicorn's `http`, which makes one object a connection and gives it no settings of ours."""
    return type("BoundedHttp", (BoundedHttp,), {"header_deadline_s": header_deadline_s})
