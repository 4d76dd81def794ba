"""Operators' keys: over every operation and every scope, a key does exactly the operations of the key's scopes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast

import httpx
import pytest

from gateway.app import Gateway
from gateway.control.openapi import document
from gateway.http.auth import Auth
from gateway.inference.asking import Asking, Bounds
from gateway.inference.endpoint import Inference
from store.db.operators import EVERYTHING, SCOPES
from tests.gateway.control.strangers import THINGS, Ask, Strangers, ask
from tests.gateway.http.test_auth import bearer
from tests.gateway.plane import ADMIN_KEY, PEPPER, Plane, made

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the gateway

# Names of missing things: a permitted operation answers 404 without a change.
NOTHING = dict.fromkeys((*THINGS, "served"), "nothing")


def in_days(days: float) -> str:
    return (datetime.now(UTC) + timedelta(days=days)).isoformat()


async def operator(plane: Plane, *scopes: str, name: str = "alice", **said: object) -> tuple[Any, httpx.AsyncClient]:
    """Make an operator's key with `scopes`. Returns the answer to the maker, and a client with the key."""
    body = {"name": name, "scopes": list(scopes), **said}
    key = made(await plane.admin.post("/operator-keys", json=body))
    return key, plane.client(key["key"])


@pytest.fixture
async def whole(plane: Plane) -> Plane:
    """A control plane behind tenants' endpoints, as in the gateway."""
    nobody = cast(Any, None)  # keys and scopes are checked before any use of the missing parts
    asking = Asking(plane.auth, plane.fleet, plane.metrics, Bounds(1 << 20, 5.0, 0.0))
    inference = Inference(plane.auth, asking, nobody, plane.metrics)
    plane.app = cast(Any, Gateway(inference, plane.app, nobody))
    await plane.admin.aclose()
    plane.admin = plane.client(ADMIN_KEY)
    return plane


def asked(plane: Plane) -> list[tuple[Ask, set[str]]]:
    """Every operation that needs a key, with the scopes that permit the operation by the OpenAPI document."""
    described = document(plane.control.endpoints())
    asks = Strangers(described, NOTHING, {}).asks()
    return [
        (said, set(described["paths"][said.template][said.method.lower()]["x-operator-scopes"]))
        for said in sorted(asks, key=lambda said: said.method == "DELETE")
    ]


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_scope_permits_the_operations_that_declare_the_scope_and_no_others(whole: Plane, scope: str) -> None:
    _, client = await operator(whole, scope)
    operations = asked(whole)
    assert len(operations) > 60
    for said, scopes in operations:
        status = (await ask(client, whole.app, said)).status
        if scope in scopes:
            assert status not in (401, 403) and status < 500, f"{scope}: {said}: {status}"
        else:
            assert status == 403, f"{scope}: {said}: {status}"


async def test_a_key_with_metrics_read_gets_403_on_everything_but_metrics(whole: Plane) -> None:
    _, client = await operator(whole, "metrics:read")
    answers = [(said.template, (await ask(client, whole.app, said)).status) for said, _ in asked(whole)]
    assert {path for path, status in answers if status != 403} == {"/api/v1/metrics"}
    assert dict(answers)["/api/v1/metrics"] == 200


async def test_every_operation_with_a_key_declares_an_operators_scope(plane: Plane) -> None:
    for said, scopes in asked(plane):
        assert EVERYTHING in scopes and scopes <= set(SCOPES), f"{said}: {scopes}"
        beyond = said.template.startswith("/api/v1/operator-keys")
        assert (scopes == {EVERYTHING}) == beyond, f"{said} needs a scope of its own in its decorator: {scopes}"


async def test_several_scopes_permit_what_each_permits(plane: Plane) -> None:
    _, client = await operator(plane, "metrics:read", "fleet")
    statuses = [(await client.get(path)).status_code for path in ("/metrics", "/gpus", "/usage", "/tenants")]
    assert statuses == [200, 200, 403, 403]


async def test_the_refusal_names_the_scope_that_is_missing(plane: Plane) -> None:
    _, client = await operator(plane, "metrics:read")
    problem = made(await client.get("/gpus"), 403)
    assert problem["code"] == "insufficient_scope"
    wanted = "this needs an operator's key with the scope fleet or everything; this key has metrics:read"
    assert problem["detail"] == wanted


async def test_a_tenants_key_is_as_before_and_never_an_operators(plane: Plane) -> None:
    client = await plane.tenant("acme")
    assert made(await client.get("/operator-keys"), 403)["code"] == "admin_only"
    assert made(await client.get("/metrics"), 403)["code"] == "admin_only"
    assert (await client.get("/deployments")).status_code == 200
    made(await client.post("/tenants/acme/keys", json={"scopes": ["metrics:read"]}), 422)


# ── nobody gives more than they have ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scope", [scope for scope in SCOPES if scope != EVERYTHING])
async def test_no_lesser_key_makes_lists_rotates_or_revokes_operators_keys(plane: Plane, scope: str) -> None:
    key, client = await operator(plane, scope)
    everything, _ = await operator(plane, EVERYTHING)
    for body in ({"name": "bob", "scopes": [EVERYTHING]}, {"name": "bob", "scopes": [scope]}):
        assert (await client.post("/operator-keys", json=body)).status_code == 403
    assert (await client.get("/operator-keys")).status_code == 403
    for id in (key["id"], everything["id"]):
        assert (await client.post(f"/operator-keys/{id}:rotate", json={})).status_code == 403
        assert (await client.delete(f"/operator-keys/{id}")).status_code == 403


async def test_a_key_that_ends_makes_no_key_that_ends_later(plane: Plane) -> None:
    key, client = await operator(plane, EVERYTHING, expires_at=in_days(1))
    later = {"name": "bob", "scopes": ["fleet"], "expires_at": in_days(2)}
    assert made(await client.post("/operator-keys", json=later), 422)["errors"][0]["pointer"] == "/expires_at"
    endless = made(await client.post("/operator-keys", json={"name": "bob", "scopes": ["fleet"]}))
    assert endless["expires_at"] == key["expires_at"]
    itself = made(await client.post(f"/operator-keys/{key['id']}:rotate", json={}))
    assert itself["expires_at"] == key["expires_at"]


# ── a key's life ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_operators_key_is_shown_once_rotated_with_an_overlap_and_revoked(plane: Plane) -> None:
    key, client = await operator(plane, "fleet")
    assert key["key"].startswith(key["prefix"] + "-") and (key["state"], key["scopes"]) == ("valid", ["fleet"])
    listed = made(await plane.admin.get("/operator-keys"), 200)["data"]
    assert [seen["id"] for seen in listed] == [key["id"]] and "key" not in listed[0]
    new = made(await plane.admin.post(f"/operator-keys/{key['id']}:rotate", json={"overlap_s": 3600}))
    successor = plane.client(new["key"])
    assert (new["name"], new["scopes"]) == ("alice", ["fleet"])
    assert [(await one.get("/gpus")).status_code for one in (client, successor)] == [200, 200]
    assert (await plane.admin.delete(f"/operator-keys/{key['id']}")).status_code == 204
    refused = made(await client.get("/gpus"), 401)
    assert (refused["code"], refused["detail"]) == ("revoked_api_key", "this API key was revoked: ask for a new key")
    assert (await successor.get("/gpus")).status_code == 200
    assert made(await plane.admin.post(f"/operator-keys/{key['id']}:rotate", json={}), 409)["code"] == "key_ended"
    assert (await plane.admin.delete("/operator-keys/nothing")).status_code == 404


async def test_a_rotation_without_overlap_ends_the_old_key_at_once(plane: Plane) -> None:
    key, client = await operator(plane, "fleet")
    made(await plane.admin.post(f"/operator-keys/{key['id']}:rotate", json={"overlap_s": 0}))
    assert made(await client.get("/gpus"), 401)["code"] == "expired_api_key"


async def test_the_successor_of_a_key_that_ends_lives_as_long_as_the_key_was_made_to_live(plane: Plane) -> None:
    key, _ = await operator(plane, "fleet", expires_at=in_days(90))
    new = made(await plane.admin.post(f"/operator-keys/{key['id']}:rotate", json={}))
    left = datetime.fromisoformat(new["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=89) < left < timedelta(days=91)


async def test_an_expired_operators_key_is_refused_with_its_own_sentence(plane: Plane) -> None:
    now = [0]
    key, _ = await operator(plane, "fleet", expires_at=in_days(1))
    later = Auth(plane.database, PEPPER, ADMIN_KEY, now=lambda: now[0])
    assert (await later.caller(bearer(key["key"]))).operator == {"fleet"}
    now[0] = 1 << 60
    with pytest.raises(Exception, match="has expired"):
        await later.caller(bearer(key["key"]))


@pytest.mark.parametrize(
    ("said", "pointer"),
    [
        ({"scopes": []}, "/scopes"),
        ({"scopes": ["root"]}, "/scopes/0"),
        ({"name": "a:b"}, "/name"),
        ({"expires_at": "2020-01-01T00:00:00Z"}, "/expires_at"),
    ],
)
async def test_an_operators_key_that_can_not_be_is_refused(plane: Plane, said: dict[str, Any], pointer: str) -> None:
    body = {"name": "bob", "scopes": ["fleet"]} | said
    assert made(await plane.admin.post("/operator-keys", json=body), 422)["errors"][0]["pointer"] == pointer


async def test_the_secret_is_stored_nowhere(plane: Plane) -> None:
    key, client = await operator(plane, "fleet")
    assert (await client.get("/gpus")).status_code == 200
    await plane.auth.write_uses()
    files = [path for path in plane.folder.rglob("staccato.db*") if path.is_file()]
    assert files and not any(key["key"].encode() in path.read_bytes() for path in files)


# ── the audit log ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_audit_log_names_the_holder_of_each_deed(plane: Plane) -> None:
    key, client = await operator(plane, "tenants")
    made(await client.post("/tenants", json={"name": "acme"}))
    made(await client.post("/tenants/acme/keys", json={}))
    rows = made(await plane.admin.get("/audit"), 200)["data"]
    holder = f"operator:{key['id']}:alice"
    deeds = [("operator_key.created", "admin"), ("tenant.created", holder), ("key.created", holder)]
    assert [(row["kind"], row["by"]) for row in rows] == deeds
    assert key["key"] not in str(rows)
    assert made(await plane.admin.get("/audit:verify"), 200)["ok"]


async def test_two_operators_do_not_hear_each_others_repeated_answers(plane: Plane) -> None:
    _, alice = await operator(plane, "tenants")
    _, bob = await operator(plane, "tenants", name="bob")
    once = {"idempotency-key": "same"}
    made(await alice.post("/tenants", json={"name": "acme"}, headers=once))
    assert (await bob.post("/tenants", json={"name": "acme"}, headers=once)).status_code == 409


# ── the given key for Prometheus ──────────────────────────────────────────────────────────────────────────────────────


async def test_the_given_metrics_key_reads_metrics_and_nothing_else(plane: Plane) -> None:
    known = Auth(plane.database, PEPPER, ADMIN_KEY, metrics_key="sk-st-metrics-1")
    caller = await known.caller(bearer("sk-st-metrics-1"))
    assert caller.operator == {"metrics:read"} and not caller.scopes
    assert (await known.caller(bearer(ADMIN_KEY))).operator == {EVERYTHING}


async def test_an_operator_learns_what_its_key_is_for(plane: Plane) -> None:
    key, client = await operator(plane, "fleet", "billing:read")
    me = made(await client.get("/me"), 200)
    assert me == {"admin": True, "tenant": None, "key_id": key["id"], "scopes": ["billing:read", "fleet"]}
