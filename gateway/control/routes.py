"""The control plane, `/api/v1`: every route, and the background work behind the routes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.routing import Route

from gateway.billing import export, organization
from gateway.billing import routes as billing
from gateway.billing.export import Exports
from gateway.control import (
    audit,
    deployments,
    events,
    joining,
    models,
    openapi,
    operators,
    plan,
    prefixes,
    requests,
    runtimes,
    tenants,
    watching,
)
from gateway.control.deployments import Serving
from gateway.control.events import Feed
from gateway.control.rollout import Rollout
from gateway.http.api import Call, Endpoint, Operation, serving
from gateway.http.auth import Auth
from gateway.http.errors import Problem
from gateway.imports.jobs import Imports
from gateway.imports.sources import Sources
from gateway.inference.metrics import Metrics
from gateway.inference.recent import Recent
from gateway.streams.runtimes import RuntimesView
from store.db.database import Database
from store.db.operators import SCOPES
from store.files.architectures import Known


@dataclass(frozen=True)
class Engines:
    """Names known to the vLLM of this version."""

    known: Known
    tool_parsers: frozenset[str]
    reasoning_parsers: frozenset[str]


class ControlPlane:
    """The control plane. Serve `routes` inside `running`, which runs the background work."""

    def __init__(
        self,
        database: Database,
        auth: Auth,
        fleet: RuntimesView,
        engines: Engines,
        sources: Sources,
        metrics: Metrics,
        answered: Recent,
    ) -> None:
        self._database, self._auth, self._fleet = database, auth, fleet
        self._metrics, self._recent = metrics, answered
        self._exports = Exports(database)
        self.rollout = Rollout(database, fleet, auth)
        self.feed = Feed(database, fleet)
        self._imports = Imports(database, engines.known, sources)
        self._serving = Serving(fleet, self.rollout, engines.tool_parsers, engines.reasoning_parsers)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self._imports.resume()
        background = (self.rollout.run(), self.feed.run(), self._auth.note_uses())
        work = [asyncio.create_task(task) for task in background]
        try:
            yield
        finally:
            self.rollout.stop()
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await self._imports.stop()

    def endpoints(self) -> list[Endpoint]:
        """Endpoints of the control plane in this process; /openapi.json describes these endpoints."""
        one, imports, serving = "/deployments/{deployment}", self._imports, self._serving
        return [
            Endpoint("GET", "/me", tenants.me),
            Endpoint("POST", "/operator-keys", operators.create, "admin"),
            Endpoint("GET", "/operator-keys", operators.listed, "admin"),
            Endpoint("POST", "/operator-keys/{key}:rotate", operators.rotate, "admin"),
            Endpoint("DELETE", "/operator-keys/{key}", operators.revoke, "admin"),
            Endpoint("POST", "/join-tokens", joining.create_token, "admin"),
            Endpoint("GET", "/join-tokens", joining.list_tokens, "admin"),
            Endpoint("DELETE", "/join-tokens/{token}", joining.revoke_token, "admin"),
            Endpoint("GET", "/joined-runtimes", joining.list_runtimes, "admin"),
            Endpoint("DELETE", "/joined-runtimes/{runtime}", joining.revoke_runtime, "admin"),
            Endpoint("POST", "/tenants", tenants.create, "admin"),
            Endpoint("GET", "/tenants", tenants.listed, "admin"),
            Endpoint("GET", "/tenants/{tenant}", tenants.get, "admin"),
            Endpoint("PATCH", "/tenants/{tenant}", tenants.change, "admin"),
            Endpoint("DELETE", "/tenants/{tenant}", tenants.delete, "admin"),
            Endpoint("DELETE", "/tenants/{tenant}/prefixes", prefixes.forget_all, context=serving),
            Endpoint("POST", "/tenants/{tenant}/keys", tenants.create_key),
            Endpoint("GET", "/tenants/{tenant}/keys", tenants.list_keys),
            Endpoint("POST", "/tenants/{tenant}/keys/{key}:rotate", tenants.rotate_key),
            Endpoint("DELETE", "/tenants/{tenant}/keys/{key}", tenants.revoke_key),
            Endpoint("POST", "/models", models.create, context=imports),
            Endpoint("GET", "/models", models.listed, context=imports),
            Endpoint("GET", "/models/{model}", models.get, context=imports),
            Endpoint("DELETE", "/models/{model}", models.delete, context=imports),
            Endpoint("POST", "/models/{model}:cancel", models.cancel, context=imports),
            Endpoint("POST", "/models/{model}:retry", models.retry, context=imports),
            Endpoint("POST", "/deployments", deployments.create, context=serving),
            Endpoint("POST", "/deployments:plan", plan.plan, context=serving),
            Endpoint("GET", "/deployments", deployments.listed, context=serving),
            Endpoint("GET", one, deployments.get, context=serving),
            Endpoint("PATCH", one, deployments.change, context=serving),
            Endpoint("DELETE", one, deployments.delete, context=serving),
            Endpoint("DELETE", one + "/prefixes", prefixes.forget, context=serving),
            Endpoint("POST", one + ":sleep", deployments.sleep, context=serving),
            Endpoint("POST", one + ":wake", deployments.wake, context=serving),
            Endpoint("POST", one + ":promote", deployments.promote, context=serving),
            Endpoint("POST", one + ":rollback", deployments.roll_back, context=serving),
            Endpoint("POST", "/prices", billing.create_price, "admin"),
            Endpoint("GET", "/prices", billing.list_prices, "admin"),
            Endpoint("GET", "/usage", billing.show_usage),
            Endpoint("GET", "/usage:verify", export.verify_bill, "admin", self._exports),
            Endpoint("GET", "/billing/export", export.export, context=self._exports),
            Endpoint("POST", "/billing/corrections", billing.create_correction, "admin"),
            Endpoint("GET", "/billing/corrections", billing.list_corrections),
            Endpoint("GET", "/requests", requests.listed),
            Endpoint("GET", "/requests/{request}", requests.get, context=self._recent),
            Endpoint("GET", "/events", events.stream, context=self.feed),
            Endpoint("GET", "/audit", audit.listed),
            Endpoint("GET", "/audit:verify", audit.verify),
            Endpoint("GET", "/gpus", runtimes.listed, "admin", self._fleet),
            Endpoint("GET", "/gpus/{gpu}/timeline", watching.timeline, "admin", self._fleet),
            Endpoint("GET", "/gpus/{gpu}/pages", watching.pages, "admin", self._fleet),
            Endpoint("POST", "/gpus/{gpu}:role", runtimes.set_role, "admin", self._fleet),
            Endpoint("POST", "/gpus/{gpu}:drain", runtimes.drain, "admin", self._fleet),
            Endpoint("GET", "/fleet", runtimes.fleet, "admin", self._fleet),
            Endpoint("GET", "/metrics", show_metrics, "admin", self),
            Endpoint("GET", organization.PATH, organization.completions),
            Endpoint("GET", "/t/{tenant}" + organization.PATH, organization.completions),
        ]

    def routes(self) -> list[Route]:
        served = [self._route(endpoint, [endpoint.method]) for endpoint in self.endpoints()]
        described = msgspec.json.encode(openapi.document(self.endpoints()))
        shown = Route("/openapi.json", lambda _: Response(described, media_type="application/json"))
        return [*served, shown, self._route(Endpoint("*", "/{path:path}", nowhere, context=served), list(METHODS))]

    def _route(self, endpoint: Endpoint, methods: list[str]) -> Route:
        return Route(endpoint.whole_path, serving(endpoint, self._database, self._auth), methods=methods)

    async def metrics(self) -> bytes:
        """Return metrics about tenants. `/metrics` may not show them, since `/metrics` needs no key."""
        return await self._metrics.shown(self._database)


@Operation(media=("text/plain",), operator=("metrics:read",))
async def show_metrics(call: Call, control: ControlPlane) -> Response:
    """Show metrics about tenants, for Prometheus."""
    return Response(await control.metrics(), media_type=CONTENT_TYPE_LATEST)


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


@Operation(lenient=True, operator=SCOPES)
async def nowhere(call: Call, served: list[Route]) -> Response:
    asked = call.request
    there = [route.methods or set() for route in served if route.path_regex.match(asked.url.path)]
    if there:
        methods = ", ".join(sorted(set[str]().union(*there)))
        detail = f"there is no {asked.method} of {asked.url.path}, only {methods}"
        raise Problem(405, "method_not_allowed", detail, headers={"allow": methods})
    raise Problem(404, "no_such_route", f"there is no {asked.method} {asked.url.path}")
