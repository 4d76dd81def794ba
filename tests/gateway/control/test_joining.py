"""Routes for join tokens and joined runtimes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from store.contract.joining.proofs import TOKEN, JoinProof
from store.db.fleet import joining
from store.db.tenants import key_mac
from tests.gateway.plane import PEPPER, Plane, made


def in_hours(hours: float) -> str:
    return (datetime.now(UTC) + timedelta(hours=hours)).isoformat()


async def join(plane: Plane, id: str, secret: str) -> None:
    """Have the database bind the runtime, as the join service does."""
    await joining.admit(plane.database, JoinProof(id, f"U-{id}", True), key_mac(PEPPER, secret))


async def test_a_token_is_made_shown_once_listed_used_and_revoked(plane: Plane) -> None:
    token = made(await plane.admin.post("/join-tokens", json={"runtime": "r1"}))
    assert TOKEN.fullmatch(token["key"]) and (token["runtime"], token["state"]) == ("r1", "valid")
    other = made(await plane.admin.post("/join-tokens", json={}))
    await join(plane, "r1", token["key"])
    assert (await plane.admin.delete(f"/join-tokens/{other['id']}")).status_code == 204
    listed = made(await plane.admin.get("/join-tokens"), 200)
    assert [(row["state"], row["used_by"]) for row in listed["data"]] == [("used", "r1"), ("revoked", None)]
    assert token["key"] not in str(listed)
    files = [path for path in plane.folder.rglob("staccato.db*") if path.is_file()]
    assert files and not any(token["key"].encode() in path.read_bytes() for path in files)


async def test_a_token_lasts_an_hour_unless_said_and_a_month_at_most(plane: Plane) -> None:
    usual = made(await plane.admin.post("/join-tokens", json={}))
    life = datetime.fromisoformat(usual["expires_at"]) - datetime.fromisoformat(usual["created_at"])
    assert life == timedelta(hours=1)
    said = made(await plane.admin.post("/join-tokens", json={"expires_at": in_hours(2)}))
    assert said["expires_at"] > usual["expires_at"]
    for wrong in (in_hours(-1), in_hours(31 * 24)):
        problem = made(await plane.admin.post("/join-tokens", json={"expires_at": wrong}), 422)
        assert "not within the next 30 days" in problem["detail"]


@pytest.mark.parametrize("id", ("*", ">", "a.b", "", "a" * 64))
async def test_an_id_that_is_no_word_of_a_subject_gets_no_token(plane: Plane, id: str) -> None:
    made(await plane.admin.post("/join-tokens", json={"runtime": id}), 422)


async def test_a_repeated_request_for_a_token_makes_one_token_and_repeats_no_secret(plane: Plane) -> None:
    once = {"idempotency-key": "same"}
    first = made(await plane.admin.post("/join-tokens", json={}, headers=once))
    again = made(await plane.admin.post("/join-tokens", json={}, headers=once))
    assert again["id"] == first["id"] and "key" not in again
    assert len(made(await plane.admin.get("/join-tokens"), 200)["data"]) == 1


async def test_a_joined_runtime_is_listed_and_revoked(plane: Plane) -> None:
    token = made(await plane.admin.post("/join-tokens", json={}))
    await join(plane, "r1", token["key"])
    (row,) = made(await plane.admin.get("/joined-runtimes"), 200)["data"]
    assert (row["id"], row["state"], row["token_id"], row["public_key"]) == ("r1", "joined", token["id"], "U-r1")
    for _ in range(2):  # the second time changes nothing
        assert (await plane.admin.delete("/joined-runtimes/r1")).status_code == 204
    (row,) = made(await plane.admin.get("/joined-runtimes"), 200)["data"]
    assert row["state"] == "revoked" and row["revoked_at"]
    kinds = [row["kind"] for row in made(await plane.admin.get("/audit"), 200)["data"]]
    assert kinds == ["join_token.created", "runtime.joined", "runtime.revoked", "runtime.revoked"]
    assert made(await plane.admin.get("/audit:verify"), 200)["ok"]


async def test_what_is_not_there_is_not_found(plane: Plane) -> None:
    for path in ("/join-tokens/none", "/joined-runtimes/none"):
        made(await plane.admin.delete(path), 404)
