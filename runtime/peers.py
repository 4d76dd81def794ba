"""The other runtimes, as a node knows them by their leases: who is there, and who could go on with its requests."""

from __future__ import annotations

import os
from pathlib import Path

from runtime.transport import is_loopback
from store.bus import LEASE_TTL_S
from store.wire import Lease, ModelState, Residency, Role


class Peers:
    """Of the runtime `id`. Times are monotonic seconds."""

    def __init__(self, id: str, host_cache: str) -> None:
        self._id, self._host_cache = id, host_cache  # its name
        self._leases: dict[str, tuple[Lease, float]] = {}  # and when they said so

    def changed(self, id: str, lease: Lease | None, now: float) -> None:
        if lease is None:
            self._leases.pop(id, None)
        else:
            self._leases[id] = lease, now

    def lease(self, id: str) -> Lease | None:
        """The last of that runtime."""
        known = self._leases.get(id)
        return known[0] if known else None

    def there(self, now: float) -> list[str]:
        """Runtimes besides this one."""
        return [id for id, (_, at) in self._leases.items() if id != self._id and at > now - LEASE_TTL_S]

    def states(self, model: str, now: float) -> dict[str, ModelState | None]:
        """Of the model at those that are there and stay; None where it is not."""
        leases = {id: self._leases[id][0] for id in self.there(now)}
        return {id: lease.models.get(model) for id, lease in leases.items() if not lease.draining}

    def target(self, model: str, engine: str, now: float, decodes: bool = False) -> str | None:
        """A runtime that has the model: of those that decode, if there are, and of those that share our host cache, if
        there are, that with the fewest requests. None but one that decodes, if it is to be one that does."""
        leases = [self._leases[id][0] for id in self.there(now)]
        peers = [
            (
                lease.role is Role.PREFILL,
                lease.host_cache != self._host_cache,
                state.residency is not Residency.RESIDENT,
                _requests(lease),
                lease.runtime,
            )
            for lease in leases
            if not lease.draining and lease.engine == engine and self._reaches(lease)
            if (state := lease.models.get(model)) is not None and state.residency is not Residency.FAILED
        ]
        if not peers or (decodes and min(peers)[0]):
            return None
        return min(peers)[-1]

    def _reaches(self, lease: Lease) -> bool:
        """Whether blocks can be carried to it. The loopback of another machine is not ours."""
        if lease.host_cache == self._host_cache:
            return True
        same_machine = _machine(lease.host_cache) == _machine(self._host_cache)
        return bool(lease.receives_at) and (same_machine or not is_loopback(lease.receives_at))


def _requests(lease: Lease) -> int:
    return sum(state.running + state.waiting for state in lease.models.values())


def name_of(host_cache: int) -> str:
    """The same for all processes of this host that share it, and for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.fstat(host_cache).st_ino}"


def _machine(host_cache: str) -> str:
    return host_cache.partition(":")[0]
