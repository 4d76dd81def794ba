"""Deployments and their revisions: what a tenant wants served, and the engine that each revision means.

A revision never changes. `active` has the traffic; `target` is a newer one that gets it once a runtime could load it.
With a canary, the target has a share of it until it is promoted.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from sqlalchemy import ColumnElement, and_, case, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store import wire
from store.db import AnyRow, AnySelect, added_once, new_id
from store.models import Model, model_of
from store.tables import artefacts, deployments, models, revisions, tenants, usage

FAILED = "error"  # how usage says that a request ended by a fault of ours
DURATION = r"^(auto|never|\d{1,6}(ms|s|m|h))$"
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

Parser = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the spec."""


class Slo(_Part, frozen=True, kw_only=True):
    ttft_ms: Annotated[int, Meta(ge=1, le=3_600_000)] = 10_000
    tbt_ms: Annotated[int, Meta(ge=1, le=60_000)] = 100


class Scaling(_Part, frozen=True, kw_only=True):
    idle: Annotated[str, Meta(pattern=DURATION)] = "auto"  # asleep after so long without a request; auto: if need be
    min_resident: Annotated[int, Meta(ge=0, le=1)] = 0  # 1: never asleep
    max_replicas: Annotated[int, Meta(ge=1, le=1024)] | None = None  # runtimes that host it; None: all


class Nothing(_Part, frozen=True, kw_only=True):
    """A part whose fields are still to come: every one of them is refused."""


class Spec(_Part, frozen=True, kw_only=True):
    """What a revision says."""

    model: str
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: Annotated[int, Meta(ge=1)] | None = None  # tokens; None: what the model can
    slo: Slo = Slo()
    priority: Literal["high", "normal", "batch"] = "normal"
    scaling: Scaling = Scaling()
    limits: Nothing = Nothing()
    price: Nothing = Nothing()
    tool_parser: Parser | None = None
    reasoning_parser: Parser | None = None


class Share(_Part, frozen=True, kw_only=True):
    """Of the requests that name no revision, as long as the target is not promoted."""

    weight: Annotated[int, Meta(ge=0, le=100)]  # percent
    errors_most: Annotated[float, Meta(ge=0, le=1)] = 0.05  # share of them that may fail: with more it gets no others


class Canary(Share, frozen=True, kw_only=True):
    """A share that a target has."""

    since_us: int
    halted: str | None = None  # why it gets no requests any more

    @property
    def share(self) -> Share:
        return Share(weight=self.weight, errors_most=self.errors_most)


@dataclass(frozen=True)
class Revision:
    number: int
    spec: Spec
    engine: wire.EngineSpec
    created_us: int


@dataclass(frozen=True)
class Deployment:
    id: str
    tenant_id: str
    tenant: str
    tenant_weight: float
    name: str
    desired_state: Literal["awake", "asleep"]
    active: Revision
    target: Revision | None
    canary: Canary | None  # of the target; None: it takes over as soon as it can
    version: int
    created_us: int

    @property
    def live(self) -> list[Revision]:
        """Those whose engines the runtimes must have."""
        return [self.active, *([self.target] if self.target else [])]


@dataclass(frozen=True)
class Target:
    """What serves a name that a tenant asked for."""

    deployment_id: str
    name: str
    revision: int
    spec: wire.EngineSpec
    slo: Slo
    priority: str  # high | normal | batch
    tenant_weight: float
    tool_parser: str | None
    reasoning_parser: str | None
    owner: str  # the tenant's name
    created_at: float  # UNIX seconds
    canary: Target | None = None  # serves some of the requests instead
    canary_weight: int = 0  # percent of them


# ── the engine of a revision ──────────────────────────────────────────────────────────────────────────────────────────


def engine_of(spec: Spec, model: Model) -> wire.EngineSpec:
    """The same key means the same engine: equal files in the same folder under equal settings are built once."""
    artefact = model.artefact
    assert artefact is not None, f"model {model.id} is {model.state}"
    tokens = spec.max_model_len or artefact.context_tokens
    idle, never = idle_s(spec.scaling), pinned(spec.scaling)
    # The folder counts too: nobody's copy may stand in for another's, for its owner could change it.
    replicas = spec.scaling.max_replicas or 0
    settings = f"{spec.dtype}|{tokens}|{'never' if never else idle}|{replicas}|{model.path}"
    return wire.EngineSpec(
        key=f"{artefact.digest[:16]}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}",
        path=model.path,
        digest=artefact.digest,
        architecture=artefact.architecture,
        dtype=spec.dtype,
        max_model_len=tokens,
        weight_bytes=artefact.weight_bytes_as(spec.dtype),
        kv_bytes_per_token=artefact.kv_bytes_per_token * (2 if spec.dtype == "float32" else 1),
        idle_s=idle,
        pinned=never,
        replicas=replicas,
    )


def pinned(scaling: Scaling) -> bool:
    """Never asleep."""
    return scaling.min_resident > 0 or scaling.idle == "never"


def idle_s(scaling: Scaling) -> float | None:
    """None: no time of its own; unless it is pinned it sleeps once others need its memory."""
    if pinned(scaling) or scaling.idle == "auto":
        return None
    number, unit = re.fullmatch(r"(\d+)(\w+)", scaling.idle).groups()  # type: ignore[union-attr]  # DURATION matched
    return int(number) * _UNIT_S[unit]


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_owners = tenants.alias("owners")  # of models
_ALIVE = deployments.c.deleted_us.is_(None)
_LIVE = or_(
    revisions.c.number == deployments.c.active_revision,
    revisions.c.number == deployments.c.target_revision,
)


def _select(*which: ColumnElement[bool]) -> AnySelect:
    """A row for each live revision of each deployment, in order."""
    owner = _owners.c.name.label("owner")
    return (
        select(deployments, tenants.c.name.label("tenant"), tenants.c.weight, revisions, models, artefacts, owner)
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
        name=said[deployments.c.name],
        desired_state=said[deployments.c.desired_state],
        active=live[said[deployments.c.active_revision]],
        target=live[said[deployments.c.target_revision]] if said[deployments.c.target_revision] else None,
        canary=_canary(said[deployments.c.canary]),
        version=said[deployments.c.version],
        created_us=said[deployments.c.created_us],
    )


def _canary(text: str | None) -> Canary | None:
    return msgspec.json.decode(text, type=Canary) if text else None


def _revision(row: AnyRow) -> Revision:
    said = row._mapping
    spec = msgspec.json.decode(said[revisions.c.spec], type=Spec)
    return Revision(said[revisions.c.number], spec, engine_of(spec, model_of(row)), said[revisions.c.created_us])


async def by_id(connection: AsyncConnection, id: str, lock: bool = False) -> Deployment | None:
    """`lock` keeps others from changing it until the transaction ends."""
    if lock:
        await connection.execute(select(deployments.c.id).where(deployments.c.id == id).with_for_update())
    found = await _read(connection, deployments.c.id == id)
    return found[0] if found else None


async def named(connection: AsyncConnection, tenant_id: str | None, name: str) -> list[Deployment]:
    """By name or id, of one tenant or (None) of all."""
    which = [or_(deployments.c.name == name, deployments.c.id == name)]
    return await _read(connection, *which, *([deployments.c.tenant_id == tenant_id] if tenant_id else []))


async def listed(connection: AsyncConnection, tenant_id: str | None, after: str, most: int) -> list[Deployment]:
    ids = select(deployments.c.id).where(_ALIVE, deployments.c.id > after).order_by(deployments.c.id).limit(most)
    ids = ids.where(deployments.c.tenant_id == tenant_id) if tenant_id else ids
    return await _read(connection, deployments.c.id.in_(ids.scalar_subquery()))


async def everything(connection: AsyncConnection) -> list[Deployment]:
    return await _read(connection)


async def target(connection: AsyncConnection, tenant_id: str, name: str) -> Target | None:
    """What serves `name`, or `name@revision` when that revision is live."""
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
    """The active revision, and beside it the target if that has a share."""
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
        reasoning_parser=revision.spec.reasoning_parser,
        owner=deployment.tenant,
        created_at=deployment.created_us / 1e6,
    )


# ── changing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def create(
    connection: AsyncConnection, tenant_id: str, name: str, spec: Spec, model: Model, now_us: int
) -> Deployment:
    """Its first revision has the traffic at once: there is none that it could take it from. Raises Taken."""
    id = new_id()
    row = {"id": id, "tenant_id": tenant_id, "name": name, "desired_state": "awake", "version": 1}
    with added_once("deployment", name):
        await connection.execute(deployments.insert().values(**row, active_revision=1, created_us=now_us))
    await _add_revision(connection, id, 1, spec, model, now_us, activated_us=now_us)
    return await _changed(connection, id)


async def revise(
    connection: AsyncConnection,
    deployment: Deployment,
    spec: Spec,
    model: Model,
    now_us: int,
    share: Share | None = None,
) -> Deployment:
    """A new revision, to take over or to have a share until it is promoted; one that waited for that is given up."""
    newest = await connection.scalar(
        select(func.max(revisions.c.number)).where(revisions.c.deployment_id == deployment.id)
    )
    assert newest is not None, f"deployment {deployment.id} has no revision"
    await _add_revision(connection, deployment.id, newest + 1, spec, model, now_us, activated_us=None)
    await _set(connection, deployment, target_revision=newest + 1, canary=_text(share, now_us))
    return await _changed(connection, deployment.id)


async def share(connection: AsyncConnection, deployment: Deployment, share: Share | None, now_us: int) -> Deployment:
    """Of the target from now on, also if it was halted; None: it takes over as soon as it can."""
    await _set(connection, deployment, canary=_text(share, now_us))
    return await _changed(connection, deployment.id)


def _text(share: Share | None, now_us: int) -> str | None:
    if share is None:
        return None
    return msgspec.json.encode(Canary(**msgspec.structs.asdict(share), since_us=now_us)).decode()


async def promote(connection: AsyncConnection, deployment: Deployment, now_us: int) -> Deployment:
    """The target takes over, whatever its share was."""
    assert deployment.target is not None
    number = deployment.target.number
    await _set(connection, deployment, active_revision=number, target_revision=None, canary=None)
    await _had_traffic(connection, deployment.id, number, now_us)
    return await _changed(connection, deployment.id)


async def roll_back(connection: AsyncConnection, deployment: Deployment, number: int | None) -> Deployment | None:
    """To a revision that had the traffic before, by default the last one; one that waits for it is given up instead.

    None when there is no such revision.
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
    """awake | asleep."""
    await _set(connection, deployment, desired_state=state)
    return await _changed(connection, deployment.id)


async def delete(connection: AsyncConnection, deployment: Deployment, now_us: int) -> None:
    await _set(connection, deployment, deleted_us=now_us)


async def activate(connection: AsyncConnection, id: str, number: int, now_us: int) -> bool:
    """The target takes the traffic; False when it is no longer the target, or is one that has to be promoted."""
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
    """Requests that the canary was given and that have ended, and those of them that failed, as far as they are booked.

    Some of the first may have asked for it by its number."""
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
    """Its canary gets no more requests; False when the canary is another one by now."""
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
    model: Model,
    now_us: int,
    activated_us: int | None,
) -> None:
    row = {"deployment_id": deployment_id, "number": number, "model_id": model.id, "created_us": now_us}
    text = msgspec.json.encode(spec).decode()
    await connection.execute(revisions.insert().values(**row, spec=text, activated_us=activated_us))
