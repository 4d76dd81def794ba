"""Where the time of requests went: from the gateway's memory, then from the ledger, and never of a foreign tenant."""

from __future__ import annotations

import httpx
import pytest

from gateway.inference import recent as module
from gateway.inference.recent import Recent, Seen
from gateway.inference.timing import Breakdown
from store.contract import wire
from store.contract.elapsed import Elapsed
from store.db import requests
from tests.gateway.plane import Plane, made
from tests.store.db.test_usage import message


def seen(id: str) -> Seen:
    breakdown = Breakdown(total_ms=12.5, first_token_ms=4.0, parts={"queue": 2.5, "prefill": 10.0})
    return Seen(
        **dict(id=id, deployment_id="d", revision=1, started_at=1.0, cold="host", finish="stop"),
        **dict(prompt_tokens=3, cached_tokens=0, output_tokens=4, breakdown=breakdown),
    )


def test_the_newest_of_a_tenant_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TENANT_MOST", 2)
    recent = Recent()
    for id in ("a", "b", "c"):
        recent.add("t", seen(id))
    recent.add("u", seen("d"))
    assert [recent.find("t", id) is not None for id in "abcd"] == [False, True, True, False]
    assert recent.find(None, "d") is not None and recent.find("u", "b") is None


def test_of_many_tenants_those_who_asked_longest_ago_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    recent = Recent()
    for tenant, id in (("t", "a"), ("u", "b"), ("t", "c"), ("v", "d")):
        recent.add(tenant, seen(id))
    assert [recent.find(None, id) is not None for id in "abcd"] == [True, False, True, True]


async def test_a_tenant_sees_its_own_requests_and_nobody_elses(plane: Plane) -> None:
    acme, other = await plane.tenant("acme"), await plane.tenant("other")
    tenant_id = (await plane.admin.get("/tenants/acme")).json()["id"]
    plane.recent.add(tenant_id, seen("q"))
    shown = made(await acme.get("/requests/q"), 200)
    assert shown["breakdown"] == {"total_ms": 12.5, "first_token_ms": 4.0, "parts": {"queue": 2.5, "prefill": 10.0}}
    assert made(await plane.admin.get("/requests/q"), 200) == shown
    assert made(await other.get("/requests/q"), 404)["code"] == "request_not_found"
    assert made(await acme.get("/requests/nothing"), 404)["code"] == "request_not_found"


async def test_a_request_is_found_after_a_restart_and_thousands_of_others(plane_on_both: Plane) -> None:
    plane = plane_on_both
    acme, other = await plane.tenant("acme"), await plane.tenant("other")
    ids = {name: (await plane.admin.get(f"/tenants/{name}")).json()["id"] for name in ("acme", "other")}
    messages = [ended(f"q{n}", ids["acme"], 1000 + n, "d1") for n in range(300)]
    messages += [ended("slow", ids["acme"], 90_000, "d2"), ended("theirs", ids["other"], 90_000, "d3")]
    async with plane.database.write() as connection:
        await requests.keep(connection, messages)
    assert plane.recent.find(None, "q0") is None, "this gateway has just begun"
    shown = made(await acme.get("/requests/q0"), 200)
    assert shown["breakdown"] == {"total_ms": 1.0, "first_token_ms": 0.4, "parts": {"queue": 0.4, "decode": 0.6}}
    assert (shown["cold"], shown["finish"], shown["output_tokens"]) == ("host", "stop", 3)
    assert made(await other.get("/requests/q0"), 404)["code"] == "request_not_found"
    assert made(await plane.admin.get("/requests/theirs"), 200)["deployment_id"] == "d3"

    async def listed(client: httpx.AsyncClient, query: str) -> list[str]:
        return [seen["id"] for seen in made(await client.get(f"/requests?{query}"), 200)["data"]]

    assert await listed(acme, "slower_than_ms=50") == ["slow"]
    assert await listed(acme, "deployment=d2") == ["slow"] and await listed(acme, "deployment=d3") == []
    assert len(await listed(acme, "limit=7")) == 7 and await listed(other, "") == ["theirs"]
    assert await listed(plane.admin, "slower_than_ms=90&tenant=other") == ["theirs"]
    assert sorted(await listed(plane.admin, "slower_than_ms=90")) == ["slow", "theirs"]
    for wrong in ("slower_than_ms=-1", "slower_than_ms=fast", "limit=0", "sort=slow"):
        made(await acme.get(f"/requests?{wrong}"), 422)


def ended(id: str, tenant_id: str, total_us: int, deployment_id: str) -> wire.Usage:
    elapsed = Elapsed("host", total_us, 400, {"queue": 400, "decode": total_us - 400})
    said = message(id, output_tokens=3)
    return wire.replace(said, tenant_id=tenant_id, deployment_id=deployment_id, elapsed=elapsed, finish="stop")
