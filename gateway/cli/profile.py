"""`staccato profile`: measures the costs of models on this host, and shows them."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.api import CliError, Row
from gateway.cli.terminal.options import Json
from gateway.cli.terminal.output import note, print_rows
from runtime.core.ledgers.costs import Fit, Law, ModelCosts, Profile, load_profile

MODELS = {
    "MODEL": "name",
    "WEIGHTS MB": "weights_mb",
    "STEP ms": "step_ms",
    "A REQUEST": "request_ms",
    "1000 TOKENS": "context_ms",
    "PREFILL ms": "prefill_ms",
    "1000 TOKENS OF PROMPT": "prompt_ms",
    "LOAD ms": "load_ms",
    "SWITCH ms": "switch_ms",
    "COPY GB/s": "copy_gb_s",
    "OFF BY": "off",
}
CONDITIONS = {"CONDITION": "name", "": "value"}
LAW = {"LAW": "name", "SECONDS": "value", "+-": "error"}


def profile(
    out: Annotated[Path | None, typer.Option(help="Where to keep it, as a file of JSON.")] = None,
    models: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a model, or of several; repeat for more folders. Default: those of the demo."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure what models cost on this machine: steps, prompts, loads, switches. Takes up to three minutes."""
    with tempfile.TemporaryDirectory(prefix="staccato-profile-") as folder:
        path = out or Path(folder) / "profile.json"
        _measure(path, models or [])
        text = path.read_text()
    if json:
        typer.echo(text, nl=False)
        return
    show(load_profile(text, str(path)))
    if out:
        note(f"written to {out}")


def show(found: Profile) -> None:
    print_rows([_row(name, costs, found.fits[name]) for name, costs in found.models.items()], MODELS, False)
    typer.echo()
    if found.law:
        print_rows(_law(found.law, found.fits["law"]), LAW, False)
    typer.echo()
    print_rows([{"name": name, "value": value} for name, value in found.conditions.items()], CONDITIONS, False)


def _measure(out: Path, models: list[Path]) -> None:
    """Measure in a separate process: only that process waits for vLLM. Its lines go to the terminal."""
    from gateway.machine.processes import module_command

    command = [*module_command("runtime.profile"), "--out", str(out), *map(str, models)]
    last = ""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace") as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if last:
                note(last)
            last = line.strip()
        if process.wait() == 0:
            note(last)
            return
        stderr.seek(0)
        why = last if process.returncode == 1 else (stderr.read().strip().splitlines() or [last])[-1]
    raise CliError(f"nothing was measured: {why}")


def _row(name: str, costs: ModelCosts, fit: Fit) -> Row:
    return {
        "name": name,
        "weights_mb": round(costs.weight_bytes / 1e6, 1),
        "step_ms": _ms(costs.step_s),
        "request_ms": _ms(costs.step_s_per_request),
        "context_ms": _ms(1000 * costs.step_s_per_token),
        "prefill_ms": _ms(costs.prefill_s),
        "prompt_ms": _ms(costs.prefill(1000) - costs.prefill_s),
        "load_ms": _ms(costs.load_s),
        "switch_ms": _ms(costs.switch_s),
        "copy_gb_s": float(f"{1e-9 / costs.copy_s_per_byte:.3g}") if costs.copy_s_per_byte else None,
        "off": _off(fit),
    }


def _law(law: Law, fit: Fit) -> list[Row]:
    rows: list[Row] = [
        {"name": name, "value": f"{getattr(law, name):.3g}", "error": f"{fit.errors.get(name, 0.0):.2g}"}
        for name in law.__struct_fields__
    ]
    return [*rows, {"name": "off by", "value": _off(fit)}]


def _off(fit: Fit) -> str:
    return ", ".join(f"{what} {off:.0%}" for what, off in fit.residuals.items())


def _ms(seconds: float) -> float:
    return float(f"{seconds * 1e3:.3g}")
