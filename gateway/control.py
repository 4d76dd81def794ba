"""The control plane, `/api/v1`: every route, and the background work behind them."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response
from starlette.routing import Route

from gateway import billing, deployments, metrics, models, organization, runtimes, tenants
from gateway.api import Act, Call, endpoint
from gateway.auth import Auth
from gateway.deployments import Serving
from gateway.errors import Problem, openai_response
from gateway.export import Exports
from gateway.fleet import Fleet
from gateway.models import Imports
from gateway.rollout import Rollout
from store import usage
from store.db import Database, DatabaseError, now_us

PREFIX = "/api/v1"


@dataclass(frozen=True)
class Engines:
    """What this version's vLLM knows by name."""

    architectures: frozenset[str]
    tool_parsers: frozenset[str]
    reasoning_parsers: frozenset[str]


class Control:
    """Serve `routes` inside `running`, which does the background work."""

    def __init__(
        self, database: Database, auth: Auth, fleet: Fleet, engines: Engines, model_roots: tuple[Path, ...]
    ) -> None:
        self._database, self._auth, self._fleet = database, auth, fleet
        self._metrics = metrics.registry(fleet)
        self._unreconciled = metrics.unreconciled(self._metrics)
        self._exports = Exports(database)
        self.rollout = Rollout(database, fleet, auth)
        self._imports = Imports(database, engines.architectures, model_roots)
        self._serving = Serving(fleet, self.rollout, engines.tool_parsers, engines.reasoning_parsers)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self._imports.resume()
        rollout = asyncio.create_task(self.rollout.run())
        try:
            yield
        finally:
            self.rollout.stop()
            rollout.cancel()
            await asyncio.gather(rollout, return_exceptions=True)
            await self._imports.stop()

    def routes(self) -> list[Route]:
        one = "/deployments/{deployment}"
        organized = endpoint(organization.completions, self._database, self._auth, shown=openai_response)
        return [
            self._route("POST", "/tenants", tenants.create, admin=True),
            self._route("GET", "/tenants", tenants.listed, admin=True),
            self._route("GET", "/tenants/{tenant}", tenants.get, admin=True),
            self._route("PATCH", "/tenants/{tenant}", tenants.change, admin=True),
            self._route("DELETE", "/tenants/{tenant}", tenants.delete, admin=True),
            self._route("POST", "/tenants/{tenant}/keys", tenants.create_key),
            self._route("GET", "/tenants/{tenant}/keys", tenants.list_keys),
            self._route("POST", "/tenants/{tenant}/keys/{key}:rotate", tenants.rotate_key),
            self._route("DELETE", "/tenants/{tenant}/keys/{key}", tenants.revoke_key),
            self._route("POST", "/models", self._importing(models.create)),
            self._route("GET", "/models", self._importing(models.listed)),
            self._route("GET", "/models/{model}", self._importing(models.get)),
            self._route("DELETE", "/models/{model}", models.delete),
            self._route("POST", "/deployments", self._deploying(deployments.create)),
            self._route("GET", "/deployments", self._deploying(deployments.listed)),
            self._route("GET", one, self._deploying(deployments.get)),
            self._route("PATCH", one, self._deploying(deployments.change)),
            self._route("DELETE", one, self._deploying(deployments.delete)),
            self._route("POST", one + ":sleep", self._deploying(deployments.sleep)),
            self._route("POST", one + ":wake", self._deploying(deployments.wake)),
            self._route("POST", one + ":rollback", self._deploying(deployments.roll_back)),
            self._route("POST", "/prices", billing.create_price, admin=True),
            self._route("GET", "/prices", billing.list_prices, admin=True),
            self._route("GET", "/usage", billing.show_usage),
            self._route("GET", "/usage:verify", self._exports.verify, admin=True),
            self._route("GET", "/billing/export", self._exports.serve),
            self._route("POST", "/billing/corrections", billing.create_correction, admin=True),
            self._route("GET", "/billing/corrections", billing.list_corrections),
            self._route("GET", "/gpus", self._running(runtimes.listed), admin=True),
            self._route("POST", "/gpus/{gpu}:role", self._running(runtimes.set_role), admin=True),
            self._route("POST", "/gpus/{gpu}:drain", self._running(runtimes.drain), admin=True),
            self._route("GET", "/fleet", self._running(runtimes.fleet), admin=True),
            self._route("GET", "/metrics", self._show_metrics, admin=True),
            *(Route(before + organization.PATH, organized, methods=["GET"]) for before in ("", "/t/{tenant}")),
            Route(PREFIX + "/{path:path}", endpoint(_nowhere, self._database, self._auth), methods=list(_METHODS)),
        ]

    def _route(self, method: str, path: str, act: Act, admin: bool = False) -> Route:
        return Route(PREFIX + path, endpoint(act, self._database, self._auth, admin), methods=[method])

    def _importing(self, act: Callable[[Call, Imports], Awaitable[Response]]) -> Act:
        return lambda call: act(call, self._imports)

    def _deploying(self, act: Callable[[Call, Serving], Awaitable[Response]]) -> Act:
        return lambda call: act(call, self._serving)

    def _running(self, act: Callable[[Call, Fleet], Awaitable[Response]]) -> Act:
        return lambda call: act(call, self._fleet)

    async def _show_metrics(self, call: Call) -> Response:
        """Tenants and what they do: not for `/metrics`, which needs no key."""
        try:
            async with self._database.read() as connection:
                self._unreconciled.set(await usage.unreconciled(connection, now_us()))
        except DatabaseError:  # the rest is known all the same
            self._unreconciled.set(math.nan)
        return Response(generate_latest(self._metrics), media_type=CONTENT_TYPE_LATEST)


_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


async def _nowhere(call: Call) -> Response:
    raise Problem(404, "no_such_route", f"there is no {call.request.method} {call.request.url.path}")
