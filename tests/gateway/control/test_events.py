"""Events of deployments: in order, without a gap, only for the tenants concerned, for as long as the key is valid."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.control import events
from gateway.control.routes import ControlPlane
from store.contract.wire import ModelState, Residency
from tests.gateway.control.test_deployments import RESIDENT, deployed
from tests.gateway.plane import ADMIN_KEY, Plane, made

LOADING, ASLEEP = ModelState(residency=Residency.LOADING), ModelState(residency=Residency.STAGED, load_ms=1.0)


class Reader:
    """An ASGI client that can read slowly: httpx's client would wait for the end of the stream."""

    def __init__(self, plane: Plane, key: str, query: str = "", last: str | None = None) -> None:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        headers += [(b"last-event-id", last.encode())] if last else []
        path = "/api/v1/events"
        scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": headers}
        self._gone, self._may_read = asyncio.Event(), asyncio.Event()
        self._may_read.set()
        self.status = 0
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self.task = asyncio.create_task(plane.app(scope, self._receive, self._send))
        self._text = ""

    async def _receive(self) -> Any:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self._may_read.wait()
        self.status = message.get("status", self.status)
        self.pieces.put_nowait(message.get("body", b""))

    def pause(self) -> None:
        self._may_read.clear()

    async def next(self) -> tuple[str, Any, str | None]:
        """(kind, data, id) of the next event."""
        while True:
            async with asyncio.timeout(60):
                while "\n\n" not in self._text:
                    self._text += (await self.pieces.get()).decode()
            event, _, self._text = self._text.partition("\n\n")
            said = dict(line.partition(": ")[::2] for line in event.splitlines())
            if "event" in said:
                return said["event"], json.loads(said["data"]), said.get("id")

    async def leave(self) -> None:
        self._gone.set()
        async with asyncio.timeout(60):
            await self.task


@pytest.fixture
async def reader(plane: Plane) -> AsyncIterator[Any]:
    readers: list[Reader] = []

    def read(key: str = ADMIN_KEY, query: str = "", last: str | None = None) -> Reader:
        readers.append(Reader(plane, key, query, last))
        return readers[-1]

    yield read
    for one in readers:
        await one.leave()


async def key_of(plane: Plane, tenant: str) -> Any:
    return made(await plane.admin.post(f"/tenants/{tenant}/keys", json={}))


async def test_a_life_is_told_as_it_happens(plane: Plane, reader: Any) -> None:
    client, one = await deployed(plane)
    read = reader((await key_of(plane, "acme"))["key"])
    assert (await read.next())[1]["phase"] == "deploying"  # the state at the beginning
    phases = []
    for state in (LOADING, RESIDENT, ASLEEP, LOADING):
        await plane.report({one["engine"]: state})
        kind, said, id = await read.next()
        assert (kind, said["deployment"], id) == ("deployment.phase", "chat", None)
        phases.append(said["phase"])
    assert phases == ["waking", "awake", "asleep", "waking"]
    made(await client.patch("/deployments/chat", json={"priority": "high"}), 200)
    kind, said, id = await read.next()
    assert (kind, said["new"]["priority"]) == ("deployment.changed", "high") and id == said["id"]


async def test_who_comes_back_is_told_what_was_missed_and_nothing_twice(plane: Plane, reader: Any) -> None:
    client, _ = await deployed(plane)
    first = reader(query="after=")
    told = [await first.next() for _ in range(3)]
    assert [kind for kind, _, _ in told] == ["model.created", "model.ready", "deployment.created"]
    id = told[-1][2]
    await first.leave()
    for priority in ("high", "batch"):
        made(await client.patch("/deployments/chat", json={"priority": priority}), 200)
    again = reader(last=id)
    priorities = [(await again.next())[1]["new"]["priority"] for _ in range(2)]
    assert priorities == ["high", "batch"] and (await again.next())[0] == "deployment.phase"


async def test_a_page_that_is_full_is_followed_by_the_next(
    plane: Plane, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "PAGE_ROWS", 2)
    client, _ = await deployed(plane)
    for tbt_ms in range(1, 8):
        made(await client.patch("/deployments/chat", json={"slo": {"tbt_ms": tbt_ms}}), 200)
    read = reader(query="after=")
    of_model = [(await read.next())[0] for _ in range(2)]
    seen = [(await read.next())[1]["new"]["slo"]["tbt_ms"] for _ in range(8)]
    assert of_model == ["model.created", "model.ready"] and seen == [100, 1, 2, 3, 4, 5, 6, 7]


async def test_a_tenant_hears_nothing_of_others(plane: Plane, reader: Any) -> None:
    client, one = await deployed(plane)
    await plane.tenant("other")
    read = reader((await key_of(plane, "other"))["key"], "after=")
    made(await client.patch("/deployments/chat", json={"priority": "high"}), 200)
    await plane.report({one["engine"]: RESIDENT})
    made(await plane.admin.post("/deployments", json={"name": "own", "model": "llama", "tenant": "other"}))
    kind, said, _ = await read.next()
    assert (kind, said["new"]["name"]) == ("deployment.created", "own")
    assert (await read.next())[1]["deployment"] == "own" and read.pieces.empty()
    foreign = next(row for row in (await plane.admin.get("/audit")).json()["data"] if row["subject_id"] == one["id"])
    refused = await plane.client((await key_of(plane, "other"))["key"]).get(f"/events?after={foreign['id']}")
    assert made(refused, 422)["errors"][0]["pointer"] == "?after"


async def test_a_revoked_key_ends_the_stream(plane: Plane, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEY_CHECK_S", 0.05)
    await deployed(plane)
    key = await key_of(plane, "acme")
    read = reader(key["key"])
    await read.next()
    assert (await plane.admin.delete(f"/tenants/acme/keys/{key['id']}")).status_code == 204
    kind, said, _ = await read.next()
    assert kind == "end" and "not valid" in said["reason"]
    await read.task


async def test_a_gateway_that_stops_says_so(plane: Plane, reader: Any) -> None:
    await deployed(plane)
    read = reader()
    await read.next()
    assert isinstance(plane.control, ControlPlane)
    plane.control.feed.end()
    assert (await read.next())[0] == "end"
    await read.task


async def test_who_reads_nothing_costs_nothing_and_is_let_go(
    plane: Plane, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "READ_DEADLINE_S", 0.3)
    client, _ = await deployed(plane)
    read = reader()
    await read.next()
    read.pause()
    for tbt_ms in range(1, 20):
        made(await client.patch("/deployments/chat", json={"slo": {"tbt_ms": tbt_ms}}), 200)
    async with asyncio.timeout(60):
        await read.task
    assert read.pieces.qsize() <= 1


async def test_there_are_not_more_streams_than_a_gateway_has(
    plane: Plane, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "STREAMS_MOST", 1)
    await deployed(plane)
    read = reader()
    await read.next()
    refused = await plane.admin.get("/events")
    assert made(refused, 503)["code"] == "too_many_streams"
    await read.leave()
    assert (await reader().next())[0] == "deployment.phase"


async def test_silence_is_broken_by_comments(plane: Plane, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "BEAT_S", 0.1)
    monkeypatch.setattr(events, "KEY_CHECK_S", 0.05)
    read = reader()
    async with asyncio.timeout(60):
        while b": nothing new\n\n" not in await read.pieces.get():
            pass
