"""Open streams of a node: frames to gateways, frames kept for repair, and gateways that fall silent."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import structlog

from runtime import ipc
from runtime.core.ledgers.kept_requests import KeptRequest, KeptRequests
from runtime.migration.host import OpenStream
from runtime.node import parting
from runtime.node.gateways import GatewayPeer, Gateways
from runtime.node.own import OwnState
from runtime.node.spans import Spans
from store.bus import Bus, BusError
from store.contract import wire
from store.contract.resumption import TAKEN_MOST, Resume, ResumeAnswer
from store.contract.wire import Delta, Finish

log = structlog.get_logger()

RING_KEPT_S = 60.0  # frames are kept for so long after the gateway's last sign of life


class Streams:
    """Streams that are open on this runtime, by gateway."""

    def __init__(self, bus: Bus, own: OwnState, gateways: Gateways, kept: KeptRequests, spans: Spans | None) -> None:
        self._bus, self._own, self._gateways, self._kept, self._spans = bus, own, gateways, kept, spans

    # ── opening and closing ───────────────────────────────────────────────────────────────────────────────────────────

    def open(self, run: wire.Run) -> tuple[OpenStream, int]:
        """Open a stream for a gateway. Returns the stream, and the number of the last frame to the gateway."""
        self._gateways.known(run.gateway)
        self._gateways.heard(run.gateway)
        return self._open(run, len(run.made), run.made)

    def take_over(self, run: wire.Run, at: int, made: Sequence[int] = ()) -> int:
        """Open a stream that comes from another runtime. Returns the number of the last frame to the gateway."""
        gateway = self._gateways.known(run.gateway)
        gateway.silence.excuse(time.monotonic())  # another runtime vouches for the gateway: no sign of life
        return self._open(run, at, made)[1]

    def _open(self, run: wire.Run, at: int, made: Sequence[int]) -> tuple[OpenStream, int]:
        gateway = self._gateways[run.gateway]
        stream = gateway.streams[run.stream] = OpenStream(run, time.monotonic(), at)
        self._kept.begin(run, (run.gateway, run.stream), made)
        self._own.report_due.set()
        if self._spans:
            self._spans.began(run, at)
        return stream, gateway.ring.last

    def give_back(self, run: wire.Run) -> None:
        """Close a stream again that was taken over in vain."""
        self._kept.forget(run, (run.gateway, run.stream))
        known = self._gateways[run.gateway].close([run.stream])
        self._own.report_due.set()
        if self._spans:
            self._spans.gone(run.gateway, known)
        if known:
            self._own.send(ipc.Stop(run.gateway, known))

    async def hand_over(self, gateway: str, number: int, moved: wire.Moved) -> None:
        """Close a stream that another runtime has now, with a last delta that names the runtime."""
        stream = self._gateways[gateway].streams[number]
        self._kept.forget(stream.run, (gateway, number))
        await self.publish(gateway, [Delta(number, [], stream.at, moved=moved)])
        del self._gateways[gateway].streams[number]
        self._own.report_due.set()

    async def cancel(self, cancel: wire.Cancel) -> None:
        """Stop the streams that no client wants any more."""
        if gateway := self._gateways.get(cancel.gateway):
            asked, last = parting.cancelled(gateway.streams, cancel.streams, self._own.device is not None)
            for number in (*asked, *(delta.stream for delta in last)):
                if not cancel.keep:
                    self._kept.forget(gateway.streams[number].run, (cancel.gateway, number))
            self._stop(gateway.streams[number] for number in asked)
            await self.publish(cancel.gateway, last)

    async def lose_all(self, error: str, stepped: str | None = None) -> None:
        """End all streams as lost. `stepped`: the model in a step when the device process died, a suspect."""
        for gateway_id in list(self._gateways):
            await self.lose(gateway_id, None, error, stepped)

    async def lose(self, gateway_id: str, number: int | None, error: str, stepped: str | None = None) -> None:
        """End a gateway's stream, or with None all streams, as lost: a living gateway finds another runtime."""
        streams = self._gateways[gateway_id].streams
        await self._lose(gateway_id, list(streams) if number is None else [number], error, stepped)

    async def _lose(self, gateway_id: str, numbers: list[int], error: str, stepped: str | None = None) -> None:
        streams = self._gateways[gateway_id].streams
        ended = [streams[number] for number in numbers]
        lost = [
            Delta(each, [], streams[each].at, Finish.LOST, error=error, suspect=streams[each].run.model == stepped)
            for each in numbers
        ]
        await self.publish(gateway_id, lost)
        self._stop(ended)

    def _stop(self, streams: Iterable[OpenStream]) -> None:
        """Tell the device to stop streams, by the names that the device knows."""
        names: dict[str, list[int]] = {}
        for stream in streams:
            names.setdefault(stream.run.gateway, []).append(stream.run.stream)
        for gateway, numbers in names.items():
            self._own.send(ipc.Stop(gateway, numbers))

    async def gone(self, gateway_id: str, number: int, at: int) -> None:
        """Tell a gateway, alive or dead, that the stream goes on elsewhere, `at` tokens after the start."""
        if self._spans:
            self._spans.gone(gateway_id, [number])
        error = "the request was taken up by another connection of its client"
        await self._publish(gateway_id, self._gateways[gateway_id], [Delta(number, [], at, Finish.ERROR, error=error)])

    # ── frames ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def publish(self, gateway_id: str, made: list[Delta]) -> None:
        """Send deltas to a gateway as one frame, kept for repair. Deltas of streams no longer open are left out."""
        gateway = self._gateways[gateway_id]
        deltas = [delta for delta in made if delta.stream in gateway.streams]
        if not deltas:
            return
        if self._spans:
            self._spans.heard(gateway_id, deltas)
        for delta in deltas:
            stream, name = gateway.streams[delta.stream], (gateway_id, delta.stream)
            if delta.finish is None:
                stream.at = delta.at + len(delta.tokens)
                if stream.run.resumable is not None:
                    stream.run = self._kept.hear(stream.run, name, delta)
            else:
                if stream.run.resumable is not None:
                    self._kept.end(stream.run, name, delta, time.monotonic())
                gateway.close([delta.stream])
                self._own.report_due.set()
        await self._publish(gateway_id, gateway, deltas)

    async def _publish(self, gateway_id: str, gateway: GatewayPeer, deltas: list[Delta]) -> None:
        frame = wire.encode(self._frame(gateway, gateway.ring.last + 1, deltas))
        gateway.ring.keep(frame)
        await self._send(gateway_id, frame)

    def _frame(self, gateway: GatewayPeer, number: int, deltas: list[Delta]) -> wire.Frame:
        return wire.Frame(runtime=self._own.id, epoch=self._own.epoch, seq=number, deltas=deltas)

    async def _send(self, gateway_id: str, frame: bytes) -> None:
        try:
            await self._bus.publish(wire.frame_subject(gateway_id), frame)
        except BusError as error:  # the gateway sees the gap and asks for repair
            log.warning("node.frame_not_sent", gateway=gateway_id, error=str(error))

    async def repair(self, data: bytes) -> wire.Message:
        """Answer a gateway that missed frames with the frames still kept."""
        repair = wire.decode(wire.Repair, data)
        gateway = self._gateways.get(repair.gateway)
        if gateway is None or repair.epoch != self._own.epoch:
            return wire.Repaired(frames=[], complete=False)
        frames, complete = gateway.ring.since(repair.first, repair.last)
        log.info("node.repair", gateway=repair.gateway, first=repair.first, last=repair.last, complete=complete)
        return wire.Repaired(frames=frames, complete=complete)

    # ── gateways ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def gateway_alive(self, data: bytes) -> None:
        self._gateways.heard(wire.decode(wire.GatewayAlive, data).gateway)

    async def beat(self, now: float) -> None:
        """Send a heartbeat to every gateway with open streams; gateways silent while the bus is up lose their streams.

        Resumable streams are lost later than other streams, by the seconds in the mark of the request.
        """
        self._kept.sweep(now)
        self._gateways.forget_names()
        if not self._bus.connected:
            self._gateways.excuse(now)
            return
        for gateway_id, gateway in list(self._gateways.items()):
            await self.publish(gateway_id, parting.unanswered(gateway.streams, now))
            if gateway.streams:
                await self._send(gateway_id, wire.encode(self._frame(gateway, gateway.ring.last, [])))
            elif now - gateway.silence.heard_at > RING_KEPT_S:
                gateway.ring.clear()
        for gateway_id in await self._gateways.dead(self._bus):
            await self._lose_gateway(gateway_id)

    async def _lose_gateway(self, gateway_id: str) -> None:
        gateway, now = self._gateways[gateway_id], time.monotonic()
        silent_s = round(now - gateway.silence.heard_at, 1)
        over_s = silent_s - gateway.silence.limit_s(now)
        lost = [number for number, stream in gateway.streams.items() if stream.kept_s < over_s]
        if not lost:
            return
        log.warning("node.gateway_lost", gateway=gateway_id, streams=len(lost), silent_s=silent_s)
        gateway.silence.lose()
        for number in lost:
            self._kept.forget(gateway.streams[number].run, (gateway_id, number))
        await self._lose(gateway_id, lost, f"it heard nothing of its gateway for {silent_s:g} s")


class Resuming:
    """Answers gateways that ask for kept requests.

    A gateway that names a stream in Resume gets all tokens in the answer, and further tokens in frames."""

    def __init__(self, own: OwnState, gateways: Gateways, streams: Streams, kept: KeptRequests) -> None:
        self._own, self._gateways, self._streams, self._kept = own, gateways, streams, kept

    async def resume(self, data: bytes) -> ResumeAnswer:
        """Say what is kept of a request, or give the request to a stream of the asking gateway."""
        ask = wire.decode(Resume, data)
        kept = self._kept.find(ask.request, ask.owner, ask.model)
        if kept is None or not self._parts(kept):
            return ResumeAnswer()
        if not ask.stream:
            return self._answer(kept)
        old, new = kept.at, (ask.gateway, ask.stream)
        asking = self._gateways.known(ask.gateway)
        self._gateways.heard(ask.gateway)
        kept = self._kept.take(ask.request, new)
        answer = wire.replace(self._answer(kept), seq=asking.ring.last, made=kept.made(ask.stream))
        log.info("node.resumed", request=ask.request, gateway=ask.gateway, tokens=answer.tokens, complete=answer.ended)
        if (stream := self._gateways.take_up(old, new)) is not None:
            stream.run = kept.run
            await self._streams.gone(*old, stream.at)
        return answer

    def _parts(self, kept: KeptRequest) -> bool:
        """Whether the request can be taken up here and now. A request on the move is soon at another runtime."""
        mark = kept.run.resumable
        if mark is None or mark.taken >= TAKEN_MOST:
            return False
        gateway, number = kept.at
        stream = self._gateways[gateway].streams.get(number) if gateway in self._gateways else None
        return kept.end is not None or (stream is not None and not stream.moving)

    def _answer(self, kept: KeptRequest) -> ResumeAnswer:
        return ResumeAnswer(
            resumable=kept.run.resumable,
            attempt=kept.run.attempt,
            tokens=len(kept.tokens),
            ended=kept.end is not None,
            epoch=self._own.epoch,
        )
