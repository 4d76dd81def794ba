"""Routes for probes and scrapers: whether the gateway lives, whether the gateway can serve a request, and metrics."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from pathlib import Path

import structlog
from msgspec import UNSET, Struct, UnsetType, json
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.http.auth import Auth
from gateway.http.errors import Problem
from gateway.http.reserve import Reserve
from gateway.ops import troubles
from gateway.streams.runtimes import RuntimesView
from store.bus import Bus
from store.db.database import Database, DatabaseError

log = structlog.get_logger()

DATABASE_S_MOST = 2.0  # a frozen database never answers, and a probe waits for a few seconds


class Dying(Struct, frozen=True, omit_defaults=True):
    """A process of `staccato up` that ended lately, and may end again."""

    role: str
    deaths: int  # in a row
    error: str  # class of the error, or how the process ended
    line: str | UnsetType = UNSET  # the last line of the process: for the operator alone


class Ready(Struct, frozen=True):
    """Answer of `/readyz`. `runtimes`: runtimes that can take models; a fleet's gateway may be ready with 0."""

    ready: bool
    missing: list[str]
    runtimes: int
    dying: list[Dying]
    degraded: list[str] = []  # what is away and not needed by most requests


@dataclass
class Health:
    """Probes of a gateway.

    `runtimes`: number of runtimes that this machine is to have; with 0 the gateway is ready without runtimes.
    `data`: folder of the supervisor's list of dying processes (gateway/ops/troubles.py)."""

    database: Database
    bus: Bus
    fleet: RuntimesView
    runtimes: int
    auth: Auth
    reserve: Reserve
    data: Path
    answered_at: float = -math.inf  # monotonic time of the database's last answer

    def routes(self) -> list[Route]:
        return [
            Route("/healthz", self.alive),
            Route("/readyz", self.ready),
            Route("/metrics", self.metrics),
        ]

    async def alive(self, request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """Answer 200 if the gateway can serve a request, else 503 with the reasons.

        The bus must answer, the disk must have room for bookings, and, if the machine is to have runtimes, a runtime
        must be able to take models. The database must have answered at some time within the last `auth.kept_s` seconds:
        until then known keys are served."""
        missing, degraded = list[str](), list[str]()
        if not self.bus.connected:
            missing.append("the bus is away")
        up = sum(bool(lease.engine) for lease in self.fleet.leases.values())
        if self.runtimes and not up:
            missing.append("no runtime is up")
        if lacks := self.reserve.lacks():
            missing.append(lacks)
        operator = False
        try:
            async with asyncio.timeout(DATABASE_S_MOST):
                await self.database.revision()  # any revision will do: in an upgrade, migrations only add
            self.answered_at = time.monotonic()
            operator = await self._is_operator(request)
        except (DatabaseError, TimeoutError) as error:
            log.warning("health.database", error=str(error) or f"no answer within {DATABASE_S_MOST:g} s")
            known = time.monotonic() < self.answered_at + self.auth.kept_s
            (degraded if known else missing).append("the database does not answer")
        said = Ready(not missing, missing, up, self._dying(operator), degraded)
        return Response(json.encode(said), 503 if missing else 200, media_type="application/json")

    async def _is_operator(self, request: Request) -> bool:
        """Whether the request has a key with the scope `fleet`. Raises DatabaseError."""
        try:
            return (await self.auth.caller(request.headers)).permits(("fleet",))
        except Problem:  # no key, or a wrong key
            return False

    def _dying(self, operator: bool) -> list[Dying]:
        """Processes in trouble, with the last lines only for an operator: a line may name files of this machine."""
        return [
            Dying(trouble.role, trouble.deaths, trouble.kind, trouble.line if operator else UNSET)
            for trouble in troubles.known(self.data)
        ]

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
