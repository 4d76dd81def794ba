"""A node's own fork server, for a node that no supervisor gave the socket of a fork server."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import structlog

from runtime.config import RuntimeSettings
from store.fork import client

log = structlog.get_logger()

PAUSE_S = 1.0  # before a server that ended is started again


@contextlib.asynccontextmanager
async def with_fork_server(settings: RuntimeSettings) -> AsyncIterator[RuntimeSettings]:
    """Yield the settings with the socket of a fork server, which is kept running meanwhile.

    The settings stay as they are if they name a server already, if they want none, or for a group of devices: the
    processes of a group are executed (runtime/node/child.py)."""
    if settings.fork_server_fd >= 0 or not settings.fork_server or settings.tensor_parallel > 1:
        yield settings
        return
    ours, theirs = client.sockets()
    with ours, theirs:
        keeping = asyncio.create_task(_keep(theirs.fileno()))
        try:
            yield settings.model_copy(update={"fork_server_fd": ours.fileno()})
        finally:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping


async def _keep(orders: int) -> None:
    """Keep a fork server running until cancelled. Orders wait in the socket `orders` while no server runs."""
    while True:
        try:
            reason = f"exit code {await _run(orders)}"
        except OSError as error:
            reason = f"not started: {error.strerror}"
        log.warning("node.fork_server_ended", reason=reason)
        await asyncio.sleep(PAUSE_S)


async def _run(orders: int) -> int:
    """Run a fork server until the server ends, and return the exit code. Raises OSError if the server can't start."""
    process = await asyncio.create_subprocess_exec(
        *client.server_command(orders),
        env=os.environ | client.VARIABLES,
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=[orders],
        start_new_session=True,  # Ctrl-C reaches only the node, which ends its device in order
    )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
