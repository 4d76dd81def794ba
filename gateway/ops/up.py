"""`staccato up`: the whole platform in one process tree, NATS and the database included, until SIGTERM or Ctrl-C.

Starts the children in this order, and stops them in the reverse order, so that no child loses a child it needs:
fork server → nats → ledger → runtimes → scheduler → gateways.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from gateway.config import Settings, admin_key, pepper
from gateway.http.reserve import free_bytes
from gateway.machine.processes import (
    CONFLICT,
    StartError,
    environment,
    locked,
    module_command,
    orders_of,
    signals,
    start_fork_server,
)
from gateway.machine.runtimes import MachineRuntimes, host_cache
from gateway.ops import bus_servers, bus_users, fleet_keeper, gpus, listening
from gateway.ops.asking import get
from gateway.ops.bus_store import BusStore
from gateway.ops.fleet_keeper import FleetKeeper
from gateway.ops.supervise import Child, GaveUp, Say, Tree, unfailing
from gateway.ops.troubles import Troubles
from store.contract import grants
from store.contract.grants import User
from store.fork import client as fork
from store.settings import PREFIX
from store.telemetry import observe

RETRYABLE = 75  # exit code of the command line
MIGRATION_LOCK_S = 5.0  # longest wait for another process holding the database's lock
READY_PERIOD_S = 0.1

# Settings told to the roles; `gateway/machine/runtimes.py` has the settings of a runtime.
SCHEDULER_SETTINGS = ("nats_url", "nats_ca", "nats_replicas", "roles", "log_level")
LEDGER_SETTINGS = ("nats_url", "nats_ca", "nats_replicas", "database_url", "request_days", "usage_days", "log_level")


def run(settings: Settings, say: Say, ready: Say, verbose: bool = False) -> int:
    """Run the platform until a signal, and return the exit code. Raises StartError, SettingsError.

    `ready` is called once with the URL, `say` with each event. A failure of either is
    ignored, and the sentence is lost.
    """
    observe.no_core_files()
    before = os.umask(0o077)  # files of this process and its children are readable only for their user
    say, ready = unfailing(say), unfailing(ready)
    try:
        settings, devices = gpus.with_gpus(settings)
        settings.check_runtimes()
        with locked(settings.data):
            prepare(settings)
            return asyncio.run(serve(settings, say, ready, verbose, devices))
    except (gpus.NoSuchGpu, bus_servers.NoServers) as error:
        raise StartError(str(error)) from error
    except GaveUp as error:
        raise StartError(str(error)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        space = "free some space or " if error.errno == errno.ENOSPC else ""
        raise StartError(f"{where}{error.strerror}: {space}choose another folder with --data") from error
    finally:
        os.umask(before)


# ── before anything starts ────────────────────────────────────────────────────────────────────────────────────────────


def prepare(settings: Settings) -> None:
    """Make what the children need, and look for obstacles to a start. Raises StartError."""
    free = free_bytes(settings.data)
    if free < settings.disk_reserve:
        needed = f"at least {settings.disk_reserve >> 20} MiB are needed"
        raise StartError(
            f"the disk of {settings.data} has {free >> 20} MiB free, {needed}: "
            "free some space or choose another folder with --data"
        )
    if refusal := listening.port_refusal(settings.host, settings.port):
        raise StartError(refusal, CONFLICT)
    admin_key(settings)
    pepper(settings)
    migrate(settings)


def listening_sockets(settings: Settings) -> list[socket.socket]:
    """Open the sockets that all gateways share. Raises StartError."""
    try:
        return listening.opened(settings.host, settings.port)
    except OSError as error:
        detail = (
            listening.port_refusal(settings.host, settings.port)
            or f"cannot listen on port {settings.port}: {error.strerror}"
        )
        raise StartError(detail, CONFLICT) from error


def migrate(settings: Settings) -> None:
    from store.db.database import Database, DatabaseError, DatabaseLocked  # 25 MB that a refused start does not need

    async def bring_to_head() -> None:
        database = Database(settings.database_url, busy_timeout_s=MIGRATION_LOCK_S)
        try:
            await database.migrate()
        finally:
            await database.close()

    try:
        asyncio.run(bring_to_head())
    except DatabaseError as error:
        raise StartError(str(error), RETRYABLE if isinstance(error, DatabaseLocked) else 1) from error


# ── the tree ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def serve(
    settings: Settings, say: Say, ready: Say, verbose: bool, devices: Sequence[Sequence[gpus.Gpu]] = ()
) -> int:
    """Start the children, wait for a signal, stop the children.

    `devices` are the GPUs of each runtime, in the order of the runtimes; empty: the runtimes have no GPUs. A second
    signal kills the children; the exit code is then 130, else 0.
    """
    started_s = time.monotonic()
    troubles = Troubles(settings.data, say)

    def store_of(server: str) -> BusStore:
        return BusStore(settings.data, lambda: tree.restart(server), say)

    stores = {server: store_of(server) for server in bus_servers.names(settings)}

    def hear(child: str, line: str) -> None:
        stores[child].heard(line) if child in stores else troubles.heard(child, line)
        if verbose:
            say(f"{child:8} {line}")

    ports = listening_sockets(settings)
    orders, served = orders_of(settings)
    forks = fork.ForkServer(orders) if orders else None
    tree = Tree(settings.data / "logs", say, hear, troubles, forks)
    watching = [asyncio.create_task(store.watch()) for store in stores.values()]
    async with signals(tree) as stop:
        try:
            if served:
                start_fork_server(tree, settings, served.fileno())
            if settings.nats_url is None:
                authorization = bus_users.make(users_folder(settings), users(settings))
                url = await bus_servers.start(tree, settings, environment(settings, ()), authorization)
                own = {"nats_url": url, "nats_credentials": users_folder(settings)}
                settings = settings.model_copy(update=own)
            for name, own_gpus in zip(runtime_ids(settings), devices, strict=False):
                say(f"{name} has GPU {', '.join(gpu.shown for gpu in own_gpus)}")
            fds = [each.fileno() for each in ports]
            keeper = start_roles(tree, settings, say, fds, orders.fileno() if orders else -1, devices)
            attending = asyncio.create_task(attend(settings, keeper, started_s, say, ready))
            try:
                await tree.watch(stop)
            finally:
                attending.cancel()
            say("stopping: open streams may end; a second Ctrl-C kills")
        finally:
            for each in watching:
                each.cancel()
            await tree.stop()
            troubles.end()
            for end in (orders, served, *ports):
                if end is not None:
                    end.close()
    return 130 if tree.killed else 0


def users_folder(settings: Settings) -> Path:
    return settings.data / "nats-users"


def users(settings: Settings) -> list[User]:
    """Users of the bus: a user for each process."""
    return [grants.GATEWAY, grants.SCHEDULER, grants.LEDGER, *map(grants.runtime, runtime_ids(settings))]


def credentials(settings: Settings, user: User) -> dict[str, str]:
    """Return the variables that make a process the bus's `user`: no process learns the place of other credentials."""
    given = settings.nats_credentials
    if given is None:
        return {}
    return {PREFIX + "NATS_CREDENTIALS": str(bus_users.seed_file(given, user) if given.is_dir() else given)}


def start_roles(
    tree: Tree,
    settings: Settings,
    say: Say,
    ports: Sequence[int],
    forks: int = -1,
    devices: Sequence[Sequence[gpus.Gpu]] = (),
) -> FleetKeeper | None:
    """Start every role, and return the keeper of the number of runtimes; None: the number stays as it is.

    `ports` are the files of the gateways' listening sockets. `forks` is the socket for orders to the fork server; -1:
    there is no fork server."""
    told = environment(settings, LEDGER_SETTINGS) | credentials(settings, grants.LEDGER)
    tree.start(Child("ledger", module_command("store.db.ledger"), told, stop_s=15))
    names = runtime_ids(settings)
    own = functools.partial(runtime_variables, settings)
    machine = MachineRuntimes(settings, names, host_cache(settings), forks, devices, own)
    runtimes = tree.start(*map(machine.child, names[: settings.runtimes]))
    if len(names) > 1:
        told = environment(settings, SCHEDULER_SETTINGS) | credentials(settings, grants.SCHEDULER)
        tree.start(Child("scheduler", module_command("runtime.scheduler"), told | scaling_bounds(settings)))
    tree.start(*(gateway(settings, ports, number) for number in range(1, settings.gateways + 1)))
    if not settings.elastic:
        return None
    ask = functools.partial(fleet_keeper.ask, settings, admin_key(settings))
    return FleetKeeper(runtimes, machine.child, names, ask, say)


def gateway(settings: Settings, ports: Sequence[int], number: int) -> Child:
    """Return gateway `number`, which takes connections from the listening sockets `ports`, as every gateway does."""
    own = {"gateway_number": number, "listen_fds": tuple(map(str, ports))}
    told = environment(settings.model_copy(update=own), tuple(Settings.model_fields))
    return Child(
        "gateway" if number == 1 else f"gateway-{number}",
        module_command("gateway.app"),
        told | credentials(settings, grants.GATEWAY),
        stop_s=40,
        fds=tuple(ports),
        forked=True,
    )


def runtime_ids(settings: Settings) -> list[str]:
    """Return the names that runtimes may have; `staccato up` begins with the first names."""
    return [f"r{number}" for number in range(1, settings.runtimes_most + 1)]


def runtime_variables(settings: Settings, name: str) -> dict[str, str]:
    """Return the variables of the runtime `name` alone: credentials, and the role where an operator chose roles."""
    told = credentials(settings, grants.runtime(name))
    if settings.prefill:
        told[PREFIX + "ROLE"] = "prefill" if name in runtime_ids(settings)[: settings.prefill] else "decode"
    return told


def scaling_bounds(settings: Settings) -> dict[str, str]:
    """Return the variables that have the scheduler decide on the number of runtimes, if the number is to follow."""
    if not settings.elastic:
        return {}
    bounds = {"RUNTIMES_LEAST": settings.runtimes, "RUNTIMES_MOST": settings.runtimes_most}
    return {PREFIX + name: str(bound) for name, bound in bounds.items()}


# ── ready ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def attend(settings: Settings, keeper: FleetKeeper | None, started_s: float, say: Say, ready: Say) -> None:
    """Tell when the platform is ready, and keep the number of runtimes from then on."""
    await announce(settings, started_s, say, ready)
    if keeper:
        await keeper.keep()


async def announce(settings: Settings, started_s: float, say: Say, ready: Say) -> None:
    while not await answers(settings, "/readyz"):
        await asyncio.sleep(READY_PERIOD_S)
    ready(f"ready at {settings.url} after {time.monotonic() - started_s:.1f} s")
    if not settings.runtimes:
        say("no runtime is started here: models wait until one joins by `staccato runtime`, here or on another host")


async def answers(settings: Settings, path: str) -> bool:
    """Whether the gateway answers 200."""
    try:
        return (await get(settings, path))[0] == 200
    except OSError:
        return False
