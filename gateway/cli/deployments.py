"""`staccato deploy`, `promote`, `rollback`, `ls`, `show`, `rm`, `forget`, `sleep`, `wake`, `ps`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from gateway.cli.api import RETRYABLE, USAGE, CliError, Row
from gateway.cli.models import fetch, is_source, name_of
from gateway.cli.terminal.completion import deployment_names
from gateway.cli.terminal.options import Duration, Json, Key, Tenant, Url, connect, route
from gateway.cli.terminal.output import at, note, print_json, print_row, print_rows, text
from gateway.cli.terminal.progress import expected
from store.contract.series import PARTS
from store.contract.tasks import Task

if TYPE_CHECKING:
    from gateway.cli.terminal.client import GatewayClient

REQUEST = {
    "REQUEST": "id",
    "FINISH": "finish",
    "COLD": "cold",
    "PROMPT": "prompt_tokens",
    "CACHED": "cached_tokens",
    "OUTPUT": "output_tokens",
    "FIRST TOKEN MS": "breakdown.first_token_ms",
    **{f"{part.upper()} MS": f"breakdown.parts.{part}" for part in PARTS},
    "TOTAL MS": "breakdown.total_ms",
}
DEPLOYMENT = {
    "NAME": "name",
    "TENANT": "tenant",
    "MODEL": "model",
    "PHASE": "status.phase",
    "REVISION": "status.active_revision",
    "TARGET": "coming",
    "COLD START MS": "status.last_cold_start_ms",
}
DETAILS = DEPLOYMENT | {
    "ID": "id",
    "LAST ORDER": "status.desired_state",
    "RESIDENCY": "status.residency",
    "TARGET CHANGES": "changes",
    "CANARY": "canary",
    "CONDITIONS": "status.conditions",
    "ATTAINMENT": "status.attainment",
    "TASK": "task",
    "DTYPE": "dtype",
    "MAX LEN": "max_model_len",
    "OBJECTIVE": "slo",
    "PRIORITY": "priority",
    "SCALING": "scaling",
    "TOOL PARSER": "tool_parser",
    "REASONING": "reasoning_parser",
    "TEXT ALONE": "language_model_only",
    "PREFIXES": "keep_prefixes",
    "WARM": "warm",
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
    "WARM": "warm",
    "STAGED": "staged",
    "UNUSED": "staged_unused",
    "WEIGHTS MIB": "weights_mib",
    "KV MIB": "kv_mib",
    "ERROR": "error",
}

PLAN = {
    "WEIGHT BYTES": "weight_bytes",
    "KV BYTES/TOKEN": "kv_bytes_per_token",
    "MAX LEN": "max_model_len",
    "OBJECTIVE": "objective",
    "PRICE": "price",
}
PLANNED = {
    "DEVICE": "id",
    "FITS": "fits",
    "KV TOKENS": "kv_tokens",
    "NOW": "kv_tokens_now",
    "LONGEST REQUESTS": "longest_requests",
    "FROM FILES": "cold_start.files",
    "FROM HOST": "cold_start.host",
    "FROM PAGES": "cold_start.pages",
    "STEP": "step",
    "BUSY": "busy",
}
SLOWED = {"SLOWS": "deployment", "TENANT": "tenant", "DEVICE": "runtime", "BUSY": "busy"}

# By the deployment's task: a path below the endpoint, and what a request there says besides the model.
EXAMPLES = {
    Task.GENERATE: ("chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'),
    Task.EMBED: ("embeddings", '"input": ["Hello"]'),
    Task.CLASSIFY: ("classify", '"input": ["Hello"]'),
}
SERVING = ("asleep", "awake")  # asleep is healthy: the first request wakes the deployment
POLL_S = 0.2
LACKS_S = 2.0  # then the command asks whether any runtime is up


class Dtype(StrEnum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class PriorityOption(StrEnum):
    high = "high"
    normal = "normal"
    batch = "batch"


Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The deployment's name or id.", autocompletion=deployment_names)
]
Wait = Annotated[bool, typer.Option(help="Wait until the deployment serves.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds to wait at most.")]
WaitOrder = Annotated[bool, typer.Option(help="Wait until the order is carried out, then print the state.")]


def deploy(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What clients write as `model`.")],
    model: Annotated[
        str | None,
        typer.Option(help="A model's name, or a folder, hf://… or s3://…, registered first. Needed but for --canary."),
    ] = None,
    tenant: Tenant = None,
    dtype: Dtype = Dtype.auto,
    ttft: Duration = None,
    tbt: Duration = None,
    priority: PriorityOption = PriorityOption.normal,
    idle: Annotated[
        str, typer.Option(help="Asleep without requests: auto (when others need its memory), never, or after as 30s.")
    ] = "auto",
    max_replicas: Annotated[int | None, typer.Option(min=1, help="Runtimes that host it; all unless said.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Tokens of prompt and answer together.")] = None,
    tool_parser: Annotated[str | None, typer.Option(help="vLLM's name of the tool call format, as hermes.")] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="vLLM's name of how the model marks its thinking, as qwen3: answers have the thinking apart."
        ),
    ] = None,
    language_model_only: Annotated[
        bool, typer.Option("--language-model-only", help="Without pictures: what sees them is not loaded.")
    ] = False,
    keep_prefixes: Annotated[
        bool, typer.Option(help="Whether devices keep computed prompts for later requests of the tenant.")
    ] = True,
    warm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WINDOW",
            help="Times at which the host's memory keeps the model, as 'Mon-Fri 8:00-18:00 Europe/Berlin'; several "
            "times; '' for none.",
        ),
    ] = None,
    canary: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=100,
            metavar="PERCENT",
            help="Change what is deployed, by what else is given: the new revision gets so many requests of a hundred "
            "until `staccato promote` or `rollback`.",
        ),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what it would be, and make nothing.")] = False,
    wait: Wait = True,
    timeout: Timeout = 300,
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
        "reasoning_parser": reasoning_parser,
        "language_model_only": language_model_only,
        "keep_prefixes": keep_prefixes,
        "warm": [window for window in warm or () if window],
    }
    with connect(url, key) as gateway:
        if model is not None:
            body = {**body, "model": registered(gateway, model) if is_source(model) else model}
        if canary is not None:
            row = _give_share(gateway, name, tenant, {**_given(context, body), "canary": {"weight": canary}})
            print_deployment(row, DETAILS, json)
            return
        if model is None:
            raise CliError("--model is missing: name a model, or give a folder", USAGE)
        if plan:
            _print_plan(gateway.post(route("deployments", verb=":plan"), body), json)
            return
        row = gateway.post(route("deployments"), body)
        if wait:
            row = until(SERVING, gateway, row, timeout, f"deploying {name}")
    for warning in messages(row, "ObjectiveUnmeetable") + messages(row, "ServedSequentially"):
        note(f"warning: {warning}")
    if json:
        print_json(row)
    else:
        _print_endpoint(gateway.url, row)


def _print_plan(plan: Row, json: bool) -> None:
    """Print a plan. Raises CliError if the model fits nowhere."""
    if json:
        print_json(plan)
    else:
        print_row(plan, PLAN, False)
        runtimes, slows = (rows if isinstance(rows := plan[name], list) else [] for name in ("runtimes", "slows"))
        print_rows(runtimes, PLANNED, False)
        if slows:
            print_rows(slows, SLOWED, False)
    if not plan["fits"]:
        raise CliError(f"it fits nowhere: {text(plan['reasons'])}")


def _given(context: typer.Context, body: Row) -> Row:
    """Return the fields given on the command line; other fields keep their values."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    said = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    parts = {"slo": body["slo"], "scaling": _only(body["scaling"], said)}
    apart = ("slo", "scaling", "name", "tenant")
    whole = {name: value for name, value in body.items() if name in said and name not in apart}
    return whole | {name: part for name, part in parts.items() if part}


def _only(part: object, names: set[str]) -> Row:
    return {name: value for name, value in part.items() if name in names} if isinstance(part, Mapping) else {}


def _give_share(gateway: GatewayClient, name: str, tenant: str | None, patch: Row) -> Row:
    row = find(gateway, name, tenant)
    return gateway.patch(route("deployments", text(row["id"])), patch)


def promote(
    name: Name,
    tenant: Tenant = None,
    wait: WaitOrder = True,
    timeout: Timeout = 30,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Give all requests to the newest revision of a deployment."""
    with connect(url, key) as gateway:
        row = _ordered(gateway, name, tenant, "promote")
        print_deployment(_serving(gateway, row, wait, timeout), DEPLOYMENT, json)


def rollback(
    name: Name,
    revision: Annotated[
        int | None, typer.Option(min=1, help="Revision to go back to; the one before unless said.")
    ] = None,
    tenant: Tenant = None,
    wait: WaitOrder = True,
    timeout: Timeout = 30,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Give up the target revision, or give the requests back to an earlier revision."""
    with connect(url, key) as gateway:
        row = _ordered(gateway, name, tenant, "rollback", {"revision": revision})
        print_deployment(_serving(gateway, row, wait, timeout), DEPLOYMENT, json)


def _serving(gateway: GatewayClient, row: Row, wait: bool, timeout_s: float) -> Row:
    """Return the deployment once its active revision serves."""
    doing = f"giving the requests of {row['name']} to revision {text(at(row, 'status.active_revision'))}"
    return until(SERVING, gateway, row, timeout_s, doing) if wait else row


def registered(gateway: GatewayClient, source: str) -> str:
    """Return the name of the model made from `source`; a registered folder is not registered again."""
    return text(fetch(gateway, name_of(source), source)["name"])


def until(phases: tuple[str, ...], gateway: GatewayClient, row: Row, timeout_s: float, doing: str) -> Row:
    """Return the deployment once its phase is one of `phases`.

    Raises CliError if the deployment failed, or after `timeout_s`.
    """
    name, began_s = text(row["name"]), time.monotonic()
    deadline_s, lacks_at_s = began_s + timeout_s, began_s + min(LACKS_S, timeout_s)
    lacks = ""
    with expected(doing, _last_time_s(row)) as tell:
        while at(row, "status.phase") not in phases:
            phase = text(at(row, "status.phase"))
            if phase == "failed":
                raise CliError(f"{name} failed: {failure(row)}")
            if not lacks and time.monotonic() > lacks_at_s and (lacks := no_runtime(gateway)):
                note(lacks)
            if time.monotonic() > deadline_s:
                why = f"{lacks}, or" if lacks else "see"
                raise CliError(
                    f"{name} is still {phase} after {timeout_s:g} s: {why} `staccato show {name}`", RETRYABLE
                )
            tell(phase, at(row, "status.progress"))
            time.sleep(POLL_S)
            row = gateway.get(route("deployments", text(row["id"])))
    return row


def no_runtime(gateway: GatewayClient) -> str:
    """Return the remedy if no runtime is up; empty if a runtime is up, or if the gateway does not say."""
    with contextlib.suppress(CliError):
        if gateway.get("/readyz").get("runtimes") == 0:
            return "no runtime is up: start one with `staccato runtime` or `staccato up --runtimes 1`"
    return ""


def _last_time_s(row: Row) -> float | None:
    """Return how long the last way to the device took: the next load will take as long."""
    took_ms = at(row, "status.last_cold_start_ms")
    return took_ms / 1000 if isinstance(took_ms, int | float) else None


def failure(row: Row) -> str:
    return "; ".join(messages(row, "RevisionFailed")) or "no runtime said why"


def messages(row: Row, kind: str) -> list[str]:
    """Return the messages of conditions of type `kind`."""
    conditions = at(row, "status.conditions")
    found = conditions if isinstance(conditions, list) else []
    return [text(at(condition, "message")) for condition in found if at(condition, "type") == kind]


def _print_endpoint(url: str, row: Row) -> None:
    base = f"{url}/t/{row['tenant']}/v1"
    path, said = EXAMPLES[Task(text(row["task"]))]
    typer.echo(base)
    note(f"""
{row["name"]} is {text(at(row, "status.phase"))}. With a key of the tenant (`staccato key create {row["tenant"]}`):

  curl {base}/{path} -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" \\
    -d '{{"model": "{row["name"]}", {said}}}'

  openai.OpenAI(base_url="{base}", api_key=KEY)""")


def find(gateway: GatewayClient, name: str, tenant: str | None) -> Row:
    """Return a deployment by name or id. Raises CliError."""
    return gateway.get(route("deployments", name), tenant=tenant)


def list_deployments(tenant: Tenant = None, url: Url = None, key: Key = None, json: Json = False) -> None:
    """List the deployments: MODEL and REVISION serve the requests, TARGET is a newer revision on its way."""
    with connect(url, key) as gateway:
        found = gateway.every(route("deployments"), tenant=tenant)
    print_rows(found if json else [with_target(row) for row in found], DEPLOYMENT, json)


def show(name: Name, tenant: Tenant = None, url: Url = None, key: Key = None, json: Json = False) -> None:
    """Show a deployment, or the parts of a request's time (by the x-request-id)."""
    with connect(url, key) as gateway:
        if _is_request(name):
            print_row(gateway.get(route("requests", name), tenant=tenant), REQUEST, json)
        else:
            print_deployment(find(gateway, name, tenant), DETAILS, json)


def _is_request(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return str(UUID(name)) == name
    return False


def remove(name: Name, tenant: Tenant = None, url: Url = None, key: Key = None, json: Json = False) -> None:
    """Delete a deployment; its model stays."""
    with connect(url, key) as gateway:
        row = find(gateway, name, tenant)
        gateway.delete(route("deployments", text(row["id"])))
    if json:
        print_json({"id": row["id"], "name": row["name"]})
    else:
        note(f"{row['name']} of {row['tenant']} is deleted")


def forget(name: Name, tenant: Tenant = None, url: Url = None, key: Key = None, json: Json = False) -> None:
    """Have devices forget the computed prompts of a deployment's ended requests."""
    with connect(url, key) as gateway:
        row = find(gateway, name, tenant)
        gateway.delete(route("deployments", text(row["id"]), "prefixes"))
    if json:
        print_json({"id": row["id"], "name": row["name"]})
    else:
        note(f"the prefixes of {row['name']} of {row['tenant']} are forgotten")


def sleep(
    name: Name,
    tenant: Tenant = None,
    wait: WaitOrder = True,
    timeout: Timeout = 30,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Give the device memory of a deployment back now; the next request wakes the deployment."""
    with connect(url, key) as gateway:
        row = _ordered(gateway, name, tenant, "sleep")
        if shared := messages(row, "EngineShared"):
            note(f"{text(row['name'])} is ordered to sleep, but {shared[0]}")
        elif wait:
            row = _asleep(gateway, row, timeout)
        print_deployment(row, DEPLOYMENT, json)


def _asleep(gateway: GatewayClient, row: Row, timeout_s: float) -> Row:
    """Return the deployment once its phase is asleep. Raises CliError if still awake after `timeout_s`."""
    try:
        return until(("asleep",), gateway, row, timeout_s, f"putting {row['name']} to sleep")
    except CliError as error:
        if error.exit_code != RETRYABLE:
            raise
        sentence = f"{error}; the order to sleep stands, and a request that came meanwhile keeps a deployment awake"
        raise CliError(sentence, RETRYABLE) from error


def wake(
    name: Name,
    tenant: Tenant = None,
    wait: Wait = True,
    timeout: Timeout = 300,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Load a deployment before its first request comes."""
    with connect(url, key) as gateway:
        answer = _ordered(gateway, name, tenant, "wake")
        if wait:
            answer = until(("awake",), gateway, answer, timeout, f"waking {name}")
        print_deployment(answer, DEPLOYMENT, json)


def _ordered(gateway: GatewayClient, name: str, tenant: str | None, order: str, body: Row | None = None) -> Row:
    row = find(gateway, name, tenant)
    return gateway.post(route("deployments", text(row["id"]), verb=f":{order}"), body)


# ── a deployment as text ──────────────────────────────────────────────────────────────────────────────────────────────


def print_deployment(row: Row, columns: Mapping[str, str], json: bool) -> None:
    """Print a deployment: the active revision, and apart from it the target revision."""
    print_row(row if json else with_target(row), columns, json)


def with_target(row: Row) -> Row:
    """The deployment with two texts about the revision on its way: `coming` in short, `changes` with what differs."""
    target = row.get("target")
    if not isinstance(target, Mapping):
        return row
    coming = f"revision {target['revision']}"
    if (weight := at(target, "canary.weight")) is not None:
        coming = f"{coming}, {weight} %"
    if target["model"] != row["model"]:
        coming = f"{coming}, {target['model']}"
    return {**row, "coming": coming, "changes": changes(row, target)}


def changes(live: Row, target: Row) -> str:
    """Return differences of a target's spec to the live spec: `model: faq → poet, slo.ttft_ms: 2000 → 1000`."""
    old, new = _flat(live), _flat(target)
    differing = [name for name in new if name in old and old[name] != new[name] and not name.startswith(NO_SPEC)]
    return ", ".join(f"{name}: {text(old[name])} → {text(new[name])}" for name in differing) or "none"


NO_SPEC = ("digest", "engine", "canary")  # fields of a target outside its spec


def _flat(row: Row, prefix: str = "") -> dict[str, object]:
    """`{"slo": {"ttft_ms": 1}}` as `{"slo.ttft_ms": 1}`."""
    flat: dict[str, object] = {}
    for name, value in row.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def processes(url: Url = None, key: Key = None, json: Json = False) -> None:
    """Show the models on each device, and the model that has the turn."""
    with connect(url, key) as gateway:
        devices = gateway.rows(route("gpus"))
    if json:
        print_json(devices)
    else:
        print_rows([line for device in devices for line in on_device(device)], ON_DEVICE, False)


def on_device(device: Row) -> list[Row]:
    """Return a row for each model; without models, a row for the device itself."""
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
