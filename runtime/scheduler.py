"""The scheduler: looks at the whole fleet once a second and says which runtime gives requests to which other, which
of them host a model that not all are to host, and how many there should be.

It knows what the runtimes' leases say, sums of each model and nothing of single requests, and keeps nothing: another
one begins where the last stopped, with the next leases. One of them leads at a time; its orders carry its term, and
runtimes do not obey an earlier one. Nothing waits for it: without a scheduler gateways go on choosing by the same
leases, and only what is badly spread stays so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import uuid

import structlog
import uvloop

from runtime.cluster import JOIN_S_MOST, Cluster, Drain, Join, Migrate, Order, Rules
from runtime.config import SchedulerSettings
from runtime.placing import Placing
from runtime.policy.migration import Load
from runtime.policy.scaling import Band
from runtime.request import ModelKey
from store import grants, observe, signs, wire
from store.bus import LEASE_TTL_S, Bus, BusError, ended
from store.settings import read

log = structlog.get_logger()

ROLE = "scheduler"
TICK_S = 1.0  # also between two reports of a runtime
ALL = 1 << 20  # requests


class Fleet:
    """The machine of the fleet, fed with leases. Runtimes have numbers there, in the order in which they came."""

    def __init__(self, rules: Rules) -> None:
        self.cluster = Cluster(0, {}, rules)
        self.placing = Placing()
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []  # by number
        self._unused: list[int] = []  # numbers of those that will not come back
        self._leases: dict[str, wire.Lease] = {}  # of those that are there
        self._heard_at: dict[str, float] = {}  # also of those that are gone
        self._specs: dict[str, wire.EngineSpec] = {}
        self.draining: set[str] = set()  # those that say so, and those that were told to

    # ── told ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def spec_changed(self, key: str, value: bytes | None) -> None:
        spec = None if value is None else wire.decode(wire.EngineSpec, value)
        self.placing.spec_changed(key, spec)
        if spec is None:
            self._specs.pop(key, None)
        else:
            self._specs[key] = spec

    def places_changed(self, key: str, value: bytes | None) -> None:
        self.placing.places_changed(key, None if value is None else wire.decode(wire.Places, value))

    def heard(self, lease: wire.Lease, now: float) -> None:
        if not lease.engine:  # its device process is being started
            self.gone(lease.runtime)
            return
        number = self._number(lease)
        self._leases[lease.runtime], self._heard_at[lease.runtime] = lease, now
        self.placing.hear(lease, now)
        if self.cluster.devices[number].there:
            self.cluster.hear(self._load(number, lease, now))

    def _number(self, lease: wire.Lease) -> int:
        """A runtime that was started again is another device in the same place."""
        id, known = lease.runtime, self._numbers.get(lease.runtime)
        if known is None:
            known = self._numbers[id] = self._take_number(id)
            self.cluster.joined(known)
        device, before = self.cluster.devices[known], self._leases.get(id)
        anew = before is not None and before.epoch != lease.epoch
        takes_again = before is not None and before.draining and not lease.draining
        if device.there and anew:
            self.cluster.died(known)
        elif device.drains and device.there and takes_again:
            self.cluster.stays(known)
        if lease.draining:
            self.draining.add(id)
        elif anew or takes_again:
            self.draining.discard(id)
        if not self.cluster.devices[known].there and not lease.draining:
            self.cluster.joined(known)
        if lease.draining and self.cluster.devices[known].there:
            self.cluster.leaves(known)
        return known

    def _take_number(self, id: str) -> int:
        if self._unused:
            number = self._unused.pop()
            self._names[number] = id
            return number
        self._names.append(id)
        return len(self._names) - 1

    def _load(self, number: int, lease: wire.Lease, now: float) -> Load:
        models = lease.models.items()
        weights = sum(state.weights_pages for _, state in models)
        used = sum(state.kv_pages for _, state in models)
        step_bytes = sum(
            self._specs[key].kv_bytes_per_token * state.running for key, state in models if key in self._specs
        )
        head = max([state.head_bytes for _, state in models], default=0)  # whoever gets in next, it is no larger
        waited = sum(state.head_bytes + state.queued_bytes for _, state in models)
        shares = {ModelKey(key): state.busy for key, state in models if state.busy}
        return Load(
            device=number,
            at=now,
            kv_bytes=(lease.pages_total - weights) * lease.page_bytes,
            used_bytes=used * lease.page_bytes + head,
            step_bytes=step_bytes,
            running=sum(state.running for _, state in models),
            waiting=sum(state.waiting for _, state in models),
            busy=sum(shares.values()),
            shares=shares,
            queued_bytes=waited - head,
            least_bytes=min([s.least_bytes for _, s in models if s.least_bytes is not None], default=None),
        )

    def gone(self, runtime: str) -> None:
        lease = self._leases.pop(runtime, None)
        self.placing.gone(runtime)
        if lease is None:
            return
        number = self._numbers[runtime]
        if self.cluster.devices[number].there:
            self.cluster.died(number)
        if lease.draining:  # it was told to go
            self.cluster.forgotten(number)
        self.draining.discard(runtime)

    def _forget(self, runtime: str) -> None:
        """Names may be new with every start: those that are gone for good must not pile up."""
        del self._heard_at[runtime]
        number = self._numbers.pop(runtime)
        self.cluster.forgotten(number)
        self._unused.append(number)

    def settled(self, runtime: str) -> None:
        self.cluster.settled(self._numbers[runtime])

    # ── asked ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> list[tuple[str, wire.Migrate | wire.Drain]]:
        """What to say to whom."""
        for runtime, at in list(self._heard_at.items()):
            if now - at > LEASE_TTL_S:
                self.gone(runtime)
            if now - at > JOIN_S_MOST:
                self._forget(runtime)
        return [said for order in self.cluster.tick(now) for said in self._said(order)]

    def _said(self, order: Order) -> list[tuple[str, wire.Migrate | wire.Drain]]:
        match order:
            case Migrate(source, target, model):
                return self._migrate(self._names[source], self._names[target], model)
            case Drain(device):
                self.draining.add(self._names[device])
                return [(self._names[device], wire.Drain(on=True))]
            case Join(count):
                again = sorted(self.draining)[:count]  # they are still there
                self.draining.difference_update(again)
                return [(runtime, wire.Drain(on=False)) for runtime in again]
        return []

    def _migrate(self, source: str, target: str, model: ModelKey | None) -> list[tuple[str, wire.Migrate | wire.Drain]]:
        if model is not None and model not in self._leases[target].models:
            self.settled(source)
            return []
        return [(source, wire.Migrate(target=target, model=model or "", count=1 if model is None else ALL))]

    def wish(self, holder: str, term: int) -> wire.Leader:
        """What the leader says of itself."""
        wanted = self.cluster.wanted if self.cluster.rules.band is not None else 0
        return wire.Leader(holder=holder, term=term, wanted=wanted, draining=sorted(self.draining))


class Scheduler:
    """The process: takes the lead when nobody has it, and gives orders while it does."""

    def __init__(self, bus: Bus, rules: Rules, name: str) -> None:
        self._bus, self._rules, self._name = bus, rules, name
        self._fleet = Fleet(rules)
        self._term = 0  # 0: another one leads
        self._last = 0  # what was said when the lead was kept last
        self._placed = 0  # the last term in which all places were said
        self.orders = 0

    @property
    def leads(self) -> bool:
        return self._term > 0

    async def run(self, stop: asyncio.Event) -> None:
        await self._bus.watch(wire.MODELS, self._fleet.spec_changed)
        await self._bus.watch(wire.PLACES, self._fleet.places_changed)
        await self._bus.watch(wire.LEASES, self._lease_changed)
        while not stop.is_set():
            try:
                await self._lead()
                if self.leads:
                    await self._place()
                if self.leads:
                    await self._give_orders()
            except BusError as error:
                self._term = 0
                log.warning("scheduler.bus_away", error=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await stop.wait()
        if self.leads:
            with contextlib.suppress(BusError):
                await self._bus.delete(wire.LEADER, ROLE)

    async def _lead(self) -> None:
        if not self.leads:
            self._term = self._last = await self._bus.take_lead(ROLE, self._name) or 0
            if not self.leads:
                return
            log.info("scheduler.leads", term=self._term)
        kept = await self._bus.keep_lead(ROLE, self._fleet.wish(self._name, self._term), self._last)
        if kept is None:
            log.warning("scheduler.lead_lost", term=self._term)
            self._term = 0
        else:
            self._last = kept

    def _lease_changed(self, id: str, value: bytes | None) -> None:
        if value is None:
            self._fleet.gone(id)
        else:
            self._fleet.heard(wire.decode(wire.Lease, value), time.monotonic())

    async def _place(self) -> None:
        """A new leader says all places again, of its term: from then on who led before, and does not know yet that it
        does not any more, can't change them."""
        placing, term = self._fleet.placing, self._term
        said = {} if self._placed == term else placing.places
        for key, places in (said | placing.decide(time.monotonic())).items():
            if not await self._say(key, places and wire.replace(places, term=term)):
                return
        self._placed = term

    async def _say(self, key: str, places: wire.Places | None) -> bool:
        """False if somebody else said something meanwhile: a later leader, or nobody knows who."""
        known, last = await self._bus.read(wire.PLACES, key, wire.Places)
        if known is not None and known.term > self._term:
            log.warning("scheduler.lead_lost", term=self._term)
            self._term = 0
            return False
        if places is None:
            await self._bus.delete(wire.PLACES, key, last)
        else:
            log.info("scheduler.place", model=key, runtimes=places.runtimes, leaving=places.leaving)
            if await self._bus.swap(wire.PLACES, key, places, last) is None:
                return False
        self._fleet.placing.places_changed(key, places)
        return True

    async def _give_orders(self) -> None:
        for runtime, order in self._fleet.tick(time.monotonic()):
            self.orders += 1
            refusal = await self._order(runtime, wire.replace(order, term=self._term))
            log.info("scheduler.order", runtime=runtime, refusal=refusal, **_shown(order))
            if refusal and isinstance(order, wire.Migrate):
                self._fleet.settled(runtime)

    async def _order(self, runtime: str, order: wire.Migrate | wire.Drain) -> str:
        """Why it is not obeyed, or nothing."""
        subject = wire.migrate_subject if isinstance(order, wire.Migrate) else wire.drain_subject
        try:
            reply = wire.decode(wire.Reply, await self._bus.request(subject(runtime), order, TICK_S))
        except BusError as error:
            return str(error)
        return reply.reason if reply.refusal is not None else ""


def _shown(order: wire.Migrate | wire.Drain) -> dict[str, object]:
    match order:
        case wire.Migrate(target=target, model=model):
            return {"target": target, "model": model}
        case wire.Drain(on=on):
            return {"drain": on}


async def serve(settings: SchedulerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    name = f"scheduler-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    async with Bus.connect(settings.nats_url, name, grants.SCHEDULER, settings.nats_credentials) as bus:
        band = Band(settings.runtimes_least, settings.runtimes_most) if settings.runtimes_most else None
        giving = asyncio.create_task(signs.give(lambda: bus.connected))
        await Scheduler(bus, Rules(migrate=True, band=band), name).run(stop)
        await ended(giving)


def main() -> int:
    observe.configure_logs("scheduler")
    try:
        settings = read(SchedulerSettings)
        settings.check()
        uvloop.run(serve(settings))
    except (ValueError, BusError) as error:
        print(f"scheduler: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
