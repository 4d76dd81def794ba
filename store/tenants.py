"""Tenants and their keys. A key is shown once and kept as its HMAC; whoever steals the database can't use it."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass, replace

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.db import AnyRow, added_once, new_id
from store.tables import deployments, keys, tenants

SCOPES = frozenset({"inference", "control"})
OVERLAP_US = 24 * 3600 * 1_000_000  # how long a rotated key still works


@dataclass(frozen=True)
class Tenant:
    id: str
    name: str
    weight: float
    created_us: int


@dataclass(frozen=True)
class Key:
    """All that is known of a key but the key."""

    id: str
    tenant_id: str
    name: str
    prefix: str
    scopes: frozenset[str]
    created_us: int
    expires_us: int | None
    revoked_us: int | None


@dataclass(frozen=True)
class KnownKey:
    """A key that was presented and is not revoked."""

    id: str
    tenant_id: str
    tenant: str
    scopes: frozenset[str]
    expires_us: int | None


class TenantInUse(Exception):
    """`deployments` are in its way."""

    def __init__(self, name: str, deployments: int) -> None:
        super().__init__(f"tenant {name!r} still has {deployments} deployments: delete them first")


# ── tenants ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_TENANT = (tenants.c.id, tenants.c.name, tenants.c.weight, tenants.c.created_us)
_ALIVE = tenants.c.deleted_us.is_(None)


async def create(connection: AsyncConnection, name: str, now_us: int, weight: float = 1.0) -> Tenant:
    """Raises Taken."""
    tenant = Tenant(new_id(), name, weight, now_us)
    with added_once("tenant", name):
        await connection.execute(tenants.insert().values(id=tenant.id, name=name, weight=weight, created_us=now_us))
    return tenant


async def weigh(connection: AsyncConnection, tenant: Tenant, weight: float) -> Tenant:
    await connection.execute(update(tenants).where(tenants.c.id == tenant.id).values(weight=weight))
    return replace(tenant, weight=weight)


async def tenant(connection: AsyncConnection, name: str, lock: bool = False) -> Tenant | None:
    """`lock` holds it against deletion until the transaction ends."""
    query = select(*_TENANT).where(_ALIVE, tenants.c.name == name)
    row = (await connection.execute(query.with_for_update() if lock else query)).one_or_none()
    return Tenant(*row) if row else None


async def listed(connection: AsyncConnection, after: str, most: int) -> list[Tenant]:
    query = select(*_TENANT).where(_ALIVE, tenants.c.id > after).order_by(tenants.c.id).limit(most)
    return [Tenant(*row) for row in await connection.execute(query)]


async def delete(connection: AsyncConnection, tenant: Tenant, now_us: int) -> None:
    """With its keys; what it used stays on the bill. Raises TenantInUse."""
    alive = (deployments.c.tenant_id == tenant.id) & deployments.c.deleted_us.is_(None)
    if count := await connection.scalar(select(func.count()).select_from(deployments).where(alive)):
        raise TenantInUse(tenant.name, count)
    await connection.execute(update(tenants).where(tenants.c.id == tenant.id).values(deleted_us=now_us))
    await _revoke(connection, keys.c.tenant_id == tenant.id, now_us)


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_KEY = (
    keys.c.id,
    keys.c.tenant_id,
    keys.c.name,
    keys.c.prefix,
    keys.c.scopes,
    keys.c.created_us,
    keys.c.expires_us,
    keys.c.revoked_us,
)


def key_mac(pepper: bytes, secret: str) -> str:
    return hmac.new(pepper, secret.encode(), hashlib.sha256).hexdigest()


async def create_key(
    connection: AsyncConnection,
    pepper: bytes,
    tenant_id: str,
    name: str,
    scopes: frozenset[str],
    expires_us: int | None,
    now_us: int,
) -> tuple[Key, str]:
    """The key and its secret, which nobody can ask for again."""
    id = new_id()
    prefix = f"sk-st-{id}"
    secret = f"{prefix}-{secrets.token_hex(24)}"
    key = Key(id, tenant_id, name, prefix, scopes, now_us, expires_us, None)
    await connection.execute(
        keys.insert().values(
            id=id,
            tenant_id=tenant_id,
            name=name,
            prefix=prefix,
            mac=key_mac(pepper, secret),
            scopes=json.dumps(sorted(scopes)),
            created_us=now_us,
            expires_us=expires_us,
        )
    )
    return key, secret


async def rotate_key(
    connection: AsyncConnection, pepper: bytes, old: Key, overlap_us: int, now_us: int
) -> tuple[Key, str]:
    """A new key like the old one, which ends after the overlap, or earlier if it was to."""
    ends_us = min(now_us + overlap_us, old.expires_us or now_us + overlap_us)
    await connection.execute(update(keys).where(keys.c.id == old.id).values(expires_us=ends_us))
    return await create_key(connection, pepper, old.tenant_id, old.name, old.scopes, None, now_us)


async def revoke_key(connection: AsyncConnection, key: Key, now_us: int) -> None:
    await _revoke(connection, keys.c.id == key.id, now_us)


async def _revoke(connection: AsyncConnection, which: ColumnElement[bool], now_us: int) -> None:
    await connection.execute(update(keys).where(which, keys.c.revoked_us.is_(None)).values(revoked_us=now_us))


async def key(connection: AsyncConnection, tenant_id: str, id: str) -> Key | None:
    query = select(*_KEY).where(keys.c.tenant_id == tenant_id, keys.c.id == id)
    row = (await connection.execute(query)).one_or_none()
    return _key(row) if row else None


async def listed_keys(connection: AsyncConnection, tenant_id: str, after: str, most: int) -> list[Key]:
    query = select(*_KEY).where(keys.c.tenant_id == tenant_id, keys.c.id > after).order_by(keys.c.id).limit(most)
    return [_key(row) for row in await connection.execute(query)]


async def key_by_mac(connection: AsyncConnection, mac: str) -> KnownKey | None:
    """None for a key that is unknown or revoked."""
    query = select(keys.c.id, tenants.c.id, tenants.c.name, keys.c.scopes, keys.c.expires_us).join(tenants)
    row = (await connection.execute(query.where(keys.c.mac == mac, keys.c.revoked_us.is_(None), _ALIVE))).one_or_none()
    return KnownKey(row[0], row[1], row[2], frozenset(json.loads(row[3])), row[4]) if row else None


def _key(row: AnyRow) -> Key:
    return Key(row[0], row[1], row[2], row[3], frozenset(json.loads(row[4])), row[5], row[6], row[7])
