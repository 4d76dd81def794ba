"""`staccato top`: holders of the GPUs and states of the deployments, once a second, until q or Ctrl-C."""

from __future__ import annotations

import contextlib
import json as json_module
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.api import RETRYABLE, CliError, Row
from gateway.cli.terminal.options import Json, Key, Tenant, Url, connect, route
from gateway.cli.terminal.output import at, print_json, print_rows, table_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gateway.cli.terminal.client import GatewayClient

PERIOD_S = 1.0  # period of the runtimes' leases
LEAVE, ESCAPE = b"qQ\x04", b"\x1b"  # an escape followed by more bytes is another key

GPU = {
    "GPU": "gpu",
    "HELD BY": "held_by",
    "MEMORY MIB": "memory_mib",
    "USED": "used",
    "RUNNING": "running",
    "WAITING": "waiting",
    "TOKENS/S": "tokens_per_s",
    "SWITCHES/S": "switches_per_s",
}
DEPLOYMENT = {
    "DEPLOYMENT": "name",
    "TENANT": "tenant",
    "STATE": "state",
    "RUNNING": "running",
    "WAITING": "waiting",
    "TOKENS/S": "tokens_per_s",
    "FIRST TOKENS ON TIME": "first_on_time",
    "TOKENS ON TIME": "on_time",
}


@dataclass(frozen=True)
class Sample:
    """Answers of the gateway at `at_s`. `gpus` is None if the key may not see GPUs, which belong to the operator."""

    at_s: float
    gpus: list[Row] | None
    deployments: list[Row]


@dataclass(frozen=True)
class View:
    """Tables to show: a row for each GPU and a row for each deployment, the busiest deployment first."""

    gpus: list[Row] | None
    deployments: list[Row]


def top(
    once: Annotated[bool, typer.Option("--once", help="One look, of a second, instead of a live view.")] = False,
    tenant: Tenant = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Watch the GPUs and the deployments; q or Ctrl-C leaves."""
    with connect(url, key) as gateway, contextlib.suppress(KeyboardInterrupt):
        if once:
            before = sample(gateway, tenant)
            time.sleep(PERIOD_S)
            _print(view(before, sample(gateway, tenant)), json)
        elif json or not (sys.stdout.isatty() and sys.stdin.isatty()):
            _print_on(gateway, tenant, json)
        else:
            _live(gateway, tenant)


# ── what is shown ─────────────────────────────────────────────────────────────────────────────────────────────────────


def sample(gateway: GatewayClient, tenant: str | None) -> Sample:
    try:
        gpus: list[Row] | None = gateway.rows(route("gpus")) if tenant is None else None
    except CliError as error:
        if error.status != 403:
            raise
        gpus = None
    return Sample(time.monotonic(), gpus, gateway.every(route("deployments"), tenant=tenant))


def view(before: Sample | None, now: Sample) -> View:
    """Return the tables; speeds are averages since `before`."""
    counted = {_id(gpu): gpu for gpu in (before.gpus if before else None) or ()}
    passed_s = now.at_s - before.at_s if before else 0.0
    gpus = None if now.gpus is None else [_gpu(gpu, counted.get(_id(gpu)), passed_s) for gpu in now.gpus]
    work = _work(now.gpus or (), counted, passed_s)
    rows = [_deployment(row, work, known=now.gpus is not None) for row in now.deployments]
    rows.sort(key=lambda row: (-(_number(row["running"]) + _number(row["waiting"])), str(row["tenant"]), row["name"]))
    return View(gpus and sorted(gpus, key=lambda row: str(row["gpu"])), rows)


def _drain(gpu: Row) -> str:
    """Return "surplus" for a GPU drained for want of load, "draining" for another drained GPU, else ""."""
    return "surplus" if gpu.get("surplus") else "draining" if gpu.get("draining") else ""


def _gpu(gpu: Row, before: Row | None, passed_s: float) -> Row:
    models = _models(gpu)
    holder = models.get(str(gpu.get("holder")))
    return {
        "gpu": gpu["id"],
        "held_by": _drain(gpu) or ("idle" if holder is None else _label(holder)),
        "memory_mib": round(_number(gpu["memory_bytes"]) / 2**20),
        "used": _share(_number(gpu["used_bytes"]), _number(gpu["memory_bytes"])),
        "running": sum(_number(model["running"]) for model in models.values()),
        "waiting": sum(_number(model["waiting"]) for model in models.values()),
        "tokens_per_s": _speed(_tokens(gpu), _tokens(before) if before else None, passed_s),
        "switches_per_s": _speed(_number(gpu["switches"]), _number(before["switches"]) if before else None, passed_s),
    }


def _deployment(row: Row, work: Mapping[str, dict[str, float | None]], known: bool) -> Row:
    """Return a deployment's row. With `known`, a deployment missing in `work` has no work, else unknown work."""
    mine = work.get(
        f"{row['tenant']}/{row['name']}", {"running": 0, "waiting": 0, "tokens_per_s": 0.0} if known else {}
    )
    return {
        "name": row["name"],
        "tenant": row["tenant"],
        "state": at(row, "status.phase"),
        **{name: mine.get(name) for name in ("running", "waiting", "tokens_per_s")},
        "first_on_time": _share(at(row, "status.attainment.first_token")),
        "on_time": _share(at(row, "status.attainment.token")),
    }


def _work(gpus: Sequence[Row], before: Mapping[str, Row], passed_s: float) -> dict[str, dict[str, float | None]]:
    """Return deployment → work of its model on all GPUs. Deployments that share a model each show the whole work."""
    found: dict[str, dict[str, float | None]] = {}
    for gpu in gpus:
        counted = _models(before.get(_id(gpu), {}))
        for key, model in _models(gpu).items():
            last = counted.get(key)
            speed = _speed(_number(model["tokens"]), _number(last["tokens"]) if last else None, passed_s)
            for name in {str(name).rpartition("@")[0] for name in _names(model)}:
                sums = found.setdefault(name, {"running": 0, "waiting": 0, "tokens_per_s": None})
                for what, more in (
                    ("running", model["running"]),
                    ("waiting", model["waiting"]),
                    ("tokens_per_s", speed),
                ):
                    sums[what] = sums[what] if more is None else _number(sums[what]) + _number(more)
    return found


def _speed(now: float, before: float | None, passed_s: float) -> float | None:
    """Return the speed a second, or None if unknown. A restarted process counts from 0 again."""
    return None if before is None or passed_s <= 0 else round(max(now - before, 0.0) / passed_s, 1)


def _models(gpu: Row) -> Mapping[str, Row]:
    models = gpu.get("models")
    return models if isinstance(models, Mapping) else {}


def _names(model: Row) -> list[object]:
    names = model.get("deployments")
    return names if isinstance(names, list) else []


def _label(model: Row) -> str:
    names = _names(model)
    return f"{names[0]}{f' +{len(names) - 1}' if len(names) > 1 else ''}" if names else "a model of nobody"


def _tokens(gpu: Row) -> float:
    return sum(_number(model["tokens"]) for model in _models(gpu).values())


def _share(part: object, whole: float = 1.0) -> float | None:
    """Return a share rounded down to thousandths, so that 1 means all."""
    return int(1000 * part / whole) / 1000 if isinstance(part, int | float) and whole else None


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0


def _id(gpu: Row) -> str:
    return str(gpu["id"])


# ── how ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _print(shown: View, json: bool) -> None:
    if json:
        print_json({"gpus": shown.gpus, "deployments": shown.deployments})
        return
    if shown.gpus is not None:
        print_rows(shown.gpus, GPU, False)
        typer.echo()
    print_rows(shown.deployments, DEPLOYMENT, False)


def _print_on(gateway: GatewayClient, tenant: str | None, json: bool) -> None:
    """Print a view each second for a pipe, as plain text or as a line of JSON."""
    before = sample(gateway, tenant)
    while True:
        time.sleep(PERIOD_S)
        now = sample(gateway, tenant)
        shown = view(before, now)
        if json:
            typer.echo(json_module.dumps({"gpus": shown.gpus, "deployments": shown.deployments}))
        else:
            _print(shown, False)
            typer.echo()
        sys.stdout.flush()
        before = now


def _live(gateway: GatewayClient, tenant: str | None) -> None:
    """Show views on an alternate screen until the user leaves. If the gateway is away, wait for it."""
    from rich.console import Console
    from rich.live import Live

    before: Sample | None = None
    with _keys(), Live(console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            began_s = time.monotonic()
            try:
                now = sample(gateway, tenant)
                live.update(_screen(gateway.url, view(before, now)), refresh=True)
                before = now
            except CliError as error:
                if error.exit_code != RETRYABLE:
                    raise
                live.update(_trouble(str(error)), refresh=True)
                before = None
            if _left(began_s + PERIOD_S):
                return


def _screen(url: str, shown: View) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    head = Text.assemble(("staccato top", "bold"), f"  {url}  {time.strftime('%H:%M:%S')}  q leaves\n")
    parts: list[RenderableType] = [head]
    if shown.gpus is not None:
        parts += [table_of(shown.gpus, GPU), Text()]
    return Group(*parts, table_of(shown.deployments, DEPLOYMENT))


def _trouble(sentence: str) -> RenderableType:
    from rich.text import Text

    return Text(f"{sentence}\n\nIt is asked again every second; q leaves.")


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Read keys singly and without echo until the end of the block. Ctrl-C stays a signal."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    as_it_was = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, as_it_was)


def _left(until_s: float) -> bool:
    """Whether the user asked to leave before `until_s`."""
    while (rest_s := until_s - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], rest_s)[0]:
            typed = os.read(sys.stdin.fileno(), 64)
            if not typed or typed == ESCAPE or set(typed) & set(LEAVE):
                return True
    return False
