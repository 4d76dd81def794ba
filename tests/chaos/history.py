"""What clients asked, and what each of them saw: its own record, made of the bytes that came out of its socket.

A client that goes away says so by closing its half of the connection, and reads until the gateway has closed the other
one. What the gateway gave to the socket arrives, also when it is killed: so the record of such a client is complete.
One that vanishes reads nothing more, and may have been sent more than it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import h11

CHUNK_BYTES = 1 << 14
SILENCE_MOST_S = 90.0


class End(StrEnum):
    DONE = "done"  # the answer was there to its end
    FAILED = "failed"  # it ended with an error after it had begun
    REFUSED = "refused"  # it never began: a status of 400 or more
    LEFT = "left"  # the client went away, and read what had been sent until then
    VANISHED = "vanished"  # the client went away, and read nothing more
    CUT = "cut"  # the connection broke
    UNREACHED = "unreached"  # nobody listened
    SILENT = "silent"  # nothing came for SILENCE_MOST_S


@dataclass(frozen=True)
class Ask:
    """One request. `leaves_at`: the tokens after which its client goes away."""

    number: int
    tenant: str
    path: str
    body: dict[str, Any]
    key: str
    prompts: tuple[int, ...] = ()  # tokens of each; empty: not known before
    tokens_most: int = 0  # of all choices
    leaves_at: int | None = None
    vanishes: bool = False

    @property
    def question(self) -> str:
        """Those who ask the same are answered the same."""
        return json.dumps([self.path, {k: v for k, v in self.body.items() if not k.startswith("stream")}])


@dataclass
class Seen:
    """What the client of `ask` saw."""

    ask: Ask
    end: End = End.UNREACHED
    status: int = 0
    request: str = ""  # the id that the gateway gave it
    said: dict[int, list[int]] = field(default_factory=dict)  # tokens, by choice
    last: dict[int, int] = field(default_factory=dict)  # how many tokens came last, by choice
    usage: dict[str, Any] | None = None
    error: str = ""

    @property
    def last_write(self) -> int:
        """The most tokens that one write of the gateway may have brought."""
        return sum(self.last.values())

    @property
    def tokens(self) -> int:
        return sum(map(len, self.said.values()))

    def line(self) -> str:
        """For the file of a run."""
        return json.dumps(vars(self) | {"ask": vars(self.ask) | {"key": ""}})


async def ask(host: str, port: int, asked: Ask) -> Seen:
    """Until the connection is closed."""
    seen = Seen(asked)
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return seen
    try:
        async with asyncio.timeout(None) as limit:
            await _Client(seen, reader, writer, limit).run()
    except TimeoutError:
        seen.end = End.SILENT
    except (OSError, h11.RemoteProtocolError) as error:
        seen.end, seen.error = seen.end if seen.end is End.LEFT else End.CUT, str(error)
    finally:
        writer.transport.abort()
    return seen


class _Client:
    def __init__(
        self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: asyncio.Timeout
    ) -> None:
        self._seen, self._reader, self._writer, self._limit = seen, reader, writer, limit
        self._http = h11.Connection(h11.CLIENT)
        self._body = b""
        self._stream = False

    async def run(self) -> None:
        asked, seen = self._seen.ask, self._seen
        self._send(asked)
        seen.end = End.CUT  # until it is known better
        self._go_if_time()
        while seen.end in (End.CUT, End.LEFT):
            self._limit.reschedule(asyncio.get_running_loop().time() + SILENCE_MOST_S)
            data = await self._reader.read(CHUNK_BYTES)
            self._http.receive_data(data)
            while (event := self._http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.ConnectionClosed):
                    return
                self._hear(event)

    def _send(self, asked: Ask) -> None:
        body = json.dumps(asked.body).encode()
        headers = {"host": "gateway", "authorization": f"Bearer {asked.key}", "content-length": str(len(body))}
        headers |= {"content-type": "application/json", "connection": "close"}
        for event in (
            h11.Request(method="POST", target=asked.path, headers=list(headers.items())),
            h11.Data(body),
            h11.EndOfMessage(),
        ):
            self._writer.write(self._http.send(event) or b"")

    def _hear(self, event: Any) -> None:
        seen = self._seen
        if isinstance(event, h11.Response):
            headers = dict(event.headers)
            seen.status, seen.request = event.status_code, headers.get(b"x-request-id", b"").decode()
            self._stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        elif isinstance(event, h11.Data):
            self._body += event.data
            if self._stream:
                *events, self._body = self._body.split(b"\n\n")
                for said in events:
                    self._event(said)
        elif isinstance(event, h11.EndOfMessage):
            self._whole()

    def _event(self, said: bytes) -> None:
        """One server-sent event."""
        data = said.removeprefix(b"data: ")
        if data == b"[DONE]":
            self._seen.end = End.DONE
        elif said != data:
            self._take(json.loads(data))
            self._go_if_time()

    def _whole(self) -> None:
        """The answer is there."""
        seen = self._seen
        if seen.status >= 400:
            seen.end, seen.error = End.REFUSED, self._body.decode()
        elif not self._stream:
            self._take(json.loads(self._body))
            seen.end = End.DONE
        elif seen.end is not End.DONE:
            seen.end = End.FAILED if seen.error else seen.end

    def _take(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self._seen.error = str(answer["error"])
        self._seen.usage = answer.get("usage") or self._seen.usage
        for choice in answer.get("choices", ()):
            made = choice.get("token_ids") or ()
            self._seen.said.setdefault(choice["index"], []).extend(made)
            if made:
                self._seen.last[choice["index"]] = len(made)

    def _go_if_time(self) -> None:
        seen, at = self._seen, self._seen.ask.leaves_at
        if at is None or seen.tokens < at or seen.end is not End.CUT:
            return
        if seen.ask.vanishes:
            seen.end = End.VANISHED
        else:
            seen.end = End.LEFT
            with contextlib.suppress(OSError):
                self._writer.write_eof()
