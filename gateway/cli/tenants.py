"""`staccato tenant …` and `staccato key …`."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from gateway.cli.api import USAGE, CliError, Row
from gateway.cli.terminal.options import Json, Key, Url, connect, route
from gateway.cli.terminal.output import note, print_json, print_row, print_rows

tenant = typer.Typer(help="Tenants: who deploys, asks and pays.", no_args_is_help=True)
key = typer.Typer(help="API keys of a tenant.", no_args_is_help=True)

TENANT = {"NAME": "name", "ID": "id", "WEIGHT": "weight", "PREFIXES": "keep_prefixes", "CREATED": "created_at"}
KEY = {
    "ID": "id",
    "NAME": "name",
    "PREFIX": "prefix",
    "SCOPES": "scopes",
    "PRIORITY": "priority",
    "STATE": "state",
    "CREATED": "created_at",
    "EXPIRES": "expires_at",
    "REVOKED": "revoked_at",
    "LAST USED": "last_used_at",
}

LIMITS = {
    "REQUESTS/MIN": "limits.requests_per_minute",
    "TOKENS/MIN": "limits.tokens_per_minute",
    "STREAMS": "limits.concurrent_streams",
    "OUTPUT TOKENS": "limits.max_output_tokens",
    "BUDGET/MONTH": "limits.monthly_budget",
    "STORAGE BYTES": "limits.storage_bytes",
}

COUNTS = ("requests_per_minute", "tokens_per_minute", "concurrent_streams", "max_output_tokens", "storage_bytes")

Weight = Annotated[float | None, typer.Option(help="Under overload, tokens of more weight are given up later.")]
Limit = Annotated[str | None, typer.Option(metavar="N|none")]
Keeps = Annotated[
    bool | None,
    typer.Option(
        "--keep-prefixes/--no-keep-prefixes",
        help="Without: zero retention. Devices keep no computed prompt for later requests, whatever deployments say.",
    ),
]
Money = Annotated[str | None, typer.Option(metavar="MONEY|none", help="As 25.50 or '25.50 EUR'; USD by default.")]

TenantName = Annotated[str, typer.Argument(metavar="TENANT")]
KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="As `staccato key ls` shows it.")]


@tenant.command("create")
def create_tenant(
    name: str,
    weight: Weight = None,
    keep_prefixes: Keeps = None,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    concurrent_streams: Limit = None,
    max_output_tokens: Limit = None,
    monthly_budget: Money = None,
    storage_bytes: Limit = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Create a tenant with the given limits and no further limits."""
    counts = (requests_per_minute, tokens_per_minute, concurrent_streams, max_output_tokens, storage_bytes)
    limits = _limits(counts, monthly_budget)
    body: Row = {"name": name, "limits": limits, **_given(weight, keep_prefixes)}
    with connect(url, key) as gateway:
        print_row(gateway.post(route("tenants"), body), TENANT | LIMITS, json)


@tenant.command("set")
def set_tenant(
    name: str,
    weight: Weight = None,
    keep_prefixes: Keeps = None,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    concurrent_streams: Limit = None,
    max_output_tokens: Limit = None,
    monthly_budget: Money = None,
    storage_bytes: Limit = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Change what is given and nothing else; `none` takes a limit away."""
    counts = (requests_per_minute, tokens_per_minute, concurrent_streams, max_output_tokens, storage_bytes)
    limits = _limits(counts, monthly_budget)
    body: Row = {"limits": limits, **_given(weight, keep_prefixes)}
    with connect(url, key) as gateway:
        print_row(gateway.patch(route("tenants", name), body), TENANT | LIMITS, json)


def _given(weight: float | None, keep_prefixes: bool | None) -> Row:
    """Return the settings that were given."""
    settings = {"weight": weight, "keep_prefixes": keep_prefixes}
    return {name: value for name, value in settings.items() if value is not None}


def _limits(counts: tuple[str | None, ...], budget: str | None) -> dict[str, object]:
    """Return the given limits; `counts` in the order of COUNTS. Raises a usage error."""
    given: dict[str, object] = {
        name: _count(name, said) for name, said in zip(COUNTS, counts, strict=True) if said is not None
    }
    return given if budget is None else {**given, "monthly_budget": _budget(budget)}


def _count(name: str, said: str) -> int | None:
    if said != "none" and not re.fullmatch(r"[0-9]+", said):
        raise typer.BadParameter(f"--{name.replace('_', '-')} {said!r}: say a number, or none")
    return None if said == "none" else int(said)


def _budget(said: str) -> Row | None:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(?: ?([A-Z]{3}))?", said)
    if said != "none" and found is None:
        raise typer.BadParameter(f"--monthly-budget {said!r}: write it as 25.50 or '25.50 EUR', or say none")
    return {"amount": found[1], "currency": found[2] or "USD"} if found else None


@tenant.command("ls")
def list_tenants(url: Url = None, key: Key = None, json: Json = False) -> None:
    """List the tenants."""
    with connect(url, key) as gateway:
        print_rows(gateway.every(route("tenants")), TENANT, json)


@tenant.command("rm")
def remove_tenant(
    name: TenantName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Delete a tenant that has no deployments, and revoke all keys of the tenant; usage stays on the bill."""
    with connect(url, key) as gateway:
        row = gateway.get(route("tenants", name))
        if not yes and not _confirmed(name):
            raise CliError(f"tenant {name} is not deleted: answer y, or give --yes", USAGE)
        gateway.delete(route("tenants", name))
    if json:
        print_json({"id": row["id"], "name": name})
    else:
        note(f"tenant {name} is deleted: within 5 seconds no gateway takes a key of the tenant")


def _confirmed(name: str) -> bool:
    """Ask the user on standard error; an end of the input means no."""
    try:
        return typer.confirm(f"Delete tenant {name} and revoke all keys of the tenant?", err=True)
    except typer.Abort:
        return False


@key.command("create")
def create_key(
    tenant: TenantName,
    name: Annotated[str | None, typer.Option(help="What the key is for.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="What it may do; all by default. Repeat for several.")] = None,
    expires: Annotated[str | None, typer.Option(metavar="TIME", help="As 2026-12-31T00:00:00Z.")] = None,
    priority: Annotated[
        str | None,
        typer.Option(metavar="high|normal|batch", help="Highest that its requests may ask for; normal by default."),
    ] = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Create a key and print the key; the key can't be shown again."""
    body: Row = {"name": name, "scopes": scope, "expires_at": expires, "priority": priority}
    with connect(url, key) as gateway:
        print_secret(gateway.post(route("tenants", tenant, "keys"), body), json)


@key.command("ls")
def list_keys(tenant: TenantName, url: Url = None, key: Key = None, json: Json = False) -> None:
    """List the keys of a tenant, by their prefixes."""
    with connect(url, key) as gateway:
        print_rows(gateway.every(route("tenants", tenant, "keys")), KEY, json)


@key.command("rotate")
def rotate_key(tenant: TenantName, key_id: KeyId, url: Url = None, key: Key = None, json: Json = False) -> None:
    """Print a successor of a key; the old key goes on for a while."""
    with connect(url, key) as gateway:
        print_secret(gateway.post(route("tenants", tenant, "keys", key_id, verb=":rotate")), json)


@key.command("revoke")
def revoke_key(tenant: TenantName, key_id: KeyId, url: Url = None, key: Key = None, json: Json = False) -> None:
    """Refuse a key from now on."""
    with connect(url, key) as gateway:
        gateway.delete(route("tenants", tenant, "keys", key_id))
    if json:
        print_json({"id": key_id})
    else:
        note(f"key {key_id} is revoked: within 5 seconds no gateway takes it")


def print_secret(answer: Row, json: bool) -> None:
    """Print a new key: only the key goes to standard output, so that `KEY=$(staccato key create …)` works."""
    if json:
        print_json(answer)
        return
    typer.echo(answer["key"])
    note(f"key {answer['id']}: keep it, it is not shown again")
