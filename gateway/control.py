"""The control plane, `/api/v1`: every route, and the background work behind them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway import billing, deployments, metrics, models, tenants
from gateway.api import Act, Call, endpoint
from gateway.auth import Auth
from gateway.deployments import Serving
from gateway.errors import Problem
from gateway.fleet import Fleet
from gateway.models import Imports
from gateway.objectives import label
from gateway.rollout import Rollout
from gateway.status import attainment
from store import deployments as stored
from store.bus import BusError
from store.db import Database
from store.wire import Lease, Role

PREFIX = "/api/v1"


@dataclass(frozen=True)
class Engines:
    """What this version's vLLM knows by name."""

    architectures: frozenset[str]
    tool_parsers: frozenset[str]
    reasoning_parsers: frozenset[str]


class RoleAsked(msgspec.Struct, forbid_unknown_fields=True):
    role: Role


class Control:
    """Serve `routes` inside `running`, which does the background work."""

    def __init__(
        self, database: Database, auth: Auth, fleet: Fleet, engines: Engines, model_roots: tuple[Path, ...]
    ) -> None:
        self._database, self._auth, self._fleet = database, auth, fleet
        self._metrics = metrics.registry(fleet)
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
            self._route("GET", "/billing/export", billing.export),
            self._route("GET", "/gpus", self._gpus, admin=True),
            self._route("POST", "/gpus/{gpu}:role", self._set_role, admin=True),
            self._route("GET", "/metrics", self._show_metrics, admin=True),
            Route(PREFIX + "/{path:path}", endpoint(_nowhere, self._database, self._auth), methods=list(_METHODS)),
        ]

    def _route(self, method: str, path: str, act: Act, admin: bool = False) -> Route:
        return Route(PREFIX + path, endpoint(act, self._database, self._auth, admin), methods=[method])

    def _importing(self, act: Callable[[Call, Imports], Awaitable[Response]]) -> Act:
        return lambda call: act(call, self._imports)

    def _deploying(self, act: Callable[[Call, Serving], Awaitable[Response]]) -> Act:
        return lambda call: act(call, self._serving)

    async def _set_role(self, call: Call) -> Response:
        """What a runtime does of requests from now on."""
        id, asked = call.path("gpu"), await call.body(RoleAsked)
        if id not in self._fleet.leases:
            raise Problem(404, "no_such_gpu", f"there is no runtime {id!r}: `staccato ps` lists them")
        try:
            await self._fleet.set_role(id, asked.role)
        except BusError as error:
            raise Problem(503, "runtime_refused", f"{error}: try again", headers={"retry-after": "2"}) from error
        return JSONResponse({"id": id, "role": asked.role}, 202)

    async def _gpus(self, call: Call) -> Response:
        """Who holds which device now."""
        async with self._database.read() as connection:
            found = await stored.everything(connection)
        users: dict[str, dict[str, str]] = {}  # engine key → its deployments' names → their labels
        for deployment in found:
            for revision in deployment.live:
                name = f"{deployment.tenant}/{deployment.name}@{revision.number}"
                users.setdefault(revision.engine.key, {})[name] = label(deployment.tenant_id, deployment.id)
        gpus = [_gpu(lease, users) for lease in self._fleet.leases.values()]
        return JSONResponse({"data": gpus, "next_cursor": None})

    async def _show_metrics(self, call: Call) -> Response:
        """Tenants and what they do: not for `/metrics`, which needs no key."""
        return Response(generate_latest(self._metrics), media_type=CONTENT_TYPE_LATEST)


_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


async def _nowhere(call: Call) -> Response:
    raise Problem(404, "no_such_route", f"there is no {call.request.method} {call.request.url.path}")


def _gpu(lease: Lease, users: dict[str, dict[str, str]]) -> dict[str, object]:
    return {
        "id": lease.runtime,
        "engine": lease.engine,
        "draining": lease.draining,
        "role": lease.role,
        "holder": lease.holder or None,
        "switches": lease.switches,
        "moved": lease.moved,
        "memory_bytes": lease.pages_total * lease.page_bytes,
        "used_bytes": lease.pages_used * lease.page_bytes,
        "models": {
            key: {
                "deployments": sorted(users.get(key, {})),
                "residency": state.residency.name.lower(),
                "error": state.error or None,
                "load_ms": state.load_ms,
                "fetches": state.fetches,
                "fetch_ms": state.fetch_ms,
                "weights_bytes": state.weights_pages * lease.page_bytes,
                "kv_bytes": state.kv_pages * lease.page_bytes,
                "kv_fragmentation": state.kv_fragmentation,
                "running": state.running,
                "waiting": state.waiting,
                "turns": state.turns,
                "tokens": state.tokens,
                "attainment": attainment(
                    lease.attainment[label]
                    for label in sorted(set(users.get(key, {}).values()))
                    if label in lease.attainment
                ),
            }
            for key, state in sorted(lease.models.items())
        },
    }
