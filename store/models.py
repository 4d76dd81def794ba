"""The models that can be deployed: a name, the folder it means, and what inspecting the folder found."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

import msgspec
from sqlalchemy import ColumnElement, func, or_, select, true, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.artefact import Artefact, File
from store.db import AnyRow, AnySelect, added_once, insert, new_id
from store.tables import artefacts, deployments, models, revisions, tenants

State = Literal["importing", "ready", "refused", "cancelled"]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    done_bytes: int
    total_bytes: int
    eta_s: int | None = None  # at the speed of the last seconds
    waits_for: str | None = None  # what keeps it from going on


@dataclass(frozen=True)
class Model:
    id: str
    tenant_id: str | None  # None: the operator's, visible to all
    tenant: str | None
    name: str
    source: str
    path: str
    state: State
    reason: str
    artefact: Artefact | None
    created_us: int
    revision: str | None = None  # the commit, where the source has such a thing
    expected: str | None = None  # the digest that it must have
    progress: Progress | None = None


class ModelInUse(Exception):
    """`deployments` are in its way."""

    def __init__(self, name: str, deployments: list[str]) -> None:
        super().__init__(f"model {name!r} is used by {', '.join(deployments)}: delete these deployments first")


_ALIVE = models.c.deleted_us.is_(None)


class NoRoom(Exception):
    """A tenant's models would take more than it may have."""


async def create(
    connection: AsyncConnection,
    tenant_id: str | None,
    name: str,
    source: str,
    path: str,
    now_us: int,
    expected: str | None = None,
) -> Model:
    """`path` is empty when it is to be fetched. Raises Taken."""
    id = new_id()
    row = {"id": id, "tenant_id": tenant_id, "name": name, "source": source, "path": path, "created_us": now_us}
    row |= {"expected": expected}
    with added_once("model", name):
        await connection.execute(models.insert().values(**row, state="importing", reason=""))
    model = await by_id(connection, id)
    assert model is not None
    return model


async def accept(
    connection: AsyncConnection, id: str, artefact: Artefact, now_us: int, path: str | None = None
) -> bool:
    """It is what it should be, and lies at `path` (None: where it was said). False: nobody waits for it any more."""
    facts = {name: value for name, value in vars(artefact).items() if name != "files"}
    files = json.dumps([asdict(file) for file in artefact.files])
    row = insert(connection, artefacts).values(**facts, files=files, created_us=now_us)
    await connection.execute(row.on_conflict_do_nothing())
    moved = {} if path is None else {"path": path}
    return await _finish(connection, id, state="ready", digest=artefact.digest, **moved)


async def refuse(connection: AsyncConnection, id: str, reason: str) -> bool:
    return await _finish(connection, id, state="refused", reason=reason)


async def cancel(connection: AsyncConnection, id: str) -> bool:
    return await _finish(connection, id, state="cancelled", reason="the import was cancelled")


async def _finish(connection: AsyncConnection, id: str, **values: str | None) -> bool:
    return await _while_importing(connection, id, progress=None, **values)


async def _while_importing(connection: AsyncConnection, id: str, **values: object) -> bool:
    which = (models.c.id == id, models.c.state == "importing", _ALIVE)
    return (await connection.execute(update(models).where(*which).values(**values))).rowcount > 0


async def begin_again(connection: AsyncConnection, id: str) -> None:
    """An import that was refused or cancelled."""
    which = (models.c.id == id, models.c.state.in_(("refused", "cancelled")))
    await connection.execute(update(models).where(*which).values(state="importing", reason=""))


async def found_revision(connection: AsyncConnection, id: str, revision: str) -> None:
    """What it goes on with, whatever becomes of the name that was given."""
    await _while_importing(connection, id, revision=revision)


async def progressed(connection: AsyncConnection, id: str, progress: Progress) -> bool:
    """False: it was cancelled or deleted."""
    return await _while_importing(connection, id, progress=msgspec.json.encode(progress).decode())


async def is_importing(connection: AsyncConnection, id: str) -> bool:
    which = (models.c.id == id, models.c.state == "importing", _ALIVE)
    return await connection.scalar(select(models.c.id).where(*which)) is not None


async def reserve(connection: AsyncConnection, model: Model, size: int, most: int | None) -> None:
    """`size` bytes of what the owner may have imported: `most`. Raises NoRoom.

    What several tenants imported is stored once and counts for each: nobody learns from the sum what others have."""
    if model.tenant_id is not None:  # two imports of one tenant come one after the other
        await connection.execute(select(tenants.c.id).where(tenants.c.id == model.tenant_id).with_for_update())
    of_tenant = (models.c.tenant_id == model.tenant_id, models.c.state.in_(("importing", "ready")))
    others = select(func.coalesce(func.sum(models.c.imported_bytes), 0)).where(
        _ALIVE, *of_tenant, models.c.id != model.id
    )
    used = int(await connection.scalar(others) or 0)
    if most is not None and used + size > most:
        raise NoRoom(
            f"it has {size} bytes, and of the {most} that the tenant's limit storage_bytes allows {used} are used: "
            "delete models or ask the operator for more"
        )
    await _while_importing(connection, model.id, imported_bytes=size)


async def delete(connection: AsyncConnection, model: Model, viewer: str | None, now_us: int) -> None:
    """Raises ModelInUse, which names what `viewer` (a tenant, or None: the operator) may see."""
    used = (
        select(tenants.c.name, deployments.c.name)
        .select_from(revisions)
        .join(deployments, deployments.c.id == revisions.c.deployment_id)
        .join(tenants, tenants.c.id == deployments.c.tenant_id)
        .where(revisions.c.model_id == model.id, deployments.c.deleted_us.is_(None))
        .distinct()
        .order_by(tenants.c.name, deployments.c.name)
    )
    if rows := (await connection.execute(used)).all():
        raise ModelInUse(model.name, [row[1] if viewer else f"{row[0]}/{row[1]}" for row in rows])
    await connection.execute(update(models).where(models.c.id == model.id).values(deleted_us=now_us))


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def by_id(connection: AsyncConnection, id: str) -> Model | None:
    row = (await connection.execute(_select(models.c.id == id))).one_or_none()
    return model_of(row) if row else None


async def find(connection: AsyncConnection, tenant_id: str | None, name: str, lock: bool = False) -> Model | None:
    """By name, id or digest. A tenant sees its own, which come first, and the shared; None: the operator, who sees all.

    `lock` holds it against deletion until the transaction ends.
    """
    named = or_(models.c.name == name, models.c.id == name, models.c.digest == name)
    first = models.c.tenant_id.is_(None) if tenant_id else models.c.tenant_id.is_not(None)
    query = _select(named, _visible(tenant_id)).order_by(first, models.c.id).limit(1)
    query = query.with_for_update(of=models) if lock else query
    row = (await connection.execute(query)).one_or_none()
    return model_of(row) if row else None


async def listed(connection: AsyncConnection, tenant_id: str | None, after: str, most: int) -> list[Model]:
    query = _select(_visible(tenant_id), models.c.id > after).order_by(models.c.id).limit(most)
    return [model_of(row) for row in await connection.execute(query)]


async def importing(connection: AsyncConnection) -> list[Model]:
    """What was begun, here or by a process that is gone."""
    query = _select(models.c.state == "importing").order_by(models.c.id)
    return [model_of(row) for row in await connection.execute(query)]


async def waiting(connection: AsyncConnection, tenant_id: str) -> int:
    """Imports of a tenant that are not done."""
    which = (models.c.tenant_id == tenant_id, models.c.state == "importing", _ALIVE)
    return await connection.scalar(select(func.count()).select_from(models).where(*which)) or 0


async def paths(connection: AsyncConnection) -> set[str]:
    """Of all models that are there."""
    return set((await connection.execute(select(models.c.path).where(_ALIVE))).scalars())


async def pending(connection: AsyncConnection) -> bool:
    """Whether there are imports that go on, or may."""
    fetched = or_(models.c.source.startswith("hf://"), models.c.source.startswith("s3://"))
    return (
        await connection.scalar(select(models.c.id).where(_ALIVE, fetched, models.c.state != "ready").limit(1))
        is not None
    )


def _visible(tenant_id: str | None) -> ColumnElement[bool]:
    return true() if tenant_id is None else or_(models.c.tenant_id.is_(None), models.c.tenant_id == tenant_id)


def _select(*which: ColumnElement[bool]) -> AnySelect:
    owner = tenants.c.name.label("owner")
    joined = models.outerjoin(artefacts).outerjoin(tenants, tenants.c.id == models.c.tenant_id)
    return select(models, artefacts, owner).select_from(joined).where(_ALIVE, *which)


def model_of(row: AnyRow) -> Model:
    """From a row that has the columns of models and artefacts, and the name of the tenant as `owner`."""
    said = row._mapping
    return Model(
        id=said[models.c.id],
        tenant_id=said[models.c.tenant_id],
        tenant=said["owner"],
        name=said[models.c.name],
        source=said[models.c.source],
        path=said[models.c.path],
        state=said[models.c.state],
        reason=said[models.c.reason],
        artefact=_artefact(row) if said[models.c.digest] else None,
        created_us=said[models.c.created_us],
        revision=said[models.c.revision],
        expected=said[models.c.expected],
        progress=_progress(said[models.c.progress]),
    )


def _progress(text: str | None) -> Progress | None:
    return None if text is None else msgspec.json.decode(text, type=Progress)


def _artefact(row: AnyRow) -> Artefact:
    said = row._mapping
    return Artefact(
        digest=said[artefacts.c.digest],
        architecture=said[artefacts.c.architecture],
        dtype=said[artefacts.c.dtype],
        weight_bytes=said[artefacts.c.weight_bytes],
        kv_bytes_per_token=said[artefacts.c.kv_bytes_per_token],
        context_tokens=said[artefacts.c.context_tokens],
        files=tuple(File(**file) for file in json.loads(said[artefacts.c.files])),
    )
