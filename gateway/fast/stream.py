"""Sends the answers of a request on the fast way: a single write for all waiting pieces, and errors in vLLM's form."""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.types import Send

from gateway.core.position import Part, Position
from gateway.fast.answer import Answers, TextPiece
from gateway.fast.chunks import DONE, StreamEvents
from gateway.fast.resume import EventIds
from gateway.inference.context import RequestContext

_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
_JSON = [(b"content-type", b"application/json")]


async def send_stream(
    send: Send,
    context: RequestContext,
    answers: Answers,
    events: StreamEvents,
    includes_usage: bool,
    submitting: Awaitable[None],
) -> None:
    """Send a stream to the end. `submitting` gives the request to runtimes, after the head of the response was sent.

    Events of a stream that the client can resume have ids, and events that the client has are left out. Raises
    AnswerFailed, and the errors of `submitting`.
    """
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
    await submitting
    sent: dict[int, int] = {}  # tokens of each answer
    begun, writer = False, context.writer
    ids = EventIds(context.resumes_after or Position()) if context.resumable is not None else None
    while True:
        pieces = await answers.waiting()
        said = []
        if not begun:
            begun = True
            context.call.prompt_tokens += events.prompt_tokens
            context.call.cached_tokens += answers.cached_tokens
            first = [events.first(index) for index in range(answers.count)]
            said += first if ids is None else [ids.marked(Part.TEXT, event) for event in first]
        for piece in pieces:
            context.made_tokens += piece.tokens
            context.call.finish = piece.finish or context.call.finish
            before = sent.get(piece.index, 0)
            if piece.text or piece.tokens or before:
                sent[piece.index] = before + piece.tokens
                lacking = piece if ids is None else ids.piece(piece)
                if lacking is not None:
                    event = _event(events, lacking, sent[piece.index], not includes_usage)
                    said.append(event if ids is None else ids.named(event, piece.finish))
        if ended := answers.ended:
            if includes_usage:
                usage = events.usage(sum(sent.values()), answers.cached_tokens, answers.written_tokens)
                said.append(usage if ids is None else ids.marked(Part.USAGE, usage))
            said.append(DONE)
        if ended or writer is None:
            await send({"type": "http.response.body", "body": b"".join(said), "more_body": not ended})
        elif context.there() and (body := b"".join(said)):
            await writer.piece(body)
        if ended:
            return


def _event(events: StreamEvents, piece: TextPiece, tokens: int, of_all: bool) -> bytes:
    if piece.finish is None:
        return events.piece(piece.index, piece.text, tokens)
    return events.last(piece.index, piece.text, tokens, piece.finish, piece.stop, of_all)


async def send_failure(send: Send, streamed: bool, status: int, error: bytes) -> None:
    """Send an error. `error`: JSON in vLLM's form. The head of a stream was sent before."""
    if streamed:
        await send({"type": "http.response.body", "body": b"data: " + error + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return
    await send({"type": "http.response.start", "status": status, "headers": _JSON})
    await send({"type": "http.response.body", "body": error, "more_body": False})
