"""Deployments and their revisions: models that tenants want served, and the engine of each revision.

A revision never changes. `active` has the traffic; `target` is a newer revision and gets the traffic once a runtime
could load the target. With a canary, the target has a share of the traffic until the target is promoted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
from sqlalchemy import ColumnElement, and_, case, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.contract import wire
from store.contract.deployments import (
    Canary,
    Deployment,
    EngineUse,
    Revision,
    Share,
    Spec,
    Target,
    idle_s,
    pinned,
)
from store.db.database import AnyRow, AnySelect, added_once, new_id
from store.db.models import StoredModel, model_of
from store.db.tables import artefacts, deployments, models, revisions, tenants, usage
from store.files.architectures import language_model_only

FAILED = "error"  # `finish` of a usage row whose request ended by a fault of the platform
# ── the engine of a revision ──────────────────────────────────────────────────────────────────────────────────────────


def engine_of(spec: Spec, model: StoredModel) -> wire.EngineSpec:
    """Return the engine of a spec and a ready model.

    Equal keys mean one engine: equal files in one folder under equal settings are built once."""
    artefact = model.artefact
    assert artefact is not None, f"model {model.id} is {model.state}"
    tokens = spec.max_model_len or artefact.context_tokens
    idle, never = idle_s(spec.scaling), pinned(spec.scaling)
    # The folder is part of the key: no tenant's copy may serve another tenant, since the owner could change the copy.
    replicas = spec.scaling.max_replicas or 0
    settings = f"{spec.dtype}|{tokens}|{'never' if never else idle}|{replicas}|{model.path}"
    if spec.reasoning_parser:  # an engine without a parser keeps the key from before parsers
        settings += f"|{spec.reasoning_parser}"
    text = language_model_only(artefact.architecture, spec.language_model_only)
    if text:
        settings += "|language_model_only"
    if spec.warm:
        settings += f"|warm {';'.join(spec.warm)}"
    return wire.EngineSpec(
        key=f"{artefact.digest[:16]}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}",
        path=model.path,
        digest=artefact.digest,
        architecture=artefact.architecture,
        dtype=spec.dtype,
        max_model_len=tokens,
        weight_bytes=artefact.weight_bytes_as(spec.dtype, text),
        kv_bytes_per_token=artefact.kv_bytes_per_token * (2 if spec.dtype == "float32" else 1),
        kv_layers=artefact.kv_layers_as(spec.dtype) or msgspec.UNSET,
        idle_s=idle,
        pinned=never,
        replicas=replicas,
        reasoning_parser=spec.reasoning_parser or "",
        language_model_only=text or msgspec.UNSET,
        task=artefact.task if artefact.task.pools else msgspec.UNSET,
        warm=spec.warm or msgspec.UNSET,
    )


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_owners = tenants.alias("owners")  # owners of models
_ALIVE = deployments.c.deleted_us.is_(None)
_LIVE = or_(
    revisions.c.number == deployments.c.active_revision,
    revisions.c.number == deployments.c.target_revision,
)

_OF_TENANT = tenants.c.weight, tenants.c.keep_prefixes


def _select(*which: ColumnElement[bool]) -> AnySelect:
    """Return a query with a row for each live revision of each deployment, in order."""
    owner = _owners.c.name.label("owner")
    return (
        select(deployments, tenants.c.name.label("tenant"), *_OF_TENANT, revisions, models, artefacts, owner)
        .join(tenants, tenants.c.id == deployments.c.tenant_id)
        .join(revisions, and_(revisions.c.deployment_id == deployments.c.id, _LIVE))
        .join(models, models.c.id == revisions.c.model_id)
        .join(artefacts, artefacts.c.digest == models.c.digest)
        .outerjoin(_owners, _owners.c.id == models.c.tenant_id)
        .where(_ALIVE, *which)
        .order_by(deployments.c.id, revisions.c.number)
    )


async def _read(connection: AsyncConnection, *which: ColumnElement[bool]) -> list[Deployment]:
    rows = (await connection.execute(_select(*which))).all()
    by_id: dict[str, list[AnyRow]] = {}
    for row in rows:
        by_id.setdefault(row._mapping[deployments.c.id], []).append(row)
    return [_deployment(rows) for rows in by_id.values()]


def _deployment(rows: list[AnyRow]) -> Deployment:
    said = rows[0]._mapping
    live = {revision.number: revision for revision in map(_revision, rows)}
    return Deployment(
        id=said[deployments.c.id],
        tenant_id=said[deployments.c.tenant_id],
        tenant=said["tenant"],
        tenant_weight=said[tenants.c.weight],
        tenant_keeps_prefixes=said[tenants.c.keep_prefixes],
        name=said[deployments.c.name],
        desired_state=said[deployments.c.desired_state],
        active=live[said[deployments.c.active_revision]],
        target=live[said[deployments.c.target_revision]] if said[deployments.c.target_revision] else None,
        canary=_canary(said[deployments.c.canary]),
        version=said[deployments.c.version],
        created_us=said[deployments.c.created_us],
        managed_by=said[deployments.c.managed_by],
    )


def _canary(text: str | None) -> Canary | None:
    return msgspec.json.decode(text, type=Canary) if text else None


def _revision(row: AnyRow) -> Revision:
    said = row._mapping
    spec = msgspec.json.decode(said[revisions.c.spec], type=Spec)
    return Revision(said[revisions.c.number], spec, engine_of(spec, model_of(row)), said[revisions.c.created_us])


async def by_id(connection: AsyncConnection, id: str, lock: bool = False) -> Deployment | None:
    """Return a deployment. `lock` keeps other transactions from changing the deployment until this transaction ends."""
    if lock:
        await connection.execute(select(deployments.c.id).where(deployments.c.id == id).with_for_update())
    found = await _read(connection, deployments.c.id == id)
    return found[0] if found else None


async def named(connection: AsyncConnection, tenant_id: str | None, name: str) -> list[Deployment]:
    """Return the deployments with a name or id, of a tenant or (None) of every tenant."""
    which = [or_(deployments.c.name == name, deployments.c.id == name)]
    return await _read(connection, *which, *([deployments.c.tenant_id == tenant_id] if tenant_id else []))


async def listed(connection: AsyncConnection, tenant_id: str | None, after: str, most: int) -> list[Deployment]:
    ids = select(deployments.c.id).where(_ALIVE, deployments.c.id > after).order_by(deployments.c.id).limit(most)
    ids = ids.where(deployments.c.tenant_id == tenant_id) if tenant_id else ids
    return await _read(connection, deployments.c.id.in_(ids.scalar_subquery()))


async def everything(connection: AsyncConnection) -> list[Deployment]:
    return await _read(connection)


async def engine_uses(connection: AsyncConnection, keys: Iterable[str]) -> list[EngineUse]:
    """Return every revision that needed these engines, oldest first: also past revisions and deleted deployments.

    An engine's key says which revisions the engine may have served; `EngineUse` says when."""
    wanted = set(keys)
    digests = [artefacts.c.digest.startswith(key.partition("-")[0], autoescape=True) for key in sorted(wanted)]
    if not digests:
        return []
    owner = _owners.c.name.label("owner")
    query = (
        select(deployments, tenants.c.name.label("tenant"), revisions, models, artefacts, owner)
        .join(tenants, tenants.c.id == deployments.c.tenant_id)
        .join(revisions, revisions.c.deployment_id == deployments.c.id)
        .join(models, models.c.id == revisions.c.model_id)
        .join(artefacts, artefacts.c.digest == models.c.digest)
        .outerjoin(_owners, _owners.c.id == models.c.tenant_id)
        .where(or_(*digests))
        .order_by(revisions.c.created_us, deployments.c.id, revisions.c.number)
    )
    rows = [row for row in await connection.execute(query) if _revision(row).engine.key in wanted]
    ids = {row._mapping[deployments.c.id] for row in rows}
    columns = (revisions.c.deployment_id, revisions.c.number, revisions.c.created_us, revisions.c.activated_us)
    history = (await connection.execute(select(*columns).where(revisions.c.deployment_id.in_(ids)))).all()
    return [_use(row, [began for began in history if began[0] == row._mapping[deployments.c.id]]) for row in rows]


def _use(row: AnyRow, history: Sequence[AnyRow]) -> EngineUse:
    """Return the use of a row's revision.

    `history`: id, number, creation and first activation of every revision of the row's deployment."""
    said = row._mapping
    number, deleted_us = said[revisions.c.number], said[deployments.c.deleted_us]
    live = number in (said[deployments.c.active_revision], said[deployments.c.target_revision])
    ends_us = [] if deleted_us is None else [deleted_us]
    if not live and (activated_us := said[revisions.c.activated_us]) is None:  # a newer target took the place
        ends_us += [created_us for _, other, created_us, _ in history if other > number]
    elif not live:
        ends_us += [later_us for *_, later_us in history if later_us is not None and later_us > activated_us]
    return EngineUse(
        key=_revision(row).engine.key,
        name=f"{said['tenant']}/{said[deployments.c.name]}@{number}",
        since_us=said[revisions.c.created_us],
        until_us=min(ends_us, default=None),
        live=live and deleted_us is None,
    )


async def target(connection: AsyncConnection, tenant_id: str, name: str) -> Target | None:
    """Return what serves `name`, or `name@revision` if the revision is live; None: no such deployment or revision."""
    name, _, number = name.partition("@")
    found = await _read(connection, deployments.c.tenant_id == tenant_id, deployments.c.name == name)
    if not found:
        return None
    if not number:
        return _shared(found[0])
    wanted = [revision for revision in found[0].live if str(revision.number) == number]
    return _target(found[0], wanted[0]) if wanted else None


async def targets(connection: AsyncConnection, tenant_id: str) -> list[Target]:
    found = await _read(connection, deployments.c.tenant_id == tenant_id)
    return [_target(deployment, deployment.active) for deployment in sorted(found, key=lambda d: d.name)]


def _shared(deployment: Deployment) -> Target:
    """Return the active revision, with the target as canary if the target has a share."""
    active, canary = _target(deployment, deployment.active), deployment.canary
    if deployment.target is None or canary is None or canary.halted:
        return active
    return replace(active, canary=_target(deployment, deployment.target), canary_weight=canary.weight)


def _target(deployment: Deployment, revision: Revision) -> Target:
    return Target(
        deployment_id=deployment.id,
        name=deployment.name,
        revision=revision.number,
        spec=revision.engine,
        slo=revision.spec.slo,
        priority=revision.spec.priority,
        tenant_weight=deployment.tenant_weight,
        tool_parser=revision.spec.tool_parser,
        keep_prefixes=revision.spec.keep_prefixes and deployment.tenant_keeps_prefixes,
        owner=deployment.tenant,
        created_at=deployment.created_us / 1e6,
    )


# ── changing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def create(
    connection: AsyncConnection,
    tenant_id: str,
    name: str,
    spec: Spec,
    model: StoredModel,
    now_us: int,
    managed_by: str | None = None,
) -> Deployment:
    """Create a deployment whose first revision has the traffic at once: no older revision serves. Raises Taken."""
    id = new_id()
    row = {"id": id, "tenant_id": tenant_id, "name": name, "desired_state": "awake", "version": 1}
    row |= {"managed_by": managed_by}
    with added_once("deployment", name):
        await connection.execute(deployments.insert().values(**row, active_revision=1, created_us=now_us))
    await _add_revision(connection, id, 1, spec, model, now_us, activated_us=now_us)
    return await _changed(connection, id)


async def revise(
    connection: AsyncConnection,
    deployment: Deployment,
    spec: Spec,
    model: StoredModel,
    now_us: int,
    share: Share | None = None,
) -> Deployment:
    """Add a revision as the target; an earlier target is given up.

    Without a share the new target takes over once a runtime could load the target; with a share, once promoted."""
    newest = await connection.scalar(
        select(func.max(revisions.c.number)).where(revisions.c.deployment_id == deployment.id)
    )
    assert newest is not None, f"deployment {deployment.id} has no revision"
    await _add_revision(connection, deployment.id, newest + 1, spec, model, now_us, activated_us=None)
    await _set(connection, deployment, target_revision=newest + 1, canary=_text(share, now_us))
    return await _changed(connection, deployment.id)


async def share(connection: AsyncConnection, deployment: Deployment, share: Share | None, now_us: int) -> Deployment:
    """Set the target's share from now on, also of a halted target.

    None: the target takes over once a runtime could load the target."""
    await _set(connection, deployment, canary=_text(share, now_us))
    return await _changed(connection, deployment.id)


def _text(share: Share | None, now_us: int) -> str | None:
    if share is None:
        return None
    return msgspec.json.encode(Canary(**msgspec.structs.asdict(share), since_us=now_us)).decode()


async def promote(connection: AsyncConnection, deployment: Deployment, now_us: int) -> Deployment:
    """Give the traffic to the target, whatever share the target had."""
    assert deployment.target is not None
    number = deployment.target.number
    await _set(connection, deployment, active_revision=number, target_revision=None, canary=None)
    await _had_traffic(connection, deployment.id, number, now_us)
    return await _changed(connection, deployment.id)


async def roll_back(connection: AsyncConnection, deployment: Deployment, number: int | None) -> Deployment | None:
    """Give the traffic back to a revision that had the traffic before, and give up any target.

    Without `number`: if a target waits, only the target is given up; else the newest earlier revision gets the traffic.
    Returns None if no earlier revision fits.
    """
    if number is None and deployment.target is not None:
        await _set(connection, deployment, target_revision=None, canary=None)
        return await _changed(connection, deployment.id)
    had_traffic = (revisions.c.deployment_id == deployment.id) & revisions.c.activated_us.is_not(None)
    wanted = revisions.c.number == number if number else revisions.c.number < deployment.active.number
    found = await connection.scalar(select(func.max(revisions.c.number)).where(had_traffic, wanted))
    if found is None:
        return None
    await _set(connection, deployment, active_revision=found, target_revision=None, canary=None)
    return await _changed(connection, deployment.id)


async def desire(connection: AsyncConnection, deployment: Deployment, state: str) -> Deployment:
    """Set the state that the operator wants: awake | asleep."""
    await _set(connection, deployment, desired_state=state)
    return await _changed(connection, deployment.id)


async def delete(connection: AsyncConnection, deployment: Deployment, now_us: int) -> None:
    await _set(connection, deployment, deleted_us=now_us)


async def activate(connection: AsyncConnection, id: str, number: int, now_us: int) -> bool:
    """Give the traffic to the target.

    Returns False if the revision `number` is no longer the target, or has a share and must be promoted."""
    waiting = (deployments.c.id == id) & (deployments.c.target_revision == number) & _ALIVE
    waiting &= deployments.c.canary.is_(None)
    moved = await connection.execute(
        update(deployments).where(waiting).values(active_revision=number, target_revision=None)
    )
    if moved.rowcount:
        await _had_traffic(connection, id, number, now_us)
    return bool(moved.rowcount)


async def _had_traffic(connection: AsyncConnection, id: str, number: int, now_us: int) -> None:
    it = (revisions.c.deployment_id == id) & (revisions.c.number == number) & revisions.c.activated_us.is_(None)
    await connection.execute(update(revisions).where(it).values(activated_us=now_us))


# ── canaries ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def outcomes(connection: AsyncConnection, deployment: Deployment) -> tuple[int, int]:
    """Return how many booked requests of the canary have ended, and how many of these requests failed.

    Requests that named the canary's revision by number are counted as well."""
    assert deployment.target is not None and deployment.canary is not None
    failed = func.coalesce(func.sum(case((usage.c.finish == FAILED, 1), else_=0)), 0)
    query = select(func.count(), failed).where(
        usage.c.tenant_id == deployment.tenant_id,
        usage.c.started_us >= deployment.canary.since_us,
        usage.c.deployment_id == deployment.id,
        usage.c.revision == deployment.target.number,
        usage.c.final,
    )
    ended, errors = (await connection.execute(query)).one()
    return ended, int(errors)


async def halt(connection: AsyncConnection, deployment: Deployment, reason: str) -> bool:
    """Stop requests to the deployment's canary. Returns False if the canary was replaced meanwhile."""
    assert deployment.target is not None and deployment.canary is not None
    was = msgspec.json.encode(deployment.canary).decode()
    now = msgspec.json.encode(msgspec.structs.replace(deployment.canary, halted=reason)).decode()
    it = (deployments.c.id == deployment.id) & (deployments.c.target_revision == deployment.target.number)
    it &= (deployments.c.canary == was) & _ALIVE
    return bool((await connection.execute(update(deployments).where(it).values(canary=now))).rowcount)


async def _set(connection: AsyncConnection, deployment: Deployment, **values: str | int | None) -> None:
    change = update(deployments).where(deployments.c.id == deployment.id)
    await connection.execute(change.values(**values, version=deployment.version + 1))


async def _changed(connection: AsyncConnection, id: str) -> Deployment:
    deployment = await by_id(connection, id)
    assert deployment is not None
    return deployment


async def _add_revision(
    connection: AsyncConnection,
    deployment_id: str,
    number: int,
    spec: Spec,
    model: StoredModel,
    now_us: int,
    activated_us: int | None,
) -> None:
    row = {"deployment_id": deployment_id, "number": number, "model_id": model.id, "created_us": now_us}
    text = msgspec.json.encode(spec).decode()
    await connection.execute(revisions.insert().values(**row, spec=text, activated_us=activated_us))
