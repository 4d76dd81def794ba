"""Imports under way: folders being inspected, and models being fetched from a hub or an object store.

An import is recorded as `importing`, so the next gateway to start continues an unfinished import. The database also has
the progress of each import, for every gateway to show. A cancellation is written to the database, and the import sees
it within a second.
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

from gateway.imports.job import PATIENCE_S, Imported, ImportSpace, Job, Standing, Stopped
from gateway.imports.sources import Sources, parse
from store.contract.deployments import Progress
from store.db import audit, models, tenants
from store.db.database import Database, DatabaseError, now_us
from store.db.models import NoRoom, StoredModel
from store.files.architectures import Known
from store.files.artefact import Artefact, ArtefactRefused, inspect
from store.files.blobs import Blobs

log = structlog.get_logger()

AT_ONCE = 2  # folders inspected at a time: the disk is the bottleneck
FETCHED_AT_ONCE, OF_TENANT_AT_ONCE = 4, 2  # fetches at a time: the network is the bottleneck
WAITING_MOST = 20  # imports of a tenant
RETRY_S = 1.0
BEAT_S = 1.0
# Wait for threads to end. A thread waiting for a silent host ends with its deadline.
STOP_S = 2.0
ANYWHERE = (Path("/"),)

T = TypeVar("T")


class Imports:
    """Imports of this gateway."""

    def __init__(
        self,
        database: Database,
        known: Known,
        sources: Sources,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.sources = sources
        self.roots = tuple(root.resolve() for root in sources.roots)
        self._database, self._known, self._patience_s = database, known, patience_s
        self._blobs = Blobs(sources.folder)
        self._room = ImportSpace(self._blobs, sources.bytes_most)
        self._progress: dict[str, Progress] = {}  # progress of folders, lost when the gateway ends
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._halts: dict[str, threading.Event] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._fetching = asyncio.Semaphore(FETCHED_AT_ONCE)
        self._of_tenant: dict[str | None, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(OF_TENANT_AT_ONCE))
        # Separate threads: the event loop's shared threads must not wait for a network.
        self._threads = ThreadPoolExecutor(AT_ONCE + FETCHED_AT_ONCE + 1, thread_name_prefix="import")
        self._sweeping: asyncio.Task[None] | None = None
        self._stopping = False

    async def resume(self) -> None:
        """Continue imports that a former gateway began."""
        async with self._database.read() as connection:
            for model in await models.importing(connection):
                self.start(model)
        self.sweep()

    def start(self, model: StoredModel) -> None:
        """Start an import, or continue an import where an earlier run stopped."""
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
            halt.set()  # the threads see the flag with their next megabyte
        tasks = [*self._tasks.values(), *([self._sweeping] if self._sweeping else [])]
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def progress(self, model: StoredModel) -> Progress | None:
        return self._progress.get(model.id) or model.progress

    async def _run(self, model: StoredModel, halt: threading.Event, earlier: asyncio.Task[None] | None) -> None:
        if earlier:
            await asyncio.wait([earlier])
        try:
            found = await (self._fetched(model, halt) if parse(model.source) else self._inspected(model, halt))
        except Stopped:
            raise
        except Exception as error:
            if self._stopping:  # the next gateway goes on with the import
                raise
            log.error("model.import_failed", model=model.id, error=f"{type(error).__name__}: {error}")
            found = ArtefactRefused(
                f"the gateway failed at the import ({type(error).__name__}): see the gateway's log, then import again"
            )
        await self._keep(model, found)
        self._progress.pop(model.id, None)

    async def _in_thread(self, act: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, act, *arguments)

    # ── a folder ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _inspected(self, model: StoredModel, halt: threading.Event) -> Artefact | ArtefactRefused:
        async with self._slots:
            return await self._in_thread(self._inspect, model, halt)

    def _inspect(self, model: StoredModel, halt: threading.Event) -> Artefact | ArtefactRefused:
        def progress(done: int, total: int) -> None:
            if halt.is_set():
                raise Stopped
            self._progress[model.id] = Progress(done_bytes=done, total_bytes=total)

        try:
            roots = self.roots if model.tenant_id else ANYWHERE
            return inspect(Path(model.path), self._known, roots, progress)
        except ArtefactRefused as refused:
            return refused

    # ── from elsewhere ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _fetched(self, model: StoredModel, halt: threading.Event) -> Imported | ArtefactRefused:
        loop = asyncio.get_running_loop()
        remote = parse(model.source)
        assert remote is not None

        def reserve(size: int) -> None:
            try:
                asyncio.run_coroutine_threadsafe(self._reserve(model, size), loop).result()
            except NoRoom as error:
                raise ArtefactRefused(str(error)) from error

        def keep(revision: str) -> None:
            asyncio.run_coroutine_threadsafe(self._found(model, revision), loop).result()

        job = Job(
            model.id,
            remote,
            model.revision,
            self.sources,
            self._blobs,
            self._room,
            self._known,
            reserve,
            keep,
            self._patience_s,
            halt=halt,
        )
        async with self._of_tenant[model.tenant_id], self._fetching:
            beating = asyncio.create_task(self._beat(job))
            try:
                return await self._in_thread(job.run)
            except ArtefactRefused as refused:
                return refused
            finally:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)

    async def _reserve(self, model: StoredModel, size: int) -> None:
        """Reserve bytes of the owner's storage. Raises NoRoom."""

        async def act(connection: AsyncConnection) -> None:
            owner = await tenants.by_id(connection, model.tenant_id) if model.tenant_id else None
            await models.reserve(connection, model, size, owner.limits.storage_bytes if owner else None)

        await self._written(model, act)

    async def _found(self, model: StoredModel, revision: str) -> None:
        await self._written(model, lambda connection: models.found_revision(connection, model.id, revision))

    async def _beat(self, job: Job) -> None:
        """Record the job's progress, and halt the job if any gateway cancelled the import."""
        said = None
        while True:
            await asyncio.sleep(BEAT_S)
            progress = _progress(job.standing)
            with contextlib.suppress(DatabaseError):  # the import continues meanwhile
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

    async def _keep(self, model: StoredModel, found: Artefact | Imported | ArtefactRefused) -> None:
        if isinstance(found, Artefact):
            found = Imported(None, None, found)
        if isinstance(found, Imported) and model.expected not in (None, found.artefact.digest):
            found = ArtefactRefused(
                f"it has the digest {found.artefact.digest}, and {model.expected} was asked for: it is another model"
            )

        async def act(connection: AsyncConnection) -> None:
            said: dict[str, object]
            if isinstance(found, ArtefactRefused):
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
        log.info("model.inspected", model=model.id, refused=str(found) if isinstance(found, ArtefactRefused) else None)

    async def _written(self, model: StoredModel, act: Callable[[AsyncConnection], Awaitable[None]]) -> None:
        """Run `act` in a transaction, again and again until the database accepts."""
        while True:
            try:
                async with self._database.write() as connection:
                    return await act(connection)
            except DatabaseError as error:
                log.warning("model.not_kept", model=model.id, error=str(error), retry_in_s=RETRY_S)
            await asyncio.sleep(RETRY_S)

    def sweep(self) -> None:
        """Delete blobs that no model needs any more, in the background."""
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
