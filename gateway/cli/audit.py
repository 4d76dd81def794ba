"""`staccato audit` and `staccato audit verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.api import ERROR, CliError
from gateway.cli.terminal.options import Json, Key, Tenant, Url, connect, route
from gateway.cli.terminal.output import note, print_json, print_rows

audit = typer.Typer(invoke_without_command=True)

ENTRY = {
    "SEQ": "seq",
    "AT": "at",
    "WHAT": "kind",
    "SUBJECT": "subject_id",
    "BY": "by",
    "REQUEST": "request_id",
    "OLD": "old",
    "NEW": "new",
}


@audit.callback()
def show(context: typer.Context, tenant: Tenant = None, url: Url = None, key: Key = None, json: Json = False) -> None:
    """Show who did what, oldest first."""
    if context.invoked_subcommand:
        return
    with connect(url, key) as gateway:
        print_rows(gateway.every(route("audit"), tenant=tenant), ENTRY, json)


@audit.command("verify")
def verify(
    head: Annotated[
        str | None,
        typer.Option(metavar="SEQ:HASH", help="As an earlier run printed it: what was up to there still is."),
    ] = None,
    tenant: Tenant = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Find what was changed, removed, put in or moved, and print where the log ends, to be noted elsewhere."""
    with connect(url, key) as gateway:
        verdict = gateway.get(route("audit", verb=":verify"), tenant=tenant, head=head)
    if json:
        print_json(verdict)
    elif verdict["ok"]:
        typer.echo(verdict["head"])
        note(f"{verdict['rows']} rows are as they were written")
    if not verdict["ok"]:
        raise CliError(f"the audit log is not right from row {verdict['row']} on: {verdict['flaw']}", ERROR)
