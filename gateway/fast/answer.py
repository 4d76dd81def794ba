"""The answers of a request on the fast way: deltas become text as the deltas come, and a task sends waiting text.

Text is made where the deltas arrive: a stop string ends the work of a device even while the client reads slowly.
Waiting text of an answer is a single piece: a slow reader makes pieces longer, not more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.fast.text import TextDecoder
from store.contract.wire import Delta, Finish

FINISHES = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort", Finish.REPETITION: "repetition"}


class AnswerFailed(Exception):
    """No runtime could answer to the end. `refused`: the client is at fault."""

    def __init__(self, error: str, refused: bool) -> None:
        super().__init__(error)
        self.refused = refused


@dataclass(slots=True)
class TextPiece:
    """Waiting text of an answer. `finish` is set on the last piece."""

    index: int
    text: str
    tokens: int
    finish: str | None = None
    stop: int | str | None = None


class Answers:
    """The answers of a request, `n` in number."""

    def __init__(self, decoders: list[TextDecoder], whole: bool, end: Callable[[int], None]) -> None:
        """`whole`: the client gets all text at the end. `end` is called with the index of an answer ended by a stop
        string: the engine need not go on."""
        self._decoders, self._whole, self._end = decoders, whole, end
        self._pieces: dict[int, TextPiece] = {}  # by index
        self._waiter: asyncio.Future[None] | None = None  # of the task that sends
        self._told: Callable[[], None] | None = None  # hears of text while the answers go on
        self._failure: BaseException | None = None
        self._open = set(range(len(decoders)))
        self._found: dict[int, tuple[int, int]] = {}  # by index, until the end: prompt tokens found cached, and written
        self.cached_tokens = self.written_tokens = 0
        self._counted = False

    @property
    def count(self) -> int:
        return len(self._decoders)

    @property
    def ended(self) -> bool:
        """Whether no further token will come. The last pieces may still wait."""
        return not self._open

    def listener(self, index: int) -> AnswerListener:
        return AnswerListener(self, index)

    def made(self, index: int, delta: Delta) -> None:
        """Take a delta of answer `index`."""
        if index not in self._open:
            return  # the engine went on for some steps after a stop string
        if delta.at == 0:
            self._found[index] = (delta.cached_tokens, delta.written_tokens)
        decoder = self._decoders[index]
        stop, kept = decoder.update(delta.tokens, delta.finish is Finish.STOP)
        finish, reason = (None, None) if delta.finish is None else (FINISHES[delta.finish], delta.stop_reason)
        if stop is not None:
            finish, reason = "stop", stop
            if delta.finish is None:
                self._end(index)
        if finish is not None:
            self._open.discard(index)
        if self._whole and finish is None:
            return
        self._count_found(index)
        self._add(index, decoder.take(finish is not None), kept, finish, reason)
        if not (self._whole and self._open):
            self._wake()

    def _count_found(self, index: int) -> None:
        """Note the prompt's tokens found in a cache: as said by the first answer of a stream, or by the last to end."""
        if self._whole or not self._counted:
            self._counted = True
            self.cached_tokens, self.written_tokens = self._found.get(index, (0, 0))

    def _add(self, index: int, text: str, tokens: int, finish: str | None, stop: int | str | None) -> None:
        piece = self._pieces.get(index)
        if piece is None:
            tokens = self._decoders[index].tokens if self._whole else tokens
            self._pieces[index] = TextPiece(index, text, tokens, finish, stop)
            return
        piece.text += text
        piece.tokens += tokens
        piece.finish, piece.stop = finish, stop

    def failed(self, error: str, refused: bool) -> None:
        """Note the failure of an answer: the request fails, and waiting pieces are not sent."""
        self._failure = AnswerFailed(error, refused)
        self._wake()

    def broken(self, error: BaseException) -> None:
        """Note that the client can't be written to: `over` raises `error`."""
        self._failure = error
        self._wake()

    def tell(self, told: Callable[[], None] | None) -> None:
        """Let `told` hear when text waits, now and later, while the answers go on."""
        self._told = told
        if told is not None and self._pieces and self.go_on:
            told()

    @property
    def go_on(self) -> bool:
        """Whether further tokens will come, and no answer failed."""
        return bool(self._open) and self._failure is None

    def _wake(self) -> None:
        if self._told is not None and self.go_on:
            self._told()
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def text(self) -> None:
        """Wait until a piece waits. Raises AnswerFailed."""
        while self._failure is None and (not self._pieces or (self._whole and self._open)):
            await self._woken()
        if self._failure is not None:
            raise self._failure

    async def over(self) -> None:
        """Wait until no further token will come. The last pieces wait. Raises AnswerFailed, and what `broken` noted."""
        while self.go_on:
            await self._woken()
        if self._failure is not None:
            raise self._failure

    async def _woken(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def take(self) -> list[TextPiece]:
        """Return the waiting pieces, which wait no longer."""
        pieces, self._pieces = list(self._pieces.values()), {}
        return pieces


class AnswerListener:
    """Hears the deltas of an answer."""

    __slots__ = ("_answers", "_index")

    def __init__(self, answers: Answers, index: int) -> None:
        self._answers, self._index = answers, index

    def made(self, delta: Delta) -> None:
        self._answers.made(self._index, delta)

    def failed(self, error: str, refused: bool) -> None:
        self._answers.failed(error, refused)
