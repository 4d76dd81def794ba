"""A control plane in the test's process: real routes, real database, real NATS; the test plays only the runtime."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from gateway.control.openapi import document
from gateway.control.routes import ControlPlane, Engines
from gateway.http.auth import Auth
from gateway.imports.sources import Sources
from gateway.inference.metrics import Metrics
from gateway.inference.recent import Recent
from gateway.streams.runtimes import RuntimesView
from store.bus import Bus
from store.contract import wire
from store.contract.wire import Attained, ModelState, Role
from store.db.database import Database
from store.streams import LEASE_TTL_S
from store.tasks import ended
from tests.conftest import NatsServer
from tests.gateway.http.described import Described
from tests.store.files.folders import KNOWN, write_model

ADMIN_KEY = "sk-st-admin"
PEPPER = b"pepper"
ENGINES = Engines(KNOWN, frozenset({"hermes"}), frozenset({"qwen3"}))

DESCRIBED: list[Described] = []  # the first description of this process


@dataclass
class Plane:
    """A control plane. `admin` is a client with the admin key; `tenant` makes a tenant and a client with a tenant's
    key.

    Every answer is held against the description of the API.
    """

    app: Starlette
    bus: Bus
    fleet: RuntimesView
    auth: Auth
    control: ControlPlane
    metrics: Metrics
    recent: Recent
    database: Database
    folder: Path
    admin: httpx.AsyncClient
    clients: list[httpx.AsyncClient] = field(default_factory=list)
    leases: dict[str, wire.Lease] = field(default_factory=dict)  # the last lease of each runtime that the test plays

    @property
    def described(self) -> Described:
        """The API, described as every control plane describes the API: a description takes 50 ms of a processor."""
        if not DESCRIBED:
            DESCRIBED.append(Described(document(self.control.endpoints())))
        return DESCRIBED[0]

    def client(self, key: str | None) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(self.app)
        client = httpx.AsyncClient(
            transport=transport,
            base_url="http://gateway/api/v1",
            headers=headers,
            event_hooks={"response": [self.described.check]},
        )
        self.clients.append(client)
        return client

    async def tenant(self, name: str, **key: object) -> httpx.AsyncClient:
        made(await self.admin.post("/tenants", json={"name": name}))
        answer = made(await self.admin.post(f"/tenants/{name}/keys", json=key))
        return self.client(answer["key"])

    async def model(self, name: str, client: httpx.AsyncClient | None = None, folder: Path | None = None) -> Any:
        """Register a model, and return the model after the inspection."""
        client = client or self.admin
        source = str(folder or write_model(self.folder / name, seed=name))
        model = made(await client.post("/models", json={"name": name, "source": source}), 202)

        async def inspected() -> Any:
            seen = (await client.get(f"/models/{model['id']}")).json()
            return seen if seen["state"] != "importing" else None

        return await until(inspected)

    async def report(
        self,
        states: Mapping[str, ModelState],
        runtime: str = "r1",
        pool_bytes: int = 0,
        attainment: Mapping[str, Attained] | None = None,
        role: Role = Role.BOTH,
        false_losses: int = 0,
    ) -> None:
        """Put a lease with the states of a runtime's models. Returns when the gateway has heard the lease."""
        pages = dict(page_bytes=1 << 12, pages_total=pool_bytes >> 12)
        lease = wire.Lease(
            runtime=runtime,
            epoch=1,
            engine="test",
            role=role,
            models=dict(states),
            attainment=dict(attainment or {}),
            false_losses=false_losses,
            **pages,
        )
        self.leases[runtime] = lease
        await self.bus.put(wire.LEASES, runtime, lease)

        async def heard() -> bool:
            return self.fleet.leases.get(runtime) == lease

        await until(heard)

    async def renew(self) -> None:
        """Renew the leases without end, as runtimes do: a lease not renewed is gone after LEASE_TTL_S."""
        while True:
            await asyncio.sleep(LEASE_TTL_S / 4)
            for runtime in list(self.leases):
                await self.bus.put(wire.LEASES, runtime, self.leases[runtime])

    async def placed(self, keys: set[str]) -> None:
        """Return when the bus tells runtimes to have exactly the engines `keys`."""

        async def are_placed() -> bool:
            return set(await self.bus.keys(wire.MODELS)) == keys

        await until(are_placed)


def made(answer: httpx.Response, status: int = 201) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()


async def until(found: Callable[[], Awaitable[Any]]) -> Any:
    deadline = time.monotonic() + 180
    while not (seen := await found()):
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.01)
    return seen


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    """Sources of models. A test that needs different sources overrides the fixture."""
    return Sources(roots=(tmp_path / "roots",), folder=tmp_path / "imported")


@pytest.fixture
async def plane(sqlite_url: str, nats_server: NatsServer, tmp_path: Path, sources: Sources) -> AsyncIterator[Plane]:
    async with Database.open(sqlite_url) as database, _plane(database, nats_server, tmp_path, sources) as made_plane:
        yield made_plane


@pytest.fixture
async def plane_on_both(
    database: Database, nats_server: NatsServer, tmp_path: Path, sources: Sources
) -> AsyncIterator[Plane]:
    """A control plane on each kind of database: for tests that depend on SQL or the isolation of writers."""
    async with _plane(database, nats_server, tmp_path, sources) as made_plane:
        yield made_plane


@contextlib.asynccontextmanager
async def _plane(database: Database, nats_server: NatsServer, tmp_path: Path, sources: Sources) -> AsyncIterator[Plane]:
    (tmp_path / "roots").mkdir()
    async with Bus.connect(nats_server.url, "test") as bus:
        fleet, auth = RuntimesView(bus), Auth(database, PEPPER, ADMIN_KEY)
        await fleet.start()
        metrics, recent = Metrics(fleet), Recent()
        control = ControlPlane(database, auth, fleet, ENGINES, sources, metrics, recent)
        app = Starlette(routes=control.routes())
        async with control.running():
            made_plane = Plane(app, bus, fleet, auth, control, metrics, recent, database, tmp_path, httpx.AsyncClient())
            await made_plane.admin.aclose()
            made_plane.admin = made_plane.client(ADMIN_KEY)
            renewing = asyncio.create_task(made_plane.renew())
            yield made_plane
            await ended(renewing)
            for client in made_plane.clients:
                await client.aclose()
