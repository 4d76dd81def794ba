"""`staccato usage`, `staccato usage verify`, `staccato bill export` and `staccato bill correct`."""

from __future__ import annotations

import contextlib
import json as json_text
import sys
import uuid
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from gateway.cli.api import ERROR, CliError, Row
from gateway.cli.terminal.options import Json, Key, Tenant, Url, connect, route
from gateway.cli.terminal.output import note, print_json, print_row, print_rows

usage = typer.Typer(invoke_without_command=True)
bill = typer.Typer(help="The bill.", no_args_is_help=True)

READING_S_MOST = 1800.0  # time for the gateway to read a whole month, without a byte sent meanwhile
FIGURES = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "gpu_ms",
    "switch_ms",
    "cache_gb_s",
    "amount",
    "currency",
)


CORRECTION = {
    "ID": "id",
    "BILL": "period",
    "CORRECTS": "corrects",
    "TENANT": "tenant_id",
    "AMOUNT": "amount",
    "CURRENCY": "currency",
    "REASON": "reason",
}


class ExportFormat(StrEnum):
    csv = "csv"
    jsonl = "jsonl"
    parquet = "parquet"
    focus = "focus"
    cloudevents = "cloudevents"


class Detail(StrEnum):
    lines = "lines"
    rows = "rows"


Period = Annotated[str, typer.Option(metavar="YYYY-MM", help="The month, in UTC.")]


# ── usage ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@usage.callback()
def show(
    context: typer.Context,
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
    """Show tokens, the device's time and money used."""
    if context.invoked_subcommand:
        return
    params = {"from": since, "to": until, "group_by": by, "tenant": tenant}
    with connect(url, key) as gateway:
        rows = gateway.rows(route("usage"), **params)
    columns = [*by.split(","), *FIGURES]
    print_rows(rows, {name.replace("_", " ").upper(): name for name in columns}, json)


@usage.command("verify")
def verify(period: Period, url: Url = None, key: Key = None, json: Json = False) -> None:
    """Compute the bill of a month again from its rows and prices, and say what is wrong with it."""
    with connect(url, key) as gateway:
        asked = gateway.stream("GET", route("usage", verb=":verify"), None, READING_S_MOST, period=period)
        with asked as answer:
            report: Row = json_text.loads(answer.read())
    if json:
        print_json(report)
    else:
        _print_report(report)
    if not report["ok"]:
        flaws = sum(report["flawed"].values())  # type: ignore[attr-defined]
        raise CliError(f"the bill of {period} is not right: {flaws} flaws", ERROR)


def _print_report(report: Row) -> None:
    print_row(report, {name: name for name in ("period", "closed", "rows", "lines", "exports", "amounts")}, False)
    flaws = report["flaws"]
    if isinstance(flaws, list) and flaws:
        print_rows(flaws, {"CHECK": "check", "WHERE": "where", "WHAT IS WRONG": "said"}, False)


# ── the bill ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@bill.command("export")
def export(
    period: Period,
    format: Annotated[ExportFormat, typer.Option(help="How to write it.")] = ExportFormat.csv,
    detail: Annotated[
        Detail | None, typer.Option(help="Its lines, or the rows below them; what the format is for by default.")
    ] = None,
    tenant: Tenant = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; standard output by default.")] = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Write the bill of a month."""
    kind = ExportFormat.jsonl if json else format
    params = {"period": period, "format": kind.value, "detail": detail.value if detail else None, "tenant": tenant}
    with connect(url, key) as gateway:
        answer = gateway.stream("GET", route("billing", "export"), None, READING_S_MOST, **params)
        with answer as response, _opened(output) as file:
            for chunk in response.iter_bytes():
                file.write(chunk)
    if output:
        note(f"the bill of {period} is in {output}")


@bill.command("correct")
def correct(
    tenant: Annotated[str, typer.Argument(metavar="TENANT")],
    amount: Annotated[str, typer.Option(help="As -12.50, a credit, or 12.50, a debit.")],
    reason: Annotated[str, typer.Option(help="What the tenant reads on its bill.")],
    currency: Annotated[str, typer.Option(metavar="CODE")] = "USD",
    corrects: Annotated[str | None, typer.Option(metavar="YYYY-MM", help="The bill it is about; the open one.")] = None,
    once: Annotated[
        str | None, typer.Option(metavar="KEY", help="Say the same when you say it again: it is booked once.")
    ] = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Put a credit or a debit on the bill that is open now; booked usage stays unchanged."""
    body: Row = {
        "tenant": tenant,
        "amount_minor": _minor(amount, currency),
        "reason": reason,
        "currency": currency,
        "corrects": corrects,
    }
    with connect(url, key) as gateway:
        made = gateway.post(route("billing", "corrections"), body, once or uuid.uuid4().hex)
    print_row(made, CORRECTION, json)


def _minor(amount: str, currency: str) -> int:
    """Convert an amount to the currency's smallest unit. Raises a usage error."""
    from store.db.billing import minor_places  # imported late: pulls in the whole database layer

    places = minor_places(currency)
    try:
        minor = Decimal(amount).scaleb(places)
    except InvalidOperation:
        raise typer.BadParameter(f"{amount!r} is no amount: write it as -12.50") from None
    if not minor.is_finite() or minor != minor.to_integral_value():
        raise typer.BadParameter(f"{amount!r} is no amount of {currency}, which has {places} decimals")
    return int(minor)


@contextlib.contextmanager
def _opened(output: Path | None) -> Iterator[BinaryIO]:
    """Yield a file for the output. The file appears under its name once the file is complete."""
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
