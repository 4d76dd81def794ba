"""Streams that a client can resume: ids of events, and the part of a resumed stream that the client has already."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

import structlog
from msgspec import structs

from gateway.core.position import Part, Position
from gateway.fast.answer import Answers, TextPiece
from store.contract.wire import Delta
from store.telemetry.observe import place_of

log = structlog.get_logger()

SLICE = 64  # tokens made text in a turn of the loop: less than a millisecond


class EventIds:
    """Gives each event of a stream an id, and leaves out what the client has. The stream has one answer."""

    def __init__(self, seen: Position) -> None:
        """`seen`: the last event that the client has."""
        self._seen = seen
        self._tokens = self._characters = 0

    def marked(self, part: Part, event: bytes) -> bytes:
        """Return the event with an id; nothing if the client has the event, or the event is empty."""
        if not event or part <= self._seen.part:
            return b""
        return b"id: %s\n" % str(Position(self._tokens, self._characters, part)).encode() + event

    def piece(self, piece: TextPiece) -> TextPiece | None:
        """Return the part of a piece that the client lacks; None if the client has the whole piece."""
        self._tokens += piece.tokens
        self._characters += len(piece.text)
        lacking = max(0, self._characters - self._seen.characters)
        if self._seen.part >= Part.END or (piece.finish is None and not lacking and self._seen.characters):
            return None
        text = piece.text[max(0, len(piece.text) - lacking) :]
        return TextPiece(piece.index, text, piece.tokens, piece.finish, piece.stop)

    def named(self, event: bytes, finish: str | None) -> bytes:
        """Return the event of a piece with its id."""
        part = Part.TEXT if finish is None else Part.END
        return b"id: %s\n" % str(Position(self._tokens, self._characters, part)).encode() + event


class ResumedListener:
    """Hears the deltas of a resumed answer. The first delta has every token since the start of the request.

    A task makes text of many tokens in slices, so that other streams go on between two slices.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._waiting: deque[Delta] = deque()
        self._task: asyncio.Task[None] | None = None

    def made(self, delta: Delta) -> None:
        if self._task is None and len(delta.tokens) <= SLICE:
            self._answers.made(0, delta)
            return
        self._waiting.append(delta)
        if self._task is None:
            self._task = asyncio.create_task(self._replay())

    def failed(self, error: str, refused: bool) -> None:
        self._answers.failed(error, refused)

    async def _replay(self) -> None:
        try:
            while self._waiting:
                for part in slices(self._waiting.popleft()):
                    self._answers.made(0, part)
                    await asyncio.sleep(0)
        except Exception as error:
            log.error("resume.not_replayed", error=place_of(error))
            self._answers.failed("the gateway failed", False)
        self._task = None


def slices(delta: Delta) -> Iterator[Delta]:
    """Yield the delta in parts of SLICE tokens; the last part has the finish."""
    starts = range(0, max(1, len(delta.tokens)), SLICE)
    for start in starts:
        part = structs.replace(delta, tokens=delta.tokens[start : start + SLICE], at=delta.at + start)
        yield part if start == starts[-1] else structs.replace(part, finish=None, stop_reason=None)
