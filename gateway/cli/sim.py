"""`staccato sim` and `staccato plan`: replace this process by the simulator, which parses the arguments."""

from __future__ import annotations

import os
from typing import NoReturn

import typer


def sim(context: typer.Context) -> None:
    """Simulate a fleet of GPUs, or search how many models each can serve."""
    _become("sim", context.args)


def plan(context: typer.Context) -> None:
    """Say how many GPUs the workload of a trace needs."""
    _become("plan", context.args)


def _become(command: str, arguments: list[str]) -> NoReturn:
    from gateway.machine.processes import module_command

    line = [*module_command("runtime.sim"), command, *arguments]
    os.execv(line[0], line)
