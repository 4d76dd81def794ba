"""Streams over the bus: hands requests to runtimes and puts the answers in order, without gap, repeat or silence.

Frames of a runtime are numbered, and a gap is repaired from the runtime's ring. If a gap can't be repaired, the streams
of the runtime that may have lost a delta end as LOST. The streams of a runtime end as LOST as well when the runtime is
silent for SILENCE_S while the bus is up, or for longer if the runtime was taken for dead and heard again
(`store/contract/silence.py`).
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

from store.bus import Bus, BusError
from store.contract import wire
from store.contract.resumption import Resume, ResumeAnswer, resume_subject
from store.contract.silence import Silence
from store.contract.wire import Delta, Finish, Frame
from store.telemetry.observe import place_of

log = structlog.get_logger()

SILENCE_S = 2.0
BUS_GRACE_S = 10.0  # if the bus is away for longer, every stream ends
ALIVE_PERIOD_S = 0.5
RUN_TIMEOUT_S = 2.0
CATCH_UP_S = 2.0  # longest wait for the messages that the bus has for this gateway
SILENCES_MOST = 1024  # remembered silences, by runtime and epoch
EARLY_MOST = 4096  # frames held back behind a gap


class Sink(Protocol):
    """Receiver of the tokens of streams."""

    def deliver(self, deltas: list[Delta]) -> None:
        """Take deltas of the sink's streams, in order. A delta with `finish` is the last of a stream."""


class RuntimeRefused(Exception):
    """A runtime did not take the request."""

    def __init__(self, refusal: wire.Refusal, reason: str) -> None:
        super().__init__(reason)
        self.refusal = refusal


@dataclass(slots=True)
class Stream:
    id: int
    runtime: str  # empty: the stream is about to be resumed
    sink: Sink
    epoch: int = 0  # of the runtime that took the stream; 0: no runtime has answered yet
    next_at: int = 0  # index of the next token
    ahead: list[tuple[Frame, Delta]] = field(default_factory=list)  # from runtimes that the stream has not reached yet


@dataclass(slots=True)
class Source:
    """The frames of one runtime, as far as frames have come."""

    needed_at: float  # when the runtime last had a stream; monotonic
    epoch: int = 0  # 0: not known yet
    next_seq: int = 0
    early: dict[int, Frame] = field(default_factory=dict)
    repairing: bool = False
    lost: int = 0  # seq of the last frame that is gone for good


class LoopWatch(Protocol):
    """Says that the gateway lives while the gateway's loop can't."""

    def turned(self, needed: bool) -> None:
        """The loop turned just now. `needed`: runtimes wait for signs of life."""


class Relay:
    """The streams of this gateway."""

    def __init__(self, bus: Bus, gateway: str, pulse: LoopWatch | None = None) -> None:
        self._bus, self._gateway, self._pulse = bus, gateway, pulse
        self.false_losses = 0  # runtimes that were taken for dead and heard again
        self._silences: dict[tuple[str, int], Silence] = {}  # by runtime and epoch, also of runtimes without a stream
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
        """A stream id that was never used before."""
        return next(self._ids)

    async def run(self, runtime: str, run: wire.Run, sink: Sink) -> None:
        """Ask `runtime` for the stream. Raises Refused, or BusError; after NoAnswer, a second runtime may be tried."""
        stream = self._streams[run.stream] = Stream(run.stream, runtime, sink, next_at=len(run.made))
        self._source(runtime)
        try:
            data = await self._bus.request(wire.run_subject(runtime), run, RUN_TIMEOUT_S)
            reply = wire.decode(wire.Reply, data)
            if reply.refusal is not None:
                raise RuntimeRefused(reply.refusal, reply.reason)
        except BaseException as error:
            self._streams.pop(stream.id, None)
            if not isinstance(error, RuntimeRefused):  # the runtime may have taken the stream nevertheless
                await self._send_cancel(runtime, [stream.id])
            raise
        self._heard(runtime, reply.epoch)
        self._meet(stream, reply.epoch, reply.seq)

    async def resume(self, runtime: str, ask: Resume, sink: Sink) -> ResumeAnswer | None:
        """Go on with a request that `runtime` keeps, as stream `ask.stream`. Returns None if the runtime lacks it.

        The first delta has everything made since the start of the request. Raises BusError, WireError."""
        stream = self._streams[ask.stream] = Stream(ask.stream, "", sink)
        self._source(runtime)
        try:
            kept = wire.decode(ResumeAnswer, await self._bus.request(resume_subject(runtime), ask, RUN_TIMEOUT_S))
        except BaseException:  # the runtime may have given the request to the stream nevertheless
            self._streams.pop(stream.id, None)
            await self._send_cancel(runtime, [stream.id], keep=True)
            raise
        if kept.made is None:
            self._streams.pop(stream.id, None)
            return None
        self._heard(runtime, kept.epoch)
        if stream.id not in self._streams:  # cancelled meanwhile
            await self._send_cancel(runtime, [stream.id], keep=True)
            return kept
        stream.next_at = len(kept.made.tokens)
        if kept.made.finish is not None:
            del self._streams[stream.id]
        self._deliver(sink, [kept.made])
        if kept.made.finish is None:  # frames that came before the answer wait in `ahead`, as after a move
            self._follow(stream, wire.Moved(runtime, kept.epoch, kept.seq))
        return kept

    async def cancel(self, streams: Iterable[int]) -> None:
        """Cancel streams: nothing more is delivered for them."""
        by_runtime: dict[str, list[int]] = {}
        for id in streams:
            stream = self._streams.pop(id, None)
            if stream is not None and stream.runtime:
                by_runtime.setdefault(stream.runtime, []).append(id)
        for runtime, ids in by_runtime.items():
            await self._send_cancel(runtime, ids)

    async def leave(self, streams: Iterable[int], keep: bool = False) -> None:
        """Cancel streams, and go on delivering until the runtimes have said how far the streams came.

        The last delta of each stream has a `finish`. The caller bounds the wait, with `cancel`. `keep`: clients may
        still resume the streams.
        """
        by_runtime: dict[str, list[int]] = {}
        for id in streams:
            stream = self._streams.get(id)
            if stream is not None and stream.runtime:
                by_runtime.setdefault(stream.runtime, []).append(id)
        for runtime, ids in by_runtime.items():
            await self._send_cancel(runtime, ids, keep)

    async def _send_cancel(self, runtime: str, streams: list[int], keep: bool = False) -> None:
        try:
            cancel = wire.Cancel(gateway=self._gateway, streams=streams, keep=keep)
            await self._bus.publish(wire.cancel_subject(runtime), wire.encode(cancel))
        except BusError as error:
            log.warning("relay.cancel_not_sent", runtime=runtime, error=str(error))

    # ── frames ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _meet(self, stream: Stream, epoch: int, seq: int) -> None:
        """Note that a runtime took the stream in `epoch`, when the last frame of the runtime was `seq`."""
        source = self._source(stream.runtime)
        self._silence(stream.runtime, epoch).excuse(time.monotonic())
        stream.epoch = epoch
        if epoch < source.epoch:  # the runtime was restarted after the reply
            self._lose([stream], "the runtime was restarted")
        elif source.epoch != epoch:
            self._begin_epoch(stream.runtime, source, epoch, seq + 1)
            self._drain(source)
        elif seq < source.lost:  # frames with deltas of the stream may be among the lost frames
            self._give_up([stream], f"frames up to {source.lost} were lost on the way")

    def _source(self, runtime: str) -> Source:
        return self._sources.setdefault(runtime, Source(time.monotonic()))

    def _silence(self, runtime: str, epoch: int) -> Silence:
        silence = self._silences.pop((runtime, epoch), None) or Silence(SILENCE_S, time.monotonic())
        self._silences[runtime, epoch] = silence  # moved to the end: the first entry is forgotten first
        while len(self._silences) > SILENCES_MOST:
            del self._silences[next(iter(self._silences))]
        return silence

    def _heard(self, runtime: str, epoch: int) -> None:
        silence, now = self._silence(runtime, epoch), time.monotonic()
        if silence.heard(now):
            self.false_losses += 1
            log.warning("relay.runtime_lives", runtime=runtime, patience_s=round(silence.limit_s(now), 1))

    def _begin_epoch(self, runtime: str, source: Source, epoch: int, next_seq: int) -> None:
        """Begin the numbering of a runtime that is new, or was restarted. After a restart, older streams are lost."""
        source.epoch, source.next_seq, source.lost = epoch, next_seq, 0
        source.early = {seq: frame for seq, frame in source.early.items() if frame.epoch == epoch and seq >= next_seq}
        old = [s for s in self._streams.values() if s.runtime == runtime and s.epoch not in (0, epoch)]
        self._lose(old, "the runtime was restarted")

    async def _receive(self, data: bytes) -> None:
        frame = wire.decode(Frame, data)
        source = self._sources.get(frame.runtime)
        if source is None or frame.epoch >= source.epoch:
            self._heard(frame.runtime, frame.epoch)
        if source is None:
            if not any(delta.stream in self._streams for delta in frame.deltas):
                self._disown(frame.runtime, frame.deltas)
                return
            # A stream moved to the runtime: the old runtime will say where the numbering begins.
            source = self._source(frame.runtime)
        if frame.epoch < source.epoch:
            return
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
        """Hand deltas to a sink. An error of the sink is the gateway's fault, and ends only the streams in `deltas`."""
        try:
            sink.deliver(deltas)
        except Exception as error:
            log.error("relay.not_delivered", streams=len(deltas), error=place_of(error))
            self._spawn(self.cancel([delta.stream for delta in deltas]))
            for delta in deltas:
                with contextlib.suppress(Exception):  # the failing delta may fail again
                    sink.deliver([Delta(delta.stream, [], delta.at, Finish.ERROR, error="the gateway failed")])

    def _follow(self, stream: Stream, to: wire.Moved) -> None:
        """Let the stream go on at the runtime `to`, and apply the deltas that came from there ahead of time."""
        stream.runtime = to.runtime
        ahead = [(frame, delta) for frame, delta in stream.ahead if frame.runtime == to.runtime]
        stream.ahead = [(frame, delta) for frame, delta in stream.ahead if frame.runtime != to.runtime]
        self._meet(stream, to.epoch, to.seq)
        for frame, delta in ahead:
            if frame.epoch == to.epoch:
                self._apply(wire.replace(frame, deltas=[delta]))

    def _disown(self, runtime: str, deltas: list[Delta]) -> None:
        """Tell `runtime` to cancel streams unknown to the gateway: streams cancelled, or given up for lost."""
        streams = [delta.stream for delta in deltas if delta.finish is None and delta.moved is None]
        if streams:
            self._spawn(self._send_cancel(runtime, streams))

    async def _repair(self, runtime: str, source: Source, last: int) -> None:
        """Ask for frames `next_seq..last` again. If a frame is gone for good, the streams of the runtime end."""
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
            source.repairing = False  # the next frame or heartbeat tries again; a silent runtime loses its streams

    # ── ends ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _of(self, runtime: str) -> list[Stream]:
        """Streams that the runtime has taken. A stream just asked for is left out: the runtime's reply decides."""
        return [stream for stream in self._streams.values() if stream.runtime == runtime and stream.epoch]

    def _lose(self, streams: list[Stream], error: str, finish: Finish = Finish.LOST) -> None:
        streams = [stream for stream in streams if self._streams.pop(stream.id, None)]
        if streams:
            log.warning("relay.streams_lost", streams=len(streams), error=error)
        for stream in streams:
            self._deliver(stream.sink, [Delta(stream.id, [], stream.next_at, finish, error=error)])

    def _give_up(self, streams: list[Stream], error: str) -> None:
        """Lose streams, and tell the runtimes to stop work on the streams, as far as the runtimes can be reached."""
        by_runtime: dict[str, list[int]] = {}
        for stream in streams:
            by_runtime.setdefault(stream.runtime, []).append(stream.id)
        for runtime, ids in by_runtime.items():
            self._spawn(self._send_cancel(runtime, ids))
        self._lose(streams, error)

    # ── liveness ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        """Say that the gateway lives while streams are open, and notice runtimes that no longer live."""
        bus_seen_at = due = time.monotonic()
        while True:
            due = max(due, time.monotonic()) + ALIVE_PERIOD_S
            await asyncio.sleep(due - time.monotonic())
            now = time.monotonic()
            if self._pulse is not None:
                self._pulse.turned(bool(self._streams))
            for silence in self._silences.values():
                silence.late(now - due, now)
            self._forget_idle(now)
            if not self._streams:
                bus_seen_at = now
                continue
            if not self._bus.connected:
                if now - bus_seen_at > BUS_GRACE_S:
                    error = f"the bus is away for {BUS_GRACE_S:g} s"
                    self._lose([stream for stream in self._streams.values() if stream.epoch], error, Finish.ERROR)
                continue
            if bus_seen_at < now - 2 * ALIVE_PERIOD_S:  # the bus just came back: let the runtimes be heard again
                for silence in self._silences.values():
                    silence.excuse(now)
            bus_seen_at = now
            await self._say_alive()
            if self._silent():
                await self._notice_silence()

    async def _say_alive(self) -> None:
        try:
            await self._bus.publish(wire.GATEWAY_ALIVE, wire.encode(wire.GatewayAlive(gateway=self._gateway)))
        except BusError as error:
            log.warning("relay.alive_not_sent", error=str(error))

    def _silent(self) -> list[tuple[str, Silence]]:
        """Runtimes that have streams and were silent for too long. A runtime without streams has nothing to say."""
        now = time.monotonic()
        waited_on = {(stream.runtime, stream.epoch) for stream in self._streams.values() if stream.epoch}
        for key, silence in self._silences.items():
            if key not in waited_on and not silence.lost:
                silence.excuse(now)
        known = {key: self._silence(*key) for key in sorted(waited_on)}
        return [(runtime, silence) for (runtime, _), silence in known.items() if silence.too_long(now)]

    async def _notice_silence(self) -> None:
        """Read the messages that wait on the bus. Take runtimes for dead that are silent even then."""
        try:
            await self._bus.catch_up(CATCH_UP_S)
        except BusError as error:  # the silence may be the bus's
            log.warning("relay.bus_not_read", error=str(error))
            return
        for runtime, silence in self._silent():
            limit_s = silence.limit_s(time.monotonic())
            silence.lose()
            self._give_up(self._of(runtime), f"runtime {runtime} has been silent for {limit_s:.3g} s")
            self._sources.pop(runtime, None)

    def _forget_idle(self, now: float) -> None:
        """Forget the frames of runtimes without a stream for SILENCE_S. A runtime started anew may begin with any
        epoch, as clocks also go back."""
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
