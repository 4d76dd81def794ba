"""The scheduler: looks at the whole fleet once a second and says which runtime gives requests to which other.

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

from runtime.cluster import Cluster, Migrate, Order, Rules
from runtime.config import SchedulerSettings
from runtime.policy.migration import Load
from runtime.request import ModelKey
from store import observe, wire
from store.bus import LEASE_TTL_S, Bus, BusError

log = structlog.get_logger()

ROLE = "scheduler"
TICK_S = 1.0  # also between two reports of a runtime
ALL = 1 << 20  # requests


class Fleet:
    """The machine of the fleet, fed with leases. Runtimes have numbers there, in the order in which they came."""

    def __init__(self, rules: Rules) -> None:
        self.cluster = Cluster(0, {}, rules)
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._epochs: dict[str, int] = {}
        self._heard_at: dict[str, float] = {}
        self._specs: dict[str, wire.EngineSpec] = {}

    def spec_changed(self, key: str, value: bytes | None) -> None:
        if value is None:
            self._specs.pop(key, None)
        else:
            self._specs[key] = wire.decode(wire.EngineSpec, value)

    def heard(self, lease: wire.Lease, now: float) -> None:
        if not lease.engine:  # its device process is being started
            self.gone(lease.runtime)
            return
        number = self._number(lease)
        self._heard_at[lease.runtime] = now
        self.cluster.hear(self._load(number, lease, now))

    def _number(self, lease: wire.Lease) -> int:
        """A runtime that was started again is another device in the same place."""
        id, known = lease.runtime, self._numbers.get(lease.runtime)
        if known is None:
            known = self._numbers[id] = len(self._names)
            self._names.append(id)
            self.cluster.joined(known)
        elif not self.cluster.devices[known].there:
            self.cluster.joined(known)
        elif self._epochs[id] != lease.epoch:
            self.cluster.died(known)
            self.cluster.joined(known)
        self._epochs[id] = lease.epoch
        return known

    def _load(self, number: int, lease: wire.Lease, now: float) -> Load:
        models = lease.models.items()
        weights = sum(state.weights_pages for _, state in models)
        used = sum(state.kv_pages for _, state in models)
        step_bytes = sum(
            self._specs[key].kv_bytes_per_token * state.running for key, state in models if key in self._specs
        )
        shares = {ModelKey(key): state.busy for key, state in models if state.busy}
        return Load(
            device=number,
            at=now,
            kv_bytes=(lease.pages_total - weights) * lease.page_bytes,
            used_bytes=used * lease.page_bytes,
            step_bytes=step_bytes,
            running=sum(state.running for _, state in models),
            waiting=sum(state.waiting for _, state in models),
            busy=sum(shares.values()),
            shares=shares,
        )

    def gone(self, runtime: str) -> None:
        self._heard_at.pop(runtime, None)
        number = self._numbers.get(runtime)
        if number is not None and self.cluster.devices[number].there:
            self.cluster.died(number)

    def tick(self, now: float) -> list[tuple[str, wire.Migrate]]:
        """What to say to whom."""
        for runtime, at in list(self._heard_at.items()):
            if now - at > LEASE_TTL_S:
                self.gone(runtime)
        return [said for order in self.cluster.tick(now) if (said := self._said(order)) is not None]

    def _said(self, order: Order) -> tuple[str, wire.Migrate] | None:
        if not isinstance(order, Migrate):
            return None
        source, target = self._names[order.source], self._names[order.target]
        count = 1 if order.model is None else ALL
        return source, wire.Migrate(target=target, model=order.model or "", count=count)

    def settled(self, runtime: str) -> None:
        self.cluster.settled(self._numbers[runtime])


class Scheduler:
    """The process: takes the lead when nobody has it, and gives orders while it does."""

    def __init__(self, bus: Bus, rules: Rules, name: str) -> None:
        self._bus, self._rules, self._name = bus, rules, name
        self._fleet = Fleet(rules)
        self._term = 0  # 0: another one leads
        self._last = 0  # what was said when the lead was kept last
        self.orders = 0

    @property
    def leads(self) -> bool:
        return self._term > 0

    async def run(self, stop: asyncio.Event) -> None:
        await self._bus.watch(wire.MODELS, self._fleet.spec_changed)
        await self._bus.watch(wire.LEASES, self._lease_changed)
        while not stop.is_set():
            try:
                await self._lead()
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
        if self.leads:
            kept = await self._bus.keep_lead(ROLE, self._name, self._last)
            if kept is None:
                log.warning("scheduler.lead_lost", term=self._term)
                self._term = 0
            else:
                self._last = kept
        else:
            self._term = self._last = await self._bus.take_lead(ROLE, self._name) or 0
            if self.leads:
                log.info("scheduler.leads", term=self._term)

    def _lease_changed(self, id: str, value: bytes | None) -> None:
        if value is None:
            self._fleet.gone(id)
        else:
            self._fleet.heard(wire.decode(wire.Lease, value), time.monotonic())

    async def _give_orders(self) -> None:
        for runtime, migrate in self._fleet.tick(time.monotonic()):
            self.orders += 1
            log.info("scheduler.migrate", source=runtime, target=migrate.target, model=migrate.model)
            order = wire.replace(migrate, term=self._term)
            try:
                reply = wire.decode(wire.Reply, await self._bus.request(wire.migrate_subject(runtime), order, TICK_S))
            except BusError as error:
                log.warning("scheduler.not_heard", runtime=runtime, error=str(error))
                self._fleet.settled(runtime)
                continue
            if reply.refusal is not None:
                log.warning("scheduler.refused", runtime=runtime, reason=reply.reason)
                self._fleet.settled(runtime)


async def serve(settings: SchedulerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    name = f"scheduler-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    async with Bus.connect(settings.nats_url, name) as bus:
        await Scheduler(bus, Rules(migrate=True), name).run(stop)


def main() -> int:
    observe.configure_logs("scheduler")
    try:
        uvloop.run(serve(SchedulerSettings()))
    except (ValueError, BusError) as error:
        print(f"scheduler: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
