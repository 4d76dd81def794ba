"""`staccato up`, the single roles, `doctor` and `version`: commands that need no gateway."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.api import CliError
from gateway.cli.terminal.options import Json
from gateway.cli.terminal.output import note, print_json, print_rows


def _default(setting: str, value: str) -> str:
    """Return the end of an option's help: the value if neither the option nor the variable is given."""
    return f"else STACCATO_{setting.upper()}. Default: {value}."  # rich takes square brackets for markup


def up(
    port: Annotated[int | None, typer.Option(help=f"Port of the gateway, {_default('port', '8080')}")] = None,
    host: Annotated[str | None, typer.Option(help=f"Address to listen on, {_default('host', '127.0.0.1')}")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help=f"Folder of all that is kept: database, keys, logs, models, {_default('data', '.staccato')}"),
    ] = None,
    runtimes: Annotated[
        str | None,
        typer.Option(
            help="Number of runtimes, each with a device, or least and most, as 1:4: the number follows the load, "
            + _default("runtimes", "1")
        ),
    ] = None,
    gateways: Annotated[
        int | None,
        typer.Option(help=f"Number of gateways that share the port, {_default('gateways', '1')}"),
    ] = None,
    nats_cluster: Annotated[
        int | None,
        typer.Option(
            help="Number of NATS servers, 1, 3 or 5: the bus survives the loss of fewer than half, "
            + _default("nats_cluster", "1")
        ),
    ] = None,
    prefill: Annotated[
        int | None,
        typer.Option(help=f"Number of these runtimes that only compute prompts, {_default('prefill', '0')}"),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(help=f"auto: the scheduler gives and takes back roles of runtimes, {_default('roles', 'fixed')}"),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of each runtime's device for weights and KV cache, as 512MiB or 8GB, "
            + _default("device_memory", "512MiB")
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(help="GPUs by number or UUID, a runtime for each, as 0,1; without the option, all of the host"),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help=f"Rule that says which model has the device next, {_default('policy', 'slack')}"),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what all processes write to their logs.")
    ] = False,
    json: Json = False,
) -> None:
    """Run the whole platform on this machine until Ctrl-C."""
    from gateway.config import load
    from gateway.machine.processes import StartError
    from gateway.ops import up
    from gateway.ops.variables import unknown

    settings = load(
        port=port,
        host=host,
        data=data,
        **bounds(runtimes),
        gateways=gateways,
        nats_cluster=nats_cluster,
        prefill=prefill,
        roles=roles,
        device_memory=device_memory,
        gpus=gpus,
        policy=policy,
    )

    if found := unknown(os.environ):
        note(f"warning: nothing reads {', '.join(found)}")

    def ready(message: str) -> None:
        if json:
            print_json({"ready": True, "url": settings.url, "data": str(settings.data)})
        else:
            typer.echo(message)
            key = "from STACCATO_ADMIN_KEY" if settings.admin_key else f"in {settings.admin_key_file}"
            note(f"admin key {key}, logs in {settings.data / 'logs'}; Ctrl-C stops")

    try:
        code = up.run(settings, note, ready, verbose)
    except StartError as error:
        raise CliError(str(error), error.exit_code) from error
    raise typer.Exit(code)


def bounds(runtimes: str | None) -> dict[str, str]:
    """Return the settings of the option `--runtimes`. Raises typer.BadParameter."""
    if runtimes is None:
        return {}
    least, colon, most = runtimes.partition(":")
    if not least.isdigit() or (colon and not most.isdigit()):
        raise typer.BadParameter(f"--runtimes {runtimes!r}: write a number, as 2, or least and most, as 1:4")
    return {"runtimes": least, "runtimes_most": most if colon else least}


def gateway() -> None:
    """Run a gateway alone; settings from the environment."""
    _become("gateway.app")


def runtime() -> None:
    """Run a runtime alone; settings from the environment."""
    _become("runtime.node")


def node(
    runtimes: Annotated[
        int | None,
        typer.Option(help="Number of runtimes, else STACCATO_RUNTIMES. Default: one for each GPU, or 1 without GPUs."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(help="GPUs by number or UUID, a runtime for each, as 0,1; without the option, all of the machine"),
    ] = None,
) -> None:
    """Run the runtimes of this machine, with one host cache for all; settings from the environment."""
    from gateway.config import load
    from gateway.machine import node
    from gateway.machine.processes import StartError
    from store.settings import read

    try:
        code = node.run(load(runtimes=runtimes, gpus=gpus), read(node.NodeSettings), note, note)
    except StartError as error:
        raise CliError(str(error), error.exit_code) from error
    raise typer.Exit(code)


def scheduler() -> None:
    """Run the scheduler alone; settings from the environment."""
    _become("runtime.scheduler")


def ledger(
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Have all usage in the bus's stream booked again, after a restore, and end."),
    ] = False,
) -> None:
    """Run the ledger alone; settings from the environment."""
    _become("store.db.ledger", *(["--replay"] if replay else []))


def join_service() -> None:
    """Run the join service alone; settings from the environment."""
    _become("gateway.joining")


def nats_users(
    folder: Annotated[Path, typer.Argument(help="Gets NAME.nk for each user, and users.conf for nats-server.")],
    runtime: Annotated[list[str] | None, typer.Option(help="STACCATO_RUNTIME_ID of one that there will be.")] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address by which the NATS server is reached.")
    ] = None,
    join: Annotated[
        bool, typer.Option("--join", help="Let runtimes that are not named here join by proof, with a join token.")
    ] = False,
) -> None:
    """Make the users of a NATS of your own, and certificates for TLS of the server and between runtimes.

    Each role's process gets its .nk file as STACCATO_NATS_CREDENTIALS and ca.crt as STACCATO_NATS_CA; each runtime its
    .crt and .key, too. With --join, the join service gets join.nk and issuer.nk, no other process gets issuer.nk, and
    runtime.crt and runtime.key are for the runtimes that join."""
    from gateway.ops import bus_users, certificates
    from store.contract import grants

    runtimes = [grants.runtime(id) for id in runtime or ([] if join else ["r1"])]
    users = [grants.GATEWAY, grants.SCHEDULER, grants.LEDGER, *runtimes]
    block = (bus_users.make_joining if join else bus_users.make)(folder, users)
    (folder / "users.conf").write_text(block)
    try:
        joining = ["runtime"] if join else []  # one certificate for all: names of joining runtimes are unknown
        made = certificates.make(folder, [*joining, *(user.name for user in runtimes)], host or [])
    except ValueError as error:
        raise CliError(str(error)) from error
    (folder / "routes.conf").write_text(certificates.routes_block(folder))
    note(f"{len(users) + join} users in {folder}; include {folder / 'users.conf'} in the server's configuration")
    note(f"certificates: {', '.join(made) or 'all there already'}; keep {folder / 'authority'} to yourself")


def migrate(
    to: Annotated[
        str, typer.Option(help="An earlier revision, for an earlier version: what it lacks is lost.")
    ] = "head",
) -> None:
    """Bring the database to the shape that this version needs; the version before may go on using it."""
    from gateway.config import load, redacted
    from store.db import database

    url = load().database_url
    try:
        database.migrate(url, to)
        reached = database.revision(url)
    except database.DatabaseError as error:
        raise CliError(str(error)) from error
    note(f"{redacted(url)} is at revision {reached}")


def _become(module: str, *arguments: str) -> None:
    from gateway.machine.processes import module_command

    command = [*module_command(module), *arguments]
    os.execv(command[0], command)


def doctor(json: Json = False) -> None:
    """Check what the platform stands on, and print every setting."""
    from gateway.config import load, shown
    from gateway.ops import doctor

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
        from store.contract import wire
        from store.db import database

        python = sys.version.split()[0]
        print_json({"version": found, "wire": wire.VERSION, "database": database.head(), "python": python})
    else:
        typer.echo(found)


def print_version(wanted: bool) -> None:
    """Callback of the option `--version`: prints the version and ends the command."""
    if wanted:
        version()
        raise typer.Exit
