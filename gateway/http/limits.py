"""Limits of a client: connections, bytes and seconds of its requests, and the time it may leave answers unread.

uvicorn bounds none of these. A client above a limit gets an error if HTTP still allows an answer, and is cut off.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http.errors import Problem

HEADER_BYTES_MOST = 64 << 10
BODY_BYTES_PER_S_LEAST = 32 << 10  # received bytes extend a body's deadline at this rate
BODIES_BYTES_MOST = 256 << 20  # sum over the bodies being read
PIPELINED_MOST = 16  # requests of a connection waiting for the answer to an earlier request
# Bytes in the kernel, and as many again in this process. The kernel alone would otherwise take some MiB of an answer
# that no client reads.
UNSENT_BYTES_MOST = 16 << 10
LINGER_S = 2.0  # after an answer that did not wait for the whole request
# Bytes received while lingering, in sum over the connections: more than a client sends a second.
PASSED_BYTES_PER_S = 16 << 20
# ASGI extension that tells whether the connection is closing: no client reads an answer then.
CLOSING = "staccato.closing"


class Disconnected(Exception):
    """The client went away."""


class Unread(Exception):
    """Ends parsing: the remaining bytes are not parsed. Some 256 KiB come at once, and may be thousands of requests."""


_reading = 0  # bytes of bodies being read, in sum
_paid_s = 0.0  # loop time at which lingering connections may read again


async def read_body(
    request: Request, most: int, deadline_s: float, drops: Callable[[bytes], bool] = lambda chunk: False
) -> bytes:
    """Return the whole body, of at most `most` bytes. Raises Problem, Disconnected.

    `drops` is called with the bytes as the bytes come. Once `drops` is true, the body is read to its end and not kept:
    the result is empty."""
    global _reading
    chunks: list[bytes] = []
    size = 0
    too_large = Problem(
        413, "request_too_large", f"the body has more than {most} bytes, the most this gateway takes: send less"
    )
    if int(request.headers.get("content-length", 0)) > most:  # the parser has checked that the value is a number
        raise too_large
    try:
        async with asyncio.timeout(deadline_s) as deadline:
            due = deadline.when()
            assert due is not None
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                chunk = message.get("body", b"")
                size += len(chunk)
                _reading += len(chunk)
                if size > most:
                    raise too_large
                if _reading > BODIES_BYTES_MOST:
                    detail = "too many large requests are being read: try again in some seconds"
                    raise Problem(503, "overloaded", detail, headers={"retry-after": "2"})
                if drops(chunk):
                    chunks.clear()
                else:
                    chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
                deadline.reschedule(due + size / BODY_BYTES_PER_S_LEAST)
    except TimeoutError:
        late_s = deadline_s + size / BODY_BYTES_PER_S_LEAST
        detail = f"the body was not complete after {late_s:.3g} s: {size} bytes came"
        raise Problem(408, "request_timeout", detail) from None
    finally:
        _reading -= size


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of every connection."""

    header_deadline_s: float = 8.0
    read_deadline_s: float = 8.0  # an answer is given up if the client reads nothing of it for this long
    per_address: int = 1024  # connections of an address


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol within limits."""

    limits = ConnectionLimits()
    addresses: Counter[str] = Counter()
    _headers_due: asyncio.TimerHandle | None = None  # set while the headers are incomplete
    _header_bytes = 0
    _read_due: asyncio.TimerHandle | None = None  # set while more bytes are unread than the write buffer may keep
    _lingering = False

    # ── the connection ────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self.addresses[self._address] += 1
        if (own := transport.get_extra_info("socket")) is not None:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MOST)
        transport.set_write_buffer_limits(UNSENT_BYTES_MOST)
        if self.addresses[self._address] > self.limits.per_address:
            self._refuse(b"429 Too Many Requests")
        else:
            self._start_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self.addresses[self._address] -= 1
        if not self.addresses[self._address]:
            del self.addresses[self._address]
        self._stop_headers()
        self._stop_reading_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._over:
            self._let_pass(len(data))
            return
        headers = self._headers_due
        super().data_received(data)
        # uvicorn counts no bytes of an unfinished name or value.
        if headers is not None and headers is self._headers_due:
            self._header_bytes += len(data)
            self._check_headers()
        if self._over:
            self.parser = None  # the parser keeps the exception that ended it, and the exception keeps the data

    # ── headers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        if self._over:
            raise Unread
        super().on_message_begin()
        self.scope["extensions"] = {CLOSING: self.transport.is_closing}  # type: ignore[dict-item]
        self._header_bytes = 0
        self._start_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if not self._check_headers():
            raise Unread
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_headers()
        if len(self.pipeline) >= PIPELINED_MOST:
            self.transport.abort()
        if self._over:
            raise Unread
        super().on_headers_complete()

    def _check_headers(self) -> bool:
        if self._header_bytes > HEADER_BYTES_MOST:
            self._refuse(b"431 Request Header Fields Too Large")
        return self._header_bytes <= HEADER_BYTES_MOST

    def _start_headers(self) -> None:
        self._stop_headers()
        due_s = self.limits.header_deadline_s
        self._headers_due = self.loop.call_later(due_s, self._refuse, b"408 Request Timeout")

    def _stop_headers(self) -> None:
        if self._headers_due:
            self._headers_due.cancel()
            self._headers_due = None

    def send_400_response(self, msg: str) -> None:
        """Send uvicorn's answer to unparseable bytes, unless the connection is over: Unread was answered already."""
        if not self._over:
            super().send_400_response(msg)

    def _refuse(self, status: bytes) -> None:
        if self._over:
            return
        # No second answer fits inside an unfinished answer.
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self._linger()

    # ── the answer ────────────────────────────────────────────────────────────────────────────────────────────────────

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_due = self.loop.call_later(self.limits.read_deadline_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_reading_clock()
        super().resume_writing()

    def _stop_reading_clock(self) -> None:
        if self._read_due:
            self._read_due.cancel()
            self._read_due = None

    def on_response_complete(self) -> None:
        cut_short = not self.pipeline and self.cycle.more_body
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif cut_short:
            self._linger()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _close(self) -> None:
        """Close the connection: the client may still read written bytes, until the read deadline."""
        self.transport.close()
        self.loop.call_later(self.limits.read_deadline_s, self.transport.abort)

    @property
    def _over(self) -> bool:
        """Whether arriving bytes are dropped."""
        return self._lingering or self.transport.is_closing()

    def _linger(self) -> None:
        """Drop the rest of the request for LINGER_S: after an immediate close the client might lose the answer."""
        self._unset_keepalive_if_required()
        self._lingering = True
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def _let_pass(self, size: int) -> None:
        """Drop received bytes at PASSED_BYTES_PER_S, over all connections.

        A client reads its answer after sending a body of some MiB; a thousand endless senders wait.
        """
        global _paid_s
        now = self.loop.time()
        _paid_s = max(_paid_s, now) + size / PASSED_BYTES_PER_S
        self.flow.pause_reading()
        self.loop.call_at(_paid_s, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()


def raise_open_files() -> None:
    """Raise the limit of open files to the system's maximum: each connection is a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def protocol(limits: ConnectionLimits) -> type[Any]:
    """Return the class for uvicorn's `http`: uvicorn makes one object a connection, and passes no settings."""
    return type("BoundedHttp", (BoundedHttp,), {"limits": limits, "addresses": Counter()})
