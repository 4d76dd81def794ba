"""`staccato join-token …` and `staccato joined …`: runtimes that join the bus by proof."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.api import Row
from gateway.cli.operators import Ends, moment
from gateway.cli.tenants import print_secret
from gateway.cli.terminal.options import Json, Key, Url, connect, route
from gateway.cli.terminal.output import note, print_json, print_rows

join_token = typer.Typer(help="Tokens with which runtimes join, once each.", no_args_is_help=True)
joined = typer.Typer(help="Runtimes that joined by proof.", no_args_is_help=True)

JOIN_TOKEN = {
    "ID": "id",
    "RUNTIME": "runtime",
    "STATE": "state",
    "CREATED": "created_at",
    "EXPIRES": "expires_at",
    "USED": "used_at",
    "USED BY": "used_by",
}
JOINED = {"ID": "id", "STATE": "state", "JOINED": "joined_at", "REVOKED": "revoked_at", "PUBLIC KEY": "public_key"}


@join_token.command("create")
def create_token(
    runtime: Annotated[
        str | None, typer.Option(metavar="ID", help="The only runtime that may use the token. [default: any]")
    ] = None,
    expires: Ends = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Create a join token and print the token; without --expires, the token ends after an hour."""
    body: Row = {"runtime": runtime, "expires_at": moment(expires)}
    with connect(url, key) as gateway:
        print_secret(gateway.post(route("join-tokens"), body), json)


@join_token.command("ls")
def list_tokens(url: Url = None, key: Key = None, json: Json = False) -> None:
    """List join tokens, used, expired and revoked tokens included."""
    with connect(url, key) as gateway:
        print_rows(gateway.every(route("join-tokens")), JOIN_TOKEN, json)


@join_token.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(metavar="TOKEN_ID", help="As `staccato join-token ls` shows the token.")],
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Refuse a join token from now on; a runtime that joined with the token stays joined."""
    with connect(url, key) as gateway:
        gateway.delete(route("join-tokens", token_id))
    if json:
        print_json({"id": token_id})
    else:
        note(f"join token {token_id} is revoked")


@joined.command("ls")
def list_runtimes(url: Url = None, key: Key = None, json: Json = False) -> None:
    """List the runtimes that joined by proof, revoked runtimes included."""
    with connect(url, key) as gateway:
        print_rows(gateway.rows(route("joined-runtimes")), JOINED, json)


@joined.command("revoke")
def revoke_runtime(
    runtime: Annotated[str, typer.Argument(metavar="RUNTIME", help="As `staccato joined ls` shows the id.")],
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Refuse a runtime and end its connection: a stolen key, or a runtime that is gone for good."""
    with connect(url, key) as gateway:
        gateway.delete(route("joined-runtimes", runtime))
    if json:
        print_json({"id": runtime})
    else:
        note(f"runtime {runtime} is revoked: within 5 seconds its connection ends; the id needs a new join token")
