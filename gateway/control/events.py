"""Events of deployments and models as server-sent events: entries of the audit log, changed phases, import progress.

The feed queues no events for a reader. A reader keeps its place in the log and the phases already told, and gets the
rest as fast as the client reads: rows of the log without a gap, and only the last phase of several. An event of the log
has an id. A reader may continue after this id at any gateway, and is then told the present phases.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Annotated

import msgspec
import structlog
from msgspec import Meta
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.control.audit import show
from gateway.core.status import phase
from gateway.http.api import OF_TENANT, Call, Operation, Query
from gateway.http.errors import Problem, invalid
from gateway.streams.runtimes import RuntimesView
from store.contract.deployments import Deployment, Progress
from store.db import audit, deployments, models
from store.db.database import Database, DatabaseError
from store.db.models import StoredModel

log = structlog.get_logger()

STREAMS_MOST = 200  # of a gateway: a stream asks the database after each change
POLL_S = 1.0  # for changes made by another gateway
PAUSE_S = 0.1  # leases come in bursts
BEAT_S = 10.0  # longest silence, without an event
KEY_CHECK_S = 1.0  # other routes refuse a revoked key at most so much earlier
READ_DEADLINE_S = 60.0  # a client that reads nothing for so long is disconnected, and may come back
KINDS = ("deployment.", "revision.", "canary.", "model.")
PAGE_ROWS = 100

ID = r"^([0-9a-f]{32})?$"
AFTER = Query(
    "after",
    Annotated[str, Meta(pattern=ID)],
    "The id of the last event that was seen; empty: from the first. As Last-Event-ID.",
)


class PhaseChanged(msgspec.Struct, frozen=True, kw_only=True):
    deployment_id: str
    deployment: str
    tenant: str
    phase: str
    active_revision: int
    target_revision: int | None


class ImportProgressed(msgspec.Struct, frozen=True, kw_only=True):
    model_id: str
    model: str
    tenant: str | None
    progress: Progress


class Feed:
    """Phases of all deployments, progress of imports and head of the audit log, for readers."""

    def __init__(self, database: Database, fleet: RuntimesView) -> None:
        self._database, self._fleet = database, fleet
        # Deployment or model → the tenant, and the phase or progress.
        self.phases: dict[str, tuple[str | None, PhaseChanged | ImportProgressed]] = {}
        self.seq = -1  # -1: not yet known
        self.ending = False
        self._deployments: list[Deployment] = []
        self._poke, self._readers, self._streams = asyncio.Event(), asyncio.Event(), 0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        self._fleet.on_change(self._poke.set)
        while True:
            await self._readers.wait()
            try:
                await self._look()
            except DatabaseError as error:
                log.warning("events.retry", in_s=POLL_S, error=str(error))
            await asyncio.sleep(PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._poke.wait()
            self._poke.clear()

    async def _look(self) -> None:
        async with self._database.read() as connection:
            seq = (await audit.head(connection, None)).seq
            if seq != self.seq:
                self._deployments = await deployments.everything(connection)
            importing = await models.importing(connection)
        phases: dict[str, tuple[str | None, PhaseChanged | ImportProgressed]]
        phases = {d.id: (d.tenant_id, self._phase(d)) for d in self._deployments}
        phases |= {m.id: (m.tenant_id, _import(m, m.progress)) for m in importing if m.progress}
        if (seq, phases) != (self.seq, self.phases):
            self.seq, self.phases = seq, phases
            self._tell()

    def _phase(self, deployment: Deployment) -> PhaseChanged:
        return PhaseChanged(
            deployment_id=deployment.id,
            deployment=deployment.name,
            tenant=deployment.tenant,
            phase=phase(deployment.desired_state, self._fleet.states(deployment.active.engine.key)),
            active_revision=deployment.active.number,
            target_revision=deployment.target.number if deployment.target else None,
        )

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, timeout_s: float) -> None:
        """Wait until something changed, at most `timeout_s`."""
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    def end(self) -> None:
        """End all streams, since the gateway stops."""
        self.ending = True
        self._tell()

    @property
    def full(self) -> bool:
        return self._streams >= STREAMS_MOST

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        self._streams += 1
        self._readers.set()
        try:
            yield
        finally:
            self._streams -= 1
            if not self._streams:
                self._readers.clear()


def _import(model: StoredModel, progress: Progress) -> ImportProgressed:
    return ImportProgressed(model_id=model.id, model=model.name, tenant=model.tenant, progress=progress)


@Operation(media=("text/event-stream",), query=(OF_TENANT, AFTER), problems=(503,), operator=("deployments",))
async def stream(call: Call, feed: Feed) -> Response:
    """Tell what happens to deployments and models from now on, or after an event that was seen."""
    tenant_id = await call.tenant_id()
    after = call.query("after")
    after = call.request.headers.get("last-event-id") if after is None else after
    async with call.database.read() as connection:
        if after is None:
            after = await audit.last(connection, tenant_id)
        elif after and not await audit.known(connection, tenant_id, after):
            raise invalid("?after", f"{after!r} is not the id of an event: leave it away, and ask for what is now")
    if feed.full:
        detail = f"{STREAMS_MOST} streams of events are open, the most that a gateway has: close one or try again"
        raise Problem(503, "too_many_streams", detail, headers={"retry-after": "5"})
    return EventStream(call, feed, tenant_id, after)


class EventStream(Response):
    """Stream of events for one reader."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, feed: Feed, tenant_id: str | None, after: str) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._call, self._feed, self._tenant_id, self._after = call, feed, tenant_id, after
        self._told: dict[str, PhaseChanged | ImportProgressed] = {}
        self._seq = -1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.reading(), contextlib.suppress(TimeoutError, OSError):
            gone = asyncio.create_task(_gone(receive))
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for piece in self._pieces(gone):
                    async with asyncio.timeout(READ_DEADLINE_S):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                async with asyncio.timeout(READ_DEADLINE_S):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                gone.cancel()

    async def _pieces(self, gone: asyncio.Task[None]) -> AsyncIterator[bytes]:
        yield b"retry: 1000\n\n"
        silent_s = 0.0
        while not gone.done():
            said = b"".join(await self._news())
            if self._feed.ending:
                yield said + _event("end", {"reason": "the gateway stops: connect again"})
                return
            try:
                await self._call.auth.caller(self._call.request.headers)
            except Problem:
                yield _event("end", {"reason": "the key is not valid any more"})
                return
            if said:
                yield said
            elif silent_s >= BEAT_S:
                yield b": nothing new\n\n"
            silent_s = 0.0 if said or silent_s >= BEAT_S else silent_s + KEY_CHECK_S
            if not (said and self._behind):
                await self._feed.change(KEY_CHECK_S)

    async def _news(self) -> list[bytes]:
        """Return the reader's news: entries of the log, a page at a time, then the phases after these entries."""
        said = await self._done() if self._behind else []
        if self._behind:
            return said
        for id, (tenant_id, now) in self._feed.phases.items():
            if self._tenant_id in (None, tenant_id) and self._told.get(id) != now:
                self._told[id] = now
                said.append(_event("model.progress" if isinstance(now, ImportProgressed) else "deployment.phase", now))
        return said

    @property
    def _behind(self) -> bool:
        return self._seq != self._feed.seq

    async def _done(self) -> list[bytes]:
        seq = self._feed.seq
        try:
            async with self._call.database.read() as connection:
                rows = await audit.listed(connection, self._tenant_id, self._after, PAGE_ROWS)
        except DatabaseError as error:
            log.warning("events.behind", error=str(error))
            return []
        if len(rows) < PAGE_ROWS:
            self._seq = seq
        self._after = rows[-1].id if rows else self._after
        return [_event(row.kind, show(row, self._tenant_id), row.id) for row in rows if row.kind.startswith(KINDS)]


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(kind: str, data: object, id: str | None = None) -> bytes:
    named = f"id: {id}\n" if id else ""
    return f"{named}event: {kind}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"
