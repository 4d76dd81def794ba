"""Imports that are under way: folders that are inspected, models that are fetched from a hub or an object store.

What is begun is written down as `importing`, so whichever gateway starts next goes on with it. How far it is stands in
the database too, for every gateway to show; whoever cancels writes that there, and the import sees it within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.importing import PATIENCE_S, Imported, Job, Room, Standing, Stopped
from gateway.sources import Sources, parse
from store import audit, models, tenants
from store.artefact import Artefact, Refused, inspect
from store.blobs import Blobs
from store.db import Database, DatabaseError, now_us
from store.models import Model, NoRoom, Progress

log = structlog.get_logger()

AT_ONCE = 2  # folders inspected at the same time: it is the disk that works
FETCHED_AT_ONCE, OF_TENANT_AT_ONCE = 4, 2  # it is the network that is waited for
WAITING_MOST = 20  # imports of a tenant
RETRY_S = 1.0
BEAT_S = 1.0
STOP_S = 2.0  # for threads to see that they are to end; one that waits for a silent host ends with its deadline
ANYWHERE = (Path("/"),)

T = TypeVar("T")


class Imports:
    """The imports of this gateway."""

    def __init__(
        self,
        database: Database,
        architectures: frozenset[str],
        sources: Sources,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.sources = sources
        self.roots = tuple(root.resolve() for root in sources.roots)
        self._database, self._architectures, self._patience_s = database, architectures, patience_s
        self._blobs = Blobs(sources.folder)
        self._room = Room(self._blobs, sources.bytes_most)
        self._progress: dict[str, Progress] = {}  # of folders: nothing of it lasts
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._halts: dict[str, threading.Event] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._fetching = asyncio.Semaphore(FETCHED_AT_ONCE)
        self._of_tenant: dict[str | None, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(OF_TENANT_AT_ONCE))
        # Threads of its own: those that all share must not wait for a network.
        self._threads = ThreadPoolExecutor(AT_ONCE + FETCHED_AT_ONCE + 1, thread_name_prefix="import")
        self._sweeping: asyncio.Task[None] | None = None
        self._stopping = False

    async def resume(self) -> None:
        """What a gateway that is gone has begun."""
        async with self._database.read() as connection:
            for model in await models.importing(connection):
                self.start(model)
        self.sweep()

    def start(self, model: Model) -> None:
        """Goes on where an earlier run stopped."""
        earlier = self._tasks.get(model.id)
        if self._stopping or (earlier and not self._halts[model.id].is_set()):
            return
        halt = self._halts[model.id] = threading.Event()
        task = self._tasks[model.id] = asyncio.create_task(self._run(model, halt, earlier))
        task.add_done_callback(lambda done: self._ended(model.id, done))

    def _ended(self, id: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, Stopped):
            log.error("model.import_failed", model=id, error=f"{type(error).__name__}: {error}")
        if self._tasks.get(id) is task:
            del self._tasks[id], self._halts[id]

    def cancel(self, id: str) -> None:
        if halt := self._halts.get(id):
            halt.set()

    async def stop(self) -> None:
        self._stopping = True
        for halt in self._halts.values():
            halt.set()  # the threads see it with their next megabyte
        tasks = [*self._tasks.values(), *([self._sweeping] if self._sweeping else [])]
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def progress(self, model: Model) -> Progress | None:
        return self._progress.get(model.id) or model.progress

    async def _run(self, model: Model, halt: threading.Event, earlier: asyncio.Task[None] | None) -> None:
        if earlier:
            await asyncio.wait([earlier])
        found = await (self._fetched(model, halt) if parse(model.source) else self._inspected(model, halt))
        await self._keep(model, found)
        self._progress.pop(model.id, None)

    async def _in_thread(self, act: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, act, *arguments)

    # ── a folder ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _inspected(self, model: Model, halt: threading.Event) -> Artefact | Refused:
        async with self._slots:
            return await self._in_thread(self._inspect, model, halt)

    def _inspect(self, model: Model, halt: threading.Event) -> Artefact | Refused:
        def progress(done: int, total: int) -> None:
            if halt.is_set():
                raise Stopped
            self._progress[model.id] = Progress(done_bytes=done, total_bytes=total)

        try:
            roots = self.roots if model.tenant_id else ANYWHERE
            return inspect(Path(model.path), self._architectures, roots, progress)
        except Refused as refused:
            return refused

    # ── from elsewhere ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _fetched(self, model: Model, halt: threading.Event) -> Imported | Refused:
        loop = asyncio.get_running_loop()
        remote = parse(model.source)
        assert remote is not None

        def reserve(size: int) -> None:
            try:
                asyncio.run_coroutine_threadsafe(self._reserve(model, size), loop).result()
            except NoRoom as error:
                raise Refused(str(error)) from error

        def keep(revision: str) -> None:
            asyncio.run_coroutine_threadsafe(self._found(model, revision), loop).result()

        job = Job(
            model.id,
            remote,
            model.revision,
            self.sources,
            self._blobs,
            self._room,
            self._architectures,
            reserve,
            keep,
            self._patience_s,
            halt=halt,
        )
        async with self._of_tenant[model.tenant_id], self._fetching:
            beating = asyncio.create_task(self._beat(job))
            try:
                return await self._in_thread(job.run)
            except Refused as refused:
                return refused
            finally:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)

    async def _reserve(self, model: Model, size: int) -> None:
        """Raises NoRoom."""

        async def act(connection: AsyncConnection) -> None:
            owner = await tenants.by_id(connection, model.tenant_id) if model.tenant_id else None
            await models.reserve(connection, model, size, owner.limits.storage_bytes if owner else None)

        await self._written(model, act)

    async def _found(self, model: Model, revision: str) -> None:
        await self._written(model, lambda connection: models.found_revision(connection, model.id, revision))

    async def _beat(self, job: Job) -> None:
        """Writes down how far it is; hears that it was cancelled, at whichever gateway."""
        said = None
        while True:
            await asyncio.sleep(BEAT_S)
            progress = _progress(job.standing)
            with contextlib.suppress(DatabaseError):  # it goes on meanwhile
                if progress == said:
                    async with self._database.read() as connection:
                        wanted = await models.is_importing(connection, job.id)
                else:
                    async with self._database.write() as connection:
                        wanted = await models.progressed(connection, job.id, progress)
                said = progress
                if not wanted:
                    job.halt.set()

    # ── what came of it ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep(self, model: Model, found: Artefact | Imported | Refused) -> None:
        if isinstance(found, Artefact):
            found = Imported(None, None, found)
        if isinstance(found, Imported) and model.expected not in (None, found.artefact.digest):
            found = Refused(
                f"it has the digest {found.artefact.digest}, and {model.expected} was asked for: it is another model"
            )

        async def act(connection: AsyncConnection) -> None:
            said: dict[str, object]
            if isinstance(found, Refused):
                kind, said = "model.refused", {"reason": str(found)}
                kept = await models.refuse(connection, model.id, str(found))
            else:
                path = str(found.path) if found.path else None
                kind, said = "model.ready", {"digest": found.artefact.digest, "revision": found.revision}
                kept = await models.accept(connection, model.id, found.artefact, now_us(), path)
            if kept:
                said = {"name": model.name, **said}
                await audit.record(connection, kind, model.id, model.tenant_id, "platform", new=said)

        await self._written(model, act)
        log.info("model.inspected", model=model.id, refused=str(found) if isinstance(found, Refused) else None)

    async def _written(self, model: Model, act: Callable[[AsyncConnection], Awaitable[None]]) -> None:
        """In one transaction, as soon as the database lets us."""
        while True:
            try:
                async with self._database.write() as connection:
                    return await act(connection)
            except DatabaseError as error:
                log.warning("model.not_kept", model=model.id, error=str(error), retry_in_s=RETRY_S)
            await asyncio.sleep(RETRY_S)

    def sweep(self) -> None:
        """Gives back the bytes that no model needs any more, in the background."""
        if not self._stopping and self.sources.folder.is_dir():
            self._sweeping = asyncio.create_task(self._sweep(self._sweeping))

    async def _sweep(self, earlier: asyncio.Task[None] | None) -> None:
        if earlier:
            await asyncio.wait([earlier])
        candidates = await self._in_thread(self._blobs.candidates)
        try:
            async with self._database.read() as connection:
                used, pending = await models.paths(connection), await models.pending(connection)
        except DatabaseError as error:
            log.warning("model.not_swept", error=str(error))
            return
        freed = await self._in_thread(self._blobs.sweep, candidates, used, pending, time.time())
        log.info("model.swept", bytes=freed)


def _progress(standing: Standing) -> Progress:
    return Progress(
        done_bytes=standing.done_bytes,
        total_bytes=standing.total_bytes,
        eta_s=standing.eta_s,
        waits_for=standing.waits_for,
    )
