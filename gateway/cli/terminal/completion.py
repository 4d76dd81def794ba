"""`staccato completion`: scripts for shells to complete commands, options and names of deployments."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer
from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

ANSWER_S_MOST = 1.0  # a person waits with a finger on the key
COMPLETES = "_STACCATO_COMPLETE"  # set by a shell to ask for completions instead of running the command


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="Which shell it is for.")]) -> None:
    """Print a script for a shell to complete commands; `eval "$(staccato completion bash)"`."""
    typer.echo(get_completion_script(prog_name="staccato", complete_var=COMPLETES, shell=shell.value))


def init() -> None:
    """Let Typer answer a shell that asks for completions."""
    if COMPLETES in os.environ:
        completion_init()


def deployment_names(context: typer.Context, incomplete: str) -> Sequence[tuple[str, str]]:
    """Complete the name of a deployment. Returns [] if the gateway can't be asked: the shell waits."""
    from gateway.cli.api import CliError
    from gateway.cli.terminal.client import connect
    from gateway.cli.terminal.options import route

    given = context.params
    try:
        with connect(given.get("url"), given.get("key"), ANSWER_S_MOST) as gateway:
            rows = gateway.rows(route("deployments"), tenant=given.get("tenant"))
    except (CliError, ValueError):
        return []
    return [(str(row["name"]), f"of {row['tenant']}") for row in rows if str(row["name"]).startswith(incomplete)]
