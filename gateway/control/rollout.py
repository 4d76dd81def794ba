"""Brings the database's wishes to the runtimes, moves traffic to new revisions that can load, and stops failing
canaries.

Several gateways may do so at once, since each step is idempotent. A step reads the bucket's keys *before* the database:
a gateway that put a key had committed its deployment earlier, so a key missing in the database is needed no more.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from gateway.core.canary import fault
from gateway.core.status import loadable
from gateway.http.auth import Auth
from gateway.streams.runtimes import RuntimesView
from store.bus import BusError
from store.contract.deployments import Deployment
from store.contract.wire import EngineSpec
from store.db import audit, deployments
from store.db.database import Database, DatabaseError, now_us

log = structlog.get_logger()

PERIOD_S = 10.0  # repairs changes that another process made or forgot
CANARY_PERIOD_S = 2.0  # while a canary may have to be stopped
RETRY_S = 1.0


class Rollout:
    """Carries out the rollouts. `run` repeats `step`; call `nudge` after a change."""

    def __init__(self, database: Database, fleet: RuntimesView, auth: Auth) -> None:
        self._database, self._fleet, self._auth = database, fleet, auth
        self._due, self._stopping = asyncio.Event(), False
        self._put: dict[str, EngineSpec] = {}
        self._waiting: list[tuple[str, int, str]] = []  # deployment, target revision, engine key
        self._canaries: list[Deployment] = []  # canaries with requests

    async def run(self) -> None:
        """Repeat `step` until `stop`."""
        self._fleet.on_change(self._lease_changed)
        self._fleet.on_models_lost(self.nudge)
        while not self._stopping:
            pause_s = PERIOD_S
            try:
                await self.step()
                pause_s = CANARY_PERIOD_S if self._canaries else PERIOD_S
            except (BusError, DatabaseError) as error:
                log.warning("rollout.retry", in_s=RETRY_S, error=str(error))
                pause_s = RETRY_S
            with contextlib.suppress(TimeoutError):
                # Unlike asyncio.timeout, wait_for of Python 3.11 may swallow a cancellation.
                async with asyncio.timeout(pause_s):
                    await self._due.wait()
            self._due.clear()

    def stop(self) -> None:
        """End `run`. Cancelling alone is not enough: nats-py 2.16 swallows a cancellation during a KV look-up."""
        self._stopping = True
        self._due.set()

    def nudge(self) -> None:
        self._due.set()

    def _lease_changed(self) -> None:
        if any(loadable(self._fleet.states(key).values()) for _, _, key in self._waiting):
            self._due.set()

    async def step(self) -> None:
        """Place engines, judge canaries, and activate loaded targets, once. Raises BusError, DatabaseError."""
        placed = await self._fleet.keys()
        async with self._database.read() as connection:
            found = await deployments.everything(connection)
        await self._place(placed, {r.engine.key: r.engine for d in found for r in d.live})
        self._canaries = [d for d in found if d.target and d.canary and not d.canary.halted]
        if self._canaries:
            await self._judge()
        self._waiting = [(d.id, d.target.number, d.target.engine.key) for d in found if d.target and not d.canary]
        ready = [(id, number) for id, number, key in self._waiting if loadable(self._fleet.states(key).values())]
        if ready:
            await self._activate({deployment.id: deployment for deployment in found}, ready)
            self.nudge()  # the next step frees the engines of the old revisions

    async def _place(self, placed: list[str], wanted: dict[str, EngineSpec]) -> None:
        for key, spec in wanted.items():
            if key not in placed or self._put.get(key) != spec:
                await self._fleet.put(spec)
                self._put[key] = spec
        for key in placed:
            if key not in wanted:
                await self._fleet.delete(key)
                self._put.pop(key, None)

    async def _judge(self) -> None:
        """Stop failing canaries, each in a separate transaction: see audit.record."""
        for deployment in self._canaries:
            assert deployment.target is not None and deployment.canary is not None
            async with self._database.read() as connection:
                ended, failed = await deployments.outcomes(connection, deployment)
            reason = fault(ended, failed, deployment.canary.errors_most)
            if reason is not None:
                await self._halt(deployment, deployment.target.number, reason)

    async def _halt(self, deployment: Deployment, number: int, reason: str) -> None:
        async with self._database.write() as connection:
            if await deployments.halt(connection, deployment, reason):
                said = {"revision": number, "reason": reason}
                whose = (deployment.id, deployment.tenant_id)
                await audit.record(connection, "canary.halted", *whose, "platform", new=said)
        self._auth.forget()
        log.warning("rollout.canary_halted", deployment=deployment.name, revision=number, reason=reason)

    async def _activate(self, found: dict[str, Deployment], ready: list[tuple[str, int]]) -> None:
        async with self._database.write() as connection:
            done = [
                (id, number) for id, number in ready if await deployments.activate(connection, id, number, now_us())
            ]
            for id, number in done:
                said = {"revision": number}
                await audit.record(connection, "revision.activated", id, found[id].tenant_id, "platform", new=said)
        self._auth.forget()
        log.info("rollout.activated", revisions=[f"{found[id].name}@{number}" for id, number in ready])
