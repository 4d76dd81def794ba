"""Every deed leaves a row with the actor, the deed and the change. A tenant can check the tenant's rows."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import httpx
import pytest
from sqlalchemy import text, update

from store.db import tables
from tests.gateway.control.test_deployments import deployed
from tests.gateway.plane import Plane, made


async def rows(client: httpx.AsyncClient, query: str = "") -> Any:
    return made(await client.get(f"/audit{query}"), 200)["data"]


async def verdict(client: httpx.AsyncClient, query: str = "") -> Any:
    return made(await client.get(f"/audit:verify{query}"), 200)


async def test_a_row_says_who_did_what_by_which_request_and_what_was_before(plane: Plane) -> None:
    client, one = await deployed(plane)
    changed = await client.patch("/deployments/chat", json={"priority": "high"})
    (key,) = (await client.get("/tenants/acme/keys")).json()["data"]
    row = next(row for row in await rows(client) if row["kind"] == "deployment.changed")
    assert (row["by"], row["subject_id"], row["request_id"]) == (key["id"], one["id"], changed.headers["x-request-id"])
    assert (row["old"]["priority"], row["new"]["priority"]) == ("normal", "high")
    assert (row["old"]["target_revision"], row["new"]["target_revision"]) == (None, 2)


async def test_no_secret_is_in_the_log(plane: Plane) -> None:
    made(await plane.admin.post("/tenants", json={"name": "acme"}))
    key = made(await plane.admin.post("/tenants/acme/keys", json={}))
    again = made(await plane.admin.post(f"/tenants/acme/keys/{key['id']}:rotate", json={}))
    made(await plane.admin.patch("/tenants/acme", json={"weight": 2}), 200)
    assert (await plane.admin.delete(f"/tenants/acme/keys/{again['id']}")).status_code == 204
    said = json.dumps(await rows(plane.admin))
    assert [row["kind"] for row in await rows(plane.admin)] == [
        "tenant.created",
        "key.created",
        "key.rotated",
        "tenant.changed",
        "key.revoked",
    ]
    assert key["prefix"] in said and key["key"] not in said and again["key"] not in said


async def test_a_tenant_sees_its_own_chain_and_nothing_of_others(plane_on_both: Plane) -> None:
    plane = plane_on_both
    acme, other = await plane.tenant("acme"), await plane.tenant("other")
    made(await acme.post("/tenants/acme/keys", json={"name": "second"}))
    own = await rows(acme)
    assert [(row["seq"], row["kind"]) for row in own] == [(1, "tenant.created"), (2, "key.created"), (3, "key.created")]
    assert [row["seq"] for row in await rows(plane.admin)] == [1, 2, 3, 4, 5]
    assert own == await rows(plane.admin, "?tenant=acme")
    assert (await acme.get("/audit?tenant=other")).status_code == 404
    assert {row["tenant_id"] for row in await rows(other)}.isdisjoint({own[0]["tenant_id"]})


async def test_anybody_can_compute_the_chain_from_what_is_shown(plane: Plane) -> None:
    """The chain is computed as documented in store/db/audit.py, without code from there."""
    client = await plane.tenant("acme")
    made(await client.post("/tenants/acme/keys", json={"name": "é"}))
    before = "0" * 64
    for row in await rows(client):
        fields = ["id", "at_us", "kind", "tenant_id", "subject_id", "by", "request_id"]
        values = [row[name] for name in fields]
        values += [row[n] and json.dumps(row[n], sort_keys=True, separators=(",", ":")) for n in ("old", "new")]
        digest = hashlib.sha256(json.dumps(values, separators=(",", ":")).encode()).hexdigest()
        before = hashlib.sha256(f"{row['seq']}:{before}:{digest}".encode()).hexdigest()
        assert row["hash"] == before
    assert (await verdict(client))["head"] == f"3:{before}"


async def test_pages_are_in_the_order_of_the_chain(plane: Plane) -> None:
    for name in ("a", "b", "c"):
        made(await plane.admin.post("/tenants", json={"name": name}))
    first = made(await plane.admin.get("/audit?limit=2"), 200)
    second = made(await plane.admin.get("/audit", params={"limit": 2, "cursor": first["next_cursor"]}), 200)
    assert [row["seq"] for row in first["data"] + second["data"]] == [1, 2, 3] and second["next_cursor"] is None
    newest = made(await plane.admin.get("/audit?order=newest&limit=2"), 200)
    oldest = made(await plane.admin.get(f"/audit?order=newest&cursor={newest['next_cursor']}"), 200)
    assert [row["seq"] for row in newest["data"] + oldest["data"]] == [3, 2, 1] and oldest["next_cursor"] is None
    assert made(await plane.admin.get("/audit?order=best"), 422)["errors"][0]["pointer"] == "?order"


async def test_what_was_changed_in_the_database_is_found(plane: Plane) -> None:
    client = await plane.tenant("acme")
    noted = (await verdict(plane.admin))["head"]
    assert (await verdict(plane.admin, f"?head={noted}"))["ok"]
    async with plane.database.write() as connection:
        await connection.execute(text("DROP TRIGGER audit_no_update"))
        await connection.execute(update(tables.audit).where(tables.audit.c.seq == 2).values(by="somebody"))
    for who in (plane.admin, client):
        seen = await verdict(who)
        assert (seen["ok"], seen["row"], seen["flaw"]) == (False, 2, "row 2 is not what was written there")


@pytest.mark.parametrize("head", ["x", "1:abc", "-1:" + "0" * 64])
async def test_a_head_that_is_none_is_refused(plane: Plane, head: str) -> None:
    assert made(await plane.admin.get("/audit:verify", params={"head": head}), 422)["errors"][0]["pointer"] == "?head"
