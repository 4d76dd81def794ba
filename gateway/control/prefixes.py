"""Routes of the control plane for prefixes of ended requests."""

from __future__ import annotations

from starlette.responses import Response

from gateway.control.deployments import Serving, find
from gateway.core.salts import cache_salt
from gateway.http.api import OF_TENANT, Call, Operation
from gateway.http.errors import Problem


@Operation(status=204, query=(OF_TENANT,), problems=(409, 503), operator=("deployments",))
async def forget(call: Call, serving: Serving) -> Response:
    """Forget the prefixes of ended requests to the deployment.

    Later requests compute prompts anew. Other deployments of the tenant with the same engine lose prefixes, too. A
    running request leaves a prefix at the request's end."""
    tenant_id = await call.tenant_id()
    async with call.database.write() as connection:
        deployment = await find(call, connection, tenant_id)
        await call.record(connection, "deployment.prefixes_forgotten", deployment.id, deployment.tenant_id)
    for revision in deployment.live:
        await _forget(call, serving, deployment.tenant_id, revision.engine.key)
    return Response(status_code=204)


@Operation(status=204, problems=(503,), operator=("tenants",))
async def forget_all(call: Call, serving: Serving) -> Response:
    """Forget the prefixes of ended requests to every deployment of the tenant.

    A running request leaves a prefix at the request's end."""
    within = await call.tenant(call.path("tenant"))
    assert within.tenant_id is not None
    async with call.database.write() as connection:
        await call.record(connection, "tenant.prefixes_forgotten", within.tenant_id, within.tenant_id)
    await _forget(call, serving, within.tenant_id, "")
    return Response(status_code=204)


async def _forget(call: Call, serving: Serving, tenant_id: str, key: str) -> None:
    """Have every runtime forget the tenant's prefixes of an engine; an empty `key` is for every engine.

    Raises Problem if a runtime refuses."""
    reply = await serving.fleet.forget(key, cache_salt(call.auth.pepper, tenant_id))
    if reply.refusal is not None:
        raise Problem(503, "runtime_refused", f"{reply.reason}: try again", headers={"retry-after": "2"})
