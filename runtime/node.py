"""One runtime on the bus: takes requests, hands them to the device process, publishes what it makes.

This process is light and speaks NATS; the device process (runtime/device.py) holds vLLM and never waits for the bus.
The node owns what must outlive the device: which streams are open, the frames sent, the lease. When the device process
dies, every open stream is told so and the process is started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field

import structlog
import uvloop

from runtime import nixl, pipe
from runtime.child import Child
from runtime.config import RuntimeSettings
from runtime.hosting import Hosting
from runtime.memory.hostblocks import HostBlocks
from runtime.migrate import AT_ONCE, Migrations, NotMoved, Stream
from runtime.peers import Peers, name_of
from runtime.ring import Ring
from runtime.shares import may_take
from runtime.spans import Spans
from runtime.transport import Door
from runtime.views import Views
from store import grants, observe, signs, tracing, wire
from store.bus import Bus, BusError, ended
from store.settings import read
from store.wire import Delta, Finish, Refusal, Residency, Role

log = structlog.get_logger()

LEASE_PERIOD_S = 1.0
HEARTBEAT_PERIOD_S = 0.5
GATEWAY_SILENCE_S = 2.0  # then its streams are cancelled
STREAMS_MOST = 4096  # open at once; more are refused as BUSY
HAND_ON_PAUSE_S = 0.25  # between two tries to hand a stream on
RESTART_PAUSE_S = 0.2
RING_KEPT_S = 60.0  # after the gateway's last sign


@dataclass(slots=True)
class Gateway:
    """A gateway that has, or had, streams here."""

    heard_at: float
    ring: Ring = field(default_factory=Ring)
    streams: dict[int, Stream] = field(default_factory=dict)


class Node:
    """The runtime's shell on the bus."""

    def __init__(self, bus: Bus, settings: RuntimeSettings, traces: tracing.Traces | None = None) -> None:
        self._bus, self._settings = bus, settings
        self.id = settings.runtime_id
        self._spans = Spans(traces, self.id) if traces else None
        self.epoch = time.time_ns() // 1_000_000
        self._gateways: dict[str, Gateway] = {}
        self._hosting = Hosting(self.id)
        self._hosted: dict[str, wire.EngineSpec] = {}
        self._placed: dict[str, wire.EngineSpec] = {}  # what of it this device process was given
        self._leaving: dict[str, asyncio.Task[None]] = {}  # models: what it has of them goes on elsewhere
        self._state = pipe.State()
        self._law = settings.law
        self._forms: dict[str, wire.KvForm] = {}  # of the models whose engines are built
        self._device: pipe.NodeEnd | None = None
        self._engine, self.life = "", 0  # what the device process said of itself
        self._draining = False  # to end
        self._held = False  # draining, but not to end
        self._emptying: asyncio.Task[None] | None = None  # its streams go on elsewhere
        self._held_by = 0  # the term of the scheduler that said so; 0: an operator
        self._role = settings.role
        self._term = 0  # of the scheduler that was heard last
        self._lease_due = asyncio.Event()
        host_cache = settings.host_cache_fd  # outlives the device process, and so do the images in it
        if host_cache < 0:
            host_cache = os.memfd_create("staccato-host-cache")
            os.ftruncate(host_cache, settings.host_cache)
        self._child = Child(settings, host_cache)
        self.host_cache_id = name_of(host_cache)
        self.blocks = HostBlocks(host_cache)
        self.door = Door(self.blocks, nixl.Agents() if settings.transport == "nixl" else None)
        self._migrations = Migrations(bus, self)
        self._peers = Peers(self.id, self.host_cache_id)
        self._views = Views(self.id, self.device)

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then drains: refuses new requests, lets the open ones end, and leaves those
        that take too long to other runtimes."""
        settings = self._settings
        self.door.open(settings.transport_bind, settings.transport_port, settings.transport_advertise)
        await self._bus.subscribe(wire.GATEWAY_ALIVE, self._gateway_alive)
        await self._bus.subscribe(wire.cancel_subject(self.id), self._cancel)
        await self._bus.respond(wire.run_subject(self.id), self._run)
        await self._bus.respond(wire.repair_subject(self.id), self._repair)
        await self._bus.respond(wire.control_subject(self.id), self._control)
        await self._migrations.start()
        await self._bus.respond(wire.migrate_subject(self.id), self._migrate)
        await self._bus.respond(wire.role_subject(self.id), self._set_role)
        await self._bus.respond(wire.drain_subject(self.id), self._hold)
        await self._views.start(self._bus)
        await self._bus.watch(wire.LEASES, self._peer_changed)
        self._begin_after(self._peers.lease(self.id))
        await self._bus.watch(wire.PLACES, self._places_changed)
        await self._bus.watch(wire.MODELS, self._spec_changed)
        jobs = (self._keep_device, self._keep_lease, self._keep_heartbeat, self._give_signs)
        tasks = [asyncio.create_task(job()) for job in jobs]
        tasks.append(asyncio.create_task(self._child.watch(self._waited_for)))
        stopped = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        await self._drain()
        await ended(stopped, *tasks)
        await self.door.close()
        self.blocks.close()
        with contextlib.suppress(BusError):
            await self._bus.delete(wire.LEASES, self.id)
        for task in done - {stopped}:
            task.result()

    def _begin_after(self, lease: wire.Lease | None) -> None:
        """An epoch later than that of who had this name a moment ago, also if the clock went back since."""
        self.epoch = max(self.epoch, lease.epoch + 1 if lease else 0)

    async def _drain(self) -> None:
        self._draining = True
        self._empty()
        deadline = time.monotonic() + self._settings.drain_s
        while (self._open_streams() or self._migrations.landing) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self._emptying:
            await ended(self._emptying)
        await self._lose_all("the runtime is shutting down")
        if self._device:
            self._device.send(pipe.Quit())

    def _open_streams(self) -> int:
        return sum(len(gateway.streams) for gateway in self._gateways.values())

    # ── commands from the bus ─────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self, data: bytes) -> wire.Reply:
        run = wire.decode(wire.Run, data)
        if refusal := self.refusal(run):
            return refusal
        assert self._device is not None
        gateway = self._gateways.setdefault(run.gateway, Gateway(time.monotonic()))
        gateway.heard_at = time.monotonic()
        gateway.streams[run.stream] = Stream(run, time.monotonic(), len(run.made))
        if self._spans:
            self._spans.began(run, len(run.made))
        self._device.send(pipe.Start(run))
        return wire.Reply(epoch=self.epoch, seq=gateway.ring.last)

    def refusal(self, run: wire.Run) -> wire.Reply | None:
        state = self._state.models.get(run.model)
        if self._draining or self._held:
            return wire.Reply(refusal=Refusal.DRAINING, reason=f"runtime {self.id} is draining")
        if self._device is None:
            return wire.Reply(refusal=Refusal.BUSY, reason=f"runtime {self.id} is starting its device process")
        if run.engine != self._engine:
            reason = f"runtime {self.id} runs {self._engine}, the request was written by {run.engine}"
            return wire.Reply(refusal=Refusal.ENGINE_VERSION, reason=reason)
        if reason := self._child.quarantine.reason(run.model, time.monotonic()):
            return wire.Reply(refusal=Refusal.MODEL_FAILED, reason=reason)
        if run.model not in self._placed or run.model in self._leaving:
            reason = f"runtime {self.id} does not host model {run.model}"
            return wire.Reply(refusal=Refusal.UNKNOWN_MODEL, reason=reason)
        if state and state.residency is Residency.FAILED:
            return wire.Reply(refusal=Refusal.MODEL_FAILED, reason=state.error)
        free = STREAMS_MOST - self._open_streams()
        if not may_take(STREAMS_MOST - free, free) and not may_take(self._streams_of(run.tenant), free):
            reason = f"runtime {self.id} has {STREAMS_MOST - free} streams open, and {free} are left for other tenants"
            return wire.Reply(refusal=Refusal.BUSY, reason=reason)
        return None

    def _streams_of(self, tenant: str) -> int:
        streams = [stream for gateway in self._gateways.values() for stream in gateway.streams.values()]
        return sum([stream.run.tenant == tenant for stream in streams])

    async def _cancel(self, data: bytes) -> None:
        cancel = wire.decode(wire.Cancel, data)
        self._forget(cancel.gateway, cancel.streams)
        await self._migrations.forward(cancel)

    def _forget(self, gateway_id: str, streams: list[int]) -> None:
        gateway = self._gateways.get(gateway_id)
        known = [stream for stream in streams if gateway and gateway.streams.pop(stream, None) is not None]
        if self._spans:
            self._spans.gone(gateway_id, known)
        if known and self._device:
            self._device.send(pipe.Stop(gateway_id, known))

    async def _repair(self, data: bytes) -> wire.Message:
        repair = wire.decode(wire.Repair, data)
        gateway = self._gateways.get(repair.gateway)
        if gateway is None or repair.epoch != self.epoch:
            return wire.Repaired(frames=[], complete=False)
        frames, complete = gateway.ring.since(repair.first, repair.last)
        log.info("node.repair", gateway=repair.gateway, first=repair.first, last=repair.last, complete=complete)
        return wire.Repaired(frames=frames, complete=complete)

    async def _control(self, data: bytes) -> wire.Reply:
        control = wire.decode(wire.Control, data)
        if control.op not in ("sleep", "wake"):
            return wire.Reply(refusal=Refusal.BAD_MESSAGE, reason=f"no operation {control.op!r}: sleep or wake")
        if reason := self._child.quarantine.reason(control.model, time.monotonic()):
            return wire.Reply(refusal=Refusal.MODEL_FAILED, reason=reason) if control.op == "wake" else wire.Reply()
        if self._device is None:
            return wire.Reply(refusal=Refusal.BUSY, reason=f"runtime {self.id} is starting its device process")
        if control.model not in self._placed:
            return wire.Reply(refusal=Refusal.UNKNOWN_MODEL, reason=f"runtime {self.id} has no model {control.model}")
        self._device.send(pipe.Order(control.model, control.op == "wake"))
        return wire.Reply()

    async def _gateway_alive(self, data: bytes) -> None:
        if gateway := self._gateways.get(wire.decode(wire.GatewayAlive, data).gateway):
            gateway.heard_at = time.monotonic()

    # ── what it hosts ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _spec_changed(self, key: str, value: bytes | None) -> None:
        self._hosting.spec_changed(key, None if value is None else wire.decode(wire.EngineSpec, value))
        if value is None and key in self._hosted:  # its streams are not to go on anywhere
            self._withdraw(key)
        self._host()

    def _places_changed(self, key: str, value: bytes | None) -> None:
        self._hosting.places_changed(key, None if value is None else wire.decode(wire.Places, value))
        self._host()

    def _host(self) -> None:
        """Models that it is to host now, and those that it no longer is to."""
        now = time.monotonic()
        wanted = self._hosting.hosted(self._peers.there(now), now)
        for key, spec in wanted.items():
            self._leaving.pop(key, None)  # it stays after all
            if spec != self._hosted.get(key):
                self._hosted[key] = spec
        self._place(now)
        for key in self._hosted.keys() - wanted.keys() - self._leaving.keys():
            self._leaving[key] = self._migrations.spawn(self._leave(key))
            self._lease_due.set()

    def _place(self, now: float) -> None:
        """Gives the device what it is to host and has not got: not yet what others try first, nor what would end it."""
        if self._device is None:
            return
        for key, spec in self._hosted.items():
            if self._placed.get(key) is spec or self._child.quarantine.reason(key, now):
                continue
            if key in self._placed or not self._hosting.waits(key, self._peers.states(key, now), now):
                self._placed[key] = spec
                self._device.send(pipe.Place(spec))

    async def _leave(self, model: str) -> None:
        """Its streams go on elsewhere, or end here; then it goes, unless it is to stay after all."""
        leaves = asyncio.current_task()
        while self._leaving.get(model) is leaves:
            if not any(
                stream.run.model == model for known in self._gateways.values() for stream in known.streams.values()
            ):
                log.info("node.left_model", model=model)
                self._withdraw(model)
                return
            await self._move_off_all(model)

    def _withdraw(self, model: str) -> None:
        self._leaving.pop(model, None)
        del self._hosted[model]
        if self._placed.pop(model, None) and self._device:
            self._device.send(pipe.Withdraw(model))

    # ── streams that move ─────────────────────────────────────────────────────────────────────────────────────────────

    def device(self) -> pipe.NodeEnd | None:
        return self._device

    def lease(self, runtime: str) -> wire.Lease | None:
        return self._peers.lease(runtime)

    def form(self, model: str) -> wire.KvForm | None:
        return self._forms.get(model)

    def tokens_most(self, model: str) -> int:
        return self._hosted[model].max_model_len

    def stream(self, gateway: str, number: int) -> Stream | None:
        known = self._gateways.get(gateway)
        return known.streams.get(number) if known else None

    def take_over(self, run: wire.Run, at: int) -> int:
        gateway = self._gateways.setdefault(run.gateway, Gateway(time.monotonic()))
        gateway.heard_at = time.monotonic()
        gateway.streams[run.stream] = Stream(run, time.monotonic(), at)
        if self._spans:
            self._spans.began(run, at)
        return gateway.ring.last

    def give_back(self, run: wire.Run) -> None:
        self._forget(run.gateway, [run.stream])

    async def hand_over(self, gateway: str, number: int, moved: wire.Moved) -> None:
        at = self._gateways[gateway].streams[number].at
        await self._publish(gateway, [Delta(number, [], at, moved=moved)])
        del self._gateways[gateway].streams[number]

    async def _migrate(self, data: bytes) -> wire.Reply:
        migrate = wire.decode(wire.Migrate, data)
        if refusal := self._late(migrate.term):
            return refusal
        for gateway, number in self._movable(migrate.model)[: migrate.count]:
            self._migrations.spawn(self._move(gateway, number, migrate.target))
        return wire.Reply()

    def _late(self, term: int) -> wire.Reply | None:
        """Why an order is not obeyed: a later scheduler has spoken. An operator, of term 0, always is."""
        if 0 < term < self._term:
            reason = f"the scheduler of term {term} was replaced by that of term {self._term}"
            return wire.Reply(refusal=Refusal.BUSY, reason=reason)
        self._term = max(term, self._term)
        return None

    async def _hold(self, data: bytes) -> wire.Reply:
        """Like a drain, but it can be called off. What an operator said only an operator takes back."""
        drain = wire.decode(wire.Drain, data)
        if refusal := self._late(drain.term):
            return refusal
        if self._held and not self._held_by and drain.term:
            reason = f"runtime {self.id} drains by an operator's word"
            return wire.Reply(refusal=Refusal.DRAINING, reason=reason)
        self._held, self._held_by = drain.on, drain.term
        self._empty()
        return wire.Reply()

    def _empty(self) -> None:
        """As long as it drains."""
        self._lease_due.set()
        if self._emptying is None or self._emptying.done():
            self._emptying = self._migrations.spawn(self._move_all())

    def _movable(self, model: str = "") -> list[tuple[str, int]]:
        """Those that wait least for others first, the shortest of them first."""
        found = [
            (stream.run.patience_s, stream.run.prompt_tokens + stream.at, id, number)
            for id, gateway in self._gateways.items()
            for number, stream in gateway.streams.items()
            if not stream.moving and model in ("", stream.run.model)
        ]
        return [(gateway, number) for _, _, gateway, number in sorted(found)]

    async def _move(self, gateway: str, number: int, target: str) -> None:
        try:
            await self._migrations.move(gateway, number, target)
        except NotMoved as error:
            stream = self.stream(gateway, number)
            if error.waits and stream is not None:  # its gateway finds it another place
                await self._lose(gateway, number, f"runtime {self.id} gives it away")

    async def _move_all(self) -> None:
        """To whoever can take them, as long as it drains; those that can't move just now are tried again."""
        while self._draining or self._held:
            await self._move_off_all()

    async def _move_off_all(self, model: str = "") -> None:
        """Some of them; those that can't move just now may the next time."""
        movable = [named for named in self._movable(model) if self._target(*named)][:AT_ONCE]
        await asyncio.gather(*(self._move_off(*named) for named in movable), asyncio.sleep(0.05))

    async def _move_off(self, gateway: str, number: int) -> None:
        if target := self._target(gateway, number):
            await self._move(gateway, number, target)

    async def _set_role(self, data: bytes) -> wire.Reply:
        self._role = wire.decode(wire.SetRole, data).role
        self._lease_due.set()
        return wire.Reply()

    def _hand_on(self, gateway: str, deltas: list[Delta]) -> None:
        """Who has its first token goes on where tokens are made; if it can't, it goes on here and is tried again."""
        now = time.monotonic()
        for delta in deltas:
            stream = self.stream(gateway, delta.stream)
            if stream is not None and not stream.moving and now > stream.tried_at + HAND_ON_PAUSE_S:
                stream.tried_at = now
                self._migrations.spawn(self._move_off(gateway, delta.stream))

    def _target(self, gateway: str, number: int) -> str | None:
        stream = self.stream(gateway, number)
        handing_on = self._role is Role.PREFILL and not self._draining
        return self._peers.target(stream.run.model, self._engine, time.monotonic(), handing_on) if stream else None

    def _peer_changed(self, id: str, value: bytes | None) -> None:
        self._peers.changed(id, None if value is None else wire.decode(wire.Lease, value), time.monotonic())

    # ── the device process ────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_device(self) -> None:
        while not self._draining:
            await self._serve_device()
            stepped = self._child.autopsy(self._state.models)
            self._device, self._state, self._forms, self._placed = None, pipe.State(), {}, {}
            self._migrations.device_lost()
            self._views.device_lost()
            await self._lose_all("the runtime lost its device process", stepped)
            if not self._draining:
                log.error("node.device_lost", restart_in_s=RESTART_PAUSE_S)
                await asyncio.sleep(RESTART_PAUSE_S)

    async def _serve_device(self) -> None:
        """Start the process and pass on what it says until it is gone."""
        device = await self._child.start()
        try:
            async for message in device.messages():
                await self._from_device(message, device)
        finally:
            device.close()
            await self._child.end()

    async def _from_device(self, message: pipe.ToNode, device: pipe.NodeEnd) -> None:
        self._child.heard()
        match message:
            case pipe.Ready(engine, life):
                self._engine, self._device, self.life = engine, device, life
                self._place(time.monotonic())
                log.info("node.ready", engine=engine)
            case pipe.Made(deltas):
                for gateway_id, made in deltas.items():
                    await self._publish(gateway_id, made)
            case pipe.State():
                self._state = message
                self._child.quarantine.heard(message.models)
                self._hosting.trials.heard(message.models)
                self._views.heard(message)
            case pipe.Passed() | pipe.Mapped():
                self._views.heard(message)
            case pipe.Formed(model, form):
                self._forms[model] = form
            case pipe.LandedHere(move):
                await self._migrations.landed_here(move)
            case _:
                self._migrations.heard(message)
        if isinstance(message, pipe.State | pipe.Ready):
            self._lease_due.set()

    async def _publish(self, gateway_id: str, made: list[Delta]) -> None:
        """One frame, kept for repair. Deltas of streams that were cancelled meanwhile are left out."""
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
                del gateway.streams[delta.stream]
        frame = wire.encode(wire.Frame(runtime=self.id, epoch=self.epoch, seq=gateway.ring.last + 1, deltas=deltas))
        gateway.ring.keep(frame)
        await self._send_frame(gateway_id, frame)
        if self._role is Role.PREFILL and not self._draining:
            self._hand_on(gateway_id, deltas)

    async def _send_frame(self, gateway_id: str, frame: bytes) -> None:
        try:
            await self._bus.publish(wire.frame_subject(gateway_id), frame)
        except BusError as error:  # the gateway sees the gap and asks for repair
            log.warning("node.frame_not_sent", gateway=gateway_id, error=str(error))

    async def _lose_all(self, error: str, stepped: str | None = None) -> None:
        """`stepped`: the model in whose step the device process died."""
        for gateway_id in list(self._gateways):
            await self._lose(gateway_id, None, error, stepped)

    async def _lose(self, gateway_id: str, number: int | None, error: str, stepped: str | None = None) -> None:
        """This stream or all of a gateway: if it lives, it finds them another runtime."""
        streams = self._gateways[gateway_id].streams
        numbers = list(streams) if number is None else [number]
        lost = [
            Delta(each, [], streams[each].at, Finish.LOST, error=error, suspect=streams[each].run.model == stepped)
            for each in numbers
        ]
        await self._publish(gateway_id, lost)
        if self._device:
            self._device.send(pipe.Stop(gateway_id, numbers))

    async def _give_signs(self) -> None:
        """Ready when the device process is: that every model sleeps is no matter."""
        await signs.give(lambda: self._bus.connected and self._device is not None)

    def _waited_for(self) -> bool:
        """Somebody does, for what the device says."""
        return self._device is not None and any(each.streams for each in self._gateways.values())

    # ── leases and heartbeats ─────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_lease(self) -> None:
        """Every second, and at once when a model moved."""
        while True:
            self._lease_due.clear()
            with contextlib.suppress(BusError):  # NATS is away: the lease runs out, gateways know
                await self._bus.put(wire.LEASES, self.id, self._own_lease())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEASE_PERIOD_S):  # wait_for of Python 3.11 may swallow a cancellation
                    await self._lease_due.wait()

    def _models(self) -> dict[str, wire.ModelState]:
        """What others are to know of them."""
        shown = self._child.stepping.shown_in(self._state.models, self._leaving)
        return self._child.quarantine.shown_in(shown, self._hosted, time.monotonic())

    def _own_lease(self) -> wire.Lease:
        return wire.Lease(
            runtime=self.id,
            epoch=self.epoch,
            engine=self._engine if self._device else "",
            draining=self._draining or self._held,
            role=self._role,
            host_cache=self.host_cache_id,
            receives_at=self.door.address,
            reads=self.door.agents is not None,
            holder=self._state.holder,
            switches=self._state.switches,
            moved=self._migrations.moved,
            page_bytes=self._state.page_bytes,
            pages_total=self._state.pages_total,
            pages_used=self._state.pages_used,
            models=self._models(),
            attainment=self._state.attainment,
            accounts=self._state.accounts,
            wakes=self._state.wakes,
            law=self._law,
            switch_times=self._state.switch_times,
        )

    async def _keep_heartbeat(self) -> None:
        """To every gateway with open streams; those that fell silent while the bus was up lose theirs."""
        while True:
            await asyncio.sleep(HEARTBEAT_PERIOD_S)
            now = time.monotonic()
            self._migrations.sweep(now)
            self._host()
            for gateway_id, gateway in list(self._gateways.items()):
                if not self._bus.connected:
                    gateway.heard_at = now
                elif gateway.streams and now - gateway.heard_at > GATEWAY_SILENCE_S:
                    log.warning("node.gateway_lost", gateway=gateway_id, streams=len(gateway.streams))
                    await self._lose(gateway_id, None, f"it heard nothing of its gateway for {GATEWAY_SILENCE_S:g} s")
                elif gateway.streams:
                    beat = wire.Frame(runtime=self.id, epoch=self.epoch, seq=gateway.ring.last)
                    await self._send_frame(gateway_id, wire.encode(beat))
                elif now - gateway.heard_at > RING_KEPT_S:
                    gateway.ring.clear()


async def serve(settings: RuntimeSettings, traces: tracing.Traces | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    user = grants.runtime(settings.runtime_id)
    async with Bus.connect(settings.nats_url, user.name, user, settings.nats_credentials) as bus:
        await Node(bus, settings, traces).run(stop)


def main() -> int:
    observe.configure_logs("runtime")
    try:
        settings = read(RuntimeSettings)
        settings.check()
        with tracing.configured("runtime") as traces:
            uvloop.run(serve(settings, traces))
    except (ValueError, BusError) as error:
        print(f"runtime: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
