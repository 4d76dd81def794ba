"""The scheduler: looks at the whole fleet once a second, orders runtimes to give requests to less loaded runtimes,
places models with limited replicas on runtimes, and says how many runtimes there should be.

The scheduler knows the leases of the runtimes: sums for each model, and no single requests. The scheduler keeps no
state: a new scheduler begins with the next leases where the last scheduler stopped. A single scheduler leads at a time.
Orders carry the term of the lead, and runtimes refuse orders of an earlier term. No process waits for the scheduler:
without a scheduler, gateways go on choosing by the leases, and only badly spread load stays badly spread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable

import structlog
import uvloop

from runtime.config import SchedulerSettings
from runtime.core.device.request import ModelKey
from runtime.core.fleet.assignment import Placing
from runtime.core.fleet.cluster import JOIN_S_MOST, Cluster, DrainOrder, Join, MigrateOrder, Order, RoleOrder, Rules
from runtime.core.fleet.headroom import headroom
from runtime.core.fleet.rebalance import LackingModel, Load
from runtime.core.fleet.report import kv_room_bytes, needed_pages
from runtime.core.fleet.roles import RoleRule, RoleView
from runtime.core.fleet.scaling import Band
from store.bus import Bus, BusError
from store.contract import grants, wire
from store.leases import watch_leases
from store.settings import read
from store.streams import LEASE_TTL_S
from store.tasks import ended
from store.telemetry import observe, signs

log = structlog.get_logger()

ROLE = "scheduler"
TICK_S = 1.0  # also the interval between two reports of a runtime
ALL = 1 << 20  # requests: more than a runtime has
Sent = wire.Migrate | wire.Drain | wire.SetRole  # orders to runtimes
SUBJECTS: dict[type, Callable[[str], str]] = {
    wire.Migrate: wire.migrate_subject,
    wire.Drain: wire.drain_subject,
    wire.SetRole: wire.role_subject,
}


class LeasedFleet:
    """Feeds the pure `Cluster` and `Placing` with leases and turns their orders into messages.

    In the cluster runtimes are numbered devices; numbers of forgotten runtimes are used again."""

    def __init__(self, rules: Rules, nodes: str = "") -> None:
        """`nodes`: name of the nodes that come and go, without the number; "": runtimes come and go by themselves."""
        self._nodes = re.compile(rf"{re.escape(nodes)}-(\d+)-r\d+") if nodes else None
        self.cluster = Cluster(0, {}, rules)
        self.placing = Placing()
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []  # by number
        self._unused: list[int] = []  # numbers of runtimes that will not come back
        self._leases: dict[str, wire.Lease] = {}  # last leases of the runtimes present
        self._heard_at: dict[str, float] = {}  # time of the last lease, also for runtimes that are gone
        self._specs: dict[str, wire.EngineSpec] = {}
        self.surplus: set[str] = set()  # runtimes drained for want of load, by their leases or by an order on its way

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
        if not lease.engine:  # the device process is being started
            self.gone(lease.runtime)
            return
        number = self._number(lease)
        self._leases[lease.runtime], self._heard_at[lease.runtime] = lease, now
        self.placing.hear(lease, now)
        device = self.cluster.devices[number]
        device.role = lease.role
        if device.there:
            self.cluster.hear(self._load(number, lease, now))

    def _number(self, lease: wire.Lease) -> int:
        """Number of the lease's runtime. Tells the cluster of a runtime that came, restarted, drains or stays.

        A restarted runtime is a new device under the old number."""
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
        if lease.surplus:
            self.surplus.add(id)
        elif anew or takes_again or lease.draining:  # also drained by an operator, or about to end
            self.surplus.discard(id)
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
        kv_bytes = kv_room_bytes(lease, {key: state.running + state.waiting for key, state in models})
        free = headroom(sum(state.high for _, state in models))
        used = sum(needed_pages(state) for _, state in models)
        step_bytes = sum(
            _step_bytes(self._specs[key], state, lease.page_bytes) for key, state in models if key in self._specs
        )
        head = max([state.head_bytes for _, state in models], default=0)  # the next request to run is no larger
        waited = sum(state.head_bytes + state.queued_bytes for _, state in models)
        shares = {ModelKey(key): state.busy for key, state in models if state.busy}
        return Load(
            device=number,
            at=now,
            kv_bytes=kv_bytes,
            used_bytes=used * lease.page_bytes + head + free * kv_bytes,
            step_bytes=step_bytes,
            running=sum(state.running for _, state in models),
            waiting=sum(state.waiting for _, state in models),
            busy=sum(shares.values()) + free,
            shares=shares,
            queued_bytes=waited - head,
            least_bytes=min([s.least_bytes for _, s in models if s.least_bytes is not None], default=None),
            lacking=self._lacking(lease),
            roles=self._role_view(number, lease, now) if self.cluster.rules.roles else None,
            node=self._node(lease.runtime),
        )

    def _node(self, runtime: str) -> int | None:
        """Number of the runtime's node; None: the runtime is of no node that comes and goes."""
        found = self._nodes.fullmatch(runtime) if self._nodes else None
        return int(found[1]) if found else None

    def _role_view(self, number: int, lease: wire.Lease, now: float) -> RoleView:
        attained, states = lease.attainment.values(), lease.models.items()
        with_requests = [key for key, state in states if state.running + state.waiting and key in self._specs]
        return RoleView(
            device=number,
            at=now,
            role=lease.role,
            memory_bytes=lease.pages_total * lease.page_bytes,
            prompt_s=lease.prompt_s,
            tokens=sum(each.tokens for each in attained),
            late=sum(each.tokens - each.on_time for each in attained),
            busy=sum(state.busy for _, state in states),
            weights={ModelKey(key): self._specs[key].weight_bytes for key in with_requests},
            given=lease.role_given,
        )

    def _lacking(self, lease: wire.Lease) -> dict[ModelKey, LackingModel]:
        found = {}
        for key, state in lease.models.items():
            kv_bytes = needed_pages(state) * lease.page_bytes + state.head_bytes + state.queued_bytes
            spec = self._specs.get(key)
            if spec is not None and kv_bytes > lease.pages_total * lease.page_bytes - spec.weight_bytes:
                found[ModelKey(key)] = LackingModel(state.running + state.waiting, kv_bytes, spec.weight_bytes)
        return found

    def gone(self, runtime: str) -> None:
        lease = self._leases.pop(runtime, None)
        self.placing.gone(runtime)
        if lease is None:
            return
        number = self._numbers[runtime]
        if self.cluster.devices[number].there:
            self.cluster.died(number)
        if lease.draining:  # the runtime was told to go
            self.cluster.forgotten(number)
        self.surplus.discard(runtime)

    def _forget(self, runtime: str) -> None:
        """Forgets a runtime gone for good. Names may be new at each start, so old names must not pile up."""
        del self._heard_at[runtime]
        number = self._numbers.pop(runtime)
        self.cluster.forgotten(number)
        self._unused.append(number)

    def settled(self, runtime: str) -> None:
        self.cluster.settled(self._numbers[runtime])

    def not_drained(self, runtime: str) -> None:
        """Note that a runtime did not obey the order to drain, and goes on taking requests."""
        self.surplus.discard(runtime)
        number = self._numbers.get(runtime)
        if number is not None and self.cluster.devices[number].there and self.cluster.devices[number].drains:
            self.cluster.stays(number)

    # ── asked ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> list[tuple[str, Sent]]:
        """Orders to send now, as pairs of runtime and message; first drops runtimes without a recent lease."""
        for runtime, at in list(self._heard_at.items()):
            if now - at > LEASE_TTL_S:
                self.gone(runtime)
            if now - at > JOIN_S_MOST:
                self._forget(runtime)
        return [said for order in self.cluster.tick(now) for said in self._said(order)]

    def _said(self, order: Order) -> list[tuple[str, Sent]]:
        match order:
            case MigrateOrder(source, target, model, count):
                return self._migrate(self._names[source], self._names[target], model, count)
            case DrainOrder(device):
                self.surplus.add(self._names[device])
                return [(self._names[device], wire.Drain(on=True))]
            case Join(count):
                # Surplus runtimes are still present. The node that would leave last comes back first.
                again = sorted(self.surplus, key=lambda id: (self._node(id) or 0, id))[:count]
                self.surplus.difference_update(again)
                return [(runtime, wire.Drain(on=False)) for runtime in again]
            case RoleOrder(device, role):
                return [(self._names[device], wire.SetRole(role=role))]
        return []

    def _migrate(self, source: str, target: str, model: ModelKey | None, count: int | None) -> list[tuple[str, Sent]]:
        if model is not None and model not in self._leases[target].models:
            self.settled(source)
            return []
        everything = 1 if model is None else ALL
        return [(source, wire.Migrate(target=target, model=model or "", count=count or everything))]

    def wish(self, holder: str, term: int) -> wire.Leader:
        """Message of the leader about its term, the number of runtimes wanted, and the runtimes no longer needed."""
        wanted = self.cluster.wanted if self.cluster.rules.band is not None else 0
        return wire.Leader(holder=holder, term=term, wanted=wanted, draining=sorted(self.surplus))


class Scheduler:
    """Scheduler process: takes the lead if no process has the lead, and gives orders while leading."""

    def __init__(self, bus: Bus, rules: Rules, name: str, nodes: str = "") -> None:
        """`nodes`: as for `LeasedFleet`."""
        self._bus, self._rules, self._name = bus, rules, name
        self._fleet = LeasedFleet(rules, nodes)
        self._term = 0  # term of this lead; 0: this process does not lead
        self._last = 0  # revision of the leader's key when the lead was last kept
        self._placed = 0  # last term in which every place was written
        self.orders = 0

    @property
    def leads(self) -> bool:
        return self._term > 0

    async def run(self, stop: asyncio.Event) -> None:
        self._bus.on_lost(self._bus_lost)
        await self._bus.watch(wire.MODELS, self._fleet.spec_changed)
        await self._bus.watch(wire.PLACES, self._fleet.places_changed)
        await watch_leases(self._bus, self._lease_changed)
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

    def _bus_lost(self, names: frozenset[str]) -> None:
        """Has every place written again if the bucket of places was lost."""
        if wire.PLACES in names:
            self._placed = 0

    async def _lead(self) -> None:
        if not self.leads:
            lead = await self._bus.take_lead(ROLE, self._name)
            if lead is None:
                return
            self._term, self._last = lead.term, lead.last
            log.info("scheduler.leads", term=self._term)
        kept = await self._bus.keep_lead(ROLE, self._fleet.wish(self._name, self._term), self._last)
        if kept is None:
            log.warning("scheduler.lead_lost", term=self._term)
            self._term = 0
        else:
            self._last = kept

    def _lease_changed(self, id: str, lease: wire.Lease | None) -> None:
        if lease is None:
            self._fleet.gone(id)
        else:
            self._fleet.heard(lease, time.monotonic())

    async def _place(self) -> None:
        """Writes changed places; a new leader first writes every place again, with its term.

        An earlier leader, unaware of losing the lead, can't change places of a later term."""
        placing, term = self._fleet.placing, self._term
        said = {} if self._placed == term else placing.places
        for key, places in (said | placing.decide(time.monotonic())).items():
            if not await self._say(key, places and wire.replace(places, term=term)):
                return
        self._placed = term

    async def _say(self, key: str, places: wire.Places | None) -> bool:
        """Writes the places of a model. Returns False if a later leader or an unknown writer wrote meanwhile."""
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
        orders = self._fleet.tick(time.monotonic())
        if any(isinstance(order, wire.Drain) for _, order in orders):
            await self._lead()  # a process that starts runtimes learns the wanted number before the runtime drains
        for runtime, order in orders if self.leads else ():
            self.orders += 1
            refusal = await self._order(runtime, wire.replace(order, term=self._term))
            log.info("scheduler.order", runtime=runtime, refusal=refusal, **_shown(order))
            if refusal and isinstance(order, wire.Migrate):
                self._fleet.settled(runtime)
            if refusal and isinstance(order, wire.Drain) and order.on:
                self._fleet.not_drained(runtime)

    async def _order(self, runtime: str, order: Sent) -> str:
        """Sends an order and returns why the runtime does not obey; "" if the runtime obeys."""
        try:
            reply = wire.decode(wire.Reply, await self._bus.request(SUBJECTS[type(order)](runtime), order, TICK_S))
        except BusError as error:
            return str(error)
        return reply.reason if reply.refusal is not None else ""


def _shown(order: Sent) -> dict[str, object]:
    match order:
        case wire.Migrate(target=target, model=model, count=count):
            return {"target": target, "model": model, "requests": "all" if count >= ALL else count}
        case wire.Drain(on=on):
            return {"drain": on}
        case wire.SetRole(role=role):
            return {"role": str(role)}


def _step_bytes(spec: wire.EngineSpec, state: wire.ModelState, page_bytes: int) -> int:
    """Bytes of KV cache that a step of every running request adds, if the requests are equally long."""
    if not state.running:
        return 0
    each = needed_pages(state) * page_bytes // state.running
    return spec.kv.growth(max(0, spec.kv.tokens(each, 1, spec.max_model_len))) * state.running


async def serve(settings: SchedulerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    name = f"scheduler-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    identity = (grants.SCHEDULER, settings.nats_credentials, settings.nats_ca, settings.nats_replicas)
    async with Bus.connect(settings.nats_url, name, *identity) as bus:
        each = settings.node_runtimes if settings.nodes_scaled else None
        band = None
        if settings.runtimes_most:
            band = Band(settings.runtimes_least, settings.runtimes_most, node_devices=each)
        giving = asyncio.create_task(signs.give(lambda: bus.connected))
        roles = RoleRule() if settings.roles == "auto" else None
        await Scheduler(bus, Rules(migrate=True, band=band, roles=roles), name, settings.nodes_scaled).run(stop)
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
