"""How a response leaves: our headers, metering what was sent, and errors that keep their promise.

vLLM commits to status 200 before it knows whether there will be a first token. `Answer` holds the head of the response
back until the first piece of the body is there: a failure before the first token has a real status code, a failure
after it is one `data: {"error": ...}` and no `[DONE]`.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.types import Message, Send

from gateway.errors import Problem, openai_error
from gateway.front import Served
from gateway.meter import Meter
from gateway.timing import server_timing

KEEP_ALIVE_S = 5.0  # a streaming client that has heard nothing hears an SSE comment this often
SEND_DEADLINE_S = 60.0  # a client that reads nothing for so long is dropped
_ERROR = b'data: {"error"'
_DONE = b"data: [DONE]"
# Clients read a finish reason that they know; this comment of the stream says which limit it was.
EXHAUSTED = b": x-staccato-finish: budget_exhausted\n\n"


class _Error(msgspec.Struct):
    message: str
    type: str = "InternalServerError"
    param: str | None = None
    code: int | str | None = 500


class _ErrorEvent(msgspec.Struct):
    error: _Error


class Answer:
    """The ASGI `send` that vLLM's response is given."""

    def __init__(self, send: Send, served: Served, meter: Meter, headers: dict[str, str], timed: bool = False) -> None:
        """`timed`: a stream ends with a comment on where its time went."""
        self._send, self._served, self._meter, self._headers, self._timed = send, served, meter, headers, timed
        self._head: Message | None = None  # held back
        self._began_at = time.monotonic()
        self._dropping = False  # an error was sent: nothing may follow
        self._named = False  # why it ends, in a stream
        self._sending_since: float | None = None  # monotonic; while a send has not come back
        self._status = 200
        self.started = self.failed = False

    @property
    def failure(self) -> str:
        """How one that failed is booked: a refusal of what the client sent is not our error."""
        return "rejected" if 400 <= self._status < 500 else "error"

    async def send(self, message: Message) -> None:
        if self._served.refused is not None and not self.started:
            await self._refuse(self._served.refused)
        elif self._dropping:
            return
        elif message["type"] == "http.response.start":
            self._head = message
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._served.streaming = kind.startswith(b"text/event-stream")
            self._status = message["status"]
            self.failed = self._status >= 400
        elif message["type"] == "http.response.body":
            await (self._event(message) if self._served.streaming else self._whole(message))

    async def _refuse(self, problem: Problem) -> None:
        """In our words, whatever vLLM made of it."""
        self.failed = self._dropping = True
        self._status = problem.status
        body = msgspec.json.encode(openai_error(problem))
        fields = {"content-type": "application/json", "content-length": str(len(body)), **problem.headers}
        headers = [(name.encode(), value.encode()) for name, value in fields.items()]
        self._head = {"type": "http.response.start", "status": problem.status, "headers": headers}
        await self._start()
        await self._out(body, False)

    async def _event(self, message: Message) -> None:
        """One server-sent event, or the end of them."""
        body, more = message.get("body", b""), message.get("more_body", False)
        if body.startswith(_ERROR):
            self.failed = True
            if not self.started:
                await self._plain_error(body)
                return
        elif self.failed and body.startswith(_DONE):
            body = b""
        if self._dropping or not (body or not more):
            return
        if self._served.exhausted and not self._named:
            self._named = True
            body = EXHAUSTED + body
        if self._timed and not more and (timing := self._timing()):
            body += b": x-staccato-timing: " + timing.encode() + b"\n\n"
        await self._start()
        await self._out(body, more)
        if not self.failed:
            self._count()

    async def _plain_error(self, event: bytes) -> None:
        """The first thing to say is an error: say it as HTTP does."""
        error = msgspec.json.decode(event.removeprefix(b"data: "), type=_ErrorEvent).error
        status = error.code if isinstance(error.code, int) and 400 <= error.code < 600 else 500
        assert self._head is not None
        body = msgspec.json.encode({"error": {**msgspec.structs.asdict(error), "code": str(status)}})
        self._head["status"] = self._status = status
        self._head["headers"] = [(b"content-type", b"application/json")]
        if status == 503:
            self._head["headers"].append((b"retry-after", b"2"))
        await self._start()
        await self._out(body, False)
        self._dropping = True

    async def _whole(self, message: Message) -> None:
        """A response in one piece: delivered when its last byte is handed over."""
        more = message.get("more_body", False)
        await self._start()
        await self._out(message.get("body", b""), more)
        if not more and not self.failed:
            self._count()

    def _count(self) -> None:
        """What was made until now is with the client: nothing waits between what writes a piece and the socket."""
        self._served.call.output_tokens = self._served.made_tokens
        self._meter.count(self._served.call)

    @property
    def cold(self) -> str:
        """Where the model was when the request came."""
        return self._headers["x-staccato-cold"]

    @property
    def status(self) -> int:
        """As the client knows it; 499: it left before."""
        return self._head["status"] if self.started and self._head else 499

    async def _start(self) -> None:
        if self.started:
            return
        self.started = True
        assert self._head is not None
        waited_ms = round((time.monotonic() - self._began_at) * 1e3)
        headers = {**self._headers, "x-staccato-queue-ms": str(waited_ms)}
        if headers["x-staccato-cold"] != "none":
            headers["x-staccato-wake-ms"] = str(waited_ms)
        if timing := self._timing():
            headers["server-timing"] = timing
        if self._served.admission is not None:
            headers |= self._served.admission.headers()
        if self._served.exhausted and not self._served.streaming:
            headers["x-staccato-finish"] = "budget_exhausted"
        if self._served.streaming and not self.failed:
            headers["x-accel-buffering"] = "no"
        extra = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({**self._head, "headers": [*self._head["headers"], *extra]})

    def _timing(self) -> str:
        """Up to now; empty before a runtime was asked."""
        timing = self._served.timing
        return server_timing(timing.breakdown(time.monotonic())) if timing else ""

    async def _out(self, body: bytes, more: bool) -> None:
        self._sending_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending_since = None

    async def patience(self) -> None:
        """Returns when the client has read nothing for too long. Meanwhile tells one that waits for its first token
        that we are still there. (A timeout around each send would cost more than the send.)"""
        while True:
            await asyncio.sleep(min(KEEP_ALIVE_S, SEND_DEADLINE_S))
            if self._sending_since is not None:
                if time.monotonic() - self._sending_since >= SEND_DEADLINE_S:
                    return
            elif self._head is not None and self._served.streaming and not (self._served.made_tokens or self.failed):
                await self._start()
                await self._out(b": waiting for the model\n\n", True)
