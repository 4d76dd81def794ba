"""The fork server that a node starts for itself: real processes, which import nothing heavy."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import psutil
import pytest
import uvloop
from pydantic import ByteSize

from runtime.config import RuntimeSettings
from runtime.node import forks
from runtime.node.forks import with_fork_server
from store.fork import client
from store.fork.client import ForkServer
from tests.conftest import soon


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> RuntimeSettings:
    command: Callable[..., tuple[str, ...]] = client.server_command
    monkeypatch.setattr(client, "server_command", lambda orders: command(orders, ()))
    monkeypatch.setattr(forks, "PAUSE_S", 0.05)
    return RuntimeSettings(host_cache=ByteSize(1 << 20))


def servers() -> list[psutil.Process]:
    """Return the fork servers below this process, but for the server that other tests share."""
    found = [child for child in psutil.Process().children() if "store.fork.server" in child.cmdline()]
    return [server for server in found if "runtime.engine.settings" not in server.cmdline()]


def test_a_node_has_a_fork_server_that_comes_back_and_ends_with_the_node(settings: RuntimeSettings) -> None:
    """On the event loop of nodes, which takes fewer arguments of processes than asyncio's own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(_comes_back(settings), 240))


async def _comes_back(settings: RuntimeSettings) -> None:
    async with with_fork_server(settings) as served:
        ours = ForkServer.at(served.fork_server_fd)
        assert ours is not None
        process = await ours.fork("json.tool", ("--help",), os.environ, {0: 0, 1: 2, 2: 2})
        assert await process.wait() == 0
        (first,) = servers()
        first.kill()
        process = await ours.fork("json.tool", ("--help",), os.environ, {0: 0, 1: 2, 2: 2})
        assert await process.wait() == 0
        (second,) = servers()
        assert second != first
    await soon(lambda: not second.is_running())


@pytest.mark.parametrize("update", [{"fork_server": False}, {"fork_server_fd": 0}, {"tensor_parallel": 2}])
async def test_a_node_starts_no_server_unasked(settings: RuntimeSettings, update: dict[str, object]) -> None:
    asked = settings.model_copy(update=update)
    async with with_fork_server(asked) as served:
        assert served == asked and not servers()


def test_a_socket_that_is_not_open_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="STACCATO_FORK_SERVER_FD=999 is no open file.* leave the variable out"):
        RuntimeSettings(host_cache=ByteSize(1 << 20), fork_server_fd=999).check()
