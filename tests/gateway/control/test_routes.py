"""Rules for every route: keys, problems, doing a thing once, pages. Walls between tenants: test_isolation.py."""

from __future__ import annotations

import asyncio
import secrets

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store.db.database import DatabaseLocked
from tests.gateway.plane import Plane, made


async def test_without_a_valid_key_nothing_is_said(plane: Plane) -> None:
    for key in (None, "sk-st-wrong"):
        answer = await plane.client(key).get("/deployments")
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json()["code"] == "invalid_api_key"


async def test_a_problem_is_rfc_9457_with_a_code_and_the_request_id(plane: Plane) -> None:
    answer = await plane.admin.get("/deployments/none")
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem.pop("request_id") == answer.headers["x-request-id"]
    assert problem == {
        "type": "about:blank",
        "title": "Not found",
        "status": 404,
        "detail": "there is no deployment 'none' here",
        "code": "deployment_not_found",
    }


async def test_a_path_or_a_method_that_is_not_there_is_a_problem_too(plane: Plane) -> None:
    answer = await plane.admin.get("/nowhere")
    assert (answer.status_code, answer.json()["code"]) == (404, "no_such_route")
    answer = await plane.admin.put("/tenants/x")
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "DELETE, GET, HEAD, PATCH"


@pytest.mark.parametrize(
    ("body", "status", "pointer"),
    [
        ('{"name": "chat", "model": "m", "tenant": "acme", "colour": "red"}', 422, "/colour"),
        ('{"name": "chat", "model": "m", "tenant": "acme", "slo": {"ttft": 1}}', 422, "/slo/ttft"),
        ('{"name": "chat", "model": "m", "tenant": "acme", "slo": {"ttft_ms": 0}}', 422, "/slo/ttft_ms"),
        ('{"name": "chat", "model": "m", "tenant": "acme", "slo": {"ttft_ms": "2s"}}', 422, "/slo/ttft_ms"),
        ('{"name": "chat", "model": "m", "tenant": "acme", "a/b~c": 1}', 422, "/a~1b~0c"),
        ('{"name": "chat", "tenant": "acme"}', 422, "/model"),
        ('{"name": "../etc", "model": "m", "tenant": "acme"}', 422, "/name"),
        ('{"name": "chat", "model": "m", "tenant": "acme", "dtype": "int3"}', 422, "/dtype"),
        ('{"name": "chat", "model": "m", "tenant": "acme", "scaling": {"idle": "soon"}}', 422, "/scaling/idle"),
        ('{"name": "chat", "model": "m", "tenant": "acme", "limits": {"tpm": 1}}', 422, "/limits/tpm"),
        ('{"name": "chat", "model": "none", "tenant": "acme"}', 422, "/model"),
        ('{"name": "chat", "model": "m"}', 422, "/tenant"),
        ("[]", 422, ""),
        ('{"name": "chat"', 400, None),
        ("\udcff", 400, None),
    ],
)
async def test_a_body_that_is_wrong_is_told_where(plane: Plane, body: str, status: int, pointer: str | None) -> None:
    await plane.tenant("acme")
    answer = await plane.admin.post("/deployments", content=body.encode(errors="surrogateescape"))
    problem = made(answer, status)
    assert (problem["errors"][0]["pointer"] if pointer is not None else None) == pointer


async def test_a_body_that_is_too_long_is_refused(plane: Plane) -> None:
    answer = await plane.admin.post("/tenants", content=b" " * (1 << 20) + b"{}")
    assert made(answer, 413)["code"] == "request_too_large"


async def test_a_key_for_inference_does_not_reach_the_control_plane(plane: Plane) -> None:
    client = await plane.tenant("acme", scopes=["inference"])
    assert made(await client.get("/deployments"), 403)["code"] == "insufficient_scope"


@pytest.mark.parametrize("path", ["/tenants", "/prices", "/gpus"])
async def test_what_is_the_operators_is_refused_to_a_tenant(plane: Plane, path: str) -> None:
    client = await plane.tenant("acme")
    assert made(await client.get(path), 403)["code"] == "admin_only"


async def test_a_database_that_does_not_answer_is_503_and_its_place_is_not_told(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked() -> None:
        raise DatabaseLocked("the database sqlite:////data/staccato.db is locked")

    monkeypatch.setattr(plane.database, "read", locked)
    answer = await plane.admin.get("/tenants")
    assert made(answer, 503)["code"] == "database_unavailable" and "sqlite" not in answer.text
    assert answer.headers["retry-after"]


async def test_a_mistake_of_ours_is_500_without_its_inside(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.control.tenants.show", lambda tenant: 1 / 0)
    answer = await plane.admin.post("/tenants", json={"name": "acme"})
    assert made(answer, 500)["code"] == "internal_error" and "division" not in answer.text


# ── once ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_fifty_identical_posts_at_once_make_one_row(plane_on_both: Plane) -> None:
    headers = {"idempotency-key": "k1"}
    posts = (plane_on_both.admin.post("/tenants", json={"name": "acme"}, headers=headers) for _ in range(50))
    answers = await asyncio.gather(*posts)
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
    assert len((await plane_on_both.admin.get("/tenants")).json()["data"]) == 1


async def test_one_key_for_two_bodies_is_refused(plane: Plane) -> None:
    headers = {"idempotency-key": "k1"}
    made(await plane.admin.post("/tenants", json={"name": "acme"}, headers=headers))
    again = await plane.admin.post("/tenants", json={"name": "other"}, headers=headers)
    assert made(again, 422)["code"] == "idempotency_key_reused"


async def test_what_failed_may_be_tried_again_with_its_key(plane_on_both: Plane) -> None:
    body, headers = {"name": "chat", "model": "m", "tenant": "acme"}, {"idempotency-key": "k1"}
    await plane_on_both.tenant("acme")
    made(await plane_on_both.admin.post("/deployments", json=body, headers=headers), 422)
    await plane_on_both.model("m")
    made(await plane_on_both.admin.post("/deployments", json=body, headers=headers))


async def test_a_replayed_key_creation_does_not_show_the_secret_again(plane: Plane) -> None:
    headers = {"idempotency-key": "k1"}
    made(await plane.admin.post("/tenants", json={"name": "acme"}))
    first, again = [await plane.admin.post("/tenants/acme/keys", json={}, headers=headers) for _ in range(2)]
    assert made(first).pop("key").startswith(made(again)["prefix"])
    assert "key" not in again.json() and again.json()["id"] == first.json()["id"]


async def test_two_tenants_may_choose_the_same_idempotency_key(plane: Plane) -> None:
    await plane.model("m")
    for name in ("one", "other"):
        client = await plane.tenant(name)
        body = {"name": "chat", "model": "m"}
        answer = made(await client.post("/deployments", json=body, headers={"idempotency-key": "k"}))
        assert answer["tenant"] == name


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(count=st.integers(0, 12), limit=st.integers(1, 13))
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_the_union_of_the_pages_is_the_set(plane_on_both: Plane, count: int, limit: int) -> None:
    """The set holds while tenants are added between the pages."""
    before = [tenant["name"] for tenant in (await plane_on_both.admin.get("/tenants?limit=200")).json()["data"]]
    for name in (f"t{secrets.token_hex(6)}" for _ in range(count)):
        made(await plane_on_both.admin.post("/tenants", json={"name": name}))
        before.append(name)
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await plane_on_both.admin.get("/tenants", params={"limit": limit, "cursor": cursor})).json()
        seen += [tenant["name"] for tenant in page["data"]]
        cursor = page["next_cursor"]
        if len(seen) <= 4:
            made(await plane_on_both.admin.post("/tenants", json={"name": f"m{secrets.token_hex(6)}"}))
    assert [name for name in seen if name in before] == before
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("query", ["limit=", "limit=0", "limit=201", "limit=x", "cursor=!!", "cursor=YWJj"])
async def test_a_page_that_is_none_is_refused(plane: Plane, query: str) -> None:
    assert made(await plane.admin.get(f"/tenants?{query}"), 422)["errors"][0]["pointer"] == f"?{query.split('=')[0]}"


@pytest.mark.parametrize("query", ["tenant=", "tenant=nobody"])
async def test_a_tenant_without_a_name_is_not_all_of_them(plane: Plane, query: str) -> None:
    for path in ("/deployments", "/models", "/usage", "/audit"):
        assert made(await plane.admin.get(f"{path}?{query}"), 404)["code"] == "tenant_not_found"


@pytest.mark.parametrize(
    ("patch", "pointer"), [({"limts": None}, "/limts"), ({"limits": {"tpm": None}}, "/limits/tpm"), ({"": None}, "/")]
)
async def test_a_patch_that_takes_away_what_is_not_known_is_refused(
    plane: Plane, patch: dict[str, object], pointer: str
) -> None:
    await plane.tenant("acme")
    assert made(await plane.admin.patch("/tenants/acme", json=patch), 422)["errors"][0]["pointer"] == pointer
    made(await plane.admin.patch("/tenants/acme", json={"limits": {"tokens_per_minute": None}}), 200)
