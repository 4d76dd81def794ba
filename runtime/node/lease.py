"""The lease of a runtime: sign of life and state for gateways, the scheduler and other runtimes."""

from __future__ import annotations

import asyncio
import contextlib
import time

from msgspec import UNSET

from runtime.migration.host import Host
from runtime.migration.migrate import Migrations
from runtime.node.child import DeviceChild
from runtime.node.gateways import Gateways
from runtime.node.own import OwnState
from runtime.node.serving import ModelServing
from store.bus import Bus, BusError
from store.contract import wire
from store.contract.device_bytes import DeviceBytes
from store.contract.leases import LeaseParts

LEASE_PERIOD_S = 1.0


class LeaseKeeper:
    """Renews the lease of a runtime. `law`: costs of any model on this device."""

    def __init__(
        self,
        bus: Bus,
        own: OwnState,
        host: Host,
        gateways: Gateways,
        serving: ModelServing,
        child: DeviceChild,
        migrations: Migrations,
        law: dict[str, float],
    ) -> None:
        self._bus, self._own, self._host, self._gateways = bus, own, host, gateways
        self._serving, self._child, self._migrations, self._law = serving, child, migrations, law
        self._parts = LeaseParts()
        bus.on_lost(self._lost)

    async def keep(self) -> None:
        """Renew the lease every LEASE_PERIOD_S seconds, and at once if `lease_due` is set."""
        due = self._own.lease_due
        while True:
            due.clear()
            with contextlib.suppress(BusError):  # NATS is away: the lease runs out, gateways know
                await self._publish()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEASE_PERIOD_S):  # wait_for of Python 3.11 may swallow a cancellation
                    await due.wait()

    async def _publish(self) -> None:
        base, lease = self._parts.split(self.lease(), time.monotonic())
        if base is not None:
            try:
                await self._bus.put(wire.LEASE_BASES, self._own.id, base, LEASE_PERIOD_S)
            except BusError:
                self._parts.forget()
                raise
        await self._bus.put(wire.LEASES, self._own.id, lease, LEASE_PERIOD_S)

    def _lost(self, buckets: frozenset[str]) -> None:
        if wire.LEASE_BASES in buckets:
            self._parts.forget()

    def lease(self) -> wire.Lease:
        """Return the lease, with the states of all models."""
        own, state = self._own, self._own.state
        return wire.Lease(
            runtime=own.id,
            epoch=own.epoch,
            engine=own.engine if own.device else "",
            draining=own.draining,
            surplus=own.surplus,
            role=own.role,
            role_given=own.role_given,
            prompt_s=round(own.prompt_s, 3),
            host_cache=self._host.host_cache_id,
            receives_at=self._host.door.address,
            reads=self._host.door.agents is not None,
            holder=state.holder,
            switches=state.switches,
            moved=self._migrations.moved,
            false_losses=self._gateways.false_losses,
            page_bytes=state.page_bytes,
            pages_total=state.pages_total,
            pages_used=state.pages_used,
            device_bytes=state.device_bytes if state.device_bytes != DeviceBytes() else UNSET,
            block_tokens=state.block_tokens,
            models=self._models(),
            attainment=state.attainment,
            accounts=state.accounts,
            wakes=state.wakes,
            law=self._law,
            switch_times=state.switch_times,
        )

    def _models(self) -> dict[str, wire.ModelState]:
        """States of models for the lease: without leaving models, and with models in quarantine marked."""
        shown = self._child.shown(self._own.state.models, self._serving.leaving)
        return self._child.quarantine.shown_in(shown, self._serving.hosted, time.monotonic())
