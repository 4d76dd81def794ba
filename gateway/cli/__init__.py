"""The command `staccato`: one file a group of commands, and the edge where every error becomes one sentence."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from gateway.cli import (
    audit,
    billing,
    chat,
    declared,
    deployments,
    joining,
    models,
    operators,
    profile,
    serve,
    sim,
    tenants,
    top,
)
from gateway.cli.api import CliError
from gateway.cli.terminal import completion

app = typer.Typer(
    name="staccato",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

COMMANDS: dict[str, Callable[..., None]] = {
    "up": serve.up,
    "gateway": serve.gateway,
    "runtime": serve.runtime,
    "node": serve.node,
    "scheduler": serve.scheduler,
    "ledger": serve.ledger,
    "join-service": serve.join_service,
    "controller": declared.controller,
    "migrate": serve.migrate,
    "nats-users": serve.nats_users,
    "doctor": serve.doctor,
    "profile": profile.profile,
    "version": serve.version,
    "apply": declared.apply,
    "crds": declared.crds,
    "deploy": deployments.deploy,
    "ls": deployments.list_deployments,
    "show": deployments.show,
    "rm": deployments.remove,
    "promote": deployments.promote,
    "rollback": deployments.rollback,
    "sleep": deployments.sleep,
    "wake": deployments.wake,
    "forget": deployments.forget,
    "ps": deployments.processes,
    "top": top.top,
    "chat": chat.chat,
    "completion": completion.completion,
}
SIMULATOR = {"sim": sim.sim, "plan": sim.plan}
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
GROUPS = {
    "tenant": tenants.tenant,
    "key": tenants.key,
    "operator-key": operators.operator_key,
    "join-token": joining.join_token,
    "joined": joining.joined,
    "model": models.model,
    "usage": billing.usage,
    "bill": billing.bill,
    "audit": audit.audit,
}


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=serve.print_version, help="Print the version and end.")
    ] = False,
) -> None:
    """Many language models for many tenants from few GPUs."""


for name, command in COMMANDS.items():
    app.command(name)(command)
for name, command in SIMULATOR.items():
    app.command(name, context_settings=PASSED_ON)(command)
for name, group in GROUPS.items():
    app.add_typer(group, name=name)
app.add_typer(models.model, name="models", hidden=True)  # what people write


def main() -> None:
    completion.init()
    try:
        app(prog_name="staccato")
    except CliError as error:
        _end(str(error), error.exit_code)
    except BrokenPipeError:  # the reader, as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        from store.settings import SettingsError

        if isinstance(error, SettingsError):
            _end(str(error), 2)
        if os.environ.get("STACCATO_LOG_LEVEL") == "debug":
            raise
        what = f"{type(error).__name__}: {error}"
        _end(f"internal error, {what}: please report it; STACCATO_LOG_LEVEL=debug shows where it came from", 1)


def _end(message: str, exit_code: int) -> None:
    typer.echo(f"error: {message}", err=True)
    sys.exit(exit_code)
