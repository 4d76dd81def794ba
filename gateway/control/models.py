"""Routes for models: register a folder or a remote source, read it in the background, show the result."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import Response

from gateway.core.tenants import ManagedBy
from gateway.http.api import OF_TENANT, Answer, Body, Call, Name, Operation, Page, Shown, Time, answered, time_text
from gateway.http.auth import Caller
from gateway.http.errors import Problem, invalid, not_found, rate_limited
from gateway.imports.jobs import WAITING_MOST, Imports
from gateway.imports.sources import Wrong, parse
from store.contract.deployments import Progress
from store.db import models
from store.db.database import now_us
from store.db.models import ModelInUse, State, StoredModel

Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$", description="a SHA-256 digest: 64 digits from 0 to f")]


class NewModel(Body, frozen=True):
    name: Name
    source: Annotated[str, Meta(max_length=2000)]  # /path, file:///path, hf://org/name@revision or s3://bucket/prefix
    digest: Digest | None = None  # digest that the model must have
    tenant: str | None = None  # with an operator's key: register as a model of this tenant, by the rules for tenants
    managed_by: ManagedBy | None = None  # declared object that the model is made for; None: made by hand


class ShownModel(Shown, frozen=True, kw_only=True):
    id: str
    name: str
    tenant: str | None  # None: a model of the operator, for all tenants
    source: str | None
    revision: str | None  # the fetched commit, if the source has commits
    state: State
    reason: str | None
    progress: Progress | None
    digest: str | None
    architecture: str | None
    dtype: str | None
    weight_bytes: int | None
    kv_bytes_per_token: int | None
    context_tokens: int | None
    managed_by: ManagedBy | None  # declared object that the model was made for; None: made by hand
    created_at: Time


@Operation(ShownModel, 202, body=NewModel, once=True, problems=(404, 409, 429), operator=("deployments",))
async def create(call: Call, imports: Imports) -> Response:
    """Register a folder, or a source elsewhere, as a model. The source is read in the background.

    A refused model with an equal name is replaced, unless the model is to be fetched from the same source: `:retry`
    continues with the fetched bytes."""
    body = await call.body(NewModel)
    owner = await _owner(call, body.tenant)
    path = (
        ""
        if _remote(body.source, owner, imports)
        else str(await asyncio.to_thread(_folder, body.source, owner, imports.roots))
    )
    created: list[StoredModel] = []

    async def deed(connection: AsyncConnection) -> Answer:
        await _check_waiting(connection, owner)
        await _make_room(call, connection, body, owner.tenant_id)
        model = await models.create(
            connection, owner.tenant_id, body.name, body.source, path, now_us(), body.digest, body.managed_by
        )
        said = {"name": model.name, "source": model.source}
        await call.record(connection, "model.created", model.id, model.tenant_id, new=said)
        created.append(model)
        return Answer(202, show(model, call.caller, None))

    response = await call.once(deed)
    for model in created:
        imports.start(model)
    return response


async def _owner(call: Call, tenant: str | None) -> Caller:
    """Return the caller who is to own a new model: the caller, or (for an operator who names a tenant) the tenant.

    An operator on a tenant's ground has the tenant's rights alone: the tenant's sources and limits. Raises Problem."""
    if tenant is None:
        return call.caller
    return replace(await call.tenant(tenant), operator=frozenset())


async def _make_room(call: Call, connection: AsyncConnection, body: NewModel, owner: str | None) -> None:
    """Delete a refused model that blocks the name of its successor: a refused model can't be deployed."""
    known = await models.find(connection, owner, body.name)
    if known is None or known.state != "refused" or known.tenant_id != owner:
        return
    if parse(body.source) is not None and known.source == body.source:
        return
    if refused := await models.displace_refused(connection, owner, body.name, now_us()):
        said = {"name": refused.name, "source": refused.source}
        await call.record(connection, "model.deleted", refused.id, refused.tenant_id, old=said)


async def _check_waiting(connection: AsyncConnection, caller: Caller) -> None:
    """Raises Problem if too many imports of the tenant wait."""
    if caller.tenant_id and (count := await models.waiting(connection, caller.tenant_id)) >= WAITING_MOST:
        raise rate_limited("imports", f"{count} models of this tenant are still imported, the most that may be", 10)


def _remote(source: str, caller: Caller, imports: Imports) -> bool:
    """Whether the model must be fetched. Raises Problem if the caller may not fetch from the source."""
    try:
        remote = parse(source)
    except Wrong as error:
        raise invalid("/source", str(error)) from error
    if remote and not caller.admin and not imports.sources.allows_tenants(remote):
        allowed = ", ".join(imports.sources.remotes) or "(none: ask the operator to set STACCATO_MODEL_SOURCES)"
        raise invalid("/source", f"a tenant's models come from {allowed}")
    return remote is not None


def _folder(source: str, caller: Caller, roots: tuple[Path, ...]) -> Path:
    """Return the source's folder with symlinks resolved. Raises Problem."""
    parts = urlsplit(source)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        raise invalid("/source", f"{parts.scheme}:// is no source: give a folder, hf://org/name or s3://bucket/prefix")
    named = Path(unquote(parts.path) if parts.scheme else source)
    if not named.is_absolute() or "\0" in source:
        raise invalid("/source", f"{source!r} is not an absolute path: give the folder as /path or file:///path")
    path = named.resolve()
    if not caller.admin and not any(path.is_relative_to(root) for root in roots):
        below = ", ".join(map(str, roots)) or "(none: ask the operator to set STACCATO_MODEL_ROOTS)"
        raise invalid("/source", f"a tenant's models lie below {below}")
    if not path.is_dir():
        raise invalid("/source", f"{source} is not a folder on the gateway's machine")
    return path


@Operation(Page[ShownModel], query=(OF_TENANT,), paged=True, operator=("deployments",))
async def listed(call: Call, imports: Imports) -> Response:
    """List the models."""
    tenant_id = await call.tenant_id()
    async with call.database.read() as connection:
        found = await models.listed(connection, tenant_id, call.after, call.limit + 1)
    return call.page(found, lambda model: show(model, call.caller, imports.progress(model)))


@Operation(ShownModel, query=(OF_TENANT,), operator=("deployments",))
async def get(call: Call, imports: Imports) -> Response:
    """Show a model."""
    tenant_id = await call.tenant_id()
    async with call.database.read() as connection:
        model = await _find(call, connection, tenant_id)
    return answered(show(model, call.caller, imports.progress(model)))


@Operation(ShownModel, query=(OF_TENANT,), problems=(409,), operator=("deployments",))
async def cancel(call: Call, imports: Imports) -> Response:
    """Stop an import. The fetched bytes are kept for a week, so that `:retry` can continue."""
    tenant_id = await call.tenant_id()
    async with call.database.write() as connection:
        model = await _owned(call, connection, tenant_id, "cancels its import")
        if not await models.cancel(connection, model.id):
            raise Problem(409, "not_importing", f"model {model.name!r} is {model.state}: there is nothing to cancel")
        await call.record(connection, "model.cancelled", model.id, model.tenant_id, new={"name": model.name})
        stopped = await models.by_id(connection, model.id)
    assert stopped is not None
    imports.cancel(stopped.id)
    return answered(show(stopped, call.caller, None))


@Operation(ShownModel, 202, query=(OF_TENANT,), problems=(409, 429), operator=("deployments",))
async def retry(call: Call, imports: Imports) -> Response:
    """Take up an import that was refused or cancelled, where it stopped."""
    tenant_id = await call.tenant_id()
    async with call.database.write() as connection:
        model = await _owned(call, connection, tenant_id, "takes its import up again")
        if model.state not in ("refused", "cancelled"):
            raise Problem(409, "not_stopped", f"model {model.name!r} is {model.state}: there is nothing to take up")
        await _check_waiting(connection, call.caller)
        await models.begin_again(connection, model.id)
        await call.record(connection, "model.retried", model.id, model.tenant_id, new={"name": model.name})
        begun = await models.by_id(connection, model.id)
    assert begun is not None
    imports.start(begun)
    return answered(show(begun, call.caller, imports.progress(begun)), 202)


@Operation(status=204, query=(OF_TENANT,), problems=(409,), operator=("deployments",))
async def delete(call: Call, imports: Imports) -> Response:
    """Delete an unused model. Fetched bytes needed by no other model are deleted too."""
    tenant_id = await call.tenant_id()
    async with call.database.write() as connection:
        model = await _owned(call, connection, tenant_id, "deletes it")
        try:
            await models.delete(connection, model, call.caller.tenant_id, now_us())
        except ModelInUse as error:
            raise Problem(409, "model_in_use", str(error)) from error
        await call.record(connection, "model.deleted", model.id, model.tenant_id, old={"name": model.name})
    imports.cancel(model.id)
    imports.sweep()
    return Response(status_code=204)


async def _owned(call: Call, connection: AsyncConnection, tenant_id: str | None, deed: str) -> StoredModel:
    """Return the model, locked against other changes. Raises Problem unless the caller owns the model."""
    model = await _find(call, connection, tenant_id, lock=True)
    if not _owns(call.caller, model):
        raise Problem(403, "admin_only", f"model {model.name!r} is the operator's: only the admin key {deed}")
    return model


async def _find(call: Call, connection: AsyncConnection, tenant_id: str | None, lock: bool = False) -> StoredModel:
    model = await models.find(connection, tenant_id, call.path("model"), lock)
    if model is None:
        raise not_found("model", call.path("model"))
    return model


def _owns(caller: Caller, model: StoredModel) -> bool:
    return caller.admin or caller.tenant_id == model.tenant_id


def show(model: StoredModel, caller: Caller, progress: Progress | None) -> ShownModel:
    artefact = model.artefact
    return ShownModel(
        id=model.id,
        name=model.name,
        tenant=model.tenant,
        source=model.source if _owns(caller, model) else None,  # a path of the operator's machine
        revision=model.revision,
        state=model.state,
        reason=model.reason or None,
        progress=progress if model.state == "importing" else None,
        digest=artefact.digest if artefact else None,
        architecture=artefact.architecture if artefact else None,
        dtype=artefact.dtype if artefact else None,
        weight_bytes=artefact.weight_bytes if artefact else None,
        kv_bytes_per_token=artefact.kv_bytes_per_token if artefact else None,
        context_tokens=artefact.context_tokens if artefact else None,
        managed_by=model.managed_by,
        created_at=time_text(model.created_us),
    )
