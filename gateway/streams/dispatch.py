"""Dispatch: choose a runtime for each request, and a new runtime when the first is lost. Knows nothing of vLLM.

If a request's runtime dies, hangs, drains or loses its engine, the dispatcher gives the request to a runtime again,
together with the tokens that the client has. The stream goes on where the stream stopped, and the client notices no
more than a pause. If the runtime fails twice in a step with the request, both times at the same token, the request
counts as the cause and is not tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from msgspec import structs

from gateway.streams.relay import Relay, RuntimeRefused
from gateway.streams.resuming import FoundRequest
from gateway.streams.runtimes import RuntimesView
from runtime.core.device.request import Objective
from store.bus import BusError, TooLarge
from store.contract import wire
from store.contract.resumption import ResumeAnswer
from store.contract.wire import Delta, Finish, Refusal
from store.telemetry.observe import place_of

log = structlog.get_logger()

HOLD_POLL_S = 0.5
# Each attempt computes the prompt and the tokens again, and makes an overloaded fleet slower still.
RESUME_PAUSE_S_FIRST, RESUME_PAUSE_S_MOST = 0.5, 8.0
LOSSES_APART_S = 60.0  # losses that lie farther apart have no common cause
PARTING_S = 5.0  # after the client left: longest time for the runtime to say how far the request came


class Unserved(Exception):
    """No runtime took the request before the deadline. The text says why the last runtime did not."""


class Gone(Exception):
    """The runtime no longer keeps the request that a client wants to resume."""


class Taker(Protocol):
    """Receiver of the tokens of a dispatcher's requests."""

    def made(self, deltas: list[tuple[str, Delta]]) -> None:
        """Take deltas in order, each with a request id. A delta with `finish` is the last of the request."""

    def failed(self, request: str, error: str, refused: bool = False) -> None:
        """Take note that `request` ended without an answer. `refused`: the client is at fault."""


class StreamClock(Protocol):
    """Keeps the time of a request, part by part. Times are monotonic seconds."""

    def sent(self, now: float) -> None:
        """The request was sent to a runtime."""

    def refused(self) -> None:
        """The runtime did not take the request: the request waits on."""

    def lost(self) -> None:
        """The runtime lost the request."""

    def moved(self) -> None:
        """The request moved to a new runtime, and the new runtime counts the time anew."""

    def came(self, delta: Delta, now: float) -> None:
        """A delta of the request came."""


@dataclass(slots=True, eq=False)
class Open:
    """A request that has not ended."""

    id: str
    run: wire.Run  # first attempt, with the number of the present attempt
    due_at: float  # when the first token is due; monotonic
    clock: StreamClock
    stream: int = 0  # id of the present attempt's stream
    runtime: str = ""
    made: list[int] = field(default_factory=list)  # tokens that the taker has
    first_late: bool = False
    suspect_at: int = -1  # len(made) when a runtime last failed in a step with the request
    stalled_at: float | None = None  # since when no token has come after a loss of the runtime
    losses: int = 0  # losses of runtimes, each within LOSSES_APART_S of the loss before
    lost_at: float = 0.0  # the last loss
    moving: asyncio.Task[None] | None = None
    leaving: asyncio.TimerHandle | None = None  # the client left: runs until the runtime says how far the request came
    spent: wire.Spent = wire.NOTHING_SPENT  # by the present runtime, as far as is known
    spent_before: wire.Spent = wire.NOTHING_SPENT  # by earlier runtimes

    def spend(self, delta: Delta) -> Delta:
        """Note the cost in `delta`. Returns `delta` with the cost of earlier runtimes added."""
        self.spent = self.spent.most(delta.spent)
        if self.spent_before is wire.NOTHING_SPENT:
            return delta
        return structs.replace(delta, spent=self.spent_before.plus(self.spent))

    def lose(self, now: float) -> None:
        """Count a loss of the present runtime."""
        self.losses = self.losses + 1 if self.losses and now - self.lost_at < LOSSES_APART_S else 1
        self.lost_at = now

    def leave(self) -> None:
        """Leave the present runtime: the next runtime begins to count the cost at zero."""
        self.spent_before, self.spent = self.spent_before.plus(self.spent), wire.NOTHING_SPENT


def resume_pause_s(losses: int) -> float:
    """Seconds that a request waits for its next attempt after `losses` losses in a row: none after the first."""
    if losses < 2:
        return 0.0
    return min(RESUME_PAUSE_S_MOST, RESUME_PAUSE_S_FIRST * float(1 << min(16, losses - 2)))


class Dispatcher:
    """The requests of one taker. The dispatcher is a sink of the relay."""

    def __init__(self, relay: Relay, fleet: RuntimesView, taker: Taker, resume_s: float) -> None:
        """`resume_s`: the longest time (seconds) that a request goes without a token after a loss of the runtime."""
        self._relay, self._fleet, self._taker, self._resume_s = relay, fleet, taker, resume_s
        self._open: dict[str, Open] = {}
        self._by_stream: dict[int, Open] = {}
        self._cancelling: set[asyncio.Task[None]] = set()

    async def submit(self, id: str, run: wire.Run, due_at: float, deadline: float, clock: StreamClock) -> None:
        """Give the request to a runtime, and return when a runtime has taken the request.

        `due_at`, when the first token is due, and `deadline`, for a runtime to take the request, are monotonic seconds.
        Raises Unserved, TooLarge, Refused (BAD_MESSAGE).
        """
        request = self._open[id] = Open(id, run, due_at, clock)
        try:
            await self._place(request, deadline, set())
        except BaseException:
            await self.cancel([id])  # a runtime may have taken and lost the request before the reply came
            raise

    async def resume(self, id: str, run: wire.Run, found: FoundRequest, clock: StreamClock) -> ResumeAnswer:
        """Go on with a request where `found` says. `run` is for later attempts. Raises Gone.

        The first delta has every token since the start of the request."""
        now = time.monotonic()
        run = wire.replace(run, attempt=found.kept.attempt, resumable=found.kept.resumable)
        request = self._open[id] = Open(id, run, now, clock)
        stream = request.stream = self._relay.number()
        request.runtime = found.runtime
        self._by_stream[stream] = request
        self._fleet.took(found.runtime, run.model, run.tbt_s)
        clock.sent(now)
        try:
            kept = await self._relay.resume(found.runtime, wire.replace(found.ask, stream=stream), self)
            if kept is None:
                raise Gone
        except (BusError, wire.WireError) as error:
            await self.cancel([id])
            raise Gone from error
        except BaseException:
            await self.cancel([id])
            raise
        request.run = wire.replace(run, resumable=kept.resumable)
        return kept

    async def cancel(self, ids: Iterable[str]) -> None:
        """Cancel requests: nothing more is delivered for them."""
        streams = []
        for id in ids:
            request = self._open.pop(id, None)
            if request is None:
                continue
            if request.moving is not None:
                request.moving.cancel()
            if request.leaving is not None:
                request.leaving.cancel()
            if self._forget(request):
                streams.append(request.stream)
        await self._relay.cancel(streams)

    async def leave(self, ids: Iterable[str], keep: bool = False) -> set[str]:
        """Cancel requests abandoned by their clients. Returns the ids of the requests still to be heard of.

        `keep`: the requests' text has ended, and clients may still resume the requests.

        For each request returned, the taker hears until the last delta or a failure, for PARTING_S at most: by then the
        taker has every token made until the runtime heard of the cancel.
        """
        parting, streams, nowhere = set(), [], []
        for id in ids:
            request = self._open.get(id)
            if request is None:
                continue
            if request.leaving is None and (request.moving is not None or request.stream not in self._by_stream):
                nowhere.append(id)
                continue
            if request.leaving is None:
                loop = asyncio.get_running_loop()
                request.leaving = loop.call_later(PARTING_S, self._unanswered, request)
                streams.append(request.stream)
            parting.add(id)
        await self._relay.leave(streams, keep)
        await self.cancel(nowhere)
        return parting

    def _unanswered(self, request: Open) -> None:
        if self._open.get(request.id) is not request:
            return
        log.warning("dispatch.parting_unanswered", request=request.run.request, after_s=PARTING_S)
        cancelling = asyncio.create_task(self._relay.cancel([request.stream]))
        self._cancelling.add(cancelling)
        cancelling.add_done_callback(self._cancelling.discard)
        self._fail(request, f"its runtime did not say within {PARTING_S:g} s how far it came")

    # ── finding a runtime ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _place(self, request: Open, deadline: float, avoid: set[str]) -> None:
        model, last = request.run.model, "no runtime is up that can serve the model"
        run = request.run
        objective = Objective(run.ttft_s, run.tbt_s, run.patience_s, run.priority)
        while True:
            if failure := self._fleet.failure(model):
                raise Unserved(failure)
            if runtime := self._fleet.choose(model, objective, avoid):
                try:
                    return await self._try(request, runtime)
                except TooLarge:
                    raise
                except (RuntimeRefused, BusError) as error:
                    if isinstance(error, RuntimeRefused) and error.refusal is Refusal.BAD_MESSAGE:
                        raise
                    if isinstance(error, BusError):
                        self._fleet.silent(runtime)
                    avoid.add(runtime)
                    last = str(error)
                    continue
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Unserved(f"the request waited its longest time: {last}")
            await self._fleet.change(min(left_s, HOLD_POLL_S))
            avoid.clear()

    async def _try(self, request: Open, runtime: str) -> None:
        """Ask `runtime` to take the request. Raises Refused, BusError.

        Returns as well if the runtime took and lost the request before the reply came: `_go_on` has the request then.
        """
        stream = request.stream = self._relay.number()
        request.runtime = runtime
        self._by_stream[stream] = request
        self._fleet.took(runtime, request.run.model, request.run.tbt_s)
        now = time.monotonic()
        run = wire.replace(
            request.run,
            stream=stream,
            made=request.made,
            first_late=request.first_late,
            # The wait at the gateway counts: the client's clock does not start anew at the runtime.
            ttft_s=request.due_at - now,
        )
        request.clock.sent(now)
        try:
            await self._relay.run(runtime, run, self)
        except (RuntimeRefused, BusError):
            if stream in self._by_stream:
                request.clock.refused()
                self._forget(request)
                raise
        except BaseException:
            if request.stream == stream:
                self._forget(request)
            raise

    def _forget(self, request: Open) -> bool:
        """End the request's present attempt. Returns False if the attempt was over already."""
        if self._by_stream.pop(request.stream, None) is None:
            return False
        self._fleet.gave_back(request.runtime, request.run.model)
        return True

    async def _go_on(self, request: Open) -> None:
        """After a loss, find a runtime for the request: a different runtime, or the old runtime when back."""
        assert request.stalled_at is not None
        avoid, request.run = {request.runtime}, wire.replace(request.run, attempt=request.run.attempt + 1)
        try:
            deadline = request.stalled_at + self._resume_s
            await asyncio.sleep(min(resume_pause_s(request.losses), max(0.0, deadline - time.monotonic()) / 2))
            await self._place(request, deadline, avoid)
        except (Unserved, TooLarge, RuntimeRefused) as error:
            self._fail(request, str(error))
            return
        except Exception as error:
            log.error("dispatch.not_resumed", request=request.run.request, error=place_of(error))
            self._fail(request, "the gateway could not give it to another runtime")
            return
        finally:
            if request.moving is asyncio.current_task():  # else the request was lost again at once
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
        finally:  # if a delta goes wrong, requests that ended with an earlier delta still get their last tokens
            if made:
                self._taker.made(made)

    def _hear(self, request: Open, delta: Delta, made: list[tuple[str, Delta]], now: float) -> None:
        """Take note of a delta of the request, and append to `made` the delta that the taker is to get."""
        if delta.tokens:
            if not request.made:
                request.first_late = now > request.due_at
            request.made += delta.tokens
            request.stalled_at = None
        told = request.spend(delta)
        request.clock.came(delta, now)
        if delta.moved is not None:
            request.clock.moved()
            self._fleet.gave_back(request.runtime, request.run.model)
            request.runtime = delta.moved.runtime
            self._fleet.took(request.runtime, request.run.model, request.run.tbt_s)
            request.leave()
        elif delta.finish is Finish.LOST:
            self._forget(request)
            request.leave()
            request.clock.lost()
            self._lost(request, delta)
        elif delta.finish in (Finish.ERROR, Finish.REFUSED):
            error = delta.error or "the engine ended the request with an error"
            self._fail(request, error, delta.finish is Finish.REFUSED)
        elif delta.tokens or delta.finish is not None:
            made.append((request.id, told))
            if delta.finish is not None:
                self._end(request)

    def _lost(self, request: Open, delta: Delta) -> None:
        if request.leaving is not None:  # no client waits for the rest
            self._fail(request, delta.error)
            return
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
        now = time.monotonic()
        request.lose(now)
        if request.stalled_at is None:
            request.stalled_at = now
        request.moving = asyncio.create_task(self._go_on(request))

    def _fail(self, request: Open, error: str, refused: bool = False) -> None:
        if self._end(request):
            self._taker.failed(request.id, error, refused)

    def _end(self, request: Open) -> bool:
        """False when it had ended before."""
        self._forget(request)
        if request.leaving is not None:
            request.leaving.cancel()
        return self._open.pop(request.id, None) is not None
