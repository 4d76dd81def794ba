"""`staccato up`, the single roles, `doctor` and `version`: what does not ask a gateway."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.api import CliError
from gateway.cli.options import Json
from gateway.cli.output import note, print_json, print_rows


def up(
    port: Annotated[int | None, typer.Option(help="[default: 8080]", show_default=False)] = None,
    host: Annotated[str | None, typer.Option(help="[default: 127.0.0.1]", show_default=False)] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of everything kept. [default: .staccato]")] = None,
    runtimes: Annotated[int | None, typer.Option(help="How many. [default: 1]", show_default=False)] = None,
    prefill: Annotated[int | None, typer.Option(help="Of the runtimes, for prompts alone. [default: 0]")] = None,
    device_memory: Annotated[str | None, typer.Option(help="Of each, without a GPU. [default: 512MiB]")] = None,
    policy: Annotated[str | None, typer.Option(help="Whose turn it is. [default: slack]")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the processes write.")] = False,
    json: Json = False,
) -> None:
    """Run the whole platform on this machine until Ctrl-C."""
    from gateway import up
    from gateway.config import load

    settings = load(
        port=port,
        host=host,
        data=data,
        runtimes=runtimes,
        prefill=prefill,
        device_memory=device_memory,
        policy=policy,
    )

    def ready(message: str) -> None:
        if json:
            print_json({"ready": True, "url": settings.url, "data": str(settings.data)})
        else:
            typer.echo(message)
            note(f"admin key in {settings.admin_key_file}, logs in {settings.data / 'logs'}; Ctrl-C stops")

    try:
        code = up.run(settings, note, ready, verbose)
    except up.UpError as error:
        raise CliError(str(error), error.exit_code) from error
    raise typer.Exit(code)


def gateway() -> None:
    """Run a gateway alone; settings from the environment."""
    _become("gateway.app")


def runtime() -> None:
    """Run a runtime alone; settings from the environment."""
    _become("runtime.node")


def scheduler() -> None:
    """Run the scheduler alone; settings from the environment."""
    _become("runtime.scheduler")


def ledger() -> None:
    """Run the ledger alone; settings from the environment."""
    _become("store.ledger")


def nats_users(
    folder: Annotated[Path, typer.Argument(help="Gets NAME.nk for each user, and users.conf for nats-server.")],
    runtime: Annotated[list[str] | None, typer.Option(help="STACCATO_RUNTIME_ID of one that there will be.")] = None,
) -> None:
    """Make the users of a NATS of your own: each role's process gets its file as STACCATO_NATS_CREDENTIALS."""
    from gateway import bus_users
    from store import grants

    users = [grants.GATEWAY, grants.SCHEDULER, grants.LEDGER, *map(grants.runtime, runtime or ["r1"])]
    block = bus_users.make(folder, users)
    (folder / "users.conf").write_text(block)
    note(f"{len(users)} users in {folder}; include {folder / 'users.conf'} in the server's configuration")


def migrate(
    to: Annotated[
        str, typer.Option(help="An earlier revision, for an earlier version: what it lacks is lost.")
    ] = "head",
) -> None:
    """Bring the database to the shape that this version needs; the version before may go on using it."""
    from gateway.config import load, redacted
    from store import db

    url = load().database_url
    try:
        db.migrate(url, to)
        reached = db.revision(url)
    except db.DatabaseError as error:
        raise CliError(str(error)) from error
    note(f"{redacted(url)} is at revision {reached}")


def _become(module: str) -> None:
    from gateway.up import module_command

    command = module_command(module)
    os.execv(command[0], command)


def doctor(json: Json = False) -> None:
    """Check what the platform stands on, and print every setting."""
    from gateway import doctor
    from gateway.config import load, shown

    settings = load()
    findings = doctor.examine(settings)
    if json:
        print_json({"findings": [vars(finding) for finding in findings], "settings": shown(settings)})
    else:
        for finding in findings:
            typer.echo(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.name.ljust(12)}  {finding.found}")
            if not finding.ok:
                typer.echo(f"      {''.ljust(12)}  -> {finding.fix}")
        typer.echo()
        print_rows([{"name": name, "value": value} for name, value in shown(settings).items()], SETTING, False)
    failed = sum(not finding.ok for finding in findings)
    if failed:
        raise CliError(f"{failed} of {len(findings)} checks failed")


SETTING = {"SETTING": "name", "VALUE": "value"}


def version(json: Json = False) -> None:
    """Print the version; as JSON also those of the bus and of the database."""
    from importlib.metadata import version

    found = version("staccato")
    if json:
        from store import db, wire

        python = sys.version.split()[0]
        print_json({"version": found, "wire": wire.VERSION, "database": db.head(), "python": python})
    else:
        typer.echo(found)
