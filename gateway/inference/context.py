"""Context of a request at this gateway: caller, model, deadlines, counters. The file knows nothing of vLLM.

A context is made when a request comes, and gains fields at two points: `understood`, when caller and deployment are
known, and `opened`, when the request has a slot in the usage journal. vLLM's handlers pass no context on; code that
vLLM calls reads the variable CONTEXT.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

from gateway.core.position import Position
from gateway.core.way import FAST, VLLM, ChatAsk, CompletionAsk
from gateway.http.auth import Caller, Target
from gateway.http.errors import Problem
from gateway.inference.admission import Admission
from gateway.inference.computed import Computed
from gateway.inference.meter import MeteredCall
from gateway.inference.metrics import Tally
from gateway.inference.timing import Timing
from gateway.streams.resuming import FoundRequest
from runtime.core.device.request import Objective
from store.contract.priorities import Priority
from store.contract.wire import EngineSpec, Resumable
from store.telemetry.tracing import Span, traceparent

# Tenant of the request at hand; empty: the platform's own work. Turns at a front's threads go by tenant.
TENANT: ContextVar[str] = ContextVar("tenant", default="")
TEXTS_AT_ONCE = 32  # texts of one call for vectors that runtimes have at a time


class PieceWriter(Protocol):
    """Sends pieces of a stream to the client."""

    async def piece(self, body: bytes) -> None:
        """Send a piece, neither an error nor the last."""


@dataclass(slots=True, eq=False)
class RequestContext:
    """State of one request, from its first byte to the bill. Times are seconds of the monotonic clock."""

    request_id: str
    tally: Tally
    status: int = 499  # status of the response; 499: the client left before an answer began
    began_at: float = field(default_factory=time.monotonic)  # arrival of the request's first byte
    span: Span | None = None  # None: the request is not traced

    # Set by `understood`.
    caller: Caller = field(init=False)
    name: str = field(init=False)  # the deployment's name as the client wrote it
    target: Target = field(init=False)
    priority: Priority = field(init=False)
    arrived_at: float = field(init=False)  # the request was read and parsed: its objective counts from here
    deadline: float = field(init=False)  # latest time for a runtime to take the request
    timed: bool = field(init=False)  # the client wants to read at the end of a stream where the time went
    ask: ChatAsk | CompletionAsk | None = None  # None: only vLLM's handlers can answer
    resumable: Resumable | None = None  # None: the client did not ask for a stream that can be resumed
    resumes_after: Position | None = None  # the client resumes the request: the last event that the client has
    found: FoundRequest | None = None  # a resumed request: where the request is kept

    # Set by `opened`; a request for which no device works has none of these.
    call: MeteredCall = field(init=False)
    objective: Objective = field(init=False)
    cache_salt: str = field(init=False)  # secret of the tenant: tenants never share prefixes
    admission: Admission | None = None  # None: the tenant has no limits

    # The answer.
    way: str = VLLM  # the way that the request took
    writer: PieceWriter | None = None  # takes pieces of a stream without ASGI's messages
    there: Callable[[], bool] = lambda: True  # whether the client is still there
    expected_s: Callable[[], float | None] = lambda: None  # seconds until the model's engine is built; None: not known
    refused: Problem | None = None  # the client's answer instead of vLLM's words
    failure: Problem | None = None  # error that ended a stream; vLLM's words for Anthropic's clients lose the error
    streaming: bool = False
    made_tokens: int = 0  # output tokens handed to the code that writes the response
    timing: Timing | None = None  # timing of the stream submitted last
    computed: Computed = field(default_factory=Computed)

    # A call for vectors: each text of the call is an engine's request.
    reserved_tokens: int = 0  # of the texts, reserved under the tenant's limits before the first text is sent
    sending: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TEXTS_AT_ONCE))

    def understood(
        self, caller: Caller, name: str, target: Target, tally: Tally, wait_s: float, priority: Priority, timed: bool
    ) -> None:
        """Note the caller, the deployment and the wishes. A runtime must take the request within `wait_s` seconds from
        now."""
        self.caller, self.name, self.target, self.tally = caller, name, target, tally
        self.priority, self.timed = priority, timed
        self.arrived_at = time.monotonic()
        self.deadline = self.arrived_at + wait_s

    def opened(self, call: MeteredCall, objective: Objective, cache_salt: str, admission: Admission | None) -> None:
        """Note the slot in the usage journal, the objective and the admission under the tenant's limits."""
        self.call, self.objective, self.cache_salt, self.admission = call, objective, cache_salt, admission
        if admission is not None:
            admission.call = call

    @property
    def kept_by_runtime(self) -> Resumable | None:
        """Mark of the request if the runtime keeps the request for a client that loses the connection."""
        return self.resumable if self.way == FAST else None

    @property
    def exhausted(self) -> bool:
        """Whether the tenant's budget ended the request."""
        return self.admission is not None and self.admission.exhausted

    @property
    def trace(self) -> str:
        """traceparent of the request's span; empty: not traced."""
        return traceparent(self.span)

    def noting(self, send: Send, headers: dict[str, str]) -> Send:
        """`send`, with the status noted and the headers added to the response."""
        added = [(name.encode(), value.encode()) for name, value in headers.items()]

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        return note


CONTEXT: ContextVar[RequestContext] = ContextVar("context")


class ModelFront(Protocol):
    """Answers requests for one engine spec: the fast way and vLLM's front half, in gateway/vllm/front.py."""

    async def handle(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request. The caller runs this coroutine in a task of its own: CONTEXT is a context variable."""

    async def leave(self, computed: Computed) -> None:
        """End the work of runtimes for a request whose client left."""


class ModelFronts(Protocol):
    """The fronts of a gateway."""

    async def get(self, spec: EngineSpec, tool_parser: str | None) -> ModelFront:
        """The front of an engine and a tool parser (vLLM's name), built on first use. Raises vLLM's exceptions."""
