"""Models: registering a folder, inspecting it in the background, showing what was found."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import Response

from gateway.api import OF_TENANT, Answer, Body, Call, Name, Operation, Page, Shown, Time, answered, time_text
from gateway.auth import Caller
from gateway.errors import Problem, invalid, not_found
from store import models
from store.artefact import Artefact, Refused, inspect
from store.db import Database, DatabaseError, now_us
from store.models import Model, ModelInUse

log = structlog.get_logger()

AT_ONCE = 2  # folders inspected at the same time: it is the disk that works
RETRY_S = 1.0
ANYWHERE = (Path("/"),)


class NewModel(Body, frozen=True):
    name: Name
    source: str


class Progress(Shown, frozen=True, kw_only=True):
    done_bytes: int
    total_bytes: int


class ShownModel(Shown, frozen=True, kw_only=True):
    id: str
    name: str
    tenant: str | None  # None: the operator's, for all
    source: str | None
    state: Literal["importing", "ready", "refused"]
    reason: str | None
    progress: Progress | None
    digest: str | None
    architecture: str | None
    dtype: str | None
    weight_bytes: int | None
    kv_bytes_per_token: int | None
    context_tokens: int | None
    created_at: Time


class Stopped(Exception):
    """The gateway ends in the middle of an inspection."""


class Imports:
    """The inspections that are under way."""

    def __init__(self, database: Database, architectures: frozenset[str], roots: tuple[Path, ...]) -> None:
        self.roots = tuple(root.resolve() for root in roots)
        self._database, self._architectures = database, architectures
        self._progress: dict[str, tuple[int, int]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._stopping = False

    async def resume(self) -> None:
        """What a gateway that is gone has begun."""
        async with self._database.read() as connection:
            for model in await models.importing(connection):
                self.start(model)

    def start(self, model: Model) -> None:
        if model.id not in self._tasks and not self._stopping:
            task = self._tasks[model.id] = asyncio.create_task(self._run(model))
            task.add_done_callback(lambda _: self._tasks.pop(model.id, None))

    async def stop(self) -> None:
        self._stopping = True  # the threads see it with their next megabyte
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def progress(self, id: str) -> tuple[int, int] | None:
        """Bytes done and in all."""
        return self._progress.get(id)

    async def _run(self, model: Model) -> None:
        async with self._slots:
            found = await asyncio.to_thread(self._inspect, model)
        while not await self._keep(model, found):
            await asyncio.sleep(RETRY_S)
        self._progress.pop(model.id, None)

    def _inspect(self, model: Model) -> Artefact | Refused:
        def progress(done: int, total: int) -> None:
            if self._stopping:
                raise Stopped
            self._progress[model.id] = (done, total)

        try:
            roots = self.roots if model.tenant_id else ANYWHERE
            return inspect(Path(model.path), self._architectures, roots, progress)
        except Refused as refused:
            return refused

    async def _keep(self, model: Model, found: Artefact | Refused) -> bool:
        try:
            async with self._database.write() as connection:
                if isinstance(found, Refused):
                    await models.refuse(connection, model.id, str(found))
                else:
                    await models.accept(connection, model.id, found, now_us())
        except DatabaseError as error:
            log.warning("model.not_kept", model=model.id, error=str(error), retry_in_s=RETRY_S)
            return False
        log.info("model.inspected", model=model.id, refused=str(found) if isinstance(found, Refused) else None)
        return True


# ── routes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@Operation(ShownModel, 202, body=NewModel, once=True, problems=(409,))
async def create(call: Call, imports: Imports) -> Response:
    """Register a folder as a model. It is inspected in the background."""
    body = await call.body(NewModel)
    path = await asyncio.to_thread(_folder, body.source, call.caller, imports.roots)
    created: list[Model] = []

    async def deed(connection: AsyncConnection) -> Answer:
        model = await models.create(connection, call.caller.tenant_id, body.name, body.source, str(path), now_us())
        said = {"name": model.name, "source": model.source}
        await call.record(connection, "model.created", model.id, model.tenant_id, new=said)
        created.append(model)
        return Answer(202, show(model, call.caller, None))

    response = await call.once(deed)
    for model in created:
        imports.start(model)
    return response


def _folder(source: str, caller: Caller, roots: tuple[Path, ...]) -> Path:
    """The folder that is meant, symlinks resolved. Raises Problem."""
    parts = urlsplit(source)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        raise invalid("/source", f"{parts.scheme}:// is not supported yet: give a local folder")
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
    return call.page(found, lambda model: show(model, call.caller, imports.progress(model.id)))


@Operation(ShownModel, query=(OF_TENANT,))
async def get(call: Call, imports: Imports) -> Response:
    """Show a model."""
    tenant_id = await call.tenant_id()
    async with call.database.read() as connection:
        model = await _find(call, connection, tenant_id)
    return answered(show(model, call.caller, imports.progress(model.id)))


@Operation(status=204, query=(OF_TENANT,), problems=(409,))
async def delete(call: Call) -> Response:
    """Delete a model that nothing uses."""
    tenant_id = await call.tenant_id()
    async with call.database.write() as connection:
        model = await _find(call, connection, tenant_id, lock=True)
        if not _owns(call.caller, model):
            raise Problem(403, "admin_only", f"model {model.name!r} is the operator's: only the admin key deletes it")
        try:
            await models.delete(connection, model, call.caller.tenant_id, now_us())
        except ModelInUse as error:
            raise Problem(409, "model_in_use", str(error)) from error
        await call.record(connection, "model.deleted", model.id, model.tenant_id, old={"name": model.name})
    return Response(status_code=204)


async def _find(call: Call, connection: AsyncConnection, tenant_id: str | None, lock: bool = False) -> Model:
    model = await models.find(connection, tenant_id, call.path("model"), lock)
    if model is None:
        raise not_found("model", call.path("model"))
    return model


def _owns(caller: Caller, model: Model) -> bool:
    return caller.admin or caller.tenant_id == model.tenant_id


def show(model: Model, caller: Caller, progress: tuple[int, int] | None) -> ShownModel:
    artefact = model.artefact
    return ShownModel(
        id=model.id,
        name=model.name,
        tenant=model.tenant,
        source=model.source if _owns(caller, model) else None,  # a path of the operator's machine
        state=model.state,
        reason=model.reason or None,
        progress=Progress(done_bytes=progress[0], total_bytes=progress[1]) if progress else None,
        digest=artefact.digest if artefact else None,
        architecture=artefact.architecture if artefact else None,
        dtype=artefact.dtype if artefact else None,
        weight_bytes=artefact.weight_bytes if artefact else None,
        kv_bytes_per_token=artefact.kv_bytes_per_token if artefact else None,
        context_tokens=artefact.context_tokens if artefact else None,
        created_at=time_text(model.created_us),
    )
