"""Brings what the database wants to the runtimes, and moves a deployment's traffic once its new revision could load.

Several gateways may do this at once: each step is idempotent. A key is looked up in the bucket *before* the database is
read: whoever put it had committed its deployment already, so a key that is not wanted then is wanted by nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import structlog

from gateway.auth import Auth
from gateway.fleet import Fleet
from store import deployments, events
from store.bus import BusError
from store.db import Database, DatabaseError, now_us
from store.deployments import Deployment
from store.wire import EngineSpec, ModelState, Residency

log = structlog.get_logger()

PERIOD_S = 10.0  # heals what another process changed or forgot
RETRY_S = 1.0


def loadable(states: Iterable[ModelState]) -> bool:
    """A runtime has loaded it: it is on the device, or was."""
    return any(
        state.residency is Residency.RESIDENT or (state.load_ms > 0 and state.residency is not Residency.FAILED)
        for state in states
    )


class Rollout:
    """Call `nudge` after a change; `step` does the work and is what `run` does again and again."""

    def __init__(self, database: Database, fleet: Fleet, auth: Auth) -> None:
        self._database, self._fleet, self._auth = database, fleet, auth
        self._due, self._stopping = asyncio.Event(), False
        self._put: dict[str, EngineSpec] = {}
        self._waiting: list[tuple[str, int, str]] = []  # deployment, target revision, engine key

    async def run(self) -> None:
        """Until `stop`."""
        self._fleet.on_change(self._lease_changed)
        while not self._stopping:
            pause_s = PERIOD_S
            try:
                await self.step()
            except (BusError, DatabaseError) as error:
                log.warning("rollout.retry", in_s=RETRY_S, error=str(error))
                pause_s = RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):  # wait_for of Python 3.11 may swallow a cancellation
                    await self._due.wait()
            self._due.clear()

    def stop(self) -> None:
        """Cancelling alone is not enough: nats-py 2.16 swallows a cancellation that hits it in a KV look-up."""
        self._stopping = True
        self._due.set()

    def nudge(self) -> None:
        self._due.set()

    def _lease_changed(self) -> None:
        if any(loadable(self._fleet.states(key).values()) for _, _, key in self._waiting):
            self._due.set()

    async def step(self) -> None:
        """Raises BusError, DatabaseError."""
        placed = await self._fleet.keys()
        async with self._database.read() as connection:
            found = await deployments.everything(connection)
        await self._place(placed, {r.engine.key: r.engine for d in found for r in d.live})
        self._waiting = [(d.id, d.target.number, d.target.engine.key) for d in found if d.target]
        ready = [(id, number) for id, number, key in self._waiting if loadable(self._fleet.states(key).values())]
        if ready:
            await self._activate({deployment.id: deployment for deployment in found}, ready)
            self.nudge()  # the engines they leave are to be freed

    async def _place(self, placed: list[str], wanted: dict[str, EngineSpec]) -> None:
        for key, spec in wanted.items():
            if key not in placed or self._put.get(key) != spec:
                await self._fleet.put(spec)
                self._put[key] = spec
        for key in placed:
            if key not in wanted:
                await self._fleet.delete(key)
                self._put.pop(key, None)

    async def _activate(self, found: dict[str, Deployment], ready: list[tuple[str, int]]) -> None:
        async with self._database.write() as connection:
            for id, number in ready:
                if await deployments.activate(connection, id, number, now_us()):
                    tenant_id = found[id].tenant_id
                    await events.record(connection, "revision.activated", id, tenant_id, "platform", str(number))
        self._auth.forget()
        log.info("rollout.activated", revisions=[f"{found[id].name}@{number}" for id, number in ready])
