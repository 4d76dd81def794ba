"""Walls between tenants: over every operation of /openapi.json, a stranger learns nothing of a foreign tenant's things.

tests/gateway/control/strangers.py makes the requests.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import httpx
import pytest
from prometheus_client import generate_latest
from sqlalchemy import update

from gateway.app import Gateway
from gateway.billing.formats import FORMATS
from gateway.control.openapi import PATHS, document
from gateway.http.api import Endpoint, Operation, Query
from gateway.http.auth import ADMIN, Auth, Caller
from gateway.inference.asking import Asking, Bounds
from gateway.inference.endpoint import Inference
from store.contract import wire
from store.db import deployments, tables, usage
from store.db.database import now_us
from store.db.usage import GROUPS, period_of
from tests.gateway.control.strangers import REPLAYED, Ask, Heard, Pair, Strangers, ask, cursor
from tests.gateway.inference.test_recent import seen
from tests.gateway.plane import ADMIN_KEY, Plane, made
from tests.store.db.test_usage import message
from tests.store.files.folders import write_model

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the gateway

MARK = "zebra"  # in every name of the victim's things
ONCE = {"idempotency-key": REPLAYED}
LATER = timedelta(days=1)
INVALID = ("no key", "wrong key", "expired key", "revoked key")


@dataclass
class World:
    """Two tenants with a thing of each kind, made by equal requests with an equal Idempotency-Key."""

    plane: Plane
    strangers: Strangers
    clients: dict[str, httpx.AsyncClient]  # the stranger's, by kind of key
    secrets: set[str]

    async def ask(self, role: str, said: Ask) -> Heard:
        """Ask as the stranger, and check that the answer has no secret of the victim. Returns the answer without the
        names in the request."""
        heard = await ask(self.clients[role], self.plane.app, said)
        bare = heard.without(said.said)
        found = [secret for secret in self.secrets if secret in f"{bare.text} {bare.headers}"]
        assert not found, f"{role}: {said}: {found} in {heard}"
        assert heard.status < 500, f"{role}: {said}: {heard}"
        return bare


async def obey(order: bytes) -> wire.Reply:
    """The runtime's answer to every order."""
    return wire.Reply()


async def owned(plane: Plane, name: str) -> tuple[httpx.AsyncClient, dict[str, str], dict[str, Any]]:
    """Make a tenant with a thing of each kind. Returns the tenant's client, the things by kind, and the answers."""
    admin, answers = plane.admin, {}
    answers["tenant"] = made(await admin.post("/tenants", json={"name": name}))
    key = made(await admin.post(f"/tenants/{name}/keys", json={"name": f"{name}-key"}))
    client = plane.client(key.pop("key"))
    answers["made"] = made(await client.post(f"/tenants/{name}/keys", json={"name": f"{name}-2"}, headers=ONCE))
    answers["rotated"] = made(await client.post(f"/tenants/{name}/keys/{key['id']}:rotate", json={}, headers=ONCE))
    folder = plane.folder / "roots" / f"{name}-folder"
    registered = {"name": f"{name}-model", "source": str(write_model(folder, seed=name))}
    answers["model"] = await plane.model(f"{name}-other", client, folder)
    made(await client.post("/models", json=registered, headers=ONCE), 202)
    chat = {"name": f"{name}-chat", "model": f"{name}-other"}
    deployment = answers["deployment"] = made(await client.post("/deployments", json=chat, headers=ONCE))
    price = {"tenant": name, "prompt_pico": 1000, "output_pico": 3}
    answers["price"] = made(await admin.post("/prices", json=price))
    correction = {"tenant": name, "amount_minor": -77, "reason": f"{name} complained"}
    headers = {"idempotency-key": name}
    answers["correction"] = made(await admin.post("/billing/corrections", json=correction, headers=headers))
    used = message(f"{name}-request", tenant_id=answers["tenant"]["id"], deployment_id=deployment["id"])
    used = type(used)(
        **{f: getattr(used, f) for f in used.__struct_fields__}
        | {"key_id": key["id"], "deployment": deployment["name"], "prompt_tokens": 9, "output_tokens": 4}
        | {"model": deployment["engine"], "started_at": time.time() - 60, "ended_at": time.time()}
    )
    async with plane.database.write() as connection:
        await usage.book(connection, [used], now_us())
    plane.recent.add(answers["tenant"]["id"], seen(f"{name}-request"))
    audit = made(await client.get("/audit"), 200)["data"]
    answers["audit"] = [{"id": entry["id"], "hash": entry["hash"]} for entry in audit[-2:]]
    answers["head"] = made(await client.get("/audit:verify"), 200)["head"]
    token = made(await admin.post("/join-tokens", json={}))
    names = {
        "tenant": name,
        "key": key["id"],
        "model": f"{name}-other",
        "deployment": f"{name}-chat",
        "served": f"{name}-chat",
        "gpu": "r1",
        "request": f"{name}-request",
        "token": token["id"],
        "runtime": "r1",
    }
    return client, names, answers


@pytest.fixture
async def world(plane_on_both: Plane) -> AsyncIterator[World]:
    plane = plane_on_both
    nobody = cast(Any, None)  # the walls stand before any engine
    asking = Asking(plane.auth, plane.fleet, plane.metrics, Bounds(1 << 20, 5.0, 0.0))
    inference = Inference(plane.auth, asking, nobody, plane.metrics)
    plane.app = cast(Any, Gateway(inference, plane.app, nobody))
    await plane.admin.aclose()
    plane.admin = plane.client(ADMIN_KEY)
    await plane.bus.respond(wire.control_subject("r1"), obey)
    await plane.report({})
    _, names, answers = await owned(plane, MARK)
    client, own, _ = await owned(plane, "thief")
    model, deployment = answers["model"], answers["deployment"]
    ids = set(re.findall(r"\b[0-9a-f]{32,64}\b", json.dumps(answers)))
    foreign = {
        "tenant": [MARK, answers["tenant"]["id"]],
        "key": [names["key"], answers["made"]["id"]],
        "model": [model["name"], model["id"], model["digest"]],
        "deployment": [deployment["name"], deployment["id"], f"{deployment['name']}@1"],
        "served": [deployment["name"], f"{deployment['name']}@1", deployment["id"], model["name"]],
        "gpu": ["r1"],
        "request": [f"{MARK}-request"],
        "token": [names["token"]],
        "runtime": ["r1"],
        "cursor": [cursor(answers[name]["id"]) for name in ("tenant", "made", "model", "deployment", "correction")],
        "event": [entry["id"] for entry in answers["audit"]],
        "head": [answers["head"]],
    }
    clients = await strangers_clients(plane, client)
    strangers = Strangers(document(plane.control.endpoints()), own, foreign)
    yield World(plane, strangers, clients, {MARK, *ids, answers["made"]["key"], answers["rotated"]["key"]})


async def strangers_clients(plane: Plane, client: httpx.AsyncClient) -> dict[str, httpx.AsyncClient]:
    async def key(**said: object) -> tuple[str, str]:
        answer = made(await client.post("/tenants/thief/keys", json=said))
        return answer["id"], answer["key"]

    inference, control = await key(scopes=["inference"]), await key(scopes=["control"])
    expired, revoked = await key(expires_at=(datetime.now(UTC) + LATER).isoformat()), await key()
    made_void = await client.delete(f"/tenants/thief/keys/{revoked[0]}")
    assert made_void.status_code == 204
    async with plane.database.write() as connection:
        await connection.execute(update(tables.keys).where(tables.keys.c.id == expired[0]).values(expires_us=1))
    return {
        "no key": plane.client(None),
        "wrong key": plane.client("sk-st-wrong"),
        "expired key": plane.client(expired[1]),
        "revoked key": plane.client(revoked[1]),
        "inference key": plane.client(inference[1]),
        "control key": plane.client(control[1]),
        "whole key": client,
    }


def allowed(role: str, pair: Pair) -> set[int]:
    """The statuses allowed: by the kind of key, or as for a missing thing."""
    needs = pair.foreign.needs
    if role in INVALID:
        return {401}
    if needs == "admin" or (role, needs) == ("inference key", "control"):
        return {403}
    if (role, needs) == ("control key", "inference"):
        return {403, 404}
    return {404} if pair.addressed else {200, 404, 409, 422}


async def check(world: World, role: str, pair: Pair) -> None:
    foreign, nothing = await world.ask(role, pair.foreign), await world.ask(role, pair.never)
    assert foreign.status in allowed(role, pair), f"{role}: {pair.foreign}: {foreign}"
    assert foreign == nothing, f"{role}: {pair.foreign} is told apart from {pair.never}: {foreign}, {nothing}"
    assert "idempotency-replayed" not in dict(foreign.headers), f"{role}: {pair.foreign}: {foreign}"


async def test_what_is_anothers_is_as_if_it_never_was(world: World) -> None:
    """The victim's page tokens, ETags and Idempotency-Keys open nothing either."""
    pairs = list(world.strangers.pairs())
    one_each = list({(pair.foreign.method, pair.foreign.template): pair for pair in pairs}.values())
    for role in world.clients:
        for pair in one_each if role in INVALID else pairs:
            await check(world, role, pair)
    reached = {(pair.foreign.method, pair.foreign.template) for pair in pairs}
    named = {(a.method, a.template) for a in world.strangers.asks() if a.path}
    assert named <= reached and len(reached) > 40


async def test_what_is_ones_own_shows_nothing_of_anothers(world: World) -> None:
    """The stranger's lists, sums, exports, streams and answers to deeds are checked for the victim's secrets."""
    for group in GROUPS:
        heard = await world.ask("whole key", Ask("GET", "/api/v1/usage", query={"group_by": group}))
        assert json.loads(heard.text)["data"], group
    for name, format in FORMATS.items():
        for detail in format.details:
            query = {"period": period_of(now_us()), "format": name, "detail": detail}
            heard = await world.ask("whole key", Ask("GET", "/api/v1/billing/export", query=query))
            assert heard.status == 200 and "thief" in heard.text, name
    mine = [said for said in world.strangers.asks() if said.needs == "control" or said.method == "GET"]
    for said in sorted(mine, key=lambda said: (said.method == "DELETE", said.method != "GET")):
        heard = await world.ask("whole key", said)
        assert said.method != "GET" or heard.status == (403 if said.needs == "admin" else 200), f"{said}: {heard}"


async def test_pages_never_cross_over(world: World) -> None:
    pages = 0
    for said in world.strangers.asks():
        if said.needs == "control" and world.strangers.takes(said, "cursor"):
            token: str | None = ""
            while token is not None:
                page = await world.ask("whole key", replace(said, query={"cursor": token, "limit": "1"}))
                token, pages = json.loads(page.text)["next_cursor"], pages + 1
    assert pages > 10


def test_metrics_that_need_no_key_name_nobody(world: World) -> None:
    text = generate_latest().decode()
    assert not [secret for secret in world.secrets if secret in text]


# ── the suite can fail ────────────────────────────────────────────────────────────────────────────────────────────────


async def all_pairs(world: World) -> None:
    for pair in world.strangers.pairs():
        await check(world, "whole key", pair)


async def test_a_query_for_all_tenants_is_found_or_held_by_the_second_wall(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second wall is row-level security."""
    named = deployments.named

    async def of_all(connection: Any, tenant_id: str | None, name: str) -> Any:
        return await named(connection, None, name)

    monkeypatch.setattr(deployments, "named", of_all)
    async with world.plane.database.read() as connection:
        second = connection.dialect.name == "postgresql"
    with contextlib.nullcontext() if second else pytest.raises(AssertionError, match="deployments/zebra-chat"):
        await all_pairs(world)


async def test_a_key_that_passes_for_the_operators_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    within = Auth.within

    async def of_anybody(self: Auth, caller: Caller, tenant: str) -> Caller | None:
        return await within(self, ADMIN, tenant)

    monkeypatch.setattr(Auth, "within", of_anybody)
    with pytest.raises(AssertionError, match="zebra"):
        await all_pairs(world)


async def test_a_parameter_that_nobody_knows_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PATHS, "stripe", "A stripe.")
    for endpoint in (
        Endpoint("GET", "/stripes/{stripe}", Operation(summary="Show.")),
        Endpoint("GET", "/stripes", Operation(summary="Show.", query=(Query("width", str, "Its width."),))),
    ):
        world.strangers.document = document([endpoint])
        with pytest.raises((AssertionError, KeyError), match="stripe|width"):
            list(world.strangers.pairs())
