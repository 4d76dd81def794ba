"""The runtimes as the gateway sees the runtimes: leases, reports, and the runtime that should take a request.

The choice itself is made in runtime/core/fleet/dispatch.py, by the same class that nodes and the simulator run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Set

from runtime.core.device.request import ModelKey, Objective
from runtime.core.fleet.dispatch import COLDNESS, NO_RUNTIMES, Coldness
from runtime.core.fleet.recorded import RecordedFleet
from runtime.core.fleet.watched import WatchedFleet
from store.bus import Bus, BusError
from store.contract import reports, wire
from store.contract.wire import Residency
from store.leases import watch_leases
from store.streams import LEASE_TTL_S

_DEFAULT = Objective()


class RuntimesView:
    """A view of the runtimes, kept by watching leases and reports. A lease not renewed within its TTL is gone."""

    def __init__(self, bus: Bus, record: Callable[[bytes], None] | None = None) -> None:
        """`record` takes records of what this gateway heard and chose: see runtime/core/fleet/recorded.py."""
        self._bus = bus
        self._leases: dict[str, tuple[wire.Lease, float]] = {}
        self._seen = WatchedFleet() if record is None else RecordedFleet(record)
        self._leader: tuple[wire.Leader, float] | None = None
        self.seen_any = False  # a runtime, since this process started
        self._on_change: list[Callable[[], None]] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        await self._bus.watch(wire.MODELS, self._model_changed)
        await self._bus.subscribe(reports.report_subject("*"), self._reported)
        await watch_leases(self._bus, self._lease_changed)
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
        """Leases of live runtimes, by runtime id."""
        now = time.monotonic()
        return {id: lease for id, (lease, at) in sorted(self._leases.items()) if now - at < LEASE_TTL_S}

    @property
    def largest_pool_bytes(self) -> int:
        """Bytes of the largest device pool of a live runtime; 0: no runtime is known."""
        return max((lease.pages_total * lease.page_bytes for lease in self.leases.values()), default=0)

    def states(self, key: str) -> dict[str, wire.ModelState]:
        """State of the model on each live runtime that knows the model, by runtime id."""
        return {id: lease.models[key] for id, lease in self.leases.items() if key in lease.models}

    def attained(self, label: str) -> list[wire.Attained]:
        """How requests with the label kept their objective, for each runtime, since the runtime's start."""
        return [lease.attainment[label] for lease in self.leases.values() if label in lease.attainment]

    def choose(self, key: str, objective: Objective = _DEFAULT, avoid: Set[str] = NO_RUNTIMES) -> str | None:
        """Return the runtime to try for the model `key`; None if no runtime outside `avoid` can take the model now.

        The choice needs no scheduler."""
        return self._seen.choose(ModelKey(key), objective, time.monotonic(), avoid=avoid)

    def coldness(self, key: str, runtime: str) -> Coldness:
        """Return from where the runtime would have to read the model `key`."""
        return COLDNESS[self._leases[runtime][0].models[key].residency]

    def took(self, runtime: str, key: str, tbt_s: float) -> None:
        """Count a request of this gateway at the runtime."""
        self._seen.took(runtime, ModelKey(key), tbt_s)

    def gave_back(self, runtime: str, key: str) -> None:
        """Note that a request of this gateway ended at the runtime, was lost or moved away."""
        self._seen.gave_back(runtime, ModelKey(key))

    def silent(self, runtime: str) -> None:
        """Note that the runtime did not answer: this gateway sends the runtime no request until the next report."""
        self._seen.refused(runtime)

    def failure(self, key: str) -> str | None:
        """Why the model can't be served, if every runtime that knows the model has failed to load the model."""
        states = list(self.states(key).values())
        failed = [state.error for state in states if state.residency is Residency.FAILED]
        return failed[0] if failed and len(failed) == len(states) else None

    async def change(self, timeout_s: float) -> None:
        """Wait until some lease changes, for `timeout_s` seconds at most."""
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    def on_change(self, callback: Callable[[], None]) -> None:
        self._on_change.append(callback)

    def on_models_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the bus has forgotten the models that runtimes are to serve."""
        self._bus.on_lost(lambda names: callback() if wire.MODELS in names else None)

    def _lease_changed(self, id: str, lease: wire.Lease | None) -> None:
        now = time.monotonic()
        if lease is None:
            self._leases.pop(id, None)
        else:
            self._leases[id] = lease, now
            self.seen_any = True
        self._seen.lease_changed(id, lease, now)
        self._tell()

    async def _reported(self, data: bytes) -> None:
        if self._seen.hear(wire.decode(reports.Report, data), time.monotonic()):
            self._tell()

    def _model_changed(self, key: str, value: bytes | None) -> None:
        self._seen.spec_changed(key, None if value is None else wire.decode(wire.EngineSpec, value))

    def _tell(self) -> None:
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
        """Tell every runtime to be able to serve the model. Raises BusError."""
        await self._bus.put(wire.MODELS, spec.key, spec)

    async def delete(self, key: str) -> None:
        """Tell every runtime to forget the model. Raises BusError."""
        await self._bus.delete(wire.MODELS, key)

    async def keys(self) -> list[str]:
        """Keys of the models that the runtimes were told to serve."""
        return await self._bus.keys(wire.MODELS)

    async def forget(self, key: str, salt: str) -> wire.Reply:
        """Have every runtime forget the prefixes that ended requests under a cache salt have left.

        `key`: key of an engine; empty: of every engine. Returns the first refusal, or consent."""
        order = wire.Control(model=key, op="forget", salt=salt)

        async def told(id: str) -> wire.Reply:
            try:
                return wire.decode(wire.Reply, await self._bus.request(wire.control_subject(id), order))
            except BusError as error:
                return wire.Reply(refusal=wire.Refusal.BUSY, reason=str(error))

        replies = await asyncio.gather(*(told(id) for id in self.leases))
        return next((reply for reply in replies if reply.refusal is not None), wire.Reply())

    async def ask(self, subject: str, message: wire.Message) -> bytes:
        """Send a message to the runtime at `subject` and return the answer. Raises BusError."""
        return await self._bus.request(subject, message)

    async def control(self, key: str, op: str) -> wire.Reply:
        """Ask every runtime that has the model to put the model to sleep or to wake the model.

        Returns the first refusal, or consent. Runtimes that can't load the model do not count, unless no runtime can.
        """
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
