"""Which runtime gets a request, and which one goes on with it when that one is lost. Knows nothing of vLLM.

A request whose runtime dies, hangs, drains or loses its engine is given to another one with the tokens that its client
has: the stream goes on where it stopped, and the client notices no more than a pause.
Who was twice, at the same token, in the step in which a runtime failed is taken for the cause and not tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from msgspec import structs

from gateway.fleet import Fleet
from gateway.relay import Refused, Relay
from gateway.timing import Timing
from store import wire
from store.bus import BusError, TooLarge
from store.observe import place_of
from store.wire import Delta, Finish, Refusal

log = structlog.get_logger()

HOLD_POLL_S = 0.5


class Unserved(Exception):
    """No runtime took the request in its time; says why the last one did not."""


class Taker(Protocol):
    """Who wants the tokens of a dispatcher's requests."""

    def made(self, deltas: list[tuple[str, Delta]]) -> None:
        """By request id, in order; one with `finish` is a request's last."""

    def failed(self, request: str, error: str) -> None:
        """It ends without an answer."""


@dataclass(slots=True, eq=False)
class Open:
    """A request that has not ended."""

    id: str
    run: wire.Run  # as its first attempt
    due_at: float  # its first token; monotonic
    timing: Timing
    stream: int = 0  # of its present attempt
    runtime: str = ""
    made: list[int] = field(default_factory=list)  # tokens that its taker has
    first_late: bool = False
    suspect_at: int = -1  # how many those were when a runtime failed in a step that it was in
    stalled_at: float | None = None  # since when it is without a token after its runtime was lost
    moving: asyncio.Task[None] | None = None
    spent: wire.Spent = wire.NOTHING_SPENT  # on it by its present runtime, as far as is known
    spent_before: wire.Spent = wire.NOTHING_SPENT  # and by those that it had before

    def spend(self, delta: Delta) -> Delta:
        """What it costs goes on where it stopped."""
        self.spent = self.spent.most(delta.spent)
        if self.spent_before is wire.NOTHING_SPENT:
            return delta
        return structs.replace(delta, spent=self.spent_before.plus(self.spent))

    def leave(self) -> None:
        """Its present runtime: the next one begins to count at nought."""
        self.spent_before, self.spent = self.spent_before.plus(self.spent), wire.NOTHING_SPENT


class Dispatcher:
    """The requests of one taker. A sink of the relay."""

    def __init__(self, relay: Relay, fleet: Fleet, taker: Taker, resume_s: float) -> None:
        """`resume_s`: the longest that a request goes without a token after it lost its runtime."""
        self._relay, self._fleet, self._taker, self._resume_s = relay, fleet, taker, resume_s
        self._open: dict[str, Open] = {}
        self._by_stream: dict[int, Open] = {}

    async def submit(self, id: str, run: wire.Run, due_at: float, deadline: float, timing: Timing) -> None:
        """Until a runtime has taken it; both times are monotonic. Raises Unserved, TooLarge, Refused (BAD_MESSAGE)."""
        request = self._open[id] = Open(id, run, due_at, timing)
        try:
            await self._place(request, deadline, set())
        except BaseException:
            await self.cancel([id])  # it may have been taken, and lost, before we heard of it
            raise

    async def cancel(self, ids: Iterable[str]) -> None:
        """Nothing more is delivered for these."""
        streams = []
        for id in ids:
            request = self._open.pop(id, None)
            if request is None:
                continue
            if request.moving is not None:
                request.moving.cancel()
            if self._forget(request):
                streams.append(request.stream)
        await self._relay.cancel(streams)

    # ── finding a runtime ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _place(self, request: Open, deadline: float, avoid: set[str]) -> None:
        model, last = request.run.model, "no runtime is up that can serve the model"
        while True:
            if failure := self._fleet.failure(model):
                raise Unserved(failure)
            if runtime := self._fleet.choose(model, frozenset(avoid)):
                try:
                    return await self._try(request, runtime)
                except TooLarge:
                    raise
                except (Refused, BusError) as error:
                    if isinstance(error, Refused) and error.refusal is Refusal.BAD_MESSAGE:
                        raise
                    avoid.add(runtime)
                    last = str(error)
                    continue
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Unserved(f"the request waited its longest time: {last}")
            await self._fleet.change(min(left_s, HOLD_POLL_S))
            avoid.clear()

    async def _try(self, request: Open, runtime: str) -> None:
        """Returns also when it was taken and lost before we heard that it was taken: `_go_on` has it then."""
        stream = request.stream = self._relay.number()
        request.runtime = runtime
        self._by_stream[stream] = request
        self._fleet.took(runtime)
        now = time.monotonic()
        run = wire.replace(
            request.run,
            stream=stream,
            made=request.made,
            first_late=request.first_late,
            # What it waited here counts: the client's clock does not start anew at the runtime.
            ttft_s=request.due_at - now,
        )
        request.timing.sent(now)
        try:
            await self._relay.run(runtime, run, self)
        except (Refused, BusError):
            if stream in self._by_stream:
                request.timing.refused()
                self._forget(request)
                raise
        except BaseException:
            if request.stream == stream:
                self._forget(request)
            raise

    def _forget(self, request: Open) -> bool:
        """Its present attempt is over; false when it was already."""
        if self._by_stream.pop(request.stream, None) is None:
            return False
        self._fleet.gave_back(request.runtime)
        return True

    async def _go_on(self, request: Open) -> None:
        """Its runtime is lost: another one, or the same when it is back."""
        assert request.stalled_at is not None
        avoid, request.run = {request.runtime}, wire.replace(request.run, attempt=request.run.attempt + 1)
        try:
            await self._place(request, request.stalled_at + self._resume_s, avoid)
        except (Unserved, TooLarge, Refused) as error:
            self._fail(request, str(error))
            return
        except Exception as error:
            log.error("dispatch.not_resumed", request=request.run.request, error=place_of(error))
            self._fail(request, "the gateway could not give it to another runtime")
            return
        finally:
            if request.moving is asyncio.current_task():  # else it was lost again at once
                request.moving = None
        log.info(
            "dispatch.resumed",
            request=request.run.request,
            attempt=request.run.attempt,
            runtime=request.runtime,
            tokens=len(request.made),
        )

    # ── Sink ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def deliver(self, deltas: list[Delta]) -> None:
        made: list[tuple[str, Delta]] = []
        now = time.monotonic()
        try:
            for delta in deltas:
                request = self._by_stream.get(delta.stream)
                if request is not None:
                    self._hear(request, delta, made, now)
        finally:  # who has ended before another one's delta goes wrong has its last tokens
            if made:
                self._taker.made(made)

    def _hear(self, request: Open, delta: Delta, made: list[tuple[str, Delta]], now: float) -> None:
        """`made`: what the taker is told."""
        if delta.tokens:
            if not request.made:
                request.first_late = now > request.due_at
            request.made += delta.tokens
            request.stalled_at = None
        told = request.spend(delta)
        request.timing.came(delta, now)
        if delta.moved is not None:
            request.timing.moved()
            self._fleet.gave_back(request.runtime)
            request.runtime = delta.moved.runtime
            self._fleet.took(request.runtime)
            request.leave()
        elif delta.finish is Finish.LOST:
            self._forget(request)
            request.leave()
            request.timing.lost()
            self._lost(request, delta)
        elif delta.finish is Finish.ERROR:
            self._fail(request, delta.error or "the engine ended the request with an error")
        elif delta.tokens or delta.finish is not None:
            made.append((request.id, told))
            if delta.finish is not None:
                self._forget(request)
                del self._open[request.id]

    def _lost(self, request: Open, delta: Delta) -> None:
        if delta.suspect:
            if request.suspect_at == len(request.made):
                log.error("dispatch.refused", request=request.run.request, tokens=request.suspect_at)
                self._fail(
                    request,
                    f"after token {request.suspect_at} of this request its runtime failed twice ({delta.error}): "
                    "it is not tried again",
                )
                return
            request.suspect_at = len(request.made)
        if request.stalled_at is None:
            request.stalled_at = time.monotonic()
        request.moving = asyncio.create_task(self._go_on(request))

    def _fail(self, request: Open, error: str) -> None:
        self._forget(request)
        if self._open.pop(request.id, None) is not None:
            self._taker.failed(request.id, error)
