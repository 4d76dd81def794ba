"""Models: registering a folder or a source elsewhere, which is read in the background; showing what was found."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import Response

from gateway.api import OF_TENANT, Answer, Body, Call, Name, Operation, Page, Shown, Time, answered, time_text
from gateway.auth import Caller
from gateway.errors import Problem, invalid, not_found, rate_limited
from gateway.imports import WAITING_MOST, Imports
from gateway.sources import Wrong, parse
from store import models
from store.db import now_us
from store.models import Model, ModelInUse, Progress, State


class NewModel(Body, frozen=True):
    name: Name
    source: Annotated[str, Meta(max_length=2000)]  # /path, file:///path, hf://org/name@revision or s3://bucket/prefix
    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")] | None = None  # that it must have


class ShownModel(Shown, frozen=True, kw_only=True):
    id: str
    name: str
    tenant: str | None  # None: the operator's, for all
    source: str | None
    revision: str | None  # the commit that was fetched, where the source has such a thing
    state: State
    reason: str | None
    progress: Progress | None
    digest: str | None
    architecture: str | None
    dtype: str | None
    weight_bytes: int | None
    kv_bytes_per_token: int | None
    context_tokens: int | None
    created_at: Time


@Operation(ShownModel, 202, body=NewModel, once=True, problems=(409, 429))
async def create(call: Call, imports: Imports) -> Response:
    """Register a folder, or a source elsewhere, as a model. It is read in the background."""
    body = await call.body(NewModel)
    path = (
        ""
        if _remote(body.source, call.caller, imports)
        else str(await asyncio.to_thread(_folder, body.source, call.caller, imports.roots))
    )
    created: list[Model] = []

    async def deed(connection: AsyncConnection) -> Answer:
        await _check_waiting(connection, call.caller)
        model = await models.create(
            connection, call.caller.tenant_id, body.name, body.source, path, now_us(), body.digest
        )
        said = {"name": model.name, "source": model.source}
        await call.record(connection, "model.created", model.id, model.tenant_id, new=said)
        created.append(model)
        return Answer(202, show(model, call.caller, None))

    response = await call.once(deed)
    for model in created:
        imports.start(model)
    return response


async def _check_waiting(connection: AsyncConnection, caller: Caller) -> None:
    """Raises Problem."""
    if caller.tenant_id and (count := await models.waiting(connection, caller.tenant_id)) >= WAITING_MOST:
        raise rate_limited("imports", f"{count} models of this tenant are still imported, the most that may be", 10)


def _remote(source: str, caller: Caller, imports: Imports) -> bool:
    """Whether it is to be fetched, from where this caller may. Raises Problem."""
    try:
        remote = parse(source)
    except Wrong as error:
        raise invalid("/source", str(error)) from error
    if remote and not caller.admin and not imports.sources.allows_tenants(remote):
        allowed = ", ".join(imports.sources.remotes) or "(none: ask the operator to set STACCATO_MODEL_SOURCES)"
        raise invalid("/source", f"a tenant's models come from {allowed}")
    return remote is not None


def _folder(source: str, caller: Caller, roots: tuple[Path, ...]) -> Path:
    """The folder that is meant, symlinks resolved. Raises Problem."""
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


@Operation(Page[ShownModel], query=(OF_TENANT,), paged=True)
async def listed(call: Call, imports: Imports) -> Response:
    """List the models."""
    tenant_id = await call.tenant_id()
    async with call.database.read() as connection:
        found = await models.listed(connection, tenant_id, call.after, call.limit + 1)
    return call.page(found, lambda model: show(model, call.caller, imports.progress(model)))


@Operation(ShownModel, query=(OF_TENANT,))
async def get(call: Call, imports: Imports) -> Response:
    """Show a model."""
    tenant_id = await call.tenant_id()
    async with call.database.read() as connection:
        model = await _find(call, connection, tenant_id)
    return answered(show(model, call.caller, imports.progress(model)))


@Operation(ShownModel, query=(OF_TENANT,), problems=(409,))
async def cancel(call: Call, imports: Imports) -> Response:
    """Stop an import. What has come is kept for a week: it can be taken up again."""
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


@Operation(ShownModel, 202, query=(OF_TENANT,), problems=(409, 429))
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


@Operation(status=204, query=(OF_TENANT,), problems=(409,))
async def delete(call: Call, imports: Imports) -> Response:
    """Delete a model that nothing uses. What was fetched for it goes, unless another one needs it."""
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


async def _owned(call: Call, connection: AsyncConnection, tenant_id: str | None, deed: str) -> Model:
    """Held against other changes. Raises Problem."""
    model = await _find(call, connection, tenant_id, lock=True)
    if not _owns(call.caller, model):
        raise Problem(403, "admin_only", f"model {model.name!r} is the operator's: only the admin key {deed}")
    return model


async def _find(call: Call, connection: AsyncConnection, tenant_id: str | None, lock: bool = False) -> Model:
    model = await models.find(connection, tenant_id, call.path("model"), lock)
    if model is None:
        raise not_found("model", call.path("model"))
    return model


def _owns(caller: Caller, model: Model) -> bool:
    return caller.admin or caller.tenant_id == model.tenant_id


def show(model: Model, caller: Caller, progress: Progress | None) -> ShownModel:
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
        created_at=time_text(model.created_us),
    )
