"""The way of a response to the client: platform headers, metering of sent tokens, and errors with a true status.

vLLM commits to status 200 before vLLM knows whether a first token will come. `ResponseWriter` holds the head of the
response back until the first piece of the body comes. A failure before the first token has a real status code; a
failure after the first token is one `data: {"error": ...}` and no `[DONE]`.
"""

from __future__ import annotations

import asyncio
import math
import time

from starlette.types import Message, Send

from gateway.http.errors import Problem
from gateway.http.vllm_errors import PLAIN, Wording
from gateway.inference.context import RequestContext
from gateway.inference.meter import Meter
from gateway.inference.timing import server_timing

KEEP_ALIVE_S = 5.0  # period of SSE comments to a streaming client that waits for the first token
SEND_DEADLINE_S = 60.0  # a client is dropped after reading nothing for so long
_ERROR = (b'data: {"error"', b"event: error\n")  # OpenAI's and Anthropic's
_DONE = b"data: [DONE]"
# Clients read a finish reason that clients know; the comment in the stream says which limit ended the request.
EXHAUSTED = b": x-staccato-finish: budget_exhausted\n\n"


def waiting(expected_s: float | None) -> bytes:
    """Return the comment for a client that waits for a model, with the expected seconds if these are known."""
    known = "" if expected_s is None else f", which takes about {math.ceil(expected_s)} s more to be built"
    return f": waiting for the model{known}\n\n".encode()


class ResponseWriter:
    """The ASGI `send` for vLLM's response."""

    def __init__(
        self,
        send: Send,
        context: RequestContext,
        meter: Meter,
        headers: dict[str, str],
        timed: bool = False,
        wording: Wording = PLAIN,
    ) -> None:
        """`timed`: a stream ends with a comment on where the time went. `wording`: the words for errors."""
        self.wording = wording
        self._send, self._context, self._meter, self._headers, self._timed = send, context, meter, headers, timed
        self._head: Message | None = None  # held back
        self._began_at = time.monotonic()
        self._dropping = False  # an error was sent: nothing may follow
        self._named = False  # the stream has said that the budget ended the request
        self._sending_since: float | None = None  # monotonic; set while a send has not come back
        self._status = 200
        self.started = self.failed = False

    @property
    def failure(self) -> str:
        """The finish under which a failed response is booked: "rejected" if the client is at fault, else "error"."""
        return "rejected" if 400 <= self._status < 500 else "error"

    async def send(self, message: Message) -> None:
        if self._context.refused is not None and not self.started:
            await self._refuse(self._context.refused)
        elif self._dropping:
            return
        elif message["type"] == "http.response.start":
            self._head = message
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._context.streaming = kind.startswith(b"text/event-stream")
            self._status = message["status"]
            self.failed = self._status >= 400
        elif message["type"] == "http.response.body":
            await (self._event(message) if self._context.streaming else self._whole(message))

    async def _refuse(self, problem: Problem) -> None:
        """Send `problem` in the platform's words, in place of vLLM's response."""
        self.failed = self._dropping = True
        self._status = problem.status
        body = self.wording.body(problem)
        fields = {"content-type": "application/json", "content-length": str(len(body)), **problem.headers}
        headers = [(name.encode(), value.encode()) for name, value in fields.items()]
        self._head = {"type": "http.response.start", "status": problem.status, "headers": headers}
        await self._start()
        await self._out(body, False)

    async def _event(self, message: Message) -> None:
        """Send one server-sent event, or the end of the stream."""
        body, more = message.get("body", b""), message.get("more_body", False)
        if body.startswith(_ERROR):
            self.failed = True
            problem = self._context.failure or self.wording.problem(body[body.index(b"data: ") + len(b"data: ") :])
            if not self.started:
                await self._plain_error(problem)
                return
            body = self.wording.event(problem)
        elif self.failed and body.startswith(_DONE):
            body = b""
        if self._dropping or not (body or not more):
            return
        if self._context.exhausted and not self._named:
            self._named = True
            body = EXHAUSTED + body
        if self._timed and not more and (timing := self._timing()):
            body += b": x-staccato-timing: " + timing.encode() + b"\n\n"
        await self._start()
        await self._out(body, more)
        if not self.failed:
            self._count()

    async def piece(self, body: bytes) -> None:
        """Send a piece of a stream, neither an error nor the last: the short way of `send` for each token."""
        context = self._context
        if context.refused is not None or self._dropping or (context.admission is not None and context.exhausted):
            await self.send({"type": "http.response.body", "body": body, "more_body": True})
            return
        if not self.started:
            await self._start()
        self._sending_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self._sending_since = None
        self._count()

    async def _plain_error(self, problem: Problem) -> None:
        """Send an error that comes before the first token as a plain HTTP error with its status."""
        assert self._head is not None
        self._head["status"] = self._status = problem.status
        fields = {"content-type": "application/json", **problem.headers}
        self._head["headers"] = [(name.encode(), value.encode()) for name, value in fields.items()]
        await self._start()
        await self._out(self.wording.body(problem), False)
        self._dropping = True

    async def _whole(self, message: Message) -> None:
        """Send a piece of an unstreamed response, which counts as delivered when the last byte is handed over."""
        more = message.get("more_body", False)
        await self._start()
        await self._out(message.get("body", b""), more)
        if not more and not self.failed:
            self._count()

    def _count(self) -> None:
        """Count every token made until now as delivered: no piece waits between the writer of pieces and the socket."""
        self._context.call.output_tokens = self._context.made_tokens
        self._meter.count(self._context.call)

    @property
    def cold(self) -> str:
        """Where the model was when the request came."""
        return self._headers["x-staccato-cold"]

    @property
    def status(self) -> int:
        """The status sent to the client; 499: the client left before a status was sent."""
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
        if self._context.admission is not None:
            headers |= self._context.admission.headers()
        if self._context.exhausted and not self._context.streaming:
            headers["x-staccato-finish"] = "budget_exhausted"
        if self._context.streaming and not self.failed:
            headers["x-accel-buffering"] = "no"
            if self._context.kept_by_runtime is not None:
                headers["preference-applied"] = "resume"
        extra = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({**self._head, "headers": [*self._head["headers"], *extra]})

    def _timing(self) -> str:
        """Where the time went up to now, as `server-timing` text; empty before a runtime was asked."""
        timing = self._context.timing
        return server_timing(timing.breakdown(time.monotonic()), self._context.way) if timing else ""

    async def _out(self, body: bytes, more: bool) -> None:
        self._sending_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending_since = None

    async def patience(self) -> None:
        """Return when the client has read nothing for SEND_DEADLINE_S.

        Meanwhile, a streaming client that waits for the first token hears a comment every KEEP_ALIVE_S. (A timeout
        around each send would cost more than the send.)
        """
        while True:
            await asyncio.sleep(min(KEEP_ALIVE_S, SEND_DEADLINE_S))
            if self._sending_since is not None:
                if time.monotonic() - self._sending_since >= SEND_DEADLINE_S:
                    return
            elif self._head is not None and self._context.streaming and not (self._context.made_tokens or self.failed):
                await self._start()
                await self._out(waiting(self._context.expected_s()), True)
