"""Options shared by many commands, and parsers for their values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

if TYPE_CHECKING:
    from gateway.cli.terminal.client import GatewayClient

Url = Annotated[
    str | None, typer.Option("--url", envvar="STACCATO_URL", help="The gateway; this machine's by default.")
]
Key = Annotated[str | None, typer.Option("--key", envvar="STACCATO_KEY", help="API key; DATA/admin.key by default.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Tenant = Annotated[
    str | None, typer.Option("--tenant", help="Tenant that is meant; only for the admin key, which sees every tenant.")
]

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000}


def milliseconds(duration: str) -> int:
    """Parse a duration: `100ms`, `2s`, `1.5s`, `1m`. Raises a usage error."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)", duration.strip())
    if found is None:
        raise typer.BadParameter(f"{duration!r} is no duration: write it as 100ms, 2s or 1m")
    return round(float(found[1]) * _UNITS_MS[found[2]])


Duration = Annotated[int | None, typer.Option(parser=milliseconds, metavar="DURATION")]


def connect(url: str | None, key: str | None) -> GatewayClient:
    """Return the gateway, to be used in a `with`. The late import keeps the HTTP client out of `--help`."""
    from gateway.cli.terminal import client

    return client.connect(url, key)


def route(*segments: str, verb: str = "") -> str:
    """Return a path of the control plane. Each typed text becomes one segment, whatever its characters."""
    return "/api/v1/" + "/".join(quote(segment, safe="") for segment in segments) + verb
