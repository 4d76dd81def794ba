"""Callers by key: keys that are valid, wrong, expired or revoked; and answers from memory."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http import auth
from gateway.http.auth import ADMIN, Auth, Caller
from gateway.http.errors import Problem
from store.db import tenants
from store.db.database import Database, DatabaseError, now_us
from store.db.tenants import SCOPES

PEPPER, ADMIN_KEY = b"pepper", "sk-st-admin"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def refused(known: Auth, headers: dict[str, str]) -> Problem:
    with pytest.raises(Problem) as found:
        await known.caller(headers)
    assert found.value.status == 401
    return found.value


async def _key(database: Database, tenant: str = "acme", expires_us: int | None = None) -> tuple[tenants.Key, str]:
    async with database.write() as connection:
        owner = await tenants.create(connection, tenant, 1)
        return await tenants.create_key(connection, PEPPER, owner.id, "", SCOPES, expires_us, 1)


async def test_a_tenants_key_says_which_tenant(database: Database) -> None:
    key, secret = await _key(database)
    caller = await Auth(database, PEPPER, ADMIN_KEY).caller(bearer(secret))
    assert caller is not None and (caller.tenant, caller.tenant_id, caller.key_id) == ("acme", key.tenant_id, key.id)
    assert not caller.admin


async def test_the_admin_key_has_no_tenant(database: Database) -> None:
    assert await Auth(database, PEPPER, ADMIN_KEY).caller(bearer(ADMIN_KEY)) == ADMIN
    assert ADMIN.admin and ADMIN.tenant_id is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("sk-st-0123-4567"),
        bearer(ADMIN_KEY + "x"),
        bearer("schlüssel"),
        {"authorization": ADMIN_KEY},
        {"authorization": f"Basic {ADMIN_KEY}"},
    ],
)
async def test_no_key_and_a_wrong_key_are_nobody(database: Database, headers: dict[str, str]) -> None:
    assert (await refused(Auth(database, PEPPER, ADMIN_KEY), headers)).code == "invalid_api_key"


async def test_an_expired_key_is_nobody_though_it_is_remembered(database: Database) -> None:
    now = [now_us()]
    _, secret = await _key(database, expires_us=now[0] + 10)
    known = Auth(database, PEPPER, ADMIN_KEY, now=lambda: now[0])
    assert await known.caller(bearer(secret))
    now[0] += 10
    assert (await refused(known, bearer(secret))).detail == "this API key has expired: ask for a new key"


async def test_a_revoked_key_is_refused_at_once_here_and_elsewhere_when_memory_ends(database: Database) -> None:
    key, secret = await _key(database)
    here, elsewhere = Auth(database, PEPPER, ADMIN_KEY), Auth(database, PEPPER, ADMIN_KEY)
    assert await here.caller(bearer(secret)) and await elsewhere.caller(bearer(secret))
    async with database.write() as connection:
        await tenants.revoke_key(connection, key, 2)
    here.forget()
    assert (await refused(here, bearer(secret))).detail == "this API key was revoked: ask for a new key"
    assert await elsewhere.caller(bearer(secret))
    assert auth.TARGET_TTL_S <= 2


async def test_a_gateway_that_is_asked_all_the_time_refuses_a_revoked_key_within_five_seconds(
    database: Database,
) -> None:
    """A key's age in memory counts from the last look into the database, not from the last request."""
    key, secret = await _key(database)
    elsewhere = Auth(database, PEPPER, ADMIN_KEY)
    assert await elsewhere.caller(bearer(secret))
    async with database.write() as connection:
        await tenants.revoke_key(connection, key, 2)
    async with asyncio.timeout(30):
        with pytest.raises(Problem, match="revoked"):
            while await elsewhere.caller(bearer(secret)):
                await asyncio.sleep(0.02)


async def test_a_warm_request_asks_no_database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Database.open(database_url) as database:
        _, secret = await _key(database)
        warm = Auth(database, PEPPER, ADMIN_KEY)
        caller = await warm.caller(bearer(secret))
        assert caller is not None and caller.tenant_id is not None
        assert await warm.deployment(caller.tenant_id, "chat") is None

        def away() -> None:
            raise DatabaseError("away")

        monkeypatch.setattr(database, "read", away)
        assert await warm.caller(bearer(secret)) == caller
        assert await warm.deployment(caller.tenant_id, "chat") is None
        with pytest.raises(DatabaseError):
            await warm.deployment(caller.tenant_id, "cold")


async def test_only_the_operator_stands_on_anothers_ground(database: Database) -> None:
    _, secret = await _key(database, "acme")
    await _key(database, "other")
    known = Auth(database, PEPPER, ADMIN_KEY)
    caller = await known.caller(bearer(secret))
    assert caller is not None
    assert await known.within(caller, "acme") == caller
    assert await known.within(caller, "other") is None
    operator = await known.within(ADMIN, "other")
    assert operator is not None and operator.admin and operator.tenant == "other"
    assert await known.within(ADMIN, "nobody") is None


# ── what a wrong key hears ────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_missing_and_a_mistyped_key_hear_different_sentences(database: Database) -> None:
    _, secret = await _key(database)
    known = Auth(database, PEPPER, ADMIN_KEY)
    assert "no API key" in (await refused(known, {})).detail
    mistyped = (await refused(known, bearer(secret[:-1] + "x"))).detail
    assert mistyped == "this API key is not known here: check that the whole key was copied, sk-st-…"


async def test_a_stranger_who_knows_a_prefix_does_not_hear_what_became_of_the_key(database: Database) -> None:
    key, _ = await _key(database, expires_us=1)
    known = Auth(database, PEPPER, ADMIN_KEY)
    guesses = [f"{key.prefix}-{'0' * 48}", f"sk-st-{'0' * 32}-{'0' * 48}"]
    heard = [await refused(known, bearer(guess)) for guess in guesses]
    assert len({(problem.code, problem.detail) for problem in heard}) == 1


# ── x-api-key ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_x_api_key_is_as_good_as_bearer(database: Database) -> None:
    _, secret = await _key(database)
    known = Auth(database, PEPPER, ADMIN_KEY)
    by_bearer = await known.caller(bearer(secret))
    assert await known.caller({"x-api-key": secret}) == by_bearer
    assert await known.caller({"x-api-key": secret} | bearer(secret)) == by_bearer
    assert await known.caller({"x-api-key": secret, "authorization": "Basic Zm9vOmJhcg=="}) == by_bearer


async def test_two_different_keys_in_one_request_are_refused(database: Database) -> None:
    """If two keys were taken, a proxy that adds a key would decide which tenant pays."""
    _, secret = await _key(database)
    heard = await refused(Auth(database, PEPPER, ADMIN_KEY), {"x-api-key": ADMIN_KEY} | bearer(secret))
    assert heard.detail == "Authorization and x-api-key carry two different API keys: send one key"


# ── last use ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_use_of_a_key_is_written_beside_requests_and_not_in_them(database: Database) -> None:
    now = [now_us()]
    key, secret = await _key(database)
    known = Auth(database, PEPPER, ADMIN_KEY, now=lambda: now[0])
    for _ in range(3):
        assert isinstance(await known.caller(bearer(secret)), Caller)

    async def last_used() -> int | None:
        async with database.read() as connection:
            found = await tenants.key(connection, key.tenant_id, key.id)
        assert found is not None
        return found.last_used_us

    assert await last_used() is None
    await known.write_uses()
    assert await last_used() == now[0]
    now[0] += 1
    await known.write_uses()
    assert await last_used() == now[0] - 1, "a key that was not used since is not written again"


async def test_the_uses_that_a_gateway_heard_of_are_written_when_it_stops(database: Database) -> None:
    key, secret = await _key(database)
    known = Auth(database, PEPPER, ADMIN_KEY)
    noting = asyncio.create_task(known.note_uses())
    await asyncio.sleep(0)
    await known.caller(bearer(secret))
    noting.cancel()
    await asyncio.gather(noting, return_exceptions=True)
    async with database.read() as connection:
        found = await tenants.key(connection, key.tenant_id, key.id)
    assert found is not None and found.last_used_us is not None
