"""Tenants and the life of a key."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from store.db import tables, tenants
from store.db.database import Database, Taken, new_id, now_us
from store.db.tenants import SCOPES, TenantInUse

PEPPER = b"pepper"
HOUR_US = 3600 * 1_000_000


async def test_two_tenants_never_have_one_name(database: Database) -> None:
    async with database.write() as connection:
        await tenants.create(connection, "acme", 1)
    with pytest.raises(Taken, match="already a tenant 'acme'"):
        async with database.write() as connection:
            await tenants.create(connection, "acme", 2)


async def test_the_name_of_a_deleted_tenant_is_free_again(database: Database) -> None:
    async with database.write() as connection:
        first = await tenants.create(connection, "acme", 1)
        await tenants.delete(connection, first, 2)
        second = await tenants.create(connection, "acme", 3)
        assert await tenants.tenant(connection, "acme") == second != first


async def test_a_tenant_with_deployments_is_not_deleted(database: Database) -> None:
    async with database.write() as connection:
        tenant = await tenants.create(connection, "acme", 1)
        row = {"id": new_id(), "tenant_id": tenant.id, "name": "chat", "desired_state": "awake", "version": 1}
        await connection.execute(tables.deployments.insert().values(**row, active_revision=1, created_us=1))
        with pytest.raises(TenantInUse, match="1 deployment: "):
            await tenants.delete(connection, tenant, 2)


async def test_a_key_is_found_by_its_secret_until_it_is_revoked(database: Database) -> None:
    async with database.write() as connection:
        tenant = await tenants.create(connection, "acme", 1)
        key, secret = await tenants.create_key(connection, PEPPER, tenant.id, "laptop", SCOPES, None, 1)
        known = await tenants.key_by_mac(connection, tenants.key_mac(PEPPER, secret))
        assert known is not None and (known.id, known.tenant, known.scopes) == (key.id, "acme", SCOPES)
        assert await tenants.key_by_mac(connection, tenants.key_mac(PEPPER, secret + "0")) is None
        assert await tenants.key_by_mac(connection, tenants.key_mac(b"another", secret)) is None
        await tenants.revoke_key(connection, key, 2)
        ended = await tenants.key_by_mac(connection, tenants.key_mac(PEPPER, secret))
        assert ended is not None and ended.revoked


async def test_the_keys_of_a_deleted_tenant_are_revoked(database: Database) -> None:
    async with database.write() as connection:
        tenant = await tenants.create(connection, "acme", 1)
        _, secret = await tenants.create_key(connection, PEPPER, tenant.id, "", SCOPES, None, 1)
        await tenants.delete(connection, tenant, 2)
        ended = await tenants.key_by_mac(connection, tenants.key_mac(PEPPER, secret))
        assert ended is not None and ended.revoked
        assert [key.revoked_us for key in await tenants.listed_keys(connection, tenant.id, "", 9)] == [2]


async def test_the_secret_of_a_key_is_nowhere_in_the_database(database: Database) -> None:
    async with database.write() as connection:
        tenant = await tenants.create(connection, "acme", 1)
        key, secret = await tenants.create_key(connection, PEPPER, tenant.id, "", SCOPES, None, 1)
        (row,) = (await connection.execute(select(tables.keys))).all()
    assert secret.startswith(key.prefix)
    assert secret.removeprefix(key.prefix).strip("-") not in " ".join(map(str, row))


async def test_a_rotated_key_works_beside_its_successor_until_the_overlap_ends(database: Database) -> None:
    now = now_us()
    async with database.write() as connection:
        tenant = await tenants.create(connection, "acme", now)
        old, _ = await tenants.create_key(connection, PEPPER, tenant.id, "laptop", frozenset({"inference"}), None, now)
        new, secret = await tenants.rotate_key(connection, PEPPER, old, HOUR_US, now)
        assert (new.name, new.scopes, new.expires_us) == ("laptop", frozenset({"inference"}), None)
        kept = await tenants.key(connection, tenant.id, old.id)
        assert kept is not None and kept.expires_us == now + HOUR_US
        again, _ = await tenants.rotate_key(connection, PEPPER, kept, 9 * HOUR_US, now)
        kept = await tenants.key(connection, tenant.id, old.id)
        assert kept is not None and kept.expires_us == now + HOUR_US  # rotating never prolongs


async def test_a_key_of_another_tenant_is_not_found(database: Database) -> None:
    async with database.write() as connection:
        one, other = [await tenants.create(connection, name, 1) for name in ("one", "other")]
        key, _ = await tenants.create_key(connection, PEPPER, one.id, "", SCOPES, None, 1)
        assert await tenants.key(connection, other.id, key.id) is None
