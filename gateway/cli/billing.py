"""`staccato usage` and `staccato bill export`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from gateway.cli.api import CliError
from gateway.cli.options import Json, Key, Tenant, Url, connect, route
from gateway.cli.output import note, print_rows

bill = typer.Typer(help="The bill.", no_args_is_help=True)

FIGURES = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "amount", "currency")


class Format(StrEnum):
    csv = "csv"
    jsonl = "jsonl"


def usage(
    since: Annotated[str | None, typer.Option("--from", metavar="TIME", help="As 2026-11-01 or with a time.")] = None,
    until: Annotated[str | None, typer.Option("--to", metavar="TIME", help="Up to, not including.")] = None,
    by: Annotated[
        str, typer.Option(help="Some of tenant, deployment, model, key, day, hour; comma between.")
    ] = "deployment",
    tenant: Tenant = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Show tokens and money used."""
    params = {"from": since, "to": until, "group_by": by, "tenant": tenant}
    with connect(url, key) as gateway:
        rows = gateway.rows(route("usage"), **params)
    columns = [*by.split(","), *FIGURES]
    print_rows(rows, {name.replace("_", " ").upper(): name for name in columns}, json)


@bill.command("export")
def export(
    period: Annotated[str, typer.Option(metavar="YYYY-MM", help="The month, in UTC.")],
    format: Annotated[Format, typer.Option(help="How to write it.")] = Format.csv,
    tenant: Tenant = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; standard output by default.")] = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Write the bill of a month."""
    kind = Format.jsonl if json else format
    with connect(url, key) as gateway:
        answer = gateway.stream("GET", route("billing", "export"), period=period, format=kind.value, tenant=tenant)
        with answer as response, _opened(output) as file:
            for chunk in response.iter_bytes():
                file.write(chunk)
    if output:
        note(f"the bill of {period} is in {output}")


@contextlib.contextmanager
def _opened(output: Path | None) -> Iterator[BinaryIO]:
    """A file appears under its name when it is whole."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.flush()
        return
    draft = output.with_name(f".{output.name}.part")
    try:
        with draft.open("wb") as file:
            yield file
        draft.replace(output)
    except OSError as error:
        raise CliError(f"{output} cannot be written: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
