"""`staccato model …`: artefacts that deployments are made of."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.api import RETRYABLE, CliError, Row
from gateway.cli.options import Json, Key, Tenant, Url, connect, route
from gateway.cli.output import note, print_json, print_row, print_rows, text
from gateway.cli.progress import waiting

if TYPE_CHECKING:
    from gateway.cli.client import Gateway

model = typer.Typer(help="Models: what deployments serve.", no_args_is_help=True)

MODEL = {
    "NAME": "name",
    "STATE": "state",
    "ARCHITECTURE": "architecture",
    "DTYPE": "dtype",
    "WEIGHTS": "weight_bytes",
    "KV/TOKEN": "kv_bytes_per_token",
    "DIGEST": "digest",
    "TENANT": "tenant",
    "REASON": "reason",
}
POLL_S = 0.2
IMPORT_S_MOST = 3600.0


@model.command("add")
def add(
    name: str,
    source: Annotated[str, typer.Argument(help="A folder with config.json, tokenizer and *.safetensors.")],
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Register a model and wait until it is checked."""
    with connect(url, key) as gateway:
        print_row(register(gateway, name, source), MODEL, json)


@model.command("ls")
def list_models(tenant: Tenant = None, url: Url = None, key: Key = None, json: Json = False) -> None:
    """List the models that can be deployed."""
    with connect(url, key) as gateway:
        print_rows(gateway.every(route("models"), tenant=tenant), MODEL, json)


@model.command("rm")
def remove(name: str, url: Url = None, key: Key = None, json: Json = False) -> None:
    """Forget a model that no deployment uses."""
    with connect(url, key) as gateway:
        gateway.delete(route("models", name))
    if json:
        print_json({"name": name})
    else:
        note(f"model {name} is removed; its files stay where they are")


def register(gateway: Gateway, name: str, source: str) -> Row:
    """The model once it is ready. Raises CliError with the reason when it is refused."""
    row = gateway.post(route("models"), {"name": name, "source": absolute(source)})
    deadline_s = time.monotonic() + IMPORT_S_MOST
    with waiting(f"reading {name}"):
        while row.get("state") == "importing" and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            row = gateway.get(route("models", text(row["id"])))
    if row.get("state") == "refused":
        raise CliError(f"model {name} is refused: {row.get('reason')}")
    if row.get("state") == "importing":
        raise CliError(
            f"model {name} is still being read after {IMPORT_S_MOST:g} s: see `staccato model ls`", RETRYABLE
        )
    return row


def is_source(model: str) -> bool:
    """Whether `model` says where files are, rather than the name of a model."""
    return "://" in model or "/" in model or model.startswith((".", "~"))


def absolute(source: str) -> str:
    """The gateway stands elsewhere: a path of ours is given whole."""
    return source if "://" in source else str(Path(source).expanduser().absolute())
