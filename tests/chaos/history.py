"""Requests of clients, and each client's own record of the answer, made of the bytes that came out of the socket.

A client that leaves closes its half of the connection, and reads until the gateway has closed the second half. Bytes
given to the socket arrive even if the gateway is killed, so the record of the client is complete. The client may be
billed for further tokens, made by devices until then.
A client that vanishes reads nothing more, and may have been sent more tokens than the record has.
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
    DONE = "done"  # the answer was complete
    FAILED = "failed"  # the answer ended with an error after the beginning
    REFUSED = "refused"  # the answer never began: a status of 400 or more
    LEFT = "left"  # the client went away, and read every byte sent until then
    VANISHED = "vanished"  # the client went away, and read nothing more
    CUT = "cut"  # the connection broke
    UNREACHED = "unreached"  # no gateway listened
    SILENT = "silent"  # no byte came for SILENCE_MOST_S


@dataclass(frozen=True)
class Ask:
    """A request. `leaves_at`: the number of tokens after which the client goes away."""

    number: int
    tenant: str
    path: str
    body: dict[str, Any]
    key: str
    prompts: tuple[int, ...] = ()  # tokens of each prompt; empty: not known before
    tokens_most: int = 0  # sum over the choices
    leaves_at: int | None = None
    vanishes: bool = False

    @property
    def question(self) -> str:
        """The question: requests with equal questions must get equal answers."""
        return json.dumps([self.path, {k: v for k, v in self.body.items() if not k.startswith("stream")}])


@dataclass
class Seen:
    """The record of the client of `ask`."""

    ask: Ask
    end: End = End.UNREACHED
    status: int = 0
    request: str = ""  # the id given by the gateway
    said: dict[int, list[int]] = field(default_factory=dict)  # tokens, by choice
    last: dict[int, int] = field(default_factory=dict)  # how many tokens came last, by choice
    usage: dict[str, Any] | None = None
    error: str = ""

    @property
    def last_write(self) -> int:
        """Most tokens that the gateway's last write may have brought."""
        return sum(self.last.values())

    @property
    def tokens(self) -> int:
        return sum(map(len, self.said.values()))

    def line(self) -> str:
        """The record as a line of JSON for the file of a run, without the key."""
        return json.dumps(vars(self) | {"ask": vars(self.ask) | {"key": ""}})


async def ask(host: str, port: int, asked: Ask) -> Seen:
    """Send a request and read until the connection is closed. Returns the client's record."""
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
        seen.end = End.CUT  # until a better end is known
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
        """Take a server-sent event."""
        data = said.removeprefix(b"data: ")
        if data == b"[DONE]":
            self._seen.end = End.DONE
        elif said != data:
            self._take(json.loads(data))
            self._go_if_time()

    def _whole(self) -> None:
        """Note the end of the answer's body."""
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
