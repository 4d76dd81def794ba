"""A gateway for the tests of declared objects: real routes, a real database and bus; only the runtime is a stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from gateway import config
from gateway.cli.terminal.client import GatewayClient
from store.db.database import migrate
from tests.conftest import NatsServer, free_port
from tests.gateway.cli.test_cli import serve
from tests.store.files.folders import write_model


@dataclass(frozen=True)
class Served:
    """A gateway, and the folder below which tenants' models lie."""

    settings: config.Settings
    roots: Path

    @property
    def url(self) -> str:
        return self.settings.url

    @property
    def key(self) -> str:
        return config.admin_key(self.settings)

    def client(self) -> GatewayClient:
        return GatewayClient(self.url, self.key)

    def model(self, name: str) -> str:
        """A new model's folder."""
        return str(write_model(self.roots / name, seed=name))


@contextlib.contextmanager
def gateway(folder: Path) -> Iterator[Served]:
    """Serve in a thread for the time of the context."""
    nats = NatsServer(folder / "nats")
    nats.start()
    (folder / "roots").mkdir()
    settings = config.load(data=folder, port=free_port(), nats_url=nats.url, model_roots=[folder / "roots"])
    migrate(settings.database_url)
    servers: list[uvicorn.Server] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve(settings, servers.append)))
    thread.start()
    deadline_s = time.monotonic() + 30
    while not (servers and servers[0].started):
        assert thread.is_alive() and time.monotonic() < deadline_s
        time.sleep(0.02)
    try:
        yield Served(settings, folder / "roots")
    finally:
        servers[0].should_exit = True
        thread.join()
        nats.kill()
