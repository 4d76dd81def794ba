"""`staccato deploy`, `ls`, `show`, `rm`, `sleep`, `wake`, `ps`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.api import CONFLICT, RETRYABLE, CliError, Row
from gateway.cli.models import absolute, is_source, register
from gateway.cli.options import Duration, Json, Key, Tenant, Url, connect, route
from gateway.cli.output import at, note, print_json, print_row, print_rows, text
from gateway.cli.progress import waiting

if TYPE_CHECKING:
    from gateway.cli.client import Gateway

DEPLOYMENT = {
    "NAME": "name",
    "TENANT": "tenant",
    "MODEL": "model",
    "PHASE": "status.phase",
    "REVISION": "status.active_revision",
    "COLD START MS": "status.last_cold_start_ms",
}
DETAILS = DEPLOYMENT | {
    "ID": "id",
    "DESIRED": "status.desired_state",
    "RESIDENCY": "status.residency",
    "CONDITIONS": "status.conditions",
    "ATTAINMENT": "status.attainment",
    "DTYPE": "dtype",
    "MAX LEN": "max_model_len",
    "OBJECTIVE": "slo",
    "PRIORITY": "priority",
    "SCALING": "scaling",
    "TOOL PARSER": "tool_parser",
    "REASONING": "reasoning_parser",
}
ON_DEVICE = {
    "DEVICE": "device",
    "DEPLOYMENTS": "deployments",
    "TURN": "turn",
    "STATE": "residency",
    "RUNNING": "running",
    "WAITING": "waiting",
    "TURNS": "turns",
    "TOKENS": "tokens",
    "ON TIME": "attainment.token",
    "FIRST ON TIME": "attainment.first_token",
    "LOAD MS": "load_ms",
    "FETCHES": "fetches",
    "WEIGHTS MIB": "weights_mib",
    "KV MIB": "kv_mib",
    "ERROR": "error",
}

SERVING = ("asleep", "awake")  # asleep is healthy: the first request wakes it
POLL_S = 0.2


class Dtype(StrEnum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Priority(StrEnum):
    high = "high"
    normal = "normal"
    batch = "batch"


Name = Annotated[str, typer.Argument(metavar="NAME", help="The deployment's name or id.")]


def deploy(
    name: Annotated[str, typer.Argument(help="What clients write as `model`.")],
    model: Annotated[str, typer.Option(help="A model's name, or a folder, which is registered first.")],
    tenant: Tenant = None,
    dtype: Dtype = Dtype.auto,
    ttft: Duration = None,
    tbt: Duration = None,
    priority: Priority = Priority.normal,
    idle: Annotated[
        str, typer.Option(help="Asleep without requests: auto (when others need its memory), never, or after as 30s.")
    ] = "auto",
    max_replicas: Annotated[int | None, typer.Option(min=1, help="Runtimes that host it; all unless said.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Tokens of prompt and answer together.")] = None,
    tool_parser: Annotated[str | None, typer.Option(help="vLLM's name of the tool call format, as hermes.")] = None,
    wait: Annotated[bool, typer.Option(help="Until it serves.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait.")] = 300,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Deploy a model under a name, and print where clients find it."""
    body: Row = {
        "name": name,
        "tenant": tenant,
        "dtype": dtype.value,
        "max_model_len": max_model_len,
        "slo": {name: ms for name, ms in (("ttft_ms", ttft), ("tbt_ms", tbt)) if ms is not None},
        "priority": priority.value,
        "scaling": {"idle": idle, "max_replicas": max_replicas},
        "tool_parser": tool_parser,
    }
    with connect(url, key) as gateway:
        known = registered(gateway, model) if is_source(model) else model
        row = gateway.post(route("deployments"), {**body, "model": known})
        if wait:
            row = until_serving(gateway, row, timeout)
    for warning in messages(row, "ObjectiveUnmeetable"):
        note(f"warning: {warning}")
    if json:
        print_json(row)
    else:
        _print_endpoint(gateway.url, row)


def registered(gateway: Gateway, source: str) -> str:
    """The name of the model made from `source`; a folder that is registered already is taken as it is."""
    name = PurePath(absolute(source)).name.lower()
    try:
        return text(register(gateway, name, source)["name"])
    except CliError as error:
        if error.exit_code != CONFLICT:
            raise
        known = gateway.get(route("models", name))
        if known.get("state") == "refused":  # it may have been mended since
            gateway.delete(route("models", name))
            return registered(gateway, source)
        if known.get("source") != absolute(source):
            raise CliError(
                f"there is another model {name!r}, from {known.get('source')}: "
                "register this one under a name of its own with `staccato model add`",
                CONFLICT,
            ) from error
        return name


def until_serving(gateway: Gateway, row: Row, timeout_s: float) -> Row:
    """The deployment once it serves. Raises CliError when it failed, or does not serve in time."""
    name, deadline_s = text(row["name"]), time.monotonic() + timeout_s
    with waiting(f"deploying {name}"):
        while at(row, "status.phase") not in SERVING:
            if at(row, "status.phase") == "failed":
                raise CliError(f"{name} failed: {failure(row)}")
            if time.monotonic() > deadline_s:
                phase = text(at(row, "status.phase"))
                raise CliError(f"{name} is still {phase} after {timeout_s:g} s: see `staccato show {name}`", RETRYABLE)
            time.sleep(POLL_S)
            row = gateway.get(route("deployments", text(row["id"])))
    return row


def failure(row: Row) -> str:
    return "; ".join(messages(row, "RevisionFailed")) or "no runtime said why"


def messages(row: Row, kind: str) -> list[str]:
    """Of the conditions of this type."""
    conditions = at(row, "status.conditions")
    found = conditions if isinstance(conditions, list) else []
    return [text(at(condition, "message")) for condition in found if at(condition, "type") == kind]


def _print_endpoint(url: str, row: Row) -> None:
    base = f"{url}/t/{row['tenant']}/v1"
    typer.echo(base)
    note(f"""
{row["name"]} is {text(at(row, "status.phase"))}. With a key of the tenant (`staccato key create {row["tenant"]}`):

  curl {base}/chat/completions -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" \\
    -d '{{"model": "{row["name"]}", "messages": [{{"role": "user", "content": "Hello"}}]}}'

  openai.OpenAI(base_url="{base}", api_key=KEY)""")


def find(gateway: Gateway, name: str, tenant: str | None) -> Row:
    """By name or id. Raises CliError."""
    return gateway.get(route("deployments", name), tenant=tenant)


def list_deployments(tenant: Tenant = None, url: Url = None, key: Key = None, json: Json = False) -> None:
    """List the deployments."""
    with connect(url, key) as gateway:
        print_rows(gateway.every(route("deployments"), tenant=tenant), DEPLOYMENT, json)


def show(name: Name, tenant: Tenant = None, url: Url = None, key: Key = None, json: Json = False) -> None:
    """Show one deployment."""
    with connect(url, key) as gateway:
        print_row(find(gateway, name, tenant), DETAILS, json)


def remove(name: Name, tenant: Tenant = None, url: Url = None, key: Key = None, json: Json = False) -> None:
    """Delete a deployment; its model stays."""
    with connect(url, key) as gateway:
        row = find(gateway, name, tenant)
        gateway.delete(route("deployments", text(row["id"])))
    if json:
        print_json({"id": row["id"], "name": row["name"]})
    else:
        note(f"{row['name']} of {row['tenant']} is deleted")


def sleep(name: Name, tenant: Tenant = None, url: Url = None, key: Key = None, json: Json = False) -> None:
    """Give the device memory of a deployment back now; its next request wakes it."""
    with connect(url, key) as gateway:
        _order(gateway, name, tenant, "sleep", json)


def wake(name: Name, tenant: Tenant = None, url: Url = None, key: Key = None, json: Json = False) -> None:
    """Load a deployment before its first request comes."""
    with connect(url, key) as gateway:
        _order(gateway, name, tenant, "wake", json)


def _order(gateway: Gateway, name: str, tenant: str | None, order: str, json: bool) -> None:
    row = find(gateway, name, tenant)
    answer = gateway.post(route("deployments", text(row["id"]), verb=f":{order}"))
    print_row(answer, DEPLOYMENT, json)


def processes(url: Url = None, key: Key = None, json: Json = False) -> None:
    """Show who is on each device and whose turn it is."""
    with connect(url, key) as gateway:
        devices = gateway.rows(route("gpus"))
    if json:
        print_json(devices)
    else:
        print_rows([line for device in devices for line in on_device(device)], ON_DEVICE, False)


def on_device(device: Row) -> list[Row]:
    """A row for each model; one for the device itself when there is none."""
    models = at(device, "models")
    if not isinstance(models, Mapping) or not models:
        return [{"device": device["id"]}]
    return [
        {
            **state,
            "device": device["id"],
            "model": name,
            "turn": "now" if name == device.get("holder") else "",
            "weights_mib": state["weights_bytes"] >> 20,
            "kv_mib": state["kv_bytes"] >> 20,
        }
        for name, state in models.items()
    ]
