"""Streams over the bus: hands requests to runtimes and puts what comes back in order, without gap, repeat or silence.

Frames of a runtime are numbered. A gap is repaired from the runtime's ring; streams that may have lost something that
can't be repaired are LOST to that runtime, as are those of a runtime that is silent for SILENCE_S while the bus is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from store import wire
from store.bus import Bus, BusError
from store.observe import place_of
from store.wire import Delta, Finish, Frame

log = structlog.get_logger()

SILENCE_S = 2.0
BUS_GRACE_S = 10.0  # a bus that is away longer ends every stream
ALIVE_PERIOD_S = 0.5
RUN_TIMEOUT_S = 2.0
EARLY_MOST = 4096  # frames held back behind a gap


class Sink(Protocol):
    """Who wants the tokens of a stream."""

    def deliver(self, deltas: list[Delta]) -> None:
        """Deltas of this sink's streams, in order; one with `finish` is a stream's last."""


class Refused(Exception):
    """A runtime did not take the request."""

    def __init__(self, refusal: wire.Refusal, reason: str) -> None:
        super().__init__(reason)
        self.refusal = refusal


@dataclass(slots=True)
class Stream:
    id: int
    runtime: str
    sink: Sink
    epoch: int = 0  # of the runtime that took it; 0: not answered yet
    next_at: int = 0  # index of the token that comes next
    ahead: list[tuple[Frame, Delta]] = field(default_factory=list)  # from runtimes that it has not reached yet


@dataclass(slots=True)
class Source:
    """The frames of one runtime, as far as they have come."""

    heard_at: float
    needed_at: float  # some stream was its
    epoch: int = 0  # 0: not known yet
    next_seq: int = 0
    early: dict[int, Frame] = field(default_factory=dict)
    repairing: bool = False
    lost: int = 0  # the last of the frames that are gone for good


class Relay:
    """All streams of this gateway."""

    def __init__(self, bus: Bus, gateway: str) -> None:
        self._bus, self._gateway = bus, gateway
        self._streams: dict[int, Stream] = {}
        self._sources: dict[str, Source] = {}
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._bus.subscribe(wire.frame_subject(self._gateway), self._receive)
        self._spawn(self._watch())

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    # ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def number(self) -> int:
        """A stream id nobody had."""
        return next(self._ids)

    async def run(self, runtime: str, run: wire.Run, sink: Sink) -> None:
        """Ask `runtime` for the stream. Raises Refused, or BusError (NoAnswer: another runtime may be tried)."""
        stream = self._streams[run.stream] = Stream(run.stream, runtime, sink, next_at=len(run.made))
        self._source(runtime)
        try:
            data = await self._bus.request(wire.run_subject(runtime), run, RUN_TIMEOUT_S)
            reply = wire.decode(wire.Reply, data)
            if reply.refusal is not None:
                raise Refused(reply.refusal, reply.reason)
        except BaseException as error:
            self._streams.pop(stream.id, None)
            if not isinstance(error, Refused):  # it may have been taken all the same
                await self._send_cancel(runtime, [stream.id])
            raise
        self._meet(stream, reply.epoch, reply.seq)

    async def cancel(self, streams: Iterable[int]) -> None:
        """Nothing more is delivered for these."""
        by_runtime: dict[str, list[int]] = {}
        for id in streams:
            if stream := self._streams.pop(id, None):
                by_runtime.setdefault(stream.runtime, []).append(id)
        for runtime, ids in by_runtime.items():
            await self._send_cancel(runtime, ids)

    async def _send_cancel(self, runtime: str, streams: list[int]) -> None:
        try:
            cancel = wire.Cancel(gateway=self._gateway, streams=streams)
            await self._bus.publish(wire.cancel_subject(runtime), wire.encode(cancel))
        except BusError as error:
            log.warning("relay.cancel_not_sent", runtime=runtime, error=str(error))

    # ── frames ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _meet(self, stream: Stream, epoch: int, seq: int) -> None:
        """The first stream of an epoch comes with where its numbering stands: at the frame `seq`."""
        source = self._source(stream.runtime)
        source.heard_at = time.monotonic()
        stream.epoch = epoch
        if epoch < source.epoch:  # it was restarted since it said so
            self._lose([stream], "the runtime was restarted")
        elif source.epoch != epoch:
            self._begin_epoch(stream.runtime, source, epoch, seq + 1)
            self._drain(source)
        elif seq < source.lost:  # it was taken, and what it said went before we knew
            self._give_up([stream], f"frames up to {source.lost} were lost on the way")

    def _source(self, runtime: str) -> Source:
        now = time.monotonic()
        return self._sources.setdefault(runtime, Source(now, now))

    def _begin_epoch(self, runtime: str, source: Source, epoch: int, next_seq: int) -> None:
        """The runtime is new to us, or was restarted: then what it was asked before is lost."""
        source.epoch, source.next_seq, source.lost = epoch, next_seq, 0
        source.early = {seq: frame for seq, frame in source.early.items() if frame.epoch == epoch and seq >= next_seq}
        old = [s for s in self._streams.values() if s.runtime == runtime and s.epoch not in (0, epoch)]
        self._lose(old, "the runtime was restarted")

    async def _receive(self, data: bytes) -> None:
        frame = wire.decode(Frame, data)
        source = self._sources.get(frame.runtime)
        if source is None:
            if not any(delta.stream in self._streams for delta in frame.deltas):
                self._disown(frame.runtime, frame.deltas)
                return
            # A stream moved there: its old runtime will say where to begin.
            source = self._source(frame.runtime)
        if frame.epoch < source.epoch:
            return
        source.heard_at = time.monotonic()
        if source.epoch and frame.epoch > source.epoch:
            self._begin_epoch(frame.runtime, source, frame.epoch, frame.seq + 1)
        if frame.deltas and frame.seq >= source.next_seq and len(source.early) < EARLY_MOST:
            source.early[frame.seq] = frame
        if source.epoch:
            self._drain(source)
            if frame.seq >= source.next_seq and not source.repairing:
                source.repairing = True
                self._spawn(self._repair(frame.runtime, source, frame.seq))

    def _drain(self, source: Source) -> None:
        while frame := source.early.pop(source.next_seq, None):
            source.next_seq += 1
            self._apply(frame)

    def _apply(self, frame: Frame) -> None:
        by_sink: dict[int, tuple[Sink, list[Delta]]] = {}
        moved: list[tuple[Stream, wire.Moved]] = []
        unknown: list[Delta] = []
        for delta in frame.deltas:
            stream = self._streams.get(delta.stream)
            if stream is None:
                unknown.append(delta)
            elif stream.runtime != frame.runtime:
                stream.ahead.append((frame, delta))
            elif delta.at != stream.next_at:
                self._give_up([stream], f"tokens {stream.next_at}..{delta.at - 1} were lost on the way")
            else:
                stream.next_at += len(delta.tokens)
                if delta.finish is not None:
                    del self._streams[stream.id]
                if delta.moved is not None:
                    moved.append((stream, delta.moved))
                by_sink.setdefault(id(stream.sink), (stream.sink, []))[1].append(delta)
        for sink, deltas in by_sink.values():
            self._deliver(sink, deltas)
        for stream, to in moved:
            self._follow(stream, to)
        self._disown(frame.runtime, unknown)

    def _deliver(self, sink: Sink, deltas: list[Delta]) -> None:
        """What goes wrong there is an error of ours: it ends these streams, and costs no others."""
        try:
            sink.deliver(deltas)
        except Exception as error:
            log.error("relay.not_delivered", streams=len(deltas), error=place_of(error))
            self._spawn(self.cancel([delta.stream for delta in deltas]))
            for delta in deltas:
                with contextlib.suppress(Exception):  # it may be the one that went wrong
                    sink.deliver([Delta(delta.stream, [], delta.at, Finish.ERROR, error="the gateway failed")])

    def _follow(self, stream: Stream, to: wire.Moved) -> None:
        """It goes on at another runtime, which may have said something already."""
        stream.runtime = to.runtime
        ahead = [(frame, delta) for frame, delta in stream.ahead if frame.runtime == to.runtime]
        stream.ahead = [(frame, delta) for frame, delta in stream.ahead if frame.runtime != to.runtime]
        self._meet(stream, to.epoch, to.seq)
        for frame, delta in ahead:
            if frame.epoch == to.epoch:
                self._apply(wire.replace(frame, deltas=[delta]))

    def _disown(self, runtime: str, deltas: list[Delta]) -> None:
        """Who works for streams that nobody has is told so: it was cancelled, or given up for lost."""
        streams = [delta.stream for delta in deltas if delta.finish is None and delta.moved is None]
        if streams:
            self._spawn(self._send_cancel(runtime, streams))

    async def _repair(self, runtime: str, source: Source, last: int) -> None:
        """Ask for `next_seq..last` again; what is gone for good ends the streams of this runtime."""
        epoch, first = source.epoch, source.next_seq
        try:
            repair = wire.Repair(gateway=self._gateway, epoch=epoch, first=first, last=last)
            answer = await self._bus.request(wire.repair_subject(runtime), repair, RUN_TIMEOUT_S)
            repaired = wire.decode(wire.Repaired, answer)
            if source.epoch != epoch:
                return
            for frame in (wire.decode(Frame, data) for data in repaired.frames):
                source.early.setdefault(frame.seq, frame)
            log.info("relay.repaired", runtime=runtime, first=first, last=last, complete=repaired.complete)
            if not repaired.complete:
                self._give_up(self._of(runtime), f"frames {first}..{last} were lost on the way")
                source.next_seq, source.lost = last + 1, last
            self._drain(source)
        except (BusError, wire.WireError) as error:
            log.warning("relay.repair_failed", runtime=runtime, first=first, last=last, error=str(error))
        finally:
            source.repairing = False  # the next frame or heartbeat tries again, silence ends it

    # ── ends ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _of(self, runtime: str) -> list[Stream]:
        """Those that it has taken; whether it takes one that it was just asked for is for its answer to say."""
        return [stream for stream in self._streams.values() if stream.runtime == runtime and stream.epoch]

    def _lose(self, streams: list[Stream], error: str, finish: Finish = Finish.LOST) -> None:
        streams = [stream for stream in streams if self._streams.pop(stream.id, None)]
        if streams:
            log.warning("relay.streams_lost", streams=len(streams), error=error)
        for stream in streams:
            self._deliver(stream.sink, [Delta(stream.id, [], stream.next_at, finish, error=error)])

    def _give_up(self, streams: list[Stream], error: str) -> None:
        """They may go on there, for nobody: tell the runtimes, as far as these can be told."""
        by_runtime: dict[str, list[int]] = {}
        for stream in streams:
            by_runtime.setdefault(stream.runtime, []).append(stream.id)
        for runtime, ids in by_runtime.items():
            self._spawn(self._send_cancel(runtime, ids))
        self._lose(streams, error)

    # ── liveness ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        """Say that we live while streams are open; notice who no longer does."""
        bus_seen_at = time.monotonic()
        while True:
            await asyncio.sleep(ALIVE_PERIOD_S)
            now = time.monotonic()
            self._forget_idle(now)
            if not self._streams:
                bus_seen_at = now
                continue
            if not self._bus.connected:
                if now - bus_seen_at > BUS_GRACE_S:
                    error = f"the bus is away for {BUS_GRACE_S:g} s"
                    self._lose([stream for stream in self._streams.values() if stream.epoch], error, Finish.ERROR)
                continue
            if bus_seen_at < now - 2 * ALIVE_PERIOD_S:  # it just came back: let the runtimes be heard again
                for source in self._sources.values():
                    source.heard_at = now
            bus_seen_at = now
            await self._say_alive()
            self._notice_silence(now)

    async def _say_alive(self) -> None:
        try:
            await self._bus.publish(wire.GATEWAY_ALIVE, wire.encode(wire.GatewayAlive(gateway=self._gateway)))
        except BusError as error:
            log.warning("relay.alive_not_sent", error=str(error))

    def _notice_silence(self, now: float) -> None:
        waited_on = {stream.runtime for stream in self._streams.values() if stream.epoch}
        for runtime in waited_on:
            if now - self._sources[runtime].heard_at > SILENCE_S:
                self._give_up(self._of(runtime), f"runtime {runtime} has been silent for {SILENCE_S:g} s")
                del self._sources[runtime]
        for runtime in set(self._sources) - waited_on:
            self._sources[runtime].heard_at = now  # it has nothing to tell us

    def _forget_idle(self, now: float) -> None:
        """Where no stream is: whenever it is started anew, it may begin with any epoch, for clocks go back, too."""
        needed = {stream.runtime for stream in self._streams.values()}
        for runtime, source in list(self._sources.items()):
            if runtime in needed:
                source.needed_at = now
            elif now - source.needed_at > SILENCE_S:
                del self._sources[runtime]

    def _spawn(self, job: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("relay.task_failed", error=place_of(error))
