"""Who asks: keys that are right, wrong, expired, revoked; and from memory."""

from __future__ import annotations

import asyncio

import pytest

from gateway import auth
from gateway.auth import ADMIN, Auth
from store import tenants
from store.db import Database, DatabaseError, now_us
from store.tenants import SCOPES

PEPPER, ADMIN_KEY = b"pepper", "sk-st-admin"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


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
    assert await Auth(database, PEPPER, ADMIN_KEY).caller(headers) is None


async def test_an_expired_key_is_nobody_though_it_is_remembered(database: Database) -> None:
    now = [now_us()]
    _, secret = await _key(database, expires_us=now[0] + 10)
    known = Auth(database, PEPPER, ADMIN_KEY, now=lambda: now[0])
    assert await known.caller(bearer(secret))
    now[0] += 10
    assert await known.caller(bearer(secret)) is None


async def test_a_revoked_key_is_refused_at_once_here_and_elsewhere_when_memory_ends(database: Database) -> None:
    key, secret = await _key(database)
    here, elsewhere = Auth(database, PEPPER, ADMIN_KEY), Auth(database, PEPPER, ADMIN_KEY)
    assert await here.caller(bearer(secret)) and await elsewhere.caller(bearer(secret))
    async with database.write() as connection:
        await tenants.revoke_key(connection, key, 2)
    here.forget()
    assert await here.caller(bearer(secret)) is None
    assert await elsewhere.caller(bearer(secret))
    assert auth.TARGET_TTL_S <= 2


async def test_a_gateway_that_is_asked_all_the_time_refuses_a_revoked_key_within_five_seconds(
    database: Database,
) -> None:
    """By the clock: it remembers from its last look, not from the last time it was asked."""
    key, secret = await _key(database)
    elsewhere = Auth(database, PEPPER, ADMIN_KEY)
    assert await elsewhere.caller(bearer(secret))
    async with database.write() as connection:
        await tenants.revoke_key(connection, key, 2)
    async with asyncio.timeout(5):
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
