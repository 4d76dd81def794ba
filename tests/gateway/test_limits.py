"""What a client may cost before it said what it wants, on a real uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from gateway.limits import HEADER_BYTES_MOST, TooLong, TooSlow, protocol, read_body
from tests.conftest import free_port


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    try:
        body = await read_body(request.receive, most=1000, deadline_s=0.5)
        response = PlainTextResponse(body)
    except TooLong as error:
        response = PlainTextResponse(str(error), 413)
    except TooSlow as error:
        response = PlainTextResponse(str(error), 408)
    await response(scope, receive, send)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[int]:
    port = free_port()
    config = uvicorn.Config(echo, port=port, http=protocol(0.5), log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield port
    server.should_exit = True
    await task


async def said(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """What the server answers to these bytes, sent with pauses between; until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = bytearray()

    async def listen() -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                answer.extend(data)

    listening = asyncio.create_task(listen())
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
    async with asyncio.timeout(5):
        await listening
    writer.close()
    return bytes(answer)


async def test_a_whole_body_is_read() -> None:
    async with served() as port:
        answer = await said(port, b"POST / HTTP/1.1\r\nconnection: close\r\ncontent-length: 5\r\n\r\n", b"hello")
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"hello")


async def test_headers_that_never_end_are_cut_off_by_the_clock() -> None:
    async with served() as port:
        parts = [b"GET / HTTP/1.1\r\n", *[b"x-a: 1\r\n"] * 20]
        started = asyncio.get_running_loop().time()
        assert (await said(port, *parts, pause_s=0.1)).startswith(b"HTTP/1.1 408")
        assert asyncio.get_running_loop().time() - started < 3


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with served() as port:
        assert (await said(port)).startswith(b"HTTP/1.1 408")


async def test_headers_that_are_too_large_are_refused() -> None:
    async with served() as port:
        header = b"x-a: " + b"a" * 1000 + b"\r\n"
        parts = [b"GET / HTTP/1.1\r\n", *[header] * (HEADER_BYTES_MOST // 1000 + 1), b"\r\n"]
        assert (await said(port, *parts)).startswith(b"HTTP/1.1 431")


async def test_a_body_that_never_ends_is_cut_off_by_the_clock() -> None:
    async with served() as port:
        head = b"POST / HTTP/1.1\r\nconnection: close\r\ncontent-length: 100\r\n\r\n"
        answer = await said(port, head, *[b"a"] * 8, pause_s=0.1)
        assert answer.startswith(b"HTTP/1.1 408") and b"0.5 s" in answer


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_long_is_refused_with_the_number(chunked: bool) -> None:
    async with served() as port:
        head = b"POST / HTTP/1.1\r\nconnection: close\r\n"
        if chunked:
            parts = [head + b"transfer-encoding: chunked\r\n\r\n", *[b"64\r\n" + b"a" * 100 + b"\r\n"] * 12]
        else:
            parts = [head + b"content-length: 2000\r\n\r\n", b"a" * 1500]
        answer = await said(port, *parts)
        assert answer.startswith(b"HTTP/1.1 413") and b"more than 1000 bytes" in answer


async def test_a_second_request_on_the_same_connection_has_its_own_deadline() -> None:
    async with served() as port:
        request = b"POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\na"
        slow_head = b"POST / HTTP/1.1\r\nx-a: 1\r\n"
        answer = await said(port, request, slow_head, pause_s=0.3)
        assert answer.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in answer
