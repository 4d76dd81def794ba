"""Peer runtimes, known to a node by their leases and reports: live runtimes, runtimes able to go on with a request."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from runtime.core.device.request import ModelKey, Objective
from runtime.core.fleet.recorded import RecordedFleet
from runtime.core.fleet.watched import WatchedFleet
from runtime.migration.transport import is_loopback
from store.contract.reports import Report
from store.contract.wire import EngineSpec, Lease, ModelState, Role, Run
from store.streams import LEASE_TTL_S


class Peers:
    """Peers of the runtime `id`. Times are monotonic seconds.

    `host_cache`: name of this runtime's host cache.
    `record`: takes records of what this node heard and chose, see runtime/core/fleet/recorded.py."""

    def __init__(self, id: str, host_cache: str, record: Callable[[bytes], None] | None = None) -> None:
        self._id, self._host_cache = id, host_cache
        self._leases: dict[str, tuple[Lease, float]] = {}  # runtime → last lease, time of its arrival
        self._seen = WatchedFleet() if record is None else RecordedFleet(record)

    def changed(self, id: str, lease: Lease | None, now: float) -> None:
        if lease is None:
            self._leases.pop(id, None)
        else:
            self._leases[id] = lease, now
        self._seen.lease_changed(id, lease, now)

    def reported(self, report: Report, now: float) -> None:
        """Take the report of a runtime."""
        self._seen.hear(report, now)

    def spec_changed(self, key: str, spec: EngineSpec | None) -> None:
        """Take the spec of a model that runtimes are to serve; None: no runtime is to serve the model any more."""
        self._seen.spec_changed(key, spec)

    def lease(self, id: str) -> Lease | None:
        """Return the last lease of a runtime."""
        known = self._leases.get(id)
        return known[0] if known else None

    def there(self, now: float) -> list[str]:
        """Return the live runtimes besides this runtime."""
        return [id for id, (_, at) in self._leases.items() if id != self._id and at > now - LEASE_TTL_S]

    def states(self, model: str, now: float) -> dict[str, ModelState | None]:
        """Return the model's state on each live peer that does not drain; None on a peer without the model."""
        leases = {id: self._leases[id][0] for id in self.there(now)}
        return {id: lease.models.get(model) for id, lease in leases.items() if not lease.draining}

    def target(self, run: Run, engine: str, now: float, decodes: bool = False) -> str | None:
        """Return the best runtime to go on with the request; None if no runtime can.

        Runtimes that decode come first, then runtimes on this runtime's host cache; among equal runtimes the dispatch
        chooses. If `decodes`, only a runtime that decodes is returned."""
        model, objective = ModelKey(run.model), Objective(run.ttft_s, run.tbt_s, run.patience_s, run.priority)
        reached: dict[tuple[bool, bool], set[str]] = {}
        for id in self.there(now):
            lease = self._leases[id][0]
            if lease.engine == engine and self._reaches(lease):
                rank = lease.role is Role.PREFILL, lease.host_cache != self._host_cache
                reached.setdefault(rank, set()).add(id)
        for rank in sorted(reached):
            if decodes and rank[0]:
                break
            avoid = self._seen.runtimes.keys() - reached[rank]
            if chosen := self._seen.choose(model, objective, now, decodes=True, avoid=avoid):
                return chosen
        return None

    def _reaches(self, lease: Lease) -> bool:
        """Whether blocks can be carried to the runtime. The loopback address of a different machine is out of reach."""
        if lease.host_cache == self._host_cache:
            return True
        same_machine = _machine(lease.host_cache) == _machine(self._host_cache)
        return bool(lease.receives_at) and (same_machine or not is_loopback(lease.receives_at))


def name_of(host_cache: int) -> str:
    """Return a name of the host cache, equal for exactly the processes of this host that share the cache."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.fstat(host_cache).st_ino}"


def _machine(host_cache: str) -> str:
    return host_cache.partition(":")[0]
