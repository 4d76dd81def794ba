"""The load of the gateway's benches, in a separate process: many chat streams over raw sockets. The client parses the
answers no further than counting events, and therefore takes little of the machine under test. A job per line in, a
result per line out.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.bench.gateway.child import ChildProgram

EVENT, LAST = b"data: {", b"0\r\n\r\n"
CONTENT = re.compile(rb'"content": ?("(?:[^"\\]|\\.)*")')
COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(frozen=True)
class Job:
    """`streams` connections at once, with `requests` chats in turn on every connection."""

    port: int
    key: str
    models: list[str]  # streams ask the models in turn
    streams: int
    requests: int
    salt: int  # a new salt makes new prompts
    questions: int = 0  # different questions, and the texts of all answers are compared; 0: each chat has its own
    tokens: int = 0  # of each answer; 0: see output_tokens


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p99: float


@dataclass(frozen=True)
class Load:
    """Measurements of the clients. A connection's first request comes in a burst and is not in `first_ms`, unless each
    connection has one request alone."""

    seconds: float
    tokens: int
    events: int  # fewer than tokens if a lagging server puts several tokens into an event
    first_ms: Percentiles  # from request to first event
    gap_ms: Percentiles  # between reads with events
    texts: list[list[str]]  # by question, the different texts of the answers; empty without Job.questions


def output_tokens(job: Job, stream: int, request: int) -> int:
    """Output tokens of a request: 32 to 96, for streams with different ends; 64 on average."""
    return job.tokens or 32 + (stream * 37 + request * 13) % 65


def chat(job: Job, stream: int, request: int) -> bytes:
    number = stream % job.questions if job.questions else f"{stream}-{request}"
    question = f"{job.salt}-{number}: what does a gateway add to the first token?"
    body = json.dumps(
        {
            "model": job.models[stream % len(job.models)],
            "messages": [{"role": "user", "content": question}],
            "max_tokens": output_tokens(job, stream, request),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {job.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection(asyncio.Protocol):
    """A connection with a single request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.events = 0
        # uvloop's transports are not derived from asyncio.Transport
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes, gaps: list[float], kept: list[bytes] | None = None) -> tuple[float, int]:
        """Send a request; returns the seconds to the first event, and the tokens by the server's count. `kept` gets the
        bytes of the answer."""
        self._done = asyncio.get_running_loop().create_future()
        self._gaps, self._head, self._tail, self._last_at, self._kept = gaps, b"", b"", 0.0, kept
        self._first_s = 0.0
        self._asked_at = time.perf_counter()
        self._transport.write(request)
        await self._done
        return self._first_s, int(COMPLETION_TOKENS.findall(self._tail)[-1])

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._kept is not None:
            self._kept.append(data)
        if not self._head:
            self._head = data[:512]
        self._tail = (self._tail + data)[-2048:]
        if events := data.count(EVENT):
            self.events += events
            if self._last_at:
                self._gaps.append(now - self._last_at)
            else:
                self._first_s = now - self._asked_at
            self._last_at = now
        if self._tail.endswith(LAST) or not self._head.startswith(b"HTTP/1.1 200"):
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(f"the server closed the connection: {self._tail!r}"))

    def _end(self) -> None:
        if not self._head.startswith(b"HTTP/1.1 200"):
            self._done.set_exception(RuntimeError(f"refused: {self._head!r}"))
        elif not self._done.done():
            self._done.set_result(None)

    def close(self) -> None:
        self._transport.close()


async def run(job: Job) -> Load:
    first: list[float] = []
    gaps: list[float] = []
    texts: list[set[str]] = [set() for _ in range(job.questions)]

    async def stream(number: int) -> tuple[int, int]:
        _, connection = await loop.create_connection(Connection, "127.0.0.1", job.port)
        tokens = 0
        for request in range(job.requests):
            kept: list[bytes] | None = [] if job.questions else None
            first_s, made = await connection.ask(chat(job, number, request), gaps, kept)
            asked = output_tokens(job, number, request)
            assert made == asked, f"{made} tokens, {asked} asked for"
            if kept is not None:
                texts[number % job.questions].add(text_of(b"".join(kept)))
            tokens += made
            if request or job.requests == 1:
                first.append(first_s)
        connection.close()
        return tokens, connection.events

    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    made = await asyncio.gather(*(stream(number) for number in range(job.streams)))
    tokens, events = map(sum, zip(*made, strict=True))
    seconds = time.perf_counter() - started
    return Load(seconds, tokens, events, percentiles_ms(first), percentiles_ms(gaps), [sorted(said) for said in texts])


def text_of(answer: bytes) -> str:
    """The text of a stream."""
    return "".join(json.loads(content) for content in CONTENT.findall(answer))


def percentiles_ms(seconds: list[float]) -> Percentiles:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return Percentiles(cuts[49] * 1e3, cuts[98] * 1e3)


class Client(ChildProgram):
    """The client process, as held by the bench."""

    def __init__(self) -> None:
        super().__init__(__file__)

    def run(self, job: Job) -> Load:
        return msgspec.json.decode(self.ask(job), type=Load)


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(asdict(uvloop.run(run(msgspec.json.decode(line, type=Job))))), flush=True)


if __name__ == "__main__":
    main()
