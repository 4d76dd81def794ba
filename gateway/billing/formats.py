"""Writes a bill or its rows in five formats, page by page, in constant memory."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib import metadata
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.billing.focus import Charge, charge
from store.db import bill
from store.db.bill import Line, UsedRow
from store.db.database import PAGE_ROWS

if TYPE_CHECKING:
    from typing_extensions import Buffer

VERSION = "1"  # must rise if equal rows give different bytes


@dataclass(frozen=True)
class ExportQuery:
    """An export to make. `format` is a key of FORMATS, `detail` a detail of the format."""

    period: str
    tenant_id: str | None  # None: all tenants
    format: str
    detail: str

    @property
    def recorded(self) -> bill.Export:
        version = FORMATS[self.format].version()
        return bill.Export(self.period, self.tenant_id or "", self.format, self.detail, version)


class Digest(io.RawIOBase):
    """A file that knows size and SHA-256 of the bytes written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sha256, self.size = file, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        self._sha256.update(data)
        written = self._file.write(data)
        self.size += written
        return written

    @property
    def sha256(self) -> str:
        """SHA-256 in hex."""
        return self._sha256.hexdigest()


async def write(connection: AsyncConnection, asked: ExportQuery, file: BinaryIO) -> Digest:
    """Write an export to `file`. `connection` must be a snapshot."""
    chosen, digest = FORMATS[asked.format], Digest(file)
    writer = chosen.writer(digest, chosen.kind or _KINDS[asked.detail])
    async for page in _pages(connection, asked):
        writer.page([chosen.made_of(item) for item in page] if chosen.made_of else page)
    writer.end()
    return digest


async def _pages(connection: AsyncConnection, asked: ExportQuery) -> AsyncIterator[Sequence[msgspec.Struct]]:
    if asked.detail == "rows":
        async for page in bill.rows(connection, asked.period, asked.tenant_id):
            yield page
    else:
        lines = await bill.lines(connection, asked.period, asked.tenant_id)
        for start in range(0, len(lines), PAGE_ROWS):
            yield lines[start : start + PAGE_ROWS]


# ── writers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Writer(Protocol):
    def page(self, items: Sequence[msgspec.Struct]) -> None: ...

    def end(self) -> None: ...


class Csv:
    def __init__(self, digest: Digest, kind: type[msgspec.Struct]) -> None:
        self._digest = digest
        self._write([kind.__struct_encode_fields__])

    def page(self, items: Sequence[msgspec.Struct]) -> None:
        self._write([msgspec.structs.astuple(item) for item in items])

    def _write(self, rows: Sequence[tuple[Any, ...]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        self._digest.write(text.getvalue().encode())

    def end(self) -> None:
        pass


class Jsonl:
    def __init__(self, digest: Digest, kind: type[msgspec.Struct]) -> None:
        self._digest, self._encoder = digest, msgspec.json.Encoder()

    def page(self, items: Sequence[msgspec.Struct]) -> None:
        self._digest.write(self._encoder.encode_lines(items))

    def end(self) -> None:
        pass


class Parquet:
    """Parquet writer. Numbers that other formats write as texts are decimals, which no reader rounds.

    A row group has many pages.
    """

    PLACES = {"quantity": 9, "unit_price": 12, "unrounded": 21, "amount": 21}
    GROUP_ROWS = 4000

    def __init__(self, digest: Digest, kind: type[msgspec.Struct]) -> None:
        import pyarrow as pa  # 0.2 s and 50 MB, needed only by Parquet
        import pyarrow.parquet as pq

        self._schema = pa.schema([(field.name, self._type(pa, field)) for field in msgspec.structs.fields(kind)])
        self._file = pq.ParquetWriter(digest, self._schema, compression="zstd")
        self._arrow, self._held = pa, list[msgspec.Struct]()

    def _type(self, pa: Any, field: msgspec.structs.FieldInfo) -> Any:
        if field.name in self.PLACES:
            return pa.decimal128(38, self.PLACES[field.name])
        return pa.int64() if field.type is int else pa.string()

    def page(self, items: Sequence[msgspec.Struct]) -> None:
        self._held += items
        if len(self._held) >= self.GROUP_ROWS:
            self._write()

    def _write(self) -> None:
        columns = zip(*map(msgspec.structs.astuple, self._held), strict=True)
        arrays = [self._array(field, values) for field, values in zip(self._schema, columns, strict=True)]
        self._file.write_batch(self._arrow.record_batch(arrays, schema=self._schema))
        self._held.clear()

    def _array(self, field: Any, values: Sequence[Any]) -> Any:
        exact = [Decimal(value) for value in values] if field.name in self.PLACES else values
        return self._arrow.array(exact, type=field.type)

    def end(self) -> None:
        if self._held:
            self._write()
        self._file.close()


# ── formats ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Event(msgspec.Struct, frozen=True):
    """Row as CloudEvents 1.0. A row that still changes has a new id for each state."""

    id: str
    source: str
    time: str
    subject: str
    data: UsedRow
    type: str = "staccato.usage"
    specversion: str = "1.0"
    datacontenttype: str = "application/json"


def event(used: UsedRow) -> Event:
    id = f"{used.request}:{used.attempt}:{used.seq}"
    return Event(id, f"/deployments/{used.deployment_id}", used.ended_at, used.tenant_id, used)


def _arrow_version() -> str:
    """Return the version of the format: a Parquet file names the library that wrote the file."""
    return f"{VERSION}/pyarrow-{metadata.version('pyarrow')}"


@dataclass(frozen=True)
class Format:
    """A format of exports. `kind` and `made_of`: struct written instead of lines or rows, and its maker."""

    media_type: str
    suffix: str
    details: tuple[str, ...]  # default first
    writer: Callable[[Digest, type[msgspec.Struct]], Writer]
    kind: type[msgspec.Struct] | None = None
    made_of: Callable[[Any], msgspec.Struct] | None = None
    version: Callable[[], str] = lambda: VERSION


_KINDS: dict[str, type[msgspec.Struct]] = {"lines": Line, "rows": UsedRow}
_BOTH = ("lines", "rows")
FORMATS = {
    "csv": Format("text/csv", "csv", _BOTH, Csv),
    "jsonl": Format("application/jsonl", "jsonl", _BOTH, Jsonl),
    "parquet": Format("application/vnd.apache.parquet", "parquet", _BOTH, Parquet, version=_arrow_version),
    "focus": Format("text/csv", "focus.csv", ("lines",), Csv, Charge, charge),
    "cloudevents": Format("application/jsonl", "events.jsonl", ("rows",), Jsonl, Event, event),
}
