"""Processes that a supervisor starts on this machine: the folder, the environment and the signals of the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from gateway.config import Settings
from gateway.ops.supervise import Child, Tree
from store.fork import client as fork
from store.settings import PREFIX

CONFLICT = 4  # exit code of the command line


class StartError(Exception):
    """Reason for a failed start of a supervisor, in a sentence with the remedy."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# ── the folder ────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def locked(data: Path) -> Iterator[None]:
    """Hold DATA as long as this process lives. Raises StartError if another supervisor holds the folder."""
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    close_to_others(data)
    with open(data / "up.lock", "a+", opener=_private) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise StartError(
                f"{data} is served by another `staccato up` or `staccato node` (pid {file.read().strip() or 'unknown'})"
                ": stop that one or choose another folder with --data",
                CONFLICT,
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


# Files left readable for other users by an earlier version.
PRIVATE = ("up.lock", "nats.conf", "staccato.db", "staccato.db-wal", "staccato.db-shm")


def close_to_others(data: Path) -> None:
    """Make private files of the data folder readable only for the platform's user, whatever mode the folder gets."""
    for name in PRIVATE:
        with contextlib.suppress(FileNotFoundError):
            (data / name).chmod(0o600)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


# ── what a process is told ────────────────────────────────────────────────────────────────────────────────────────────


def module_command(name: str) -> tuple[str, ...]:
    """Return a command for a module. -P: Python ignores a folder of the same name in the working directory."""
    return (sys.executable, "-P", "-m", name)


def environment(settings: Settings, names: tuple[str, ...]) -> dict[str, str]:
    """Return the supervisor's environment with the resolved settings `names`, and without any other setting."""
    ours = {PREFIX + name.upper() for name in Settings.model_fields}
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    values = {name: getattr(settings, name) for name in names}
    return inherited | {PREFIX + name.upper(): _text(value) for name, value in values.items() if value is not None}


def _text(value: object) -> str:
    if isinstance(value, list):
        return os.pathsep.join(map(str, value))
    if isinstance(value, tuple):
        return ",".join(value)
    return value.get_secret_value() if hasattr(value, "get_secret_value") else str(value)


# ── signals and the fork server ───────────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def signals(tree: Tree) -> AsyncIterator[asyncio.Event]:
    """Yield the event set by the first SIGTERM or SIGINT; a second signal kills the children."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: tree.kill() if stop.is_set() else stop.set())
    yield stop


def orders_of(settings: Settings) -> tuple[socket.socket | None, socket.socket | None]:
    """Return both ends of the socket for orders to the fork server.

    The server's end is None if the supervisor is to use a server that runs already; both are None without a server."""
    if settings.fork_server_fd >= 0:
        return socket.socket(fileno=settings.fork_server_fd), None
    return fork.sockets() if settings.fork_server else (None, None)


def start_fork_server(tree: Tree, settings: Settings, orders: int) -> None:
    """Start the fork server with the socket `orders`. The supervisor does without a server that keeps dying."""
    told = environment(settings, ()) | fork.VARIABLES
    server = Child("fork-server", fork.server_command(orders), told, fds=(orders,), needed=False)
    tree.start().start(server, lambda name, error: None)
