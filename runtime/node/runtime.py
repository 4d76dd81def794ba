"""The node process of a runtime: takes requests from the bus, hands requests to the device process, publishes tokens.

The node process is light and speaks NATS. The device process (runtime/device/loop.py) holds vLLM and never waits for
NATS. The node keeps the state that must outlive the device process: open streams, frames sent, the lease. If the device
process dies, the node ends every open stream as lost, and starts a new device process.

    bus ──▶ ModelServing   (serving.py)  models hosted here, requests for them          ┐
        ──▶ Streams        (streams.py)  open streams, frames, repair, silent gateways  ├─ OwnState (own.py)
        ──▶ StreamMoves    (moves.py)    orders and reasons to move streams away        │
        ◀── LeaseKeeper    (lease.py)    sign of life, and state                        ┘
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence

import structlog
import uvloop

from runtime import ipc
from runtime.config import RuntimeSettings
from runtime.core.ledgers.kept_requests import KeptRequests
from runtime.migration.host import OpenStream
from runtime.migration.host_blocks import HostBlocks
from runtime.migration.migrate import Migrations
from runtime.migration.peers import Peers, name_of
from runtime.migration.receiver import BlockReceiver
from runtime.node.child import DEVICE, DeviceChild
from runtime.node.forks import with_fork_server
from runtime.node.gateways import Gateways
from runtime.node.grammars import Grammars
from runtime.node.lease import LeaseKeeper
from runtime.node.moves import StreamMoves
from runtime.node.own import OwnState
from runtime.node.reporter import Reporter
from runtime.node.serving import ModelServing
from runtime.node.spans import Spans
from runtime.node.streams import Resuming, Streams
from runtime.node.views import Views
from store.bus import Bus, BusError
from store.contract import grants, wire
from store.contract.reports import Report, report_subject
from store.contract.resumption import resume_subject
from store.files.records import recorder
from store.garbage import rarely_collected
from store.leases import watch_leases
from store.settings import read
from store.tasks import ended
from store.telemetry import observe, signs, tracing

log = structlog.get_logger()

HEARTBEAT_PERIOD_S = 0.5


class Node:
    """A runtime on the bus: wires the parts of the node, watches the device process, and is the Host of migrations.

    `device` is the program of the device process, as for `DeviceChild`."""

    def __init__(
        self,
        bus: Bus,
        settings: RuntimeSettings,
        traces: tracing.Traces | None = None,
        device: Sequence[str] = DEVICE,
    ) -> None:
        self._bus, self._settings = bus, settings
        self._own = own = OwnState(settings.runtime_id, time.time_ns() // 1_000_000, settings.role)
        host_cache = settings.host_cache_fd  # cache and images outlive the device process
        if host_cache < 0:
            host_cache = os.memfd_create("staccato-host-cache")
            os.ftruncate(host_cache, settings.host_cache)
        self._child = child = DeviceChild(settings, host_cache, device)
        self.host_cache_id = name_of(host_cache)
        self.blocks = HostBlocks(host_cache)
        self.door = BlockReceiver(self.blocks, settings.transport_agents(), settings.transport_security())
        self._gateways = gateways = Gateways()
        self._grammars = Grammars(settings)
        self._migrations = Migrations(bus, self)
        self._peers = peers = Peers(
            own.id, self.host_cache_id, recorder(settings.journal, f"{own.id}-peers-{own.epoch}")
        )
        kept = KeptRequests()
        self._streams = Streams(bus, own, gateways, kept, Spans(traces, own.id) if traces else None)
        self._resuming = Resuming(own, gateways, self._streams, kept)
        self._moves = StreamMoves(own, gateways, self._streams, peers, self._migrations, self._hear_reports)
        self._hears_reports = False
        self._serving = ModelServing(
            own,
            gateways,
            self._streams,
            peers,
            child.quarantine,
            self._grammars,
            self._migrations.spawn,
            self._moves.move_off_all,
            settings.law,
        )
        self._lease = LeaseKeeper(bus, own, self, gateways, self._serving, child, self._migrations, settings.law)
        self._reporter = Reporter(bus, own, gateways, self._lease, self._serving.costs, self._fleet_size)
        self._views = Views(own.id, self.device)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain: refuse new requests, move open streams to other runtimes or let the
        streams end, and after `drain_s` seconds end the remaining streams as lost. Raises the error of a failed job."""
        settings, id = self._settings, self.id
        self.door.open(settings.transport_bind, settings.transport_port, settings.transport_advertise)
        await self._bus.subscribe(wire.GATEWAY_ALIVE, self._streams.gateway_alive)
        await self._bus.subscribe(wire.cancel_subject(id), self._cancel)
        await self._bus.respond(wire.run_subject(id), self._serving.run)
        await self._bus.respond(wire.repair_subject(id), self._streams.repair)
        await self._bus.respond(resume_subject(id), self._resuming.resume)
        await self._bus.respond(wire.control_subject(id), self._serving.control)
        await self._migrations.start()
        await self._bus.respond(wire.migrate_subject(id), self._moves.migrate)
        await self._bus.respond(wire.role_subject(id), self._moves.set_role)
        await self._bus.respond(wire.drain_subject(id), self._moves.drain)
        await self._views.start(self._bus)
        await watch_leases(self._bus, self._peer_changed)
        self._begin_after(self._peers.lease(id))
        await self._bus.watch(wire.PLACES, self._serving.places_changed)
        await self._bus.watch(wire.MODELS, self._spec_changed)
        jobs = (self._keep_device, self._lease.keep, self._reporter.keep, self._keep_heartbeat, self._give_signs)
        tasks = [asyncio.create_task(job()) for job in jobs]
        tasks.append(asyncio.create_task(self._child.watch(self._waited_for)))
        stopped = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        await self._drain()
        await ended(stopped, *tasks)
        await self._grammars.close()
        await self.door.close()
        self.blocks.close()
        with contextlib.suppress(BusError):
            await self._bus.delete(wire.LEASES, id)
            await self._bus.delete(wire.LEASE_BASES, id)
        for task in done - {stopped}:
            task.result()

    def _begin_after(self, lease: wire.Lease | None) -> None:
        """Begin an epoch later than the lease of an earlier runtime with this id, even if the clock went back since."""
        self._own.epoch = max(self._own.epoch, lease.epoch + 1 if lease else 0)

    async def _drain(self) -> None:
        self._own.ending = True
        self._moves.empty()
        deadline = time.monotonic() + self._settings.drain_s
        while (self._gateways.open_streams or self._migrations.releasing) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self._moves.emptying:
            await ended(self._moves.emptying)
        await self._streams.lose_all("the runtime is shutting down")
        self._own.send(ipc.Quit())

    async def _cancel(self, data: bytes) -> None:
        cancel = wire.decode(wire.Cancel, data)
        await self._streams.cancel(cancel)
        await self._migrations.forward(cancel)

    def _peer_changed(self, id: str, lease: wire.Lease | None) -> None:
        self._peers.changed(id, lease, time.monotonic())

    def _fleet_size(self) -> int:
        return 1 + len(self._peers.there(time.monotonic()))

    def _spec_changed(self, key: str, value: bytes | None) -> None:
        spec = None if value is None else wire.decode(wire.EngineSpec, value)
        self._peers.spec_changed(key, spec)
        self._serving.spec_changed(key, spec)

    async def _hear_reports(self) -> None:
        """Hear the reports of peers from now on. Until the first report of a peer, the peer's lease stands in."""
        if not self._hears_reports:
            self._hears_reports = True
            await self._bus.subscribe(report_subject("*"), self._peer_reported)

    async def _peer_reported(self, data: bytes) -> None:
        self._peers.reported(wire.decode(Report, data), time.monotonic())

    async def _keep_heartbeat(self) -> None:
        """Every HEARTBEAT_PERIOD_S seconds, tell gateways that the runtime lives, and drop offers without news."""
        due = time.monotonic()
        while True:
            due = max(due, time.monotonic()) + HEARTBEAT_PERIOD_S
            await asyncio.sleep(due - time.monotonic())
            now = time.monotonic()
            self._gateways.late(now - due, now)
            self._migrations.sweep(now)
            self._serving.host()
            await self._streams.beat(now)

    # ── the device process ────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_device(self) -> None:
        while not self._own.ending:
            await self._serve_device()
            stepped = self._child.autopsy(self._own.state.models)
            self._own.device_lost()
            self._serving.device_lost()
            self._migrations.device_lost()
            self._views.device_lost()
            await self._streams.lose_all("the runtime lost its device process", stepped)
            if not self._own.ending:
                pause_s, tries = self._child.pause_s, self._child.failed_starts
                log.error("node.device_lost", restart_in_s=pause_s, tries=tries)
                await asyncio.sleep(pause_s)

    async def _serve_device(self) -> None:
        """Start the device process, and handle the process's messages until the process has ended."""
        device, images = await self._child.start(), self._child.images
        try:
            async for message in device.messages():
                await self._from_device(message, device)
        finally:
            if images is not None:
                await images.end()
            device.close()
            await self._child.end()

    async def _from_device(self, message: ipc.ToNode, device: ipc.NodeEnd) -> None:
        self._child.heard()
        match message:
            case ipc.DeviceReady(engine, life):
                self._own.engine, self._own.device, self._own.life = engine, device, life
                self._serving.device_ready()
                log.info("node.ready", engine=engine)
            case ipc.Made(deltas):
                for gateway_id, made in self._gateways.named(deltas):
                    await self._streams.publish(gateway_id, made)
                    self._moves.hand_on(gateway_id, made)
            case ipc.State():
                self._own.state = message
                self._serving.heard(message)
                self._views.heard(message)
            case ipc.Passed() | ipc.Mapped():
                self._views.heard(message)
            case ipc.MakeImage(spec):
                if self._child.images is not None:
                    self._child.images.make(spec, device)
            case ipc.StopImage(model):
                if self._child.images is not None:
                    await self._child.images.stop(model, device)
            case ipc.Formed(model, form):
                self._own.forms[model] = form
            case wire.Release(move=move):
                await self._migrations.released(move)
            case _:
                self._migrations.heard(message)
        if isinstance(message, ipc.State | ipc.DeviceReady):
            self._own.lease_due.set()
            self._own.report_due.set()

    async def _give_signs(self) -> None:
        """Give signs of life to systemd and probes: ready with a device process, even if all models sleep."""
        await signs.give(lambda: self._bus.connected and self._own.device is not None)

    def _waited_for(self) -> bool:
        """Whether any stream waits for the device, with the device process ready."""
        return self._own.device is not None and self._gateways.wait_for_device

    # ── host of the migrations ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def id(self) -> str:
        return self._own.id

    @property
    def epoch(self) -> int:
        return self._own.epoch

    @property
    def life(self) -> int:
        return self._own.life

    def device(self) -> ipc.NodeEnd | None:
        return self._own.device

    def lease(self, runtime: str) -> wire.Lease | None:
        return self._peers.lease(runtime)

    def form(self, model: str) -> wire.KvForm | None:
        return self._own.forms.get(model)

    def tokens_most(self, model: str) -> int:
        return self._serving.hosted[model].max_model_len

    async def grammar(self, run: wire.Run) -> bytes:
        return await self._serving.grammar(run)

    def refusal(self, run: wire.Run) -> wire.Reply | None:
        return self._serving.refusal(run)

    def stream(self, gateway: str, number: int) -> OpenStream | None:
        return self._gateways.wanted(gateway, number)

    def take_over(self, run: wire.Run, at: int, made: Sequence[int] = ()) -> int:
        return self._streams.take_over(run, at, made)

    def give_back(self, run: wire.Run) -> None:
        self._streams.give_back(run)

    async def hand_over(self, gateway: str, number: int, moved: wire.Moved) -> None:
        await self._streams.hand_over(gateway, number, moved)


async def serve(
    settings: RuntimeSettings, traces: tracing.Traces | None = None, device: Sequence[str] = DEVICE
) -> None:
    """Run a node until SIGTERM or SIGINT. `device` is the program of the device process.

    Raises BusError, and ValueError for a join token that can't be used."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    user = grants.runtime(settings.runtime_id)
    identity = (user, settings.nats_credentials, settings.nats_ca, settings.nats_replicas, settings.join_with())
    connecting = Bus.connect(settings.nats_url, user.name, *identity)
    async with with_fork_server(settings) as served, connecting as bus, rarely_collected():
        await Node(bus, served, traces, device).run(stop)


def main() -> int:
    observe.configure_logs("runtime")
    try:
        settings = read(RuntimeSettings, ("join_token",))
        settings.check()
        with tracing.configured("runtime") as traces:
            uvloop.run(serve(settings, traces))
    except (ValueError, BusError) as error:
        print(f"runtime: {error}", file=sys.stderr)
        return 1
    return 0
