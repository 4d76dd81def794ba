"""`staccato model …`: artefacts for deployments."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.api import CONFLICT, CliError, Row
from gateway.cli.terminal.options import Json, Key, Tenant, Url, connect, route
from gateway.cli.terminal.output import note, print_json, print_row, print_rows, text
from gateway.cli.terminal.progress import bytes_coming

if TYPE_CHECKING:
    from gateway.cli.terminal.client import GatewayClient

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
    "REVISION": "revision",
    "REASON": "reason",
}
POLL_S = 0.2

Digest = Annotated[str | None, typer.Option(help="Refuse it unless it has this digest.")]
Wait = Annotated[bool, typer.Option(help="Until it is here and checked. The gateway goes on without us too.")]


@model.command("add")
def add(
    name: str,
    source: Annotated[
        str, typer.Argument(help="A folder with config.json, tokenizer and *.safetensors; hf://…; s3://….")
    ],
    digest: Digest = None,
    wait: Wait = True,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Register a model and wait until it is checked."""
    with connect(url, key) as gateway:
        print_row(register(gateway, name, source, digest, wait), MODEL, json)


@model.command("import")
def import_model(
    source: Annotated[str, typer.Argument(help="hf://org/name@revision, s3://bucket/prefix, or a folder.")],
    name: Annotated[str | None, typer.Option(help="The model's; the last part of the source unless said.")] = None,
    digest: Digest = None,
    wait: Wait = True,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Fetch a model from a hub or an object store. A repeated command goes on where the import stopped."""
    with connect(url, key) as gateway:
        print_row(fetch(gateway, name or name_of(source), source, digest, wait), MODEL, json)


@model.command("cancel")
def cancel(name: str, tenant: Tenant = None, url: Url = None, key: Key = None, json: Json = False) -> None:
    """Stop the import of a model; the fetched bytes are kept for a week."""
    with connect(url, key) as gateway:
        path = route("models", _id(gateway, name, tenant), verb=":cancel")
        print_row(gateway.post(path), MODEL, json)


@model.command("retry")
def retry(
    name: str, tenant: Tenant = None, wait: Wait = True, url: Url = None, key: Key = None, json: Json = False
) -> None:
    """Take up an import that was refused or cancelled, where it stopped."""
    with connect(url, key) as gateway:
        row = gateway.post(route("models", _id(gateway, name, tenant), verb=":retry"))
        print_row(until_checked(gateway, row) if wait else row, MODEL, json)


def _id(gateway: GatewayClient, name: str, tenant: str | None) -> str:
    return text(gateway.get(route("models", name), tenant=tenant)["id"])


@model.command("ls")
def list_models(tenant: Tenant = None, url: Url = None, key: Key = None, json: Json = False) -> None:
    """List the models; a refused model can't be deployed, and REASON says why."""
    with connect(url, key) as gateway:
        rows = gateway.every(route("models"), tenant=tenant)
    print_rows(rows, MODEL, json)
    refused = [text(row["name"]) for row in rows if row.get("state") == "refused"]
    if refused and not json:
        names = ", ".join(refused)
        note(f"refused: {names}; add the model again once its files are repaired, or `staccato model rm` the name")


@model.command("rm")
def remove(name: str, url: Url = None, key: Key = None, json: Json = False) -> None:
    """Forget a model that no deployment uses."""
    with connect(url, key) as gateway:
        gateway.delete(route("models", name))
    if json:
        print_json({"name": name})
    else:
        note(f"model {name} is removed; its files stay where they are")


def register(gateway: GatewayClient, name: str, source: str, digest: str | None = None, wait: bool = True) -> Row:
    """Register a model and return it once it is ready. Raises CliError with the reason of a refusal."""
    row = gateway.post(route("models"), {"name": name, "source": absolute(source), "digest": digest})
    return until_checked(gateway, row) if wait else row


def fetch(gateway: GatewayClient, name: str, source: str, digest: str | None = None, wait: bool = True) -> Row:
    """Register a model, or continue an import from an equal source. Raises CliError."""
    try:
        return register(gateway, name, source, digest, wait)
    except CliError as error:
        if error.exit_code != CONFLICT:
            raise
        row = gateway.get(route("models", name))
        if row.get("source") != absolute(source):
            raise CliError(
                f"there is another model {name!r}, from {row.get('source')}: "
                "register this one under a name of its own with `staccato model add`",
                CONFLICT,
            ) from error
        if row.get("state") in ("refused", "cancelled"):
            row = gateway.post(route("models", text(row["id"]), verb=":retry"))
        return until_checked(gateway, row) if wait else row


def until_checked(gateway: GatewayClient, row: Row) -> Row:
    """Wait until the import ends, without a deadline: the gateway gives up a stalled import.

    Raises CliError with the reason if the model was refused or the import cancelled.
    """
    name = row["name"]
    with bytes_coming(f"reading {name}") as tell:
        while row.get("state") == "importing":
            if isinstance(progress := row.get("progress"), Mapping):
                tell(progress)
            time.sleep(POLL_S)
            row = gateway.get(route("models", text(row["id"])))
    if row.get("state") in ("refused", "cancelled"):
        raise CliError(f"model {name} is {row['state']}: {row.get('reason')}")
    return row


def name_of(source: str) -> str:
    """`hf://org/Name@revision` → `name`."""
    place = source.partition("@")[0] if source.startswith("hf://") else absolute(source)
    return PurePath(place).name.lower()


def is_source(model: str) -> bool:
    """Whether `model` names a place of files rather than a model."""
    return "://" in model or "/" in model or model.startswith((".", "~"))


def absolute(source: str) -> str:
    """Return a source with an absolute path: the gateway's working directory differs from the user's."""
    return source if "://" in source else str(Path(source).expanduser().absolute())
