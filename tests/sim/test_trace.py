"""The required form of a trace file, and the error messages for other forms."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.sim import trace
from runtime.sim.trace import TOKENS_MOST, TraceError, read_lengths, read_trace, read_windows
from tests.sim.traces import real, written

COLUMNS = ("t", "model", "inp", "out")
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

tokens = st.integers(1, TOKENS_MOST)
names = st.text(min_size=1, max_size=8).filter(lambda text: not set(text) & set("\r\n"))
rows_of_a_trace = st.lists(st.tuples(st.floats(0, 1e9), names, tokens, tokens), min_size=1, max_size=40).map(
    lambda rows: sorted(rows, key=lambda row: row[0])
)


def refusal(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    return str(caught.value)


def cells(rows: list[tuple[float, str, int, int]]) -> list[list[str]]:
    return [[repr(at_s), model, str(prompt), str(output)] for at_s, model, prompt, output in rows]


# ── what is right is read as it is ────────────────────────────────────────────────────────────────────────────────────


@same_folder
@given(rows_of_a_trace)
def test_what_was_written_is_read(tmp_path: Path, rows: list[tuple[float, str, int, int]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *cells(rows)])
    path = tmp_path / "trace.csv"
    path.write_text(text.getvalue())
    read = read_trace(path)
    assert read.at_s.tolist() == [row[0] - rows[0][0] for row in rows]
    assert [read.names[index] for index in read.model] == [row[1] for row in rows]
    assert read.prompt_tokens.tolist() == [row[2] for row in rows]
    assert read.output_tokens.tolist() == [row[3] for row in rows]


@same_folder
@given(rows_of_a_trace)
def test_csv_compressed_csv_and_parquet_say_the_same(tmp_path: Path, rows: list[tuple[float, str, int, int]]) -> None:
    columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "trace.parquet")
    text = io.StringIO()
    csv.writer(text).writerows([COLUMNS, *cells(rows)])
    (tmp_path / "trace.csv").write_text(text.getvalue(), newline="")
    with pa.output_stream(tmp_path / "trace.csv.zst", compression="zstd") as file:
        file.write(text.getvalue().encode())
    first, *others = (read_trace(tmp_path / f"trace.{kind}") for kind in ("csv", "csv.zst", "parquet"))
    for other in others:
        assert other.names == first.names
        for column in ("at_s", "model", "prompt_tokens", "output_tokens"):
            np.testing.assert_array_equal(getattr(other, column), getattr(first, column))


def test_without_a_column_of_models_there_is_one(tmp_path: Path) -> None:
    read = read_trace(written(tmp_path / "t.csv", [["0", "3", "4"], ["1", "5", "6"]], header="t,inp,out"))
    assert len(read.names) == 1
    assert read.model.tolist() == [0, 0]


def test_other_columns_are_ignored_in_any_order(tmp_path: Path) -> None:
    read = read_trace(written(tmp_path / "t.csv", [["4", "x", "0", "0 1 2", "3"]], header="out,note,t,blocks,inp"))
    assert (read.prompt_tokens.tolist(), read.output_tokens.tolist()) == ([3], [4])


def test_models_of_a_parquet_file_may_be_numbers_or_categories(tmp_path: Path) -> None:
    for model in (pa.array([7, 2, 7]), pa.array(["7", "2", "7"]).dictionary_encode()):
        table = pa.table({"t": [0, 1, 2], "model": model, "inp": [1, 1, 1], "out": [1, 1, 1]})
        pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
        read = read_trace(tmp_path / "t.parquet")
        assert [read.names[index] for index in read.model] == ["7", "2", "7"]


def test_a_trace_begins_with_its_first_request_and_lasts_a_mean_gap_beyond_its_last(tmp_path: Path) -> None:
    read = read_trace(written(tmp_path / "t.csv", [[str(at), "a", "1", "1"] for at in (1000, 1010, 1030)]))
    assert read.at_s.tolist() == [0, 10, 30]
    assert read.duration_s == 45


@pytest.mark.parametrize(
    ("name", "rows", "models"),
    [
        ("arena27.csv.zst", 955, 22),
        ("azure23_conv.csv.zst", 14176, 1),
        ("azure23_code.csv.zst", 7491, 1),
        ("mooncake_conversation.csv.zst", 7851, 1),
    ],
)
def test_real_traces_are_read(name: str, rows: int, models: int) -> None:
    read = read_trace(real(name))
    assert (len(read.at_s), len(read.names)) == (rows, models)


def test_clients_of_servegen_are_read() -> None:
    windows = read_windows(real("servegen_clients_windows.parquet"))
    lengths = read_lengths(real("servegen_clients_lengths.csv.zst"))
    assert (len(windows), sum(len(client.rate) for client in windows.values())) == (207, 78903)
    assert len(lengths) == 304 / 2
    assert all((np.diff(client.output_tokens) >= 0).all() for client in lengths.values())


# ── what is wrong is named ────────────────────────────────────────────────────────────────────────────────────────────

never_numbers = st.sampled_from(["", "x", "nan", "inf", "-inf", "1e999", "-1", "0x10", "1_0", " 1", "1,5", "é", "१"])
wrong_cells = st.one_of(
    st.tuples(st.sampled_from(["t", "inp", "out"]), never_numbers),
    st.tuples(st.sampled_from(["inp", "out"]), st.sampled_from(["0", "1.5", "1e-3", str(TOKENS_MOST + 1)])),
    st.tuples(st.just("model"), st.just("")),
)


@same_folder
@given(st.integers(1, 30), wrong_cells, st.data())
def test_any_corrupted_cell_is_named_by_row_and_column(
    tmp_path: Path, count: int, wrong: tuple[str, str], data: st.DataObject
) -> None:
    column, value = wrong
    place = data.draw(st.integers(0, count - 1))
    rows = [[str(index), "a", "5", "6"] for index in range(count)]
    rows[place][COLUMNS.index(column)] = f'"{value}"'
    said = refusal(written(tmp_path / "bad.csv", rows))
    assert f"bad.csv, row {place + 2}, column {column}: " in said
    assert (repr(value) if value else "an empty cell") in said
    assert "\n" not in said


@same_folder
@given(st.binary(max_size=60))
def test_any_bytes_are_a_trace_or_refused_in_one_sentence(tmp_path: Path, cell: bytes) -> None:
    for name in ("t.csv", "t.csv.zst", "t.parquet"):
        for bytes_ in (cell, b"t,inp,out\n0,1," + cell, b"t,inp,out\n0,1,1\n" + cell):
            (tmp_path / name).write_bytes(bytes_)
            try:
                read_trace(tmp_path / name)
            except TraceError as error:
                assert str(tmp_path / name) in str(error)
                assert "\n" not in str(error)


@same_folder
@given(st.integers(2, 30), st.data())
def test_time_that_runs_backwards_is_named_by_the_first_row_that_does(
    tmp_path: Path, count: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(1, count - 1))
    rows = [[str(index), "a", "5", "6"] for index in range(count)]
    rows[place][0] = str(place - 1.5) if place > 1 else "0.0"
    rows[place - 1][0] = "0.5" if place == 1 else rows[place - 1][0]
    assert f"row {place + 2}, column t: {rows[place][0]!r} is before " in refusal(written(tmp_path / "t.csv", rows))


def test_a_cell_in_the_middle_of_a_large_file_is_found(tmp_path: Path) -> None:
    rows = [[str(index), "a", "1234", "5678"] for index in range(200_000)]  # several blocks of the reader
    rows[150_000][2] = "12e"
    assert "row 150002, column inp: '12e' is not a number" in refusal(written(tmp_path / "t.csv", rows))
    rows[150_000] = ["1", "2"]
    assert "row 150002: it has 2 columns, the header has 4" in refusal(written(tmp_path / "t.csv", rows))


def test_a_blank_line_is_a_row_as_an_editor_counts(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("t,inp,out\n0,1,1\n\n1,1,x\n")
    assert "row 3, column t: an empty cell" in refusal(tmp_path / "t.csv")


def test_a_long_value_is_shortened(tmp_path: Path) -> None:
    assert len(refusal(written(tmp_path / "t.csv", [["0", "a", "1", "9" * 4000 + "x"]]))) < len(str(tmp_path)) + 120


def test_a_cell_of_a_parquet_file_is_named_without_a_header_to_count(tmp_path: Path) -> None:
    table = pa.table({"t": [0, 1, 2], "inp": [5, None, 5], "out": [1, 1, 1]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    assert "row 2, column inp: an empty cell is not a number" in refusal(tmp_path / "t.parquet")


def test_a_column_that_cannot_hold_numbers_is_named(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"t": [True], "inp": [1], "out": [1]}), tmp_path / "t.parquet")
    assert re.search("column t: it holds bool, not numbers", refusal(tmp_path / "t.parquet"))


@pytest.mark.parametrize("missing", ["t", "inp", "out"])
def test_a_missing_column_is_named(tmp_path: Path, missing: str) -> None:
    header = [column for column in COLUMNS if column != missing]
    said = refusal(written(tmp_path / "t.csv", [["1"] * 3], header=",".join(header)))
    assert f"there is no column {missing}; needed are t, inp, out" in said
    pyarrow.parquet.write_table(pa.table({column: [1] for column in header}), tmp_path / "t.parquet")
    assert f"there is no column {missing}" in refusal(tmp_path / "t.parquet")


def test_no_rows_no_file_and_too_many_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there are no rows" in refusal(written(tmp_path / "t.csv", []))
    assert "there is no such file" in refusal(tmp_path / "nowhere.csv")
    monkeypatch.setattr(trace, "ROWS_MOST", 3)
    assert "more than 3 rows" in refusal(written(tmp_path / "t.csv", [["0", "a", "1", "1"]] * 4))
    pyarrow.parquet.write_table(pa.table({"t": [0] * 4, "inp": [1] * 4, "out": [1] * 4}), tmp_path / "t.parquet")
    assert "more than 3 rows" in refusal(tmp_path / "t.parquet")
    assert len(read_trace(written(tmp_path / "t.csv", [["0", "a", "1", "1"]] * 3)).at_s) == 3
