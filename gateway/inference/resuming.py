"""Streams that a client resumes after the loss of a connection: the client's wish, and refusals.

The request of a client that says `Prefer: resume` is kept by the runtime. A client resumes the stream by sending the
same body again, with the request's `x-request-id`, and with the id of the last event as `Last-Event-ID`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Mapping

from msgspec import UNSET

from gateway.core.position import Position
from gateway.http.auth import Caller
from gateway.http.errors import Problem
from gateway.inference.context import RequestContext
from gateway.streams.resuming import RequestFinder
from store.contract.wire import Resumable

DIGEST_INLINE_MOST = 1 << 18  # bytes of a body whose digest takes less than a millisecond


def resumed(headers: Mapping[str, str]) -> tuple[str, Position]:
    """Return the id of the request that a client resumes, and the last event that the client has. Raises Problem."""
    seen = Position.of(headers["last-event-id"])
    if seen is None:
        raise Problem(
            400, "invalid_request", "`Last-Event-ID` is no id of an event of a stream: send the id as it came"
        )
    try:
        return str(uuid.UUID(headers.get("x-request-id", ""))), seen
    except ValueError as error:
        remedy = "send the `x-request-id` of the first response along with `Last-Event-ID`"
        raise Problem(400, "invalid_request", f"`x-request-id` names no request: {remedy}") from error


async def resumable(path: str, body: bytes, caller: Caller, context: RequestContext, keep_s: float) -> Resumable | None:
    """Return the mark of a stream that the client can resume; None if the client can't resume the answer.

    Raises Problem if the client resumes a request whose answer can't be resumed."""
    ask = context.ask
    if ask is None or not ask.stream or not keep_s or ask.n not in (None, 1, UNSET):
        if context.resumes_after is not None:
            raise not_resumable()
        return None
    digests = _digests if len(body) <= DIGEST_INLINE_MOST else None
    owner, asked = digests(path, body, caller) if digests else await asyncio.to_thread(_digests, path, body, caller)
    return Resumable(owner, asked, keep_s, time.time())


def _digests(path: str, body: bytes, caller: Caller) -> tuple[bytes, bytes]:
    """Return digests of the caller, and of the route with the body."""
    owner = hashlib.sha256(f"{caller.tenant_id}\0{caller.key_id}\0{caller.by}".encode()).digest()[:16]
    return owner, hashlib.sha256(path.encode() + b"\0" + body).digest()[:16]


async def find(context: RequestContext, resuming: RequestFinder | None) -> None:
    """Find the runtime that keeps the request of `context`. Raises Problem."""
    mark = context.resumable
    assert mark is not None
    key = context.target.spec.key
    found = await resuming.find(context.request_id, mark.owner, key) if resuming is not None else None
    kept = found.kept.resumable if found is not None else None
    if kept is None:
        raise not_kept()
    if kept.body != mark.body:
        remedy = "send the body of the first request, byte for byte"
        raise Problem(400, "other_request", f"the body is not the body of the request to resume: {remedy}")
    context.found, context.resumable = found, kept


def not_kept() -> Problem:
    """Return the answer to a client whose request no runtime keeps."""
    remedy = "send the request again without `Last-Event-ID`"
    return Problem(404, "not_kept", f"there is no such request to resume, or its time to be resumed is over: {remedy}")


def not_resumable() -> Problem:
    """Return the answer to a client that resumes a request without ids of events."""
    detail = (
        "this request can't be resumed: only a stream of one chat or completion without tools, logprobs, grammars and "
        "pictures has ids of events; send the request again without `Last-Event-ID`"
    )
    return Problem(400, "not_resumable", detail)
