"""A nats-server at which runtimes join by proof, a database, and join services in the test's process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.config import Settings, load, pepper
from gateway.joining.service import JoinSettings, serving
from gateway.ops import bus_users
from store.bus import Bus
from store.contract import grants
from store.db.database import Database, now_us
from store.db.fleet import joining
from store.kept import kept
from store.keypairs import SigningKey, new_seed
from tests.conftest import NatsServer

CONFIGURED = (grants.GATEWAY, grants.SCHEDULER, grants.LEDGER)
HOUR_US = 3600 * 1_000_000


@dataclass
class JoinFleet:
    """`users` is the folder of seeds, as `staccato nats-users --join` makes it. `url`: the servers for runtimes."""

    url: str
    database: Database
    settings: Settings
    users: Path
    folder: Path
    lone: NatsServer | None = None
    services: list[contextlib.AsyncExitStack] = field(default_factory=list)

    @property
    def server(self) -> NatsServer:
        """The server, if the fleet has a single server."""
        assert self.lone is not None
        return self.lone

    @property
    def own(self) -> JoinSettings:
        return JoinSettings(join_issuer=self.users / bus_users.ISSUER_FILE)

    async def start_service(self) -> None:
        stack = contextlib.AsyncExitStack()
        await stack.enter_async_context(serving(self.settings, self.own))
        self.services.append(stack)

    async def stop_service(self) -> None:
        """Stop the service that was started first."""
        await self.services.pop(0).aclose()

    async def token(self, runtime: str | None = None, lasts_us: int = HOUR_US) -> str:
        async with self.database.write() as connection:
            now = now_us()
            _, secret = await joining.create_token(connection, pepper(self.settings), runtime, now + lasts_us, now)
        return secret

    def seed_file(self, name: str) -> Path:
        """File of a runtime's seed, made at first."""
        file = self.folder / f"{name}.nk"
        kept(file, new_seed("user"))
        return file

    def key(self, name: str) -> SigningKey:
        return SigningKey(self.seed_file(name).read_text())

    def connect(
        self, id: str, token: str | None = None, key: str | None = None
    ) -> contextlib.AbstractAsyncContextManager[Bus]:
        """Connect as the runtime `id`, with the key of the name `key`; None: the runtime's own key."""
        user = grants.runtime(id)
        return Bus.connect(self.url, user.name, user, self.seed_file(key or id), self.settings.nats_ca, token=token)

    def as_gateway(self) -> contextlib.AbstractAsyncContextManager[Bus]:
        seed = bus_users.seed_file(self.users, grants.GATEWAY)
        return Bus.connect(self.url, "g-test", grants.GATEWAY, seed, self.settings.nats_ca)

    async def revoke(self, id: str) -> None:
        async with self.database.write() as connection:
            found = await joining.runtime(connection, id)
            assert found is not None
            await joining.revoke_runtime(connection, found, now_us())

    async def bindings(self) -> dict[str, str]:
        """Public key of each joined runtime."""
        async with self.database.read() as connection:
            return {each.id: each.public_key for each in await joining.runtimes(connection) if not each.revoked_us}


@contextlib.asynccontextmanager
async def fleet_of(url: str, folder: Path) -> AsyncIterator[JoinFleet]:
    """Yield a fleet with a service, on the database at `url`."""
    users = folder / "users"
    server = NatsServer(folder / "nats", bus_users.make_joining(users, CONFIGURED))
    server.start()
    try:
        async with served(url, folder, users, server.url, server.url) as fleet:
            fleet.lone = server
            yield fleet
    finally:
        server.kill()


@contextlib.asynccontextmanager
async def served(
    database_url: str, folder: Path, users: Path, service_url: str, url: str, ca: Path | None = None
) -> AsyncIterator[JoinFleet]:
    """Yield a fleet with a service at the server `service_url`, and with runtimes at the servers `url`."""
    settings = load(
        data=folder / "data",
        database_url=database_url,
        nats_url=service_url,
        nats_ca=ca,
        nats_credentials=bus_users.seed_file(users, grants.JOIN),
    )
    pepper(settings)
    async with Database.open(database_url) as database:
        fleet = JoinFleet(url, database, settings, users, folder / "keys")
        await fleet.start_service()
        try:
            yield fleet
        finally:
            while fleet.services:
                await fleet.stop_service()


@pytest.fixture
async def fleet(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JoinFleet]:
    monkeypatch.setattr("store.bus.CONNECT_TIMEOUT_S", 2.0)
    monkeypatch.setattr("gateway.joining.desk.DELAY_S", 0.05)
    monkeypatch.setattr("gateway.joining.desk.LINES_PERIOD_S", 0.1)
    async with fleet_of(sqlite_url, tmp_path) as made:
        yield made
