"""Models that can be deployed: name, folder, and the artefact found by inspecting the folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

import msgspec
from sqlalchemy import ColumnElement, func, or_, select, true, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.contract.deployments import Progress
from store.contract.kv_curve import KeptLayers
from store.db.database import AnyRow, AnySelect, added_once, insert, new_id
from store.db.tables import artefacts, deployments, models, revisions, tenants
from store.files.artefact import Artefact, File

State = Literal["importing", "ready", "refused", "cancelled"]


@dataclass(frozen=True)
class StoredModel:
    id: str
    tenant_id: str | None  # None: the operator's model, visible to every tenant
    tenant: str | None
    name: str
    source: str
    path: str
    state: State
    reason: str
    artefact: Artefact | None
    created_us: int
    revision: str | None = None  # the commit, if the source has commits
    expected: str | None = None  # the digest that the model must have
    progress: Progress | None = None
    managed_by: str | None = None  # declared object that the model was made for; None: made by hand


class ModelInUse(Exception):
    """Error of deleting a model that `deployments` still use."""

    def __init__(self, name: str, deployments: list[str]) -> None:
        super().__init__(f"model {name!r} is used by {', '.join(deployments)}: delete these deployments first")


_ALIVE = models.c.deleted_us.is_(None)


class NoRoom(Exception):
    """Error of an import that would exceed the storage limit of a tenant."""


async def create(
    connection: AsyncConnection,
    tenant_id: str | None,
    name: str,
    source: str,
    path: str,
    now_us: int,
    expected: str | None = None,
    managed_by: str | None = None,
) -> StoredModel:
    """Create a model and begin the import. `path` is empty if the model must be fetched. Raises Taken."""
    id = new_id()
    row = {"id": id, "tenant_id": tenant_id, "name": name, "source": source, "path": path, "created_us": now_us}
    row |= {"expected": expected, "managed_by": managed_by}
    with added_once("model", name):
        await connection.execute(models.insert().values(**row, state="importing", reason=""))
    model = await by_id(connection, id)
    assert model is not None
    return model


async def accept(
    connection: AsyncConnection, id: str, artefact: Artefact, now_us: int, path: str | None = None
) -> bool:
    """Mark a model as ready, with the artefact found at `path` (None: the path given at creation).

    Other models with the same files get what this version found in the files, too.

    Returns False if the import was cancelled or the model deleted."""
    facts = {name: value for name, value in vars(artefact).items() if name not in ("files", "kv_layers")}
    files = json.dumps([_written(file) for file in artefact.files])
    kept = msgspec.json.encode(artefact.kv_layers).decode() if artefact.kv_layers else None
    found = facts | {"files": files, "kv_layers": kept}
    row = insert(connection, artefacts).values(**found, created_us=now_us)
    # An earlier version found less in the same files: layers that keep windows, weights of towers.
    await connection.execute(row.on_conflict_do_update(index_elements=[artefacts.c.digest], set_=found))
    moved = {} if path is None else {"path": path}
    return await _finish(connection, id, state="ready", digest=artefact.digest, **moved)


def _written(file: File) -> dict[str, object]:
    """Return the fields of a file. Earlier versions know no towers, and read files without towers as before."""
    return {name: value for name, value in asdict(file).items() if name != "tower_bytes" or value}


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
    """Begin a refused or cancelled import again."""
    which = (models.c.id == id, models.c.state.in_(("refused", "cancelled")))
    await connection.execute(update(models).where(*which).values(state="importing", reason=""))


async def found_revision(connection: AsyncConnection, id: str, revision: str) -> None:
    """Note the commit of an import. The import goes on with the commit even if the source's branch moves."""
    await _while_importing(connection, id, revision=revision)


async def progressed(connection: AsyncConnection, id: str, progress: Progress) -> bool:
    """Note the progress of an import. Returns False if the import was cancelled or the model deleted."""
    return await _while_importing(connection, id, progress=msgspec.json.encode(progress).decode())


async def is_importing(connection: AsyncConnection, id: str) -> bool:
    which = (models.c.id == id, models.c.state == "importing", _ALIVE)
    return await connection.scalar(select(models.c.id).where(*which)) is not None


async def reserve(connection: AsyncConnection, model: StoredModel, size: int, most: int | None) -> None:
    """Reserve `size` bytes of the owner's storage limit, `most` bytes (None: no limit). Raises NoRoom.

    A file that several tenants imported is stored once, and counts for each tenant. Otherwise a tenant could learn from
    the sum which models other tenants have."""
    if model.tenant_id is not None:  # imports of a tenant take turns
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


async def delete(connection: AsyncConnection, model: StoredModel, viewer: str | None, now_us: int) -> None:
    """Delete a model. Raises ModelInUse, naming deployments as `viewer` sees deployments (None: the operator)."""
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


async def displace_refused(
    connection: AsyncConnection, tenant_id: str | None, name: str, now_us: int
) -> StoredModel | None:
    """Delete the owner's refused model of a name, if any, and return the model. No deployment uses a refused model."""
    owned = models.c.tenant_id == tenant_id if tenant_id else models.c.tenant_id.is_(None)
    row = (await connection.execute(_select(models.c.name == name, owned, models.c.state == "refused"))).one_or_none()
    if row is None:
        return None
    refused = model_of(row)
    await connection.execute(update(models).where(models.c.id == refused.id).values(deleted_us=now_us))
    return refused


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def by_id(connection: AsyncConnection, id: str) -> StoredModel | None:
    row = (await connection.execute(_select(models.c.id == id))).one_or_none()
    return model_of(row) if row else None


async def find(connection: AsyncConnection, tenant_id: str | None, name: str, lock: bool = False) -> StoredModel | None:
    """Return a model by name, id or digest.

    A tenant sees the tenant's own models first, then the shared models; the operator (None) sees every model. `lock`
    keeps the model from being deleted until the transaction ends.
    """
    named = or_(models.c.name == name, models.c.id == name, models.c.digest == name)
    first = models.c.tenant_id.is_(None) if tenant_id else models.c.tenant_id.is_not(None)
    query = _select(named, _visible(tenant_id)).order_by(first, models.c.id).limit(1)
    query = query.with_for_update(of=models) if lock else query
    row = (await connection.execute(query)).one_or_none()
    return model_of(row) if row else None


async def listed(connection: AsyncConnection, tenant_id: str | None, after: str, most: int) -> list[StoredModel]:
    query = _select(_visible(tenant_id), models.c.id > after).order_by(models.c.id).limit(most)
    return [model_of(row) for row in await connection.execute(query)]


async def importing(connection: AsyncConnection) -> list[StoredModel]:
    """Return the models being imported, by this process or by a process that has died."""
    query = _select(models.c.state == "importing").order_by(models.c.id)
    return [model_of(row) for row in await connection.execute(query)]


async def waiting(connection: AsyncConnection, tenant_id: str) -> int:
    """Return the number of a tenant's unfinished imports."""
    which = (models.c.tenant_id == tenant_id, models.c.state == "importing", _ALIVE)
    return await connection.scalar(select(func.count()).select_from(models).where(*which)) or 0


async def paths(connection: AsyncConnection) -> set[str]:
    """Return the folders of the models not deleted."""
    return set((await connection.execute(select(models.c.path).where(_ALIVE))).scalars())


async def pending(connection: AsyncConnection) -> bool:
    """Whether an import from hf:// or s3:// is under way, or may be taken up again."""
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


def model_of(row: AnyRow) -> StoredModel:
    """Return the model of a row with the columns of models and artefacts, and the tenant's name as `owner`."""
    said = row._mapping
    return StoredModel(
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
        managed_by=said[models.c.managed_by],
    )


def _progress(text: str | None) -> Progress | None:
    return None if text is None else msgspec.json.decode(text, type=Progress)


def _kept(text: str | None) -> tuple[KeptLayers, ...]:
    return () if text is None else msgspec.json.decode(text, type=tuple[KeptLayers, ...])


def _artefact(row: AnyRow) -> Artefact:
    said = row._mapping
    return Artefact(
        digest=said[artefacts.c.digest],
        architecture=said[artefacts.c.architecture],
        dtype=said[artefacts.c.dtype],
        weight_bytes=said[artefacts.c.weight_bytes],
        kv_bytes_per_token=said[artefacts.c.kv_bytes_per_token],
        context_tokens=said[artefacts.c.context_tokens],
        kv_layers=_kept(said[artefacts.c.kv_layers]),
        files=tuple(File(**file) for file in json.loads(said[artefacts.c.files])),
    )
