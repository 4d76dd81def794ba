"""The runtimes as this gateway sees them: their leases, what they hold, and which of them should take a request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from enum import IntEnum

from store import wire
from store.bus import LEASE_TTL_S, Bus, BusError
from store.wire import Residency


class Coldness(IntEnum):
    """What has to be read before a model can make a token."""

    NONE = 0
    HOST = 1
    DISK = 2


# A model is worth so many requests where it need not be brought in, or read: requests of one model share their steps.
WAY_IN = {Coldness.NONE: 0, Coldness.HOST: 16, Coldness.DISK: 64}

COLDNESS = {
    Residency.RESIDENT: Coldness.NONE,
    Residency.LOADING: Coldness.HOST,
    Residency.STAGED: Coldness.HOST,
    Residency.LEAVING: Coldness.HOST,
    Residency.COLD: Coldness.DISK,
}


class Fleet:
    """A view kept by watching leases. A lease not renewed for its TTL is gone, whoever forgot to say so."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._leases: dict[str, tuple[wire.Lease, float]] = {}
        self._open: Counter[str] = Counter()  # requests of this gateway, by runtime
        self._leader: tuple[wire.Leader, float] | None = None
        self._on_change: list[Callable[[], None]] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        await self._bus.watch(wire.LEASES, self._lease_changed)
        await self._bus.watch(wire.LEADER, self._leader_changed)

    @property
    def connected(self) -> bool:
        return self._bus.connected

    @property
    def leader(self) -> wire.Leader | None:
        """The scheduler that looks after the fleet, and how many runtimes it wishes for."""
        if self._leader is None or time.monotonic() - self._leader[1] > LEASE_TTL_S:
            return None
        return self._leader[0]

    @property
    def leases(self) -> dict[str, wire.Lease]:
        """Of the runtimes that are alive, by id."""
        now = time.monotonic()
        return {id: lease for id, (lease, at) in sorted(self._leases.items()) if now - at < LEASE_TTL_S}

    @property
    def largest_pool_bytes(self) -> int:
        """Of the devices that are known; 0: none is."""
        return max((lease.pages_total * lease.page_bytes for lease in self.leases.values()), default=0)

    def states(self, key: str) -> dict[str, wire.ModelState]:
        """Where the model is, by runtime id."""
        return {id: lease.models[key] for id, lease in self.leases.items() if key in lease.models}

    def attained(self, label: str) -> list[wire.Attained]:
        """How requests with this label kept their objective, on each runtime since it started."""
        return [lease.attainment[label] for lease in self.leases.values() if label in lease.attainment]

    def choose(self, key: str, avoid: frozenset[str] = frozenset()) -> str | None:
        """The runtime to try: the one with the fewest requests, where the model's way to the device counts as many.

        This is the simple rule that needs no scheduler; None when no runtime can take the model now.
        """
        candidates = [
            (
                lease.role is wire.Role.DECODE,  # who only makes tokens gets prompts when nobody else is there
                self._requests(id, lease) + WAY_IN[COLDNESS[lease.models[key].residency]],
                id,
            )
            for id, lease in self.leases.items()
            if id not in avoid and not lease.draining and key in lease.models
            if lease.models[key].residency is not Residency.FAILED
        ]
        return min(candidates)[-1] if candidates else None

    def _requests(self, id: str, lease: wire.Lease) -> int:
        """Of all gateways at its last lease; of this one, now."""
        there = sum(state.running + state.waiting for state in lease.models.values())
        return max(there, self._open[id])

    def took(self, runtime: str) -> None:
        """A request of this gateway is there."""
        self._open[runtime] += 1

    def gave_back(self, runtime: str) -> None:
        """It ended, or is lost to it."""
        self._open[runtime] -= 1

    def failure(self, key: str) -> str | None:
        """Why the model can't be served, when every runtime that knows it says so."""
        states = list(self.states(key).values())
        failed = [state.error for state in states if state.residency is Residency.FAILED]
        return failed[0] if failed and len(failed) == len(states) else None

    async def change(self, timeout_s: float) -> None:
        """Until some lease changed, or the time is up."""
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    def on_change(self, callback: Callable[[], None]) -> None:
        self._on_change.append(callback)

    def _lease_changed(self, id: str, value: bytes | None) -> None:
        if value is None:
            self._leases.pop(id, None)
        else:
            self._leases[id] = (wire.decode(wire.Lease, value), time.monotonic())
        self._changed.set()
        self._changed = asyncio.Event()
        for callback in self._on_change:
            callback()

    def _leader_changed(self, role: str, value: bytes | None) -> None:
        said = None if value is None else wire.decode(wire.Leader, value)
        if said is None:
            self._leader = None
        elif said.term and (self.leader is None or said.term >= self.leader.term):
            self._leader = said, time.monotonic()

    # ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def put(self, spec: wire.EngineSpec) -> None:
        """Every runtime is to be able to serve it. Raises BusError."""
        await self._bus.put(wire.MODELS, spec.key, spec)

    async def delete(self, key: str) -> None:
        """Raises BusError."""
        await self._bus.delete(wire.MODELS, key)

    async def keys(self) -> list[str]:
        """What the runtimes were told to serve."""
        return await self._bus.keys(wire.MODELS)

    async def ask(self, subject: str, message: wire.Message) -> bytes:
        """Of a runtime. Raises BusError."""
        return await self._bus.request(subject, message)

    async def control(self, key: str, op: str) -> wire.Reply:
        """Ask every runtime that has the model to put it to sleep or wake it; the first refusal, or consent. Those that
        can't load it do not count, unless none can."""
        answer = wire.Reply(refusal=wire.Refusal.UNKNOWN_MODEL, reason="no runtime has the model yet")
        for id in list(self.states(key)):
            try:
                subject = wire.control_subject(id)
                reply = wire.decode(wire.Reply, await self._bus.request(subject, wire.Control(model=key, op=op)))
            except BusError as error:
                return wire.Reply(refusal=wire.Refusal.BUSY, reason=str(error))
            if reply.refusal not in (None, wire.Refusal.MODEL_FAILED):
                return reply
            if answer.refusal is not None:
                answer = reply
        return answer
