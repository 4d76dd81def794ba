"""Checks a command as far as possible without running the command. A check returns None, or a sentence on the fault."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import typer.main
import yaml

from gateway.cli import SIMULATOR, app
from runtime.sim.__main__ import understood
from tests.conftest import ROOT
from tests.deploy.tools import DEPLOY
from tests.docs.documents import PROGRAM

MAKEFILE = (ROOT / "Makefile").read_text()
PLACEHOLDER = re.compile(r"(?<![\w.])(FILE|OUT_DIR|PATH)(?![\w.])")


def wrong(command: list[str], folder: Path = ROOT, whole: bool = True) -> str | None:
    """The fault of a command, or None. `whole`: no needed argument may be missing; a command named in passing in a
    sentence may be shorter."""
    known = PROGRAM.match(command[0])
    if not whole:
        command = [re.sub("^[A-Z]$", "1", word) for word in command]
    check: Callable[[list[str], Path, bool], str | None] | None = CHECKS.get(known[1] if known else command[0])
    return check(command[1:], folder, whole) if check else f"nothing here knows {command[0]}"


def wrong_staccato(arguments: list[str], folder: Path, whole: bool) -> str | None:
    if arguments and arguments[0] in SIMULATOR:
        said = _wrong_simulation(arguments) if whole or arguments[1:] else None
        return said if whole or not said or "expected one argument" not in said else None
    try:
        return _wrong_command(_root(), arguments, whole)
    except Exception as error:  # Typer's exceptions are not exported
        if type(error).__name__ == "Exit" and getattr(error, "exit_code", 1) == 0:
            return None  # --help and --version end a correct command
        missing = type(error).__name__ == "MissingParameter" or str(error).endswith("requires an argument.")
        return None if missing and not whole else f"{type(error).__name__}: {error}"


def _wrong_command(command: Any, arguments: list[str], whole: bool, above: Any = None) -> str | None:
    if not arguments and hasattr(command, "commands"):
        return "no command" if whole and not command.invoke_without_command else None
    context = command.make_context(command.name, list(arguments), parent=above)
    if not hasattr(command, "commands"):
        return None
    rest = [*context._protected_args, *context.args]
    if rest and rest[0] not in command.commands:
        return f"there is no command {rest[0]!r}"
    return _wrong_command(command.commands[rest[0]], rest[1:], whole, context) if rest else None


@cache
def _root() -> Any:
    return typer.main.get_command(app)


def _wrong_simulation(arguments: list[str]) -> str | None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            understood().parse_args(arguments)
        except SystemExit:
            return said.getvalue()
    return None


def wrong_make(arguments: list[str], folder: Path, whole: bool) -> str | None:
    for argument in arguments:
        name, is_setting, _ = argument.partition("=")
        pattern = rf"^{name} \?=|\$\({name}\)|\(filter 0,\$\({name}" if is_setting else rf"^{name}:.*## "
        if not re.search(pattern, MAKEFILE, re.MULTILINE):
            return f"the Makefile has no {name}"
    return None if arguments else "no target"


def wrong_python(arguments: list[str], folder: Path, whole: bool) -> str | None:
    match arguments:
        case ["-c", source]:
            compile(source, "<a document>", "exec")
            return None
        case ["-m", "runtime.sim", *rest]:
            return _wrong_simulation([PLACEHOLDER.sub("x", word) for word in rest])
        case ["-m", module, *_]:
            return None if importlib.util.find_spec(module) else f"there is no module {module}"
        case [script, *_]:
            found = PLACEHOLDER.search(script) or (ROOT / script).is_file()
            return None if found else f"there is no {script}"
    return "it runs nothing"


def wrong_promtool(arguments: list[str], folder: Path, whole: bool) -> str | None:
    missing = [word for word in arguments if word.endswith(".yml") and not (folder / word).is_file()]
    return f"there is no {missing[0]}" if missing else None


def wrong_helm(arguments: list[str], folder: Path, whole: bool) -> str | None:
    """Check that the chart exists, and that each `--set` changes an existing value."""
    if arguments[0] not in ("install", "upgrade") or not (ROOT / arguments[2] / "Chart.yaml").is_file():
        return "it is about no chart of ours"
    values = yaml.safe_load((ROOT / arguments[2] / "values.yaml").read_text())
    for place, option in enumerate(arguments):
        if option == "--set":
            found: Any = values
            for name in arguments[place + 1].partition("=")[0].split("."):
                if not isinstance(found, dict) or name not in found:
                    return f"the chart has no value {arguments[place + 1]}"
                found = found[name]
    return None


def wrong_kubectl(arguments: list[str], folder: Path, whole: bool) -> str | None:
    """Check that the chart has a template for each deployment and statefulset of Staccato. Secrets are the reader's."""
    for kind, name in re.findall(r"(deployment|statefulset)/staccato-(\w+)", " ".join(arguments)):
        template = DEPLOY / f"helm/staccato/templates/{name}.yaml"
        if not template.is_file() or f"kind: {kind}\n" not in template.read_text().lower():
            return f"the chart has no {kind} {name}"
    verbs = ("create", "label", "rollout", "apply", "get", "scale")
    return None if any(verb in arguments for verb in verbs) else f"none of {', '.join(verbs)} is in it"


def wrong_docker(arguments: list[str], folder: Path, whole: bool) -> str | None:
    services = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())["services"]
    profiles = {profile for service in services.values() for profile in service.get("profiles", [])}
    asked = {word for before, word in zip(arguments, arguments[1:], strict=False) if before == "--profile"}
    if arguments[0] != "compose" or not {"up", "ps"} & set(arguments):
        return "it is neither `compose up` nor `compose ps`"
    return None if asked <= profiles else f"the compose file has no profile {', '.join(asked - profiles)}"


def wrong_systemctl(arguments: list[str], folder: Path, whole: bool) -> str | None:
    units = [word for word in arguments[1:] if word.startswith("staccato-")]
    files = [unit if unit.endswith(".socket") else re.sub(r"@.*", "@", unit) + ".service" for unit in units]
    missing = [file for file in files if not (DEPLOY / "systemd" / file).is_file()]
    known = ("daemon-reload", "enable", "restart", "reload")
    return f"there is no {missing[0]}" if missing else None if arguments[0] in known else f"{arguments[0]} is no verb"


def wrong_path(arguments: list[str], folder: Path, whole: bool) -> str | None:
    """Check the arguments of a command of the system: files of the repository must exist."""
    for path in re.findall(r"(?<![\w/.])(?:/opt/staccato/)?(deploy/[\w./-]+)", " ".join(arguments)):
        if not (ROOT / path).exists() and not list(ROOT.glob(f"{path}*")):
            return f"there is no {path}"
    return None


CHECKS: dict[str, Callable[[list[str], Path, bool], str | None]] = {
    "staccato": wrong_staccato,
    "make": wrong_make,
    "python": wrong_python,
    "promtool": wrong_promtool,
    "helm": wrong_helm,
    "kubectl": wrong_kubectl,
    "docker": wrong_docker,
    "systemctl": wrong_systemctl,
    **dict.fromkeys(("cd", "chown", "cp", "install", "mkdir", "useradd"), wrong_path),
    **dict.fromkeys(("../secrets.sh", "/opt/staccato/deploy/secrets.sh"), wrong_path),
}
