"""Routes of the control plane for deployments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import msgspec
from msgspec import Meta, structs
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import Response

from gateway.control.rollout import Rollout
from gateway.core.objectives import label
from gateway.core.status import Status, engine_shared, loadable, status
from gateway.core.tenants import ManagedBy
from gateway.http.api import (
    OF_TENANT,
    Answer,
    Body,
    Call,
    Name,
    Operation,
    Page,
    Time,
    answered,
    etag,
    one_of,
    patched,
    time_text,
)
from gateway.http.errors import Fault, Problem, invalid, not_found
from gateway.streams.runtimes import RuntimesView
from store.contract import wire
from store.contract.deployments import Deployment, Share, Spec
from store.contract.priorities import Priority, priority
from store.contract.tasks import Task
from store.contract.warm.schedule import schedule
from store.db import deployments, models, tenants
from store.db.database import now_us
from store.db.deployments import engine_of
from store.db.models import StoredModel
from store.files.architectures import refusal


class NewDeployment(Spec, frozen=True, kw_only=True):
    """The spec and the tenant of a new deployment."""

    name: Name
    tenant: str | None = None  # tenant's name, with the admin key
    managed_by: ManagedBy | None = None  # declared object that the deployment is made for; None: made by hand

    def spec(self) -> Spec:
        return Spec(**{field: getattr(self, field) for field in Spec.__struct_fields__})


class Change(Spec, frozen=True, kw_only=True):
    """The newest spec after a patch, and the share of requests that the new revision gets until it is promoted."""

    canary: Share | None = None  # None: every request, as soon as a runtime has loaded the revision

    def spec(self) -> Spec:
        return Spec(**{field: getattr(self, field) for field in Spec.__struct_fields__})


class Rollback(Body, frozen=True):
    revision: Annotated[int, Meta(ge=1)] | None = None  # None: the revision before


class ShownTarget(Spec, frozen=True, kw_only=True):
    """The spec of a revision that is to take over from the active revision, or that has a share as a canary."""

    revision: int
    digest: str
    engine: str
    canary: Share | None  # None: the revision takes over as soon as a runtime has loaded the model


class ShownDeployment(Spec, frozen=True, kw_only=True):
    """The spec of the active revision, which serves the requests; a newer revision stands in `target`.

    `status.desired_state` is the last order: asleep after `:sleep`, awake after `:wake`. A request wakes a deployment
    without changing the order, so `status.phase` alone says what the deployment is now."""

    id: str
    name: str
    tenant: str
    digest: str
    engine: str
    task: Task  # what the model makes, by the model's files: decides which paths answer
    target: ShownTarget | None  # None: there is no newer revision than the active one
    # The target's share; None: no target, or the target takes over as soon as a runtime has loaded it.
    canary: Share | None
    managed_by: ManagedBy | None  # declared object that the deployment was made for; None: made by hand
    status: Status
    created_at: Time


@dataclass(frozen=True)
class Serving:
    """Context of the routes below: fleet, rollout and the names of vLLM's parsers."""

    fleet: RuntimesView
    rollout: Rollout
    tool_parsers: frozenset[str]
    reasoning_parsers: frozenset[str]


# ── making and changing ───────────────────────────────────────────────────────────────────────────────────────────────


@Operation(
    ShownDeployment,
    201,
    body=NewDeployment,
    query=(OF_TENANT,),
    once=True,
    etag=True,
    problems=(409,),
    operator=("deployments",),
)
async def create(call: Call, serving: Serving) -> Response:
    """Deploy a model."""
    body = await call.body(NewDeployment)
    tenant = owner_of(call, body)
    await call.tenant(tenant)
    _check_priority(call, body.priority, Priority.BATCH)

    async def deed(connection: AsyncConnection) -> Answer:
        owner = await tenants.tenant(connection, tenant, lock=True)
        if owner is None:
            raise not_found("tenant", tenant)
        spec = body.spec()
        model = await _model(connection, owner.id, spec, serving)
        made = await deployments.create(connection, owner.id, body.name, spec, model, now_us(), body.managed_by)
        await call.record(connection, "deployment.created", made.id, made.tenant_id, new=_recorded(made))
        return Answer(201, show(made, serving.fleet), headers={"etag": etag(made.version)})

    response = await call.once(deed)
    _changed(call, serving)
    return response


def owner_of(call: Call, body: NewDeployment) -> str:
    """Return the name of the tenant that will own the deployment. Raises Problem."""
    tenant = body.tenant or call.query("tenant") or call.caller.tenant
    if tenant is None:
        raise invalid("/tenant", "with the admin key, say for which tenant")
    return tenant


@Operation(
    ShownDeployment,
    patch=Change,
    query=(OF_TENANT,),
    etag=True,
    if_match=True,
    problems=(409,),
    operator=("deployments",),
)
async def change(call: Call, serving: Serving) -> Response:
    """Make a new revision, by a merge patch on the newest revision.

    A patch that changes nothing makes no revision. With `canary` the new revision gets a share of the requests until it
    is promoted. A patch of `canary` alone changes the share of the newest revision.
    """
    patch = await call.body(dict[str, Any])
    tenant_id = await call.tenant_id()
    async with call.database.write() as connection:
        was = await find(call, connection, tenant_id, lock=True)
        call.check_version(was.version)
        newest, share = was.target or was.active, was.canary.share if was.canary else None
        old = msgspec.to_builtins(newest.spec) | {"canary": msgspec.to_builtins(share)}
        asked = patched(old, patch, Change)
        _check_priority(call, asked.priority, priority(newest.spec.priority))
        model = await _model(connection, was.tenant_id, asked.spec(), serving)
        if asked.spec() != newest.spec or engine_of(asked.spec(), model) != newest.engine:
            deployment = await deployments.revise(connection, was, asked.spec(), model, now_us(), asked.canary)
        elif "canary" in patch and (asked.canary or share):
            if was.target is None:
                raise Problem(
                    409, "no_target", f"{was.name!r} has no newer revision to give a share of the requests to"
                )
            deployment = await deployments.share(connection, was, asked.canary, now_us())
        else:
            deployment = was
        if deployment is not was:
            whose = (deployment.id, deployment.tenant_id)
            await call.record(connection, "deployment.changed", *whose, _recorded(was), _recorded(deployment))
    _changed(call, serving)
    return _shown(deployment, serving)


@Operation(status=204, query=(OF_TENANT,), if_match=True, problems=(409,), operator=("deployments",))
async def delete(call: Call, serving: Serving) -> Response:
    """Delete a deployment."""
    tenant_id = await call.tenant_id()
    async with call.database.write() as connection:
        deployment = await find(call, connection, tenant_id, lock=True)
        call.check_version(deployment.version)
        await deployments.delete(connection, deployment, now_us())
        whose = (deployment.id, deployment.tenant_id)
        await call.record(connection, "deployment.deleted", *whose, old=_recorded(deployment))
    _changed(call, serving)
    return Response(status_code=204)


@Operation(
    ShownDeployment,
    body=Rollback,
    query=(OF_TENANT,),
    once=True,
    etag=True,
    if_match=True,
    problems=(409,),
    operator=("deployments",),
)
async def roll_back(call: Call, serving: Serving) -> Response:
    """Give the traffic back to an earlier revision."""
    body = await call.body(Rollback)
    tenant_id = await call.tenant_id()

    async def deed(connection: AsyncConnection) -> Answer:
        deployment = await find(call, connection, tenant_id, lock=True)
        call.check_version(deployment.version)
        back = await deployments.roll_back(connection, deployment, body.revision)
        if back is None:
            raise Problem(409, "no_such_revision", f"{deployment.name!r} has no earlier revision that had the traffic")
        whose = (back.id, back.tenant_id)
        await call.record(connection, "deployment.rolled_back", *whose, _revisions(deployment), _revisions(back))
        return Answer(200, show(back, serving.fleet), headers={"etag": etag(back.version)})

    response = await call.once(deed)
    _changed(call, serving)
    return response


@Operation(
    ShownDeployment, query=(OF_TENANT,), once=True, etag=True, if_match=True, problems=(409,), operator=("deployments",)
)
async def promote(call: Call, serving: Serving) -> Response:
    """Give all requests to the revision that waits for them, or has a share of them."""
    tenant_id = await call.tenant_id()

    async def deed(connection: AsyncConnection) -> Answer:
        was = await find(call, connection, tenant_id, lock=True)
        call.check_version(was.version)
        if was.target is None:
            raise Problem(409, "no_target", f"{was.name!r} has no newer revision to promote")
        if not loadable(serving.fleet.states(was.target.engine.key).values()):
            detail = f"no runtime has loaded revision {was.target.number} of {was.name!r} so far: see its conditions"
            raise Problem(409, "not_loadable", detail)
        deployment = await deployments.promote(connection, was, now_us())
        whose = (was.id, was.tenant_id)
        await call.record(connection, "deployment.promoted", *whose, _revisions(was), _revisions(deployment))
        return Answer(200, show(deployment, serving.fleet), headers={"etag": etag(deployment.version)})

    response = await call.once(deed)
    _changed(call, serving)
    return response


def _recorded(deployment: Deployment) -> dict[str, object]:
    """Return the audit log's entry: the newest spec, and the revisions that serve requests."""
    spec = (deployment.target or deployment.active).spec
    return {"name": deployment.name, **msgspec.to_builtins(spec), **_revisions(deployment)}


def _revisions(deployment: Deployment) -> dict[str, object]:
    target = deployment.target.number if deployment.target else None
    share = deployment.canary.share if deployment.canary else None
    return {
        "active_revision": deployment.active.number,
        "target_revision": target,
        "canary": msgspec.to_builtins(share),
    }


@Operation(ShownDeployment, 202, query=(OF_TENANT,), etag=True, problems=(409,), operator=("deployments",))
async def sleep(call: Call, serving: Serving) -> Response:
    """Take a deployment off the device until its next request.

    The answer's condition EngineShared says that the model stays on the device for another deployment."""
    return await _desire(call, serving, "asleep", "sleep")


@Operation(ShownDeployment, 202, query=(OF_TENANT,), etag=True, problems=(409,), operator=("deployments",))
async def wake(call: Call, serving: Serving) -> Response:
    """Bring a deployment to the device before its next request."""
    return await _desire(call, serving, "awake", "wake")


async def _desire(call: Call, serving: Serving, state: str, op: str) -> Response:
    """Keep the order in the database, then tell the runtimes.

    An engine shared by several deployments is put to sleep when the last of these deployments is ordered to sleep.
    """
    tenant_id = await call.tenant_id()
    async with call.database.write() as connection:
        deployment = await find(call, connection, tenant_id, lock=True)
        deployment = await deployments.desire(connection, deployment, state)
        await call.record(connection, f"deployment.{op}", deployment.id, deployment.tenant_id)
        key = deployment.active.engine.key
        everything = await deployments.everything(connection) if op == "sleep" else []
    if any(other.desired_state == "awake" and key in _keys(other) for other in everything):
        shown = show(deployment, serving.fleet)
        conditions = [*shown.status.conditions, engine_shared(deployment.active.number)]
        shown = structs.replace(shown, status=structs.replace(shown.status, conditions=conditions))
        return answered(shown, 202, {"etag": etag(deployment.version)})
    reply = await serving.fleet.control(key, op)
    if reply.refusal is wire.Refusal.MODEL_FAILED:
        raise Problem(503, "model_failed", reply.reason, headers={"retry-after": "30"})
    # UNKNOWN_MODEL: the model loads when a runtime comes.
    if reply.refusal not in (None, wire.Refusal.UNKNOWN_MODEL):
        raise Problem(503, "runtime_refused", f"{reply.reason}: try again", headers={"retry-after": "2"})
    return _shown(deployment, serving, 202)


def _check_priority(call: Call, asked: str, before: Priority) -> None:
    """Check that a key that may not ask for a priority gives the priority to no deployment. Raises Problem: 403.

    `before`: the deployment's priority so far, which may stay."""
    highest = max(call.caller.priority, before)
    if priority(asked) > highest:
        raise Problem(
            403,
            "priority_too_high",
            f"the deployment asks for priority {asked}, and this key may give {highest.word} at most: ask for less, or "
            f"have an operator make a key with `staccato key create --priority {asked}`",
            [Fault("/priority", f"above {highest.word}")],
        )


def _keys(deployment: Deployment) -> set[str]:
    return {revision.engine.key for revision in deployment.live}


def _changed(call: Call, serving: Serving) -> None:
    call.auth.forget()
    serving.rollout.nudge()


async def _model(connection: AsyncConnection, tenant_id: str, spec: Spec, serving: Serving) -> StoredModel:
    """Return `model_for`'s model, locked against deletion, after a check that a device has room. Raises Problem."""
    model = await model_for(connection, tenant_id, spec, serving, lock=True)
    _check_room(engine_of(spec, model), model.name, serving.fleet.largest_pool_bytes)
    return model


async def model_for(
    connection: AsyncConnection, tenant_id: str, spec: Spec, serving: Serving, lock: bool
) -> StoredModel:
    """Return the model named by the spec, after a check that the model can be served as asked. Raises Problem."""
    model = await models.find(connection, tenant_id, spec.model, lock)
    if model is None:
        raise invalid("/model", f"there is no model {spec.model!r}: register it first")
    if model.artefact is None:
        if model.state == "refused":
            raise invalid("/model", f"model {model.name!r} was refused: {model.reason}")
        raise Problem(409, "model_importing", f"model {model.name!r} is still imported: try again", headers=_SOON)
    if why := refusal(model.artefact.architecture, None):  # registered with an earlier version
        raise invalid("/model", f"model {model.name!r}: {why}")
    if (tokens := spec.max_model_len) and tokens > model.artefact.context_tokens:
        raise invalid("/max_model_len", f"{tokens} tokens, {model.name!r} takes {model.artefact.context_tokens}")
    one_of("/tool_parser", spec.tool_parser, serving.tool_parsers)
    one_of("/reasoning_parser", spec.reasoning_parser, serving.reasoning_parsers)
    try:
        schedule(spec.warm, ZoneInfo)
    except ValueError as error:
        raise invalid("/warm", str(error)) from error
    return model


def _check_room(engine: wire.EngineSpec, name: str, pool_bytes: int) -> None:
    """Check that the largest device has room for the weights and one request of full length. Raises Problem.

    The runtime knows the need to the page; this check answers at once.
    """
    needed = engine.weight_bytes + engine.kv.bytes(engine.max_model_len)
    if 0 < pool_bytes < needed:
        raise invalid(
            "/model",
            f"{name!r} takes {_mib(engine.weight_bytes)} MiB for its weights and {_mib(needed - engine.weight_bytes)} "
            f"for one request of {engine.max_model_len} tokens, and the largest device has {_mib(pool_bytes)} MiB: "
            "lower max_model_len, choose a smaller dtype, or give runtimes more with STACCATO_DEVICE_MEMORY",
        )


def _mib(size: int) -> int:
    return -(-size // (1 << 20))


_SOON = {"retry-after": "1"}


# ── showing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@Operation(Page[ShownDeployment], query=(OF_TENANT,), paged=True, operator=("deployments",))
async def listed(call: Call, serving: Serving) -> Response:
    """List the deployments."""
    tenant_id = await call.tenant_id()
    async with call.database.read() as connection:
        found = await deployments.listed(connection, tenant_id, call.after, call.limit + 1)
    return call.page(found, lambda deployment: show(deployment, serving.fleet))


@Operation(ShownDeployment, query=(OF_TENANT,), etag=True, problems=(409,), operator=("deployments",))
async def get(call: Call, serving: Serving) -> Response:
    """Show a deployment."""
    tenant_id = await call.tenant_id()
    async with call.database.read() as connection:
        return _shown(await find(call, connection, tenant_id), serving)


async def find(call: Call, connection: AsyncConnection, tenant_id: str | None, lock: bool = False) -> Deployment:
    """Return the deployment by name or id, of a tenant or (None: for the operator) of all tenants. Raises Problem."""
    name = call.path("deployment")
    found = await deployments.named(connection, tenant_id, name)
    if len(found) > 1:
        owners = ", ".join(sorted(deployment.tenant for deployment in found))
        raise Problem(409, "ambiguous_name", f"{name!r} is of {owners}: add ?tenant= or give the id")
    deployment = await deployments.by_id(connection, found[0].id, lock) if found else None
    if deployment is None:
        raise not_found("deployment", name)
    return deployment


def _shown(deployment: Deployment, serving: Serving, status_code: int = 200) -> Response:
    headers = {"etag": etag(deployment.version)}
    return answered(show(deployment, serving.fleet), status_code, headers)


def show(deployment: Deployment, fleet: RuntimesView) -> ShownDeployment:
    active = fleet.states(deployment.active.engine.key)
    target = fleet.states(deployment.target.engine.key) if deployment.target else {}
    return ShownDeployment(
        **structs.asdict(deployment.active.spec),
        id=deployment.id,
        name=deployment.name,
        tenant=deployment.tenant,
        digest=deployment.active.engine.digest,
        engine=deployment.active.engine.key,
        task=Task(deployment.active.engine.task or Task.GENERATE),
        target=_target(deployment),
        canary=deployment.canary.share if deployment.canary else None,
        status=status(deployment, active, target, fleet.attained(label(deployment.tenant_id, deployment.id))),
        managed_by=deployment.managed_by,
        created_at=time_text(deployment.created_us),
    )


def _target(deployment: Deployment) -> ShownTarget | None:
    if (target := deployment.target) is None:
        return None
    return ShownTarget(
        **structs.asdict(target.spec),
        revision=target.number,
        digest=target.engine.digest,
        engine=target.engine.key,
        canary=deployment.canary.share if deployment.canary else None,
    )
