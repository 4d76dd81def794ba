"""Watching the leases of all runtimes on the bus."""

from __future__ import annotations

from collections.abc import Callable

from store.bus import Bus
from store.contract import wire
from store.contract.leases import WholeLeases


async def watch_leases(bus: Bus, changed: Callable[[str, wire.Lease | None], None]) -> None:
    """Call `changed` with a runtime's id and each new lease, with the states of all models; None: given back."""
    whole = WholeLeases(changed)

    def base_changed(id: str, value: bytes | None) -> None:
        whole.base_changed(id, None if value is None else wire.decode(wire.LeaseBase, value))

    def lease_changed(id: str, value: bytes | None) -> None:
        whole.lease_changed(id, None if value is None else wire.decode(wire.Lease, value))

    await bus.watch(wire.LEASE_BASES, base_changed)
    await bus.watch(wire.LEASES, lease_changed)
