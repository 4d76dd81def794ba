"""What a gateway answered lately: the newest of each tenant, and never another's."""

from __future__ import annotations

import pytest

from gateway import recent as module
from gateway.recent import Recent, Seen
from gateway.timing import Breakdown
from tests.gateway.plane import Plane, made


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
