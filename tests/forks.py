"""A fork server for the tests of a pytest process: what imports vLLM starts in a second instead of half a minute."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from store.fork import client

IMPORTED_S_MOST = 200.0  # until the server has imported its modules, on a busy machine
ROOT = str(Path(__file__).parent.parent)  # not from conftest.py: forks need not import pytest


@cache
def shared() -> client.ForkServer | None:
    """Return the fork server of this pytest process, started on first use and ended with the process.

    Returns None in a bench, which measures processes as users start processes."""
    if "PYTEST_VERSION" not in os.environ:
        return None
    ours, theirs = client.sockets()
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH", "")]))  # forks may run modules of tests
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STACCATO_")}
    with theirs:
        _SERVERS.append(
            subprocess.Popen(
                client.server_command(theirs.fileno()),
                env=environment | client.VARIABLES | {"PYTHONPATH": path},
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


async def forked(
    server: client.ForkServer,
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    files: Mapping[int, int],
) -> client.ForkedProcess:
    """Fork a process, as `ForkServer.fork` does. Waits longer: on a busy machine, a server imports vLLM for minutes.

    Raises NotForked after IMPORTED_S_MOST."""
    deadline_s = time.monotonic() + IMPORTED_S_MOST
    while True:
        try:
            return await server.fork(module, arguments, environment, files)
        except client.NotForked as error:
            if "has not answered" not in str(error) or time.monotonic() > deadline_s:
                raise


def ran(
    module: str,
    arguments: Sequence[str] = (),
    *,
    said: str = "",
    environment: Mapping[str, str] = os.environ,
    timeout_s: float = 280,
) -> str:
    """Run a module in a fork of the shared server, as `python -m` would in a new process. No event loop may be running.

    Args:
        module: the name of the module.
        arguments: the arguments of the process.
        said: standard input.
        environment: the environment of the process.
        timeout_s: seconds until the process is killed.

    Returns: standard output.

    Raises AssertionError with the end of the error output if the process fails, and TimeoutError.
    """
    server = shared()
    assert server is not None, "a bench has no fork server"
    with (
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        stdin.write(said)
        stdin.seek(0)

        async def code() -> int:
            files = {0: stdin.fileno(), 1: out.fileno(), 2: err.fileno()}
            try:
                process: Any = await forked(server, module, arguments, environment, files)
            except client.NotForked:  # on this machine vLLM's modules start threads: a new process it is
                command = [sys.executable, "-m", module, *arguments]
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=stdin, stdout=out, stderr=err, env=environment, cwd=ROOT
                )
            async with asyncio.timeout(timeout_s):  # the server kills a process whose asker does not wait any more
                return await process.wait()

        failed = asyncio.run(code())
        out.seek(0)
        err.seek(0)
        assert failed == 0, err.read()[-3000:]
        return out.read()


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
