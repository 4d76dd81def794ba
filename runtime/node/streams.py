"""Open streams of a node: frames to gateways, frames kept for repair, and gateways that fall silent."""

from __future__ import annotations

import time

import structlog

from runtime import ipc
from runtime.migration.host import OpenStream
from runtime.node import parting
from runtime.node.gateways import GatewayPeer, Gateways
from runtime.node.own import OwnState
from runtime.node.spans import Spans
from store.bus import Bus, BusError
from store.contract import wire
from store.contract.wire import Delta, Finish

log = structlog.get_logger()

RING_KEPT_S = 60.0  # frames are kept for so long after the gateway's last sign of life


class Streams:
    """Streams that are open on this runtime, by gateway."""

    def __init__(self, bus: Bus, own: OwnState, gateways: Gateways, spans: Spans | None) -> None:
        self._bus, self._own, self._gateways, self._spans = bus, own, gateways, spans

    # ── opening and closing ───────────────────────────────────────────────────────────────────────────────────────────

    def open(self, run: wire.Run) -> tuple[OpenStream, int]:
        """Open a stream for a gateway. Returns the stream, and the number of the last frame to the gateway."""
        self._gateways.known(run.gateway)
        self._gateways.heard(run.gateway)
        return self._open(run, len(run.made))

    def take_over(self, run: wire.Run, at: int) -> int:
        """Open a stream that comes from another runtime. Returns the number of the last frame to the gateway."""
        gateway = self._gateways.known(run.gateway)
        gateway.silence.excuse(time.monotonic())  # another runtime vouches for the gateway: no sign of life
        return self._open(run, at)[1]

    def _open(self, run: wire.Run, at: int) -> tuple[OpenStream, int]:
        gateway = self._gateways[run.gateway]
        stream = gateway.streams[run.stream] = OpenStream(run, time.monotonic(), at)
        self._own.report_due.set()
        if self._spans:
            self._spans.began(run, at)
        return stream, gateway.ring.last

    def give_back(self, run: wire.Run) -> None:
        """Close a stream again that was taken over in vain."""
        known = self._gateways[run.gateway].close([run.stream])
        self._own.report_due.set()
        if self._spans:
            self._spans.gone(run.gateway, known)
        if known:
            self._own.send(ipc.Stop(run.gateway, known))

    async def hand_over(self, gateway: str, number: int, moved: wire.Moved) -> None:
        """Close a stream that another runtime has now, with a last delta that names the runtime."""
        at = self._gateways[gateway].streams[number].at
        await self.publish(gateway, [Delta(number, [], at, moved=moved)])
        del self._gateways[gateway].streams[number]
        self._own.report_due.set()

    async def cancel(self, cancel: wire.Cancel) -> None:
        """Stop the streams that no client wants any more."""
        if gateway := self._gateways.get(cancel.gateway):
            asked, last = parting.cancelled(gateway.streams, cancel.streams, self._own.device is not None)
            if asked:
                self._own.send(ipc.Stop(cancel.gateway, asked))
            await self.publish(cancel.gateway, last)

    async def lose_all(self, error: str, stepped: str | None = None) -> None:
        """End all streams as lost. `stepped`: the model in a step when the device process died, a suspect."""
        for gateway_id in list(self._gateways):
            await self.lose(gateway_id, None, error, stepped)

    async def lose(self, gateway_id: str, number: int | None, error: str, stepped: str | None = None) -> None:
        """End a gateway's stream, or with None all streams, as lost: a living gateway finds another runtime."""
        streams = self._gateways[gateway_id].streams
        numbers = list(streams) if number is None else [number]
        lost = [
            Delta(each, [], streams[each].at, Finish.LOST, error=error, suspect=streams[each].run.model == stepped)
            for each in numbers
        ]
        await self.publish(gateway_id, lost)
        self._own.send(ipc.Stop(gateway_id, numbers))

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
            if delta.finish is None:
                gateway.streams[delta.stream].at = delta.at + len(delta.tokens)
            else:
                gateway.close([delta.stream])
                self._own.report_due.set()
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
        """Send a heartbeat to every gateway with open streams; gateways silent while the bus is up lose all streams."""
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
        log.warning("node.gateway_lost", gateway=gateway_id, streams=len(gateway.streams), silent_s=silent_s)
        gateway.silence.lose()
        await self.lose(gateway_id, None, f"it heard nothing of its gateway for {silent_s:g} s")
