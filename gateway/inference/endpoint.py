"""The tenant's OpenAI endpoints: find the caller and the route, hand the request on, and answer every error.

Routes: `/v1/...` (the key says the tenant) and `/t/{tenant}/v1/...`. The endpoints are a raw ASGI app: no framework
stands between vLLM's response and the socket, only `ResponseWriter`.

A request passes four stations, a file each, in this order: `endpoint.py`; `asking.py`, which reads the body and finds
the deployment; `serving.py`, which lets the request in, waits for a runtime and meters; `exchange.py`, where vLLM
answers the client. A station knows the later stations alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog
import uuid_utils
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.api import answered, check_operator
from gateway.http.auth import Auth, Caller, Target
from gateway.http.errors import Problem, endpoint_response, from_store
from gateway.http.limits import Disconnected
from gateway.inference.asking import Asking
from gateway.inference.context import RequestContext
from gateway.inference.exchange import Exchange
from gateway.inference.metrics import Metrics
from gateway.inference.routes import MODELS, OPERATOR, REPEATING, ROUTES, ModelCard, ModelCards, ModelPermission
from gateway.inference.serving import RequestServing
from gateway.inference.spans import begin, end
from store.db.database import DatabaseError
from store.telemetry.tracing import Traces

log = structlog.get_logger()


@dataclass
class Inference:
    """The ASGI app mounted at `/v1` and `/t`."""

    auth: Auth
    asking: Asking
    serving: RequestServing
    metrics: Metrics
    traces: Traces | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext(str(uuid_utils.uuid7()), self.metrics.tally("", ""))
        if self.traces:
            context.span = begin(self.traces, context.request_id, scope)
        try:
            await self._respond(Request(scope, receive), send, context)
        except Exception:
            context.status = 500
            raise
        finally:
            context.tally.answered(context.status)
            if context.span:
                end(context.span, context.status)

    async def _respond(self, request: Request, send: Send, context: RequestContext) -> None:
        tenant, path = _split(request.scope["path"])
        try:
            response = await self._answer(request, send, context, tenant, path)
        except Problem as problem:
            response = endpoint_response(problem, context.request_id, path)
        except DatabaseError as error:
            log.warning("inference.database", error=str(error))
            response = endpoint_response(from_store(error), context.request_id, path)
        except Disconnected:
            return
        if response is not None:
            context.status = response.status_code
            await response(request.scope, request.receive, send)

    async def _answer(
        self, request: Request, send: Send, context: RequestContext, tenant: str | None, path: str
    ) -> Response | None:
        """The response, or None if the response was sent already. Raises Problem, DatabaseError, Disconnected."""
        caller = await self._caller(request, tenant)
        if path == MODELS or path.startswith(MODELS + "/"):
            _allow(request, "GET")
            return await self._models(caller, path.removeprefix(MODELS).strip("/"))
        route = ROUTES.get(path)
        if route is None:
            raise Problem(404, "not_found", f"there is no {path} here")
        _allow(request, "POST")
        body = await self.asking.understand(request, path, caller, context)
        exchange = Exchange(request, send, context.request_id, route, body)
        await self.serving.serve(exchange, context, works=path not in REPEATING)
        return None

    async def _caller(self, request: Request, tenant: str | None) -> Caller:
        found = await self.auth.caller(request.headers)
        if found.admin:
            check_operator(found, OPERATOR)
        caller = found if tenant is None else await self.auth.within(found, tenant)
        if caller is None:
            raise Problem(404, "not_found", "there is no such endpoint")
        if "inference" not in caller.scopes:
            raise Problem(403, "scope_missing", "this key lacks the scope `inference`: make one that has it")
        if caller.tenant_id is None:
            raise Problem(404, "not_found", "an operator's key has no tenant of its own: use /t/TENANT/v1")
        return caller

    async def _models(self, caller: Caller, name: str) -> Response:
        """The deployment of that name; without a name a list of the tenant's deployments."""
        if name:
            return answered(_card(name, await self.asking.target(caller, name)))
        assert caller.tenant_id is not None
        targets = await self.auth.deployments(caller.tenant_id)
        return answered(ModelCards(data=[_card(target.name, target) for target in targets]))


def _split(path: str) -> tuple[str | None, str]:
    """Split a path into (tenant's name or None, the path below)."""
    if path.startswith("/t/"):
        tenant, _, rest = path.removeprefix("/t/").partition("/")
        return tenant, "/" + rest
    return None, path


def _allow(request: Request, method: str) -> None:
    if request.method != method:
        raise Problem(405, "method_not_allowed", f"{request.method} is not possible here: use {method}")


def _card(name: str, target: Target) -> ModelCard:
    created = int(target.created_at)
    return ModelCard(
        id=name,
        created=created,
        owned_by=target.owner,
        root=target.spec.digest,
        max_model_len=target.spec.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{target.deployment_id}", created=created)],
    )
