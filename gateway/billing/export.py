"""Routes that read a whole month: the bill as a file, and a check of the bill.

A file is written whole before its first byte is sent. A slow reader therefore holds no database connection, a failure
has a status code, and the digest of a closed month is known before a client relies on the file.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import BinaryIO, Literal, cast

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import Response, StreamingResponse

from gateway.billing.formats import FORMATS, Digest, ExportQuery, write
from gateway.http.api import OF_TENANT, PERIOD, Call, Operation, Query, Shown, answered, month, one_of
from gateway.http.errors import Problem
from store.db import bill, usage, verify
from store.db.database import Database, now_us
from store.db.verify import Flaw

log = structlog.get_logger()

AT_ONCE_MOST = 2  # each export holds a database connection while reading
IN_MEMORY_MOST = 1 << 20  # bytes; a larger file waits for its reader on the disk
CHUNK_BYTES = 1 << 16


class ShownReport(Shown, frozen=True, kw_only=True):
    """Result of a check by store/db/verify.py."""

    period: str
    closed: bool
    rows: int
    lines: int
    amounts: dict[str, str]
    flawed: dict[str, int]
    flaws: list[Flaw]
    ok: bool
    exports: int  # exports made again and compared


class Exports:
    """Makes bills as files. If too many exports are under way, a client is told to come again."""

    def __init__(self, database: Database) -> None:
        self._database, self._open = database, 0

    # ── a file ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def serve(self, call: Call) -> Response:
        asked = await _asked(call)
        file = cast(BinaryIO, tempfile.SpooledTemporaryFile(IN_MEMORY_MOST))
        try:
            digest, closed = await self._written(asked, file)
        except BaseException:
            file.close()
            raise
        chosen = FORMATS[asked.format]
        headers = {
            "content-disposition": f'attachment; filename="staccato-{asked.period}.{chosen.suffix}"',
            "content-length": str(digest.size),
            "x-staccato-period": "closed" if closed else "open",
            "x-staccato-sha256": digest.sha256,
        }
        return StreamingResponse(_chunks(file), headers=headers, media_type=chosen.media_type)

    async def _written(self, asked: ExportQuery, file: BinaryIO) -> tuple[Digest, bool]:
        closed = usage.is_closed(asked.period, now_us())  # tested before the read: a closed month changes no more
        async with self._snapshot(asked.tenant_id) as connection:
            digest = await write(connection, asked, file)
        if closed:
            await self._compare(asked, digest)
        return digest, closed

    async def _compare(self, asked: ExportQuery, digest: Digest) -> None:
        """Compare with the first export. Raises Problem if a closed month's bill has changed since."""
        async with self._database.write() as connection:
            first = await bill.first_sha256(connection, asked.recorded, digest.sha256, digest.size, now_us())
        if first != digest.sha256:
            log.error("export.changed", period=asked.period, format=asked.format, first=first, now=digest.sha256)
            detail = (
                f"the bill of {asked.period} is closed and is not what was exported first (sha256 {first}, now "
                f"{digest.sha256}): `staccato usage verify --period {asked.period}` says what is wrong with it"
            )
            raise Problem(409, "bill_changed", detail)

    # ── is it right ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def verify(self, call: Call) -> Response:
        period = month("?period", call.query("period"))
        async with self._snapshot() as connection:
            report = await verify.verify(connection, period, now_us())
            recorded = await bill.exported(connection, period)
            for export, first in recorded.items():
                report.add(await _changed(connection, export, first))
        return answered(ShownReport(**vars(report), ok=not report.flawed, exports=len(recorded)))

    @contextlib.asynccontextmanager
    async def _snapshot(self, tenant_id: str | None = None) -> AsyncIterator[AsyncConnection]:
        """Yield a snapshot of the database. Raises Problem if too many exports are under way."""
        if self._open == AT_ONCE_MOST:
            detail = f"{AT_ONCE_MOST} months are being read already, the most at once: try again in some seconds"
            raise Problem(503, "exports_busy", detail, headers={"retry-after": "5"})
        self._open += 1
        try:
            async with self._database.of(tenant_id).snapshot() as connection:
                yield connection
        finally:
            self._open -= 1


@Operation(
    media=tuple(sorted({chosen.media_type for chosen in FORMATS.values()})),
    query=(
        PERIOD,
        OF_TENANT,
        Query("format", Literal[tuple(FORMATS)], "How it is written; csv unless it is said."),
        Query("detail", str, "Which lines: the first that the format has unless it is said."),
    ),
    problems=(409,),
    operator=("billing:read", "billing"),
)
async def export(call: Call, exports: Exports) -> Response:
    """Send a month's bill as a file; once the month is closed, always the same one."""
    return await exports.serve(call)


@Operation(ShownReport, query=(PERIOD,), operator=("billing:read", "billing"))
async def verify_bill(call: Call, exports: Exports) -> Response:
    """Compute a month's bill again, from its rows and prices, and say what is wrong."""
    return await exports.verify(call)


async def _asked(call: Call) -> ExportQuery:
    """Return the query's parameters. Raises Problem."""
    period = month("?period", call.query("period"))
    format = call.query("format", "csv")
    one_of("?format", format, FORMATS)
    details = FORMATS[format].details
    detail = call.query("detail", details[0])
    one_of("?detail", detail, details)
    return ExportQuery(period, await call.tenant_id(), format, detail)


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        file.seek(0)
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


async def _changed(connection: AsyncConnection, export: bill.Export, first: str) -> list[Flaw]:
    """Make an export again and return a flaw if it changed; [] if another version wrote the export."""
    asked = ExportQuery(export.period, export.tenant_id or None, export.format, export.detail)
    if export.format not in FORMATS or asked.recorded != export:
        return []
    with open("/dev/null", "wb") as nowhere:
        digest = await write(connection, asked, nowhere)
    where = f"{export.format} {export.detail} of {export.tenant_id or 'all tenants'}"
    said = f"its sha256 is {digest.sha256}, the first export's was {first}"
    return [Flaw("export", where, said)] if digest.sha256 != first else []
