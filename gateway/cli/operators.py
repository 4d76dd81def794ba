"""`staccato operator-key …`: commands for operators' keys and their scopes."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from gateway.cli.api import Row
from gateway.cli.tenants import print_secret
from gateway.cli.terminal.options import Json, Key, Url, connect, route
from gateway.cli.terminal.output import note, print_json, print_rows

operator_key = typer.Typer(help="API keys of operators, each with its scopes.", no_args_is_help=True)

OPERATOR_KEY = {
    "ID": "id",
    "NAME": "name",
    "SCOPES": "scopes",
    "STATE": "state",
    "CREATED": "created_at",
    "EXPIRES": "expires_at",
    "LAST USED": "last_used_at",
}
SCOPES = "metrics:read, billing:read, billing, fleet, deployments, tenants, audit:read, everything"

OperatorKeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="As `staccato operator-key ls` shows the key.")]
Ends = Annotated[str | None, typer.Option(metavar="TIME", help="As 90d, 12h or 2026-12-31T00:00:00Z.")]


@operator_key.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="Who or what holds the key; the audit log names the holder.")],
    scope: Annotated[list[str], typer.Option(help=f"What the key may do: {SCOPES}. Repeat for several.")],
    expires: Ends = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Create a key of an operator and print the key; the key can't be shown again."""
    body: Row = {"name": name, "scopes": scope, "expires_at": moment(expires)}
    with connect(url, key) as gateway:
        print_secret(gateway.post(route("operator-keys"), body), json)


@operator_key.command("ls")
def list_keys(url: Url = None, key: Key = None, json: Json = False) -> None:
    """List operators' keys, revoked and expired keys included."""
    with connect(url, key) as gateway:
        print_rows(gateway.every(route("operator-keys")), OPERATOR_KEY, json)


@operator_key.command("rotate")
def rotate_key(
    key_id: OperatorKeyId,
    overlap: Annotated[
        str | None, typer.Option(metavar="DURATION", help="How long the old key goes on: 0s, 12h, 2d. [default: 1d]")
    ] = None,
    expires: Ends = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Print a successor of a key; the old key goes on for the overlap."""
    overlap_s = None if overlap is None else round(_duration(overlap, "--overlap").total_seconds())
    body: Row = {"overlap_s": overlap_s, "expires_at": moment(expires)}
    with connect(url, key) as gateway:
        print_secret(gateway.post(route("operator-keys", key_id, verb=":rotate"), body), json)


@operator_key.command("revoke")
def revoke_key(key_id: OperatorKeyId, url: Url = None, key: Key = None, json: Json = False) -> None:
    """Refuse a key from now on."""
    with connect(url, key) as gateway:
        gateway.delete(route("operator-keys", key_id))
    if json:
        print_json({"id": key_id})
    else:
        note(f"key {key_id} is revoked: within 5 seconds no gateway takes it")


def moment(said: str | None) -> str | None:
    """RFC 3339 of `said`: a duration from now, or a date as typed. Raises typer.BadParameter."""
    if said is None or re.match(r"\d{4}-\d\d-\d\d", said):
        return said
    return (datetime.now(UTC) + _duration(said, "--expires")).isoformat()


def _duration(said: str, option: str) -> timedelta:
    """The duration `said`, as in 90d or 12h, of the option `option`. Raises typer.BadParameter."""
    found = re.fullmatch(r"(\d{1,5})(s|m|h|d)", said)
    if found is None:
        raise typer.BadParameter(f"{option} {said!r}: write it as 90d, 12h or 30m")
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
    return timedelta(**{units[found[2]]: int(found[1])})
