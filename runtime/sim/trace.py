"""Traces from files: arrival time, model and lengths of requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.parquet as arrow_parquet

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

ROWS_MOST = 10_000_000
TOKENS_MOST = 2**31 - 1
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_VALUE_SHOWN = 24  # characters of a wrong value in an error


class TraceError(ValueError):
    """A file is wrong; a single sentence says where and how."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of arrival; `model` is an index into `names`."""

    names: tuple[str, ...]
    at_s: Floats  # since the first request
    model: Ints
    prompt_tokens: Ints
    output_tokens: Ints

    @property
    def duration_s(self) -> float:
        """Time to the expected next request: to the last request, and a mean gap. 0 if requests came at once."""
        requests = len(self.at_s)
        return float(self.at_s[-1]) * requests / (requests - 1) if requests > 1 else 0.0


def read_trace(path: Path) -> Trace:
    """Reads a trace with columns `t` (s, ascending), `inp` and `out` (tokens), and `model` if the trace has several.

    Further columns are ignored. A file not named .parquet is a CSV, plain or compressed (.csv.zst).
    Raises TraceError."""
    rows = _read(path, ("t", "inp", "out"), optional=("model",))
    at_s = rows.numbers("t", least=0)
    backwards = np.flatnonzero(np.diff(at_s) < 0)
    if len(backwards):
        before = int(backwards[0])
        raise rows.error(before + 1, "t", f"is before {at_s[before]:g}, that of the row above: sort the rows by t")
    names, model = rows.names("model") if rows.has("model") else (("",), np.zeros(len(at_s), np.int32))
    return Trace(
        names=names,
        at_s=at_s - at_s[0],
        model=model,
        prompt_tokens=rows.counts("inp"),
        output_tokens=rows.counts("out"),
    )


# ── ServeGen: what clients of a large service do in ten minutes ───────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class ClientWindows:
    """Windows of ten minutes of a client, with distributions fitted to the gaps between requests."""

    rate: Floats  # requests per second
    gamma: npt.NDArray[np.bool_]  # True: gaps are Gamma-distributed; False: Weibull
    shape: Floats


@dataclass(frozen=True, eq=False)
class ClientLengths:
    """Quantiles of the tokens of a client's requests, at `shares`."""

    shares: Floats  # ascending, up to 1
    prompt_tokens: Floats
    output_tokens: Floats


_SHARES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


def read_windows(path: Path) -> dict[str, ClientWindows]:
    """Windows by client; only windows with a fitted distribution. Raises TraceError."""
    rows = _read(path, ("pool", "client", "rate", "cv", "pat", "shape"))
    clients = _clients(rows)
    rate, shape, cv = (rows.numbers(column, least=0) for column in ("rate", "shape", "cv"))
    gamma = np.array(rows.texts("pat")) == "Gamma"
    fitted = np.flatnonzero((cv > 0) & (shape > 0) & (rate > 0))
    order = fitted[np.argsort(clients[fitted], kind="stable")]
    names, starts = np.unique(clients[order], return_index=True)
    parts = np.split(order, starts[1:])
    return {
        str(name): ClientWindows(rate[part], gamma[part], shape[part])
        for name, part in zip(names, parts, strict=bool(len(names)))
    }


def read_lengths(path: Path) -> dict[str, ClientLengths]:
    """Lengths by client; only clients with known lengths of prompts and of outputs. Raises TraceError."""
    columns = tuple(f"q{round(share * 100):02d}" for share in _SHARES)
    rows = _read(path, ("pool", "client", "field", *columns))
    tokens = np.stack([rows.numbers(column, least=0) for column in columns], axis=1)
    found = dict(zip(zip(_clients(rows).tolist(), rows.texts("field"), strict=True), tokens, strict=True))
    shares = np.array(_SHARES)
    return {
        client: ClientLengths(shares, prompt, found[client, "output_tokens"])
        for (client, field), prompt in found.items()
        if field == "input_tokens" and (client, "output_tokens") in found
    }


def _clients(rows: _Rows) -> npt.NDArray[np.str_]:
    named = zip(rows.texts("pool"), rows.texts("client"), strict=True)
    return np.array([f"{pool}:{client}" for pool, client in named])


# ── rows of a file, checked column by column ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class _Rows:
    path: Path
    table: pa.Table  # a column that the file lacks is all nulls
    first_row: int  # number of the table's first row in an editor: the header of a CSV is row 1

    def has(self, column: str) -> bool:
        cells = self.table[column]
        return bool(cells.null_count < len(cells))

    def error(self, index: int, column: str, reason: str) -> TraceError:
        value = self._shown(self.table[column][index].as_py())
        return TraceError(f"{self.path}, row {self.first_row + index}, column {column}: {value} {reason}")

    @staticmethod
    def _shown(value: object) -> str:
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        if value is None or not text:
            return "an empty cell"
        return repr(text if len(text) <= _VALUE_SHOWN else f"{text[:_VALUE_SHOWN]}…")

    def _refuse(self, wrong: npt.NDArray[np.bool_], column: str, reason: str) -> None:
        if wrong.any():
            raise self.error(int(np.argmax(wrong)), column, reason)

    def numbers(self, column: str, least: float) -> Floats:
        cells = self.table[column]
        kind = cells.type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            self._refuse(_booleans(pc.is_null(cells)), column, "is not a number")
        elif pa.types.is_binary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
            matches = pc.fill_null(pc.match_substring_regex(cells, _NUMBER), False)
            self._refuse(~_booleans(matches), column, "is not a number")
            cells = pc.cast(cells, pa.large_string())
        else:
            raise TraceError(f"{self.path}, column {column}: it holds {kind}, not numbers")
        values = np.asarray(pc.cast(cells, pa.float64(), safe=False).to_numpy())
        self._refuse(~np.isfinite(values), column, "is not finite")
        self._refuse(values < least, column, f"is less than {least:g}")
        return values

    def counts(self, column: str) -> Ints:
        """Column of token counts: whole numbers from 1 to TOKENS_MOST."""
        values = self.numbers(column, least=1)
        self._refuse(values != np.floor(values), column, "is not a whole number")
        self._refuse(values > TOKENS_MOST, column, f"is more than {TOKENS_MOST}")
        return values.astype(np.int32)

    def texts(self, column: str) -> list[str]:
        cells = self.table[column]
        texts = [
            cell.decode(errors="replace") if isinstance(cell, bytes) else "" if cell is None else str(cell)
            for cell in cells.to_pylist()
        ]
        self._refuse(np.array([not text for text in texts]), column, "names nothing")
        return texts

    def names(self, column: str) -> tuple[tuple[str, ...], Ints]:
        """Distinct texts in the order of first appearance, and for each row the index of its text."""
        encoded = pc.dictionary_encode(self.table[column].combine_chunks(), null_encoding="encode")
        distinct = _Rows(self.path, pa.table({column: encoded.dictionary}), 0)
        index = np.asarray(encoded.indices).astype(np.int32)
        empty = [place for place, name in enumerate(encoded.dictionary.to_pylist()) if name in (None, b"", "")]
        self._refuse(np.isin(index, empty), column, "names no model")
        return tuple(distinct.texts(column)), index


def _booleans(cells: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    return np.asarray(cells.to_numpy(), np.bool_)


def _read(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> _Rows:
    try:
        rows = (_parquet if path.suffix == ".parquet" else _csv)(path, [*needed, *optional])
    except FileNotFoundError as error:
        raise TraceError(f"{path}: there is no such file") from error
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{path}: it cannot be read: {str(error).splitlines()[0]}") from error
    if not rows.table.num_rows:
        raise TraceError(f"{path}: there are no rows in it")
    missing = [column for column in needed if not rows.has(column)]
    if missing:
        raise TraceError(f"{path}: there is no column {missing[0]}; needed are {', '.join(needed)}")
    return rows


def _csv(path: Path, columns: list[str]) -> _Rows:
    """Reads cells as bytes; the checks of `_Rows` parse cells and name row and column in errors."""
    try:
        with arrow_csv.open_csv(
            path,
            read_options=arrow_csv.ReadOptions(use_threads=False),  # else rows are not counted
            parse_options=arrow_csv.ParseOptions(ignore_empty_lines=False),  # rows are numbered as in an editor
            convert_options=arrow_csv.ConvertOptions(
                check_utf8=False,
                include_columns=columns,
                include_missing_columns=True,
                column_types={column: pa.binary() for column in columns},
            ),
        ) as batches:
            return _Rows(path, _table(path, batches), first_row=2)
    except pa.ArrowInvalid as error:
        # Arrow's handler of ragged rows decodes their text first, and fails if the text is no UTF-8.
        ragged = re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", str(error))
        if not ragged:
            raise
        row, wanted, had = ragged.groups()
        raise TraceError(f"{path}, row {row}: it has {had} columns, the header has {wanted}") from error


def _parquet(path: Path, columns: list[str]) -> _Rows:
    with arrow_parquet.ParquetFile(path) as file:
        if file.metadata.num_rows > ROWS_MOST:
            raise _too_many(path)
        table = file.read([column for column in columns if column in file.schema_arrow.names])
    cells = {column: table[column] if column in table.column_names else pa.nulls(table.num_rows) for column in columns}
    plain = {column: cell.cast(_plain(cell.type)) for column, cell in cells.items()}
    return _Rows(path, pa.table(plain), first_row=1)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Type of the values of an encoded column (a category of pandas)."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _table(path: Path, batches: arrow_csv.CSVStreamingReader) -> pa.Table:
    read: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        read.append(batch)
        rows += batch.num_rows
        if rows > ROWS_MOST:
            raise _too_many(path)
    return pa.Table.from_batches(read, schema=batches.schema)


def _too_many(path: Path) -> TraceError:
    return TraceError(f"{path}: it has more than {ROWS_MOST} rows; cut it")
