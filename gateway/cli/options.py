"""Options that many commands share, and how their values are read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

if TYPE_CHECKING:
    from gateway.cli.client import Gateway

Url = Annotated[
    str | None, typer.Option("--url", envvar="STACCATO_URL", help="The gateway; this machine's by default.")
]
Key = Annotated[str | None, typer.Option("--key", envvar="STACCATO_KEY", help="API key; DATA/admin.key by default.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Whose: for the admin key, which sees every tenant.")]

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000}


def milliseconds(duration: str) -> int:
    """`100ms`, `2s`, `1.5s`, `1m`. Raises a usage error."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)", duration.strip())
    if found is None:
        raise typer.BadParameter(f"{duration!r} is no duration: write it as 100ms, 2s or 1m")
    return round(float(found[1]) * _UNITS_MS[found[2]])


Duration = Annotated[int | None, typer.Option(parser=milliseconds, metavar="DURATION")]


def connect(url: str | None, key: str | None) -> Gateway:
    """Use it in a `with`. Imported when a command runs: `--help` does not wait for an HTTP client."""
    from gateway.cli import client

    return client.connect(url, key)


def route(*segments: str, verb: str = "") -> str:
    """Of the control plane. What people type becomes one segment, whatever stands in it."""
    return "/api/v1/" + "/".join(quote(segment, safe="") for segment in segments) + verb
