"""The door to NATS' system account, for the join service: logins to answer, connections to list and to end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from store.bus import BusError, close, opened
from store.contract import grants
from store.contract.joining.claims import GLOBAL_ACCOUNT

log = structlog.get_logger()

QUEUE = "join"  # of the services: a login goes to a single service
GATHER_S = 0.7  # for the answers of all servers, whose number is unknown
KICK_S = 2.0  # for the answer to an order
PAGE_CONNECTIONS = 256  # connections in an answer, some 300 kB
PAGES_MOST = 400

Answer = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True)
class OpenConnection:
    """A client's connection to a server. `user` is the name that the client was let in under."""

    server: str
    number: int
    user: str


class _Listed(msgspec.Struct, frozen=True):
    cid: int
    authorized_user: str = ""


class _Connections(msgspec.Struct, frozen=True):
    total: int = 0
    connections: list[_Listed] | None = None


class _ServerName(msgspec.Struct, frozen=True):
    id: str


class _Page(msgspec.Struct, frozen=True):
    server: _ServerName
    data: _Connections = _Connections()


class SystemBus:
    """Connection of the join service to the system account. Reconnects for ever."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, url: str, credentials: Path | None, authority: Path | None) -> AsyncIterator[SystemBus]:
        """Connect as the user `join`, as `Bus.connect` does; the connection closes at the end of the context.

        Raises BusError."""

        async def reconnected() -> None:
            log.warning("bus.reconnected", name=grants.JOIN.name)

        client = await opened(url, grants.JOIN.name, grants.JOIN, credentials, authority, None, reconnected)
        try:
            yield cls(client)
        finally:
            await close(client)

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    async def hear_logins(self, heard: Callable[[bytes, Answer], None]) -> None:
        """Call `heard` with each question of a server, and a function that sends the answer.

        Services share the questions: a question comes to a single service."""

        async def receive(message: Msg) -> None:
            async def answer(data: bytes) -> None:
                with contextlib.suppress(nats.errors.Error):  # without an answer the server refuses the client
                    await message.respond(data)

            heard(message.data, answer)

        await self._client.subscribe(grants.LOGINS, queue=QUEUE, cb=receive)

    async def connections(self) -> list[OpenConnection]:
        """Return the connections of users of the global account, at every server. Takes GATHER_S seconds or more.

        Raises BusError."""
        found: dict[tuple[str, int], OpenConnection] = {}
        for page in range(PAGES_MOST):
            answers = await self._page(page * PAGE_CONNECTIONS)
            for answer in answers:
                for listed in answer.data.connections or ():
                    connection = OpenConnection(answer.server.id, listed.cid, listed.authorized_user)
                    found[connection.server, connection.number] = connection
            if all(answer.data.total <= (page + 1) * PAGE_CONNECTIONS for answer in answers):
                break
        return list(found.values())

    async def _page(self, offset: int) -> list[_Page]:
        """Ask every server for the connections from `offset` on. Raises BusError."""
        inbox, answers = self._client.new_inbox(), list[_Page]()

        async def receive(message: Msg) -> None:
            with contextlib.suppress(msgspec.DecodeError):
                answers.append(msgspec.json.decode(message.data, type=_Page))

        asked = {"auth": True, "acc": GLOBAL_ACCOUNT, "limit": PAGE_CONNECTIONS, "offset": offset}
        try:
            subscription = await self._client.subscribe(inbox, cb=receive)
            await self._client.publish(grants.CONNECTIONS, msgspec.json.encode(asked), reply=inbox)
            await asyncio.sleep(GATHER_S)
            await subscription.unsubscribe()
        except nats.errors.Error as error:
            raise BusError(f"connections not listed: {error}") from error
        if not answers:
            raise BusError(f"{grants.CONNECTIONS}: no server answered within {GATHER_S} s")
        return answers

    async def kick(self, connection: OpenConnection) -> None:
        """Have the server end a connection. Raises BusError without an answer; a server ignores an order that wants no
        answer."""
        order = msgspec.json.encode({"cid": connection.number})
        try:
            await self._client.request(grants.kick_subject(connection.server), order, timeout=KICK_S)
        except (nats.errors.Error, TimeoutError) as error:
            raise BusError(f"connection {connection.number} not ended: {error}") from error
