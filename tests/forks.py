"""A fork server for the tests of a pytest process: gateways and devices start in a second instead of half a minute."""

from __future__ import annotations

import os
import resource
import subprocess
from functools import cache

import psutil

from store.fork import client


@cache
def shared() -> client.ForkServer | None:
    """Return the fork server of this pytest process, started on first use and ended with the process.

    Returns None in a bench, which measures processes as users start processes."""
    if "PYTEST_VERSION" not in os.environ:
        return None
    ours, theirs = client.sockets()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STACCATO_")}
    with theirs:
        _SERVERS.append(
            subprocess.Popen(
                client.server_command(theirs.fileno()),
                env=environment | client.VARIABLES,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                umask=0o077,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),  # as `staccato up` does
            )
        )
    return client.ForkServer(ours)


_SERVERS: list[subprocess.Popen[bytes]] = []


def forked_for(askers: set[int]) -> list[psutil.Process]:
    """Return the living processes that the shared server forked for the processes `askers`."""
    titles = [f"(forked for {asker})" for asker in askers]
    forks = [child for server in _SERVERS for child in psutil.Process(server.pid).children()]
    return [fork for fork in forks if any(title in " ".join(_command(fork)) for title in titles)]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # the process has just ended
        return []
