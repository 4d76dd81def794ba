"""Output of commands: JSON for programs, a table for a terminal, plain columns for a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from gateway.cli.api import Row

if TYPE_CHECKING:
    from rich.table import Table


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2 if sys.stdout.isatty() else None))


def print_rows(rows: Sequence[Row], columns: Mapping[str, str], as_json: bool) -> None:
    """Print rows as a table. `columns`: title → path of the value in a row, as `status.phase`."""
    if as_json:
        print_json(list(rows))
        return
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(table_of(rows, columns))
    else:
        _print_columns([list(columns), *_cells(rows, columns)])


def print_row(row: Row, columns: Mapping[str, str], as_json: bool) -> None:
    """Print an object: a line for each column with a value."""
    if as_json:
        print_json(row)
        return
    width = max(map(len, columns))
    for title, path in columns.items():
        if (value := at(row, path)) is not None:
            typer.echo(f"{title.ljust(width)}  {text(value)}")


def note(message: str) -> None:
    """Print a note for the person at the terminal, on standard error: programs read only standard output."""
    typer.echo(message, err=True)


def at(row: object, path: str) -> object:
    """Return the value at `path`; None if it is missing."""
    for name in path.split("."):
        row = row.get(name) if isinstance(row, Mapping) else None
    return row


def text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={text(item)}" for name, item in value.items())
    if isinstance(value, list):
        return "; ".join(map(text, value)) or "-"
    return str(value)


def table_of(rows: Sequence[Row], columns: Mapping[str, str]) -> Table:
    """Make a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for line in _cells(rows, columns):
        shown.add_row(*map(Text, line))  # a Text, since a tenant's name is no markup
    return shown


def _cells(rows: Sequence[Row], columns: Mapping[str, str]) -> list[list[str]]:
    return [[text(at(row, path)) for path in columns.values()] for row in rows]


def _print_columns(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
