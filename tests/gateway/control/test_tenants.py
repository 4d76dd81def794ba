"""Tenants and keys over REST."""

from __future__ import annotations

import pytest

from tests.gateway.plane import Plane, made


async def test_a_tenant_is_made_shown_and_deleted(plane: Plane) -> None:
    tenant = made(await plane.admin.post("/tenants", json={"name": "acme"}))
    assert (await plane.admin.get("/tenants/acme")).json() == tenant
    assert made(await plane.admin.post("/tenants", json={"name": "acme"}), 409)["code"] == "tenant_exists"
    assert (await plane.admin.delete("/tenants/acme")).status_code == 204
    assert (await plane.admin.get("/tenants/acme")).status_code == 404


async def test_a_tenants_weight_is_set_changed_and_bounded(plane: Plane) -> None:
    assert made(await plane.admin.post("/tenants", json={"name": "acme", "weight": 2.5}))["weight"] == 2.5
    assert made(await plane.admin.post("/tenants", json={"name": "other"}))["weight"] == 1.0
    assert made(await plane.admin.patch("/tenants/acme", json={}), 200)["weight"] == 2.5
    assert made(await plane.admin.patch("/tenants/acme", json={"weight": 0.1}), 200)["weight"] == 0.1
    assert (await plane.admin.get("/tenants/acme")).json()["weight"] == 0.1
    assert made(await plane.admin.patch("/tenants/acme", json={"weight": None}), 200)["weight"] == 1.0
    for weight in (0, 0.09, 10.1, "much"):
        answers = (
            await plane.admin.post("/tenants", json={"name": "third", "weight": weight}),
            await plane.admin.patch("/tenants/acme", json={"weight": weight}),
        )
        assert [made(answer, 422)["errors"][0]["pointer"] for answer in answers] == ["/weight", "/weight"]


async def test_a_tenants_retention_is_set_changed_and_a_yes_or_no(plane: Plane) -> None:
    assert (
        made(await plane.admin.post("/tenants", json={"name": "acme", "keep_prefixes": False}))["keep_prefixes"]
        is False
    )
    assert made(await plane.admin.post("/tenants", json={"name": "other"}))["keep_prefixes"] is True
    assert made(await plane.admin.patch("/tenants/acme", json={"weight": 2}), 200)["keep_prefixes"] is False
    assert made(await plane.admin.patch("/tenants/acme", json={"keep_prefixes": None}), 200)["keep_prefixes"] is True
    assert made(await plane.admin.patch("/tenants/acme", json={"keep_prefixes": False}), 200)["weight"] == 2
    assert (await plane.admin.get("/tenants/acme")).json()["keep_prefixes"] is False
    wrong = made(await plane.admin.patch("/tenants/acme", json={"keep_prefixes": "some"}), 422)
    assert wrong["errors"][0]["pointer"] == "/keep_prefixes"


async def test_a_tenants_limits_are_set_merged_and_taken_away(plane: Plane) -> None:
    limits = {"requests_per_minute": 60, "monthly_budget": {"amount": "25.00"}}
    shown = {"requests_per_minute": 60, "monthly_budget": {"amount": "25.00", "currency": "USD"}}
    assert made(await plane.admin.post("/tenants", json={"name": "acme", "limits": limits}))["limits"] == shown
    assert made(await plane.admin.post("/tenants", json={"name": "other"}))["limits"] == {}

    async def patched(limits: object) -> object:
        return made(await plane.admin.patch("/tenants/acme", json={"limits": limits}), 200)["limits"]

    assert await patched({"monthly_budget": {"amount": "30"}, "max_output_tokens": 9}) == {
        "requests_per_minute": 60,
        "max_output_tokens": 9,
        "monthly_budget": {"amount": "30", "currency": "USD"},
    }
    assert await patched({"requests_per_minute": None, "monthly_budget": None}) == {"max_output_tokens": 9}
    assert made(await plane.admin.patch("/tenants/acme", json={"weight": 2}), 200)["limits"] == {"max_output_tokens": 9}
    assert (await plane.admin.get("/tenants/acme")).json()["limits"] == {"max_output_tokens": 9}
    assert await patched(None) == {}


@pytest.mark.parametrize(
    ("limits", "pointer"),
    [
        ({"requests_per_hour": 1}, "/limits/requests_per_hour"),
        ({"requests_per_minute": 0}, "/limits/requests_per_minute"),
        ({"tokens_per_minute": "many"}, "/limits/tokens_per_minute"),
        ({"concurrent_streams": 1.5}, "/limits/concurrent_streams"),
        ({"monthly_budget": {"amount": "-1"}}, "/limits/monthly_budget/amount"),
        ({"monthly_budget": {"amount": "1", "each": "day"}}, "/limits/monthly_budget/each"),
        ({"monthly_budget": {"currency": "USD"}}, "/limits/monthly_budget/amount"),
    ],
)
async def test_a_limit_that_can_not_be_is_refused_where_it_stands(
    plane: Plane, limits: dict[str, object], pointer: str
) -> None:
    made(await plane.admin.post("/tenants", json={"name": "acme"}))
    answers = (
        await plane.admin.post("/tenants", json={"name": "other", "limits": limits}),
        await plane.admin.patch("/tenants/acme", json={"limits": limits}),
    )
    assert [made(answer, 422)["errors"][0]["pointer"] for answer in answers] == [pointer, pointer]


async def test_a_tenant_can_not_lift_its_own_limits(plane: Plane) -> None:
    client = await plane.tenant("acme")
    answer = await client.patch("/tenants/acme", json={"limits": None})
    assert made(answer, 403)["code"] == "admin_only"


async def test_a_tenant_can_not_weigh_itself(plane: Plane) -> None:
    client = await plane.tenant("acme")
    assert made(await client.patch("/tenants/acme", json={"weight": 10}), 403)["code"] == "admin_only"


async def test_a_tenant_with_deployments_stays(plane: Plane) -> None:
    await plane.model("llama")
    client = await plane.tenant("acme")
    made(await client.post("/deployments", json={"name": "chat", "model": "llama"}))
    assert made(await plane.admin.delete("/tenants/acme"), 409)["code"] == "tenant_in_use"


@pytest.mark.parametrize("name", ["", "Acme", "a b", "-a", "a-", "a.b", "a" * 64, "*"])
async def test_a_tenants_name_is_one_that_fits_a_url(plane: Plane, name: str) -> None:
    assert made(await plane.admin.post("/tenants", json={"name": name}), 422)["errors"][0]["pointer"] == "/name"


async def test_a_key_is_shown_once_used_rotated_and_revoked(plane: Plane) -> None:
    await plane.tenant("acme")
    key = made(await plane.admin.post("/tenants/acme/keys", json={"name": "laptop", "scopes": ["control"]}))
    assert key["key"].startswith(key["prefix"] + "-") and key["scopes"] == ["control"]
    client = plane.client(key["key"])
    listed = (await client.get("/tenants/acme/keys")).json()["data"]
    assert key["id"] in [seen["id"] for seen in listed] and not any("key" in seen for seen in listed)

    new = made(await client.post(f"/tenants/acme/keys/{key['id']}:rotate", json={"overlap_s": 3600}))
    successor = plane.client(new["key"])
    assert [(await c.get("/deployments")).status_code for c in (client, successor)] == [200, 200]

    assert (await successor.delete(f"/tenants/acme/keys/{key['id']}")).status_code == 204
    assert [(await c.get("/deployments")).status_code for c in (client, successor)] == [401, 200]
    again = await successor.post(f"/tenants/acme/keys/{key['id']}:rotate")
    assert made(again, 409)["code"] == "key_ended"


async def test_a_key_rotated_without_overlap_ends_at_once(plane: Plane) -> None:
    client = await plane.tenant("acme")
    (key,) = (await client.get("/tenants/acme/keys")).json()["data"]
    made(await client.post(f"/tenants/acme/keys/{key['id']}:rotate", json={"overlap_s": 0}))
    assert (await client.get("/deployments")).status_code == 401


async def test_a_key_gives_no_more_than_its_maker_has(plane: Plane) -> None:
    client = await plane.tenant("acme", scopes=["control"])
    answer = await client.post("/tenants/acme/keys", json={"scopes": ["inference"]})
    assert made(answer, 422)["errors"][0]["pointer"] == "/scopes"
    powerful = made(await plane.admin.post("/tenants/acme/keys", json={}))
    answer = await client.post(f"/tenants/acme/keys/{powerful['id']}:rotate")
    assert made(answer, 403)["code"] == "insufficient_scope"


async def test_a_tenant_raises_the_bound_of_no_key(plane: Plane) -> None:
    client = await plane.tenant("acme")
    answer = await client.post("/tenants/acme/keys", json={"priority": "high"})
    assert made(answer, 422)["errors"][0]["pointer"] == "/priority"
    assert made(await client.post("/tenants/acme/keys", json={"priority": "batch"}))["priority"] == "batch"
    high = made(await plane.admin.post("/tenants/acme/keys", json={"priority": "high"}))
    answer = await client.post(f"/tenants/acme/keys/{high['id']}:rotate")
    assert made(answer, 403)["code"] == "insufficient_scope"
    again = made(await plane.admin.post(f"/tenants/acme/keys/{high['id']}:rotate"))
    listed = (await client.get("/tenants/acme/keys")).json()["data"]
    assert [key["priority"] for key in listed] == ["normal", "batch", "high", "high"] and again["priority"] == "high"


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"scopes": []}, "/scopes"),
        ({"scopes": ["root"]}, "/scopes/0"),
        ({"expires_at": "2020-01-01T00:00:00Z"}, "/expires_at"),
        ({"expires_at": "tomorrow"}, "/expires_at"),
    ],
)
async def test_a_key_that_can_not_be_is_refused(plane: Plane, body: dict[str, object], pointer: str) -> None:
    await plane.tenant("acme")
    assert made(await plane.admin.post("/tenants/acme/keys", json=body), 422)["errors"][0]["pointer"] == pointer
