"""Bounds on the cost of a client before the request is read, on a real uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import AsyncIterator
from itertools import count

import psutil
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http import limits
from gateway.http.errors import Problem
from gateway.http.limits import (
    CLOSING,
    HEADER_BYTES_MOST,
    PIPELINED_MOST,
    ConnectionLimits,
    protocol,
    raise_open_files,
    read_body,
)
from tests.conftest import free_port, soon

MIB = 1 << 20
LIMITS = ConnectionLimits(header_deadline_s=0.5, read_deadline_s=0.5, per_address=20)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body; at /refused without waiting for the body, at /endless without an end."""
    if scope["path"] == "/endless":
        await endless(receive, send)
        return
    try:
        body = b"no" if scope["path"] == "/refused" else await read_body(Request(scope, receive), 1000, 0.5)
        response = PlainTextResponse(body)
    except Problem as problem:
        response = PlainTextResponse(problem.detail, problem.status)
    await response(scope, receive, send)


async def endless(receive: Receive, send: Send) -> None:
    """Send pieces until the client is gone."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    gone = asyncio.create_task(receive())
    while not gone.done() or gone.result()["type"] != "http.disconnect":
        if gone.done():
            gone = asyncio.create_task(receive())
        await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def served(app: ASGIApp = echo) -> AsyncIterator[int]:
    port = free_port()
    config = uvicorn.Config(
        app, port=port, http=protocol(LIMITS), loop="uvloop", log_level="critical", lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield port
    server.should_exit = True
    await task


async def said(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send `parts` with pauses in between. Returns the server's answer up to the close of the connection."""
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
    async with asyncio.timeout(30):
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


async def test_a_body_that_says_that_it_is_too_long_is_not_waited_for() -> None:
    async with served() as port:
        answer = await said(port, b"POST / HTTP/1.1\r\ncontent-length: 1000000000\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413") and b"more than 1000 bytes" in answer


async def test_a_second_request_on_the_same_connection_has_its_own_deadline() -> None:
    async with served() as port:
        request = b"POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\na"
        slow_head = b"POST / HTTP/1.1\r\nx-a: 1\r\n"
        answer = await said(port, request, slow_head, pause_s=0.3)
        assert answer.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in answer


@contextlib.asynccontextmanager
async def connected(port: int, said: bytes, kept_bytes: int = 4096) -> AsyncIterator[socket.socket]:
    """A socket that has sent `said` and reads nothing by itself. The receive buffer has `kept_bytes` bytes."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, kept_bytes)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, said)
        yield client


def open_on(port: int) -> int:
    """Number of connections that the server at `port` has open."""
    return sum(
        connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
        for connection in psutil.Process().net_connections("tcp")
    )


async def test_a_header_without_an_end_is_refused_before_it_is_kept() -> None:
    async with served() as port:
        before = psutil.Process().memory_info().rss
        parts = [b"GET / HTTP/1.1\r\nx-a: ", *[b"a" * 60_000] * 50]
        assert (await said(port, *parts)).startswith(b"HTTP/1.1 431")
        assert psutil.Process().memory_info().rss - before < 20 * MIB


async def test_a_path_without_an_end_is_refused_too() -> None:
    async with served() as port:
        assert (await said(port, b"GET /", *[b"a" * 50_000] * 8)).startswith(b"HTTP/1.1 431")


async def test_who_reads_nothing_is_cut_off_and_his_stream_ends() -> None:
    async with served() as port:
        async with contextlib.AsyncExitStack() as stack:
            before = psutil.Process().memory_info().rss
            for _ in range(20):
                await stack.enter_async_context(connected(port, b"GET /endless HTTP/1.1\r\n\r\n"))
            await soon(lambda: open_on(port) == 20)
            began = time.monotonic()
            await soon(lambda: open_on(port) == 0)
            assert time.monotonic() - began < 5
            assert psutil.Process().memory_info().rss - before < 20 * MIB
        assert (await said(port, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_who_reads_slowly_but_reads_is_served() -> None:
    async with served() as port, connected(port, b"GET /endless HTTP/1.1\r\n\r\n", MIB) as client:
        got = 0
        began = time.monotonic()
        while time.monotonic() - began < 2:  # four times the deadline
            got += len(await asyncio.get_running_loop().sock_recv(client, 65_536))
            await asyncio.sleep(0.01)
        assert got > MIB and open_on(port) == 1


async def test_an_answer_that_is_never_fetched_does_not_keep_its_connection() -> None:
    """The answer is complete and fits the buffers: only the close of the connection still waits."""
    async with served() as port:
        body = b"a" * 1000
        ask = b"POST / HTTP/1.1\r\ncontent-length: 1000\r\n\r\n" + body
        async with connected(port, ask * 10 + b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n"):
            await soon(lambda: open_on(port) == 0)


async def test_the_rest_of_a_body_that_nobody_waits_for_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINGER_S", 0.5)
    async with served() as port:
        head = b"POST /refused HTTP/1.1\r\ncontent-length: 1000000000\r\n\r\n"
        began = time.monotonic()
        answer = await said(port, head, *[b"a" * 1000] * 30, pause_s=0.1)
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"no")
        await soon(lambda: open_on(port) == 0)
        assert time.monotonic() - began < 5


async def test_who_sends_all_of_a_refused_body_first_reads_the_answer_behind_it() -> None:
    async with served() as port:
        size = 12 << 20
        head = b"POST /refused HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % size
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"a" * size)
        await asyncio.wait_for(writer.drain(), 5)
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"no")
        writer.close()


async def test_what_comes_after_answers_is_let_pass_at_a_bounded_rate_for_all_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "LINGER_S", 1.0)
    monkeypatch.setattr(limits, "PASSED_BYTES_PER_S", MIB)
    passed: list[int] = []
    let_pass = limits.BoundedHttp._let_pass
    monkeypatch.setattr(limits.BoundedHttp, "_let_pass", lambda self, size: (passed.append(size), let_pass(self, size)))

    async def flood(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(OSError):
            writer.write(b"GET / HTTP/1.1\r\nx: " + b"a" * (limits.HEADER_BYTES_MOST + 1))
            while True:
                writer.write(b"a" * 65_536)
                await writer.drain()

    async with served() as port:
        await asyncio.gather(*(flood(port) for _ in range(4)))
        await soon(lambda: open_on(port) == 0)
        assert passed, "nobody was let pass anything"
        at_once = 4 * max(passed)  # each connection brings a piece before the first wait
        assert sum(passed) <= at_once + 1.5 * MIB


async def test_a_body_that_comes_fast_enough_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_BYTES_PER_S_LEAST", 100)
    async with served() as port:
        head = b"POST / HTTP/1.1\r\nconnection: close\r\ncontent-length: 900\r\n\r\n"
        answer = await said(port, head, *[b"a" * 100] * 9, pause_s=0.15)  # 1.35 s in all
        assert answer.startswith(b"HTTP/1.1 200")
        answer = await said(port, head, *[b"a" * 10] * 40, pause_s=0.15)
        assert answer.startswith(b"HTTP/1.1 408")


async def test_bodies_that_are_being_read_have_room_for_so_much_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODIES_BYTES_MOST", 2000)
    async with served() as port:
        head = b"POST / HTTP/1.1\r\nconnection: close\r\ncontent-length: 900\r\n\r\n"
        answers = await asyncio.gather(*(said(port, head + b"a" * 800, pause_s=0.1) for _ in range(5)))
        statuses = sorted(answer.split()[1] for answer in answers)
        assert statuses == [b"408", b"408", b"503", b"503", b"503"]
        assert limits._reading == 0
        assert (await said(port, head + b"a" * 900)).startswith(b"HTTP/1.1 200")


async def test_an_address_has_so_many_connections_and_gets_others_when_they_end() -> None:
    async with served() as port:
        hello = b"GET /endless HTTP/1.1\r\n\r\n"
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(LIMITS.per_address):
                await stack.enter_async_context(connected(port, hello))
            assert (await said(port)).startswith(b"HTTP/1.1 429")
        await soon(lambda: open_on(port) == 0)
        assert (await said(port, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_requests_in_a_row_are_answered_in_order_and_too_many_are_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed, begin = count(), HttpToolsProtocol.on_message_begin

    def counted(self: HttpToolsProtocol) -> None:
        next(parsed)
        begin(self)

    async with served() as port:
        requests = [b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n%02d" % n for n in range(PIPELINED_MOST)]
        requests[-1] = requests[-1].replace(b"content", b"connection: close\r\ncontent")
        answer = await said(port, b"".join(requests))
        bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 ")[1:]]
        assert bodies[:PIPELINED_MOST] == [b"%02d" % n for n in range(PIPELINED_MOST)]
        monkeypatch.setattr(HttpToolsProtocol, "on_message_begin", counted)
        before = psutil.Process().memory_info().rss
        await said(port, b"GET / HTTP/1.1\r\n\r\n" * 20_000)
        assert PIPELINED_MOST <= next(parsed) <= 4 * PIPELINED_MOST, "the others are not even parsed"
        assert psutil.Process().memory_info().rss - before < 20 * MIB


async def test_a_late_header_does_not_write_into_an_answer_under_way() -> None:
    async with served() as port:
        answer = await said(port, b"GET /endless HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nx-a: 1\r\n")
        assert answer.startswith(b"HTTP/1.1 200") and b"408" not in answer


def test_the_process_may_have_as_many_files_as_the_system_lets_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_what_is_sent_to_a_client_that_closed_its_half_is_known_to_be_for_nobody() -> None:
    """uvicorn drops sent messages silently even before the application is told of the disconnect."""
    seen: list[bool] = []

    async def until_closing(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        told = asyncio.create_task(receive())
        while not scope["extensions"][CLOSING]():
            await asyncio.sleep(0)
        seen.append(told.done())
        assert (await told)["type"] == "http.disconnect"
        seen.append(True)

    async with served(until_closing) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.1)
        writer.write_eof()
        await soon(lambda: len(seen) == 2)
        writer.close()
    assert seen == [False, True]
