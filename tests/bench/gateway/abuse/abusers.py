"""Misbehaving clients for `bench_abuse.py`: a process with the lowest priority, so the clients' own CPU time does not
count as harm to the gateway. Reads a job per line; writes a line on the job's connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[4]))

from gateway.http.limits import raise_open_files
from tests.bench.gateway.abuse import grammar
from tests.bench.gateway.child import LAST, ChildProgram

JSON = "content-type: application/json"
ABUSER = "127.0.0.2"  # the abuser's own address: limits hold for addresses too
WINDOW_S, PATIENCE_S = 12.0, 30.0


@dataclass(frozen=True)
class Job:
    port: int
    key: str
    kind: str
    connections: int


@dataclass
class Seen:
    """How the connections of a job ended."""

    ends: Counter[str] = field(default_factory=Counter)  # by first status; `cut` without a status
    lived_s: list[float] = field(default_factory=list)


# ── kinds: what one connection says, piece by piece ───────────────────────────────────────────────────────────────────

Says = Callable[[str], AsyncIterator[bytes]]


def head(key: str, *fields: str, path: str = "/v1/completions") -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: gateway", f"authorization: Bearer {key}", JSON, *fields)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def nobody(key: str) -> AsyncIterator[bytes]:
    """The control: opens no connection, and shows the machine's own noise."""
    return
    yield b""


async def silence(key: str) -> AsyncIterator[bytes]:
    return
    yield b""


async def slow_headers(key: str) -> AsyncIterator[bytes]:
    yield b"POST /v1/completions HTTP/1.1\r\n"
    while True:
        await asyncio.sleep(1)
        yield b"x-a: 1\r\n"


async def slow_body(key: str) -> AsyncIterator[bytes]:
    yield head(key, "content-length: 100000")
    while True:
        await asyncio.sleep(1)
        yield b" "


async def unread(key: str) -> AsyncIterator[bytes]:
    yield b"GET /openapi.json HTTP/1.1\r\nhost: gateway\r\n\r\n"


async def unread_stream(key: str) -> AsyncIterator[bytes]:
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 1000, "ignore_eos": True, "stream": True, "logprobs": 5}
    text = json.dumps(body).encode()
    yield head(key, f"content-length: {len(text)}") + text


async def stream(key: str) -> AsyncIterator[bytes]:
    """A control: `unread_stream`, but read. With `--connections 1`: the price of a further stream for other streams."""
    async for piece in unread_stream(key):
        yield piece


async def gigabyte(key: str) -> AsyncIterator[bytes]:
    yield head(key, "content-length: 1000000000")
    for _ in range(16_000):
        yield b" " * 65_536


async def gigabyte_chunked(key: str) -> AsyncIterator[bytes]:
    yield head(key, "transfer-encoding: chunked")
    for _ in range(16_000):
        yield b"10000\r\n" + b" " * 65_536 + b"\r\n"


async def deep_json(key: str) -> AsyncIterator[bytes]:
    text = b'{"model": "m", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    yield head(key, f"content-length: {len(text)}", "connection: close") + text


async def huge_header(key: str) -> AsyncIterator[bytes]:
    yield b"GET / HTTP/1.1\r\nx-a: "
    for _ in range(1000):
        yield b"a" * 65_536


async def pipelining(key: str) -> AsyncIterator[bytes]:
    while True:
        yield b"GET /healthz HTTP/1.1\r\n\r\n" * 2000


async def endless_template(key: str) -> AsyncIterator[bytes]:
    """Chats with a model whose template loops without end if the message says "loop"."""
    body = {"model": "evil", "messages": [{"role": "user", "content": "loop"}], "max_tokens": 1}
    text = json.dumps(body).encode()
    yield head(key, f"content-length: {len(text)}", "connection: close", path="/v1/chat/completions") + text


KINDS: dict[str, Says] = {
    kind.__name__: kind
    for kind in (
        nobody,
        silence,
        slow_headers,
        slow_body,
        unread,
        unread_stream,
        stream,
        gigabyte,
        gigabyte_chunked,
        deep_json,
        huge_header,
        pipelining,
        endless_template,
    )
}
KINDS |= {name: grammar.says(name, head) for name in grammar.NAMES}


# ── one window ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def abuse(job: Job) -> Seen:
    seen, says = Seen(), KINDS[job.kind]
    reads = not job.kind.startswith("unread")
    began, connections = time.monotonic(), 0 if says is nobody else job.connections
    await asyncio.gather(*(one(job.port, says(job.key), reads, seen) for _ in range(connections)))
    await asyncio.sleep(max(0.0, WINDOW_S - (time.monotonic() - began)))
    return seen


async def one(port: int, says: AsyncIterator[bytes], reads: bool, seen: Seen) -> None:
    began = time.monotonic()
    said = bytearray()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(ABUSER, 0), limit=4096)
    except OSError:
        seen.ends["not accepted"] += 1
        return
    if not reads:
        writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def speak() -> None:
        with contextlib.suppress(OSError):
            async for piece in says:
                writer.write(piece)
                await writer.drain()

    async def until_cut() -> None:
        """Wait until the gateway hangs up. A client without reads gets no notice: the socket is polled, and peeked at
        for the beginning of the answer."""
        hung_up = select.poll()
        number = writer.get_extra_info("socket").fileno()
        hung_up.register(number, select.POLLRDHUP)
        with socket.socket(fileno=os.dup(number)) as own:
            while not hung_up.poll(0):
                await asyncio.sleep(0.1)
                with contextlib.suppress(OSError):
                    said[:] = own.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT) or said

    async def listen() -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                del said[64:]
                said.extend(data[:64])

    speaking, listening = asyncio.create_task(speak()), asyncio.create_task(listen() if reads else until_cut())
    done, _ = await asyncio.wait([listening], timeout=PATIENCE_S)
    seen.lived_s.append(time.monotonic() - began)
    status = said.split(b" ")[1].decode() if said else ""
    seen.ends[(status or "cut") if done else f"still there {status}".strip()] += 1
    for task in (speaking, listening):
        task.cancel()
    writer.transport.abort()


class Abusers(ChildProgram):
    """The abusers' process, as held by the bench."""

    def __init__(self) -> None:
        super().__init__(__file__, *LAST)

    def run(self, job: Job) -> Seen:
        said = json.loads(self.ask(job))
        return Seen(Counter(said["ends"]), said["lived_s"])


def main() -> None:
    raise_open_files()
    for line in sys.stdin:
        seen = uvloop.run(abuse(Job(**json.loads(line))))
        print(json.dumps({"ends": dict(seen.ends), "lived_s": seen.lived_s}), flush=True)


if __name__ == "__main__":
    main()
