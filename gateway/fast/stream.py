"""Sends the answers of a request on the fast way: a single write for all waiting pieces, and errors in vLLM's form."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any

from starlette.types import Send

from gateway.core.position import Part, Position
from gateway.fast.answer import Answers, TextPiece
from gateway.fast.chunks import DONE, StreamEvents
from gateway.fast.resume import EventIds
from gateway.inference.context import RequestContext

_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
_JSON = [(b"content-type", b"application/json")]


class Flusher:
    """Writes the waiting text of streams once in a turn of the loop, and wakes no task for a token."""

    def __init__(self) -> None:
        self._due: list[StreamSender] = []

    def add(self, sender: StreamSender) -> None:
        """Let `sender` write in the next turn of the loop."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._flush)
        self._due.append(sender)

    def _flush(self) -> None:
        due, self._due = self._due, []
        for sender in due:
            sender.flush()


class StreamSender:
    """Sends a stream to the client. Events of a stream that the client can resume have ids, and events that the client
    has are left out."""

    def __init__(
        self, context: RequestContext, answers: Answers, events: StreamEvents, includes_usage: bool, flusher: Flusher
    ) -> None:
        assert context.writer is not None
        self._context, self._answers, self._events = context, answers, events
        self._includes_usage, self._flusher, self._writer = includes_usage, flusher, context.writer
        self._ids = EventIds(context.resumes_after or Position()) if context.resumable is not None else None
        self._sent: dict[int, int] = {}  # tokens of each answer
        self._due = False
        self._writing: asyncio.Task[None] | None = None  # a write that waits for the client to read

    async def run(self, send: Send, submitting: Awaitable[None]) -> None:
        """Send the stream to the end. `submitting` gives the request to runtimes, after the head of the response was
        sent. Raises AnswerFailed, and the errors of `submitting`."""
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        await submitting
        await self._answers.text()
        body = self._begun() + self._said()
        if self._answers.go_on:
            self._write(body)
            await self._go_on()
            body = self._said()
        await send({"type": "http.response.body", "body": body + self._end(), "more_body": False})

    async def _go_on(self) -> None:
        """Write text as the text comes, until the last pieces wait. Raises AnswerFailed, and errors of writing."""
        failure: Exception | None = None
        self._answers.tell(self._has_text)
        try:
            try:
                await self._answers.over()
            except Exception as error:  # told to the client after what is being written
                failure = error
            if self._writing is not None:
                await self._writing
        except BaseException:
            if self._writing is not None:
                self._writing.cancel()
            raise
        finally:
            self._answers.tell(None)
        if failure is not None:
            raise failure

    def flush(self) -> None:
        """Write waiting text, unless the client has yet to read what was written before, or the end comes."""
        self._due = False
        if self._writing is None and self._answers.go_on:
            self._write(self._said())

    def _has_text(self) -> None:
        if not self._due:
            self._due = True
            self._flusher.add(self)

    def _write(self, body: bytes) -> None:
        """Begin to write. A write that the socket takes at once needs no task."""
        if not body or not self._context.there():
            return
        writing = self._writer.piece(body)
        try:
            waited_for = writing.send(None)
        except StopIteration:
            return
        except Exception as error:
            self._answers.broken(error)
            return
        self._writing = asyncio.create_task(_rest(writing, waited_for))
        self._writing.add_done_callback(self._written)

    def _written(self, task: asyncio.Task[None]) -> None:
        if self._writing is task:
            self._writing = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._answers.broken(error)
        else:
            self.flush()

    def _begun(self) -> bytes:
        """Count the prompt, and return the events before the first text."""
        context, events = self._context, self._events
        context.call.prompt_tokens += events.prompt_tokens
        context.call.cached_tokens += self._answers.cached_tokens
        first = [events.first(index) for index in range(self._answers.count)]
        return b"".join(first if self._ids is None else [self._ids.marked(Part.TEXT, event) for event in first])

    def _said(self) -> bytes:
        """Take the waiting pieces, and return the events of the pieces."""
        context, ids, said = self._context, self._ids, []
        for piece in self._answers.take():
            context.made_tokens += piece.tokens
            context.call.finish = piece.finish or context.call.finish
            before = self._sent.get(piece.index, 0)
            if piece.text or piece.tokens or before:
                self._sent[piece.index] = before + piece.tokens
                lacking = piece if ids is None else ids.piece(piece)
                if lacking is not None:
                    event = _event(self._events, lacking, self._sent[piece.index], not self._includes_usage)
                    said.append(event if ids is None else ids.named(event, piece.finish))
        return b"".join(said)

    def _end(self) -> bytes:
        if not self._includes_usage:
            return DONE
        answers = self._answers
        usage = self._events.usage(sum(self._sent.values()), answers.cached_tokens, answers.written_tokens)
        return (usage if self._ids is None else self._ids.marked(Part.USAGE, usage)) + DONE


@types.coroutine
def _resumed(begun: Coroutine[Any, Any, None], waited_for: Any) -> Generator[Any, Any, None]:
    yield waited_for
    yield from begun


async def _rest(begun: Coroutine[Any, Any, None], waited_for: Any) -> None:
    """Run the rest of a coroutine that was begun outside of a task, and waits for `waited_for`."""
    await _resumed(begun, waited_for)


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
