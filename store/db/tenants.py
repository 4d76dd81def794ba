"""Tenants and their keys. A key is shown once and stored as an HMAC: a stolen database gives no usable key."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass, replace

import msgspec
from sqlalchemy import ColumnElement, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.contract.limits import NO_LIMITS, Limits
from store.contract.priorities import Priority, priority
from store.db.database import AnyRow, added_once, new_id
from store.db.tables import deployments, keys, models, tenants

SCOPES = frozenset({"inference", "control"})
OVERLAP_US = 24 * 3600 * 1_000_000  # a rotated key still works so long


@dataclass(frozen=True)
class Tenant:
    id: str
    name: str
    weight: float
    limits: Limits
    created_us: int
    managed_by: str | None = None  # declared object that the tenant was made for; None: made by hand
    keep_prefixes: bool = True  # False: no deployment of the tenant keeps prefixes of ended requests


@dataclass(frozen=True)
class Key:
    """Key of a tenant without the secret."""

    id: str
    tenant_id: str
    name: str
    prefix: str
    scopes: frozenset[str]
    created_us: int
    expires_us: int | None
    revoked_us: int | None
    last_used_us: int | None
    priority: Priority  # highest priority that requests of the key may ask for


@dataclass(frozen=True)
class KnownKey:
    """Key of a request, valid, expired or revoked, with the tenant's limits."""

    id: str
    tenant_id: str
    tenant: str
    limits: Limits
    scopes: frozenset[str]
    expires_us: int | None
    revoked: bool
    priority: Priority


class TenantInUse(Exception):
    """Error of deleting a tenant that still has deployments; `deployments` is the number."""

    def __init__(self, name: str, deployments: int) -> None:
        many = "1 deployment" if deployments == 1 else f"{deployments} deployments"
        super().__init__(f"tenant {name!r} still has {many}: delete deployments first, with `staccato rm NAME`")


# ── tenants ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_TENANT = (
    tenants.c.id,
    tenants.c.name,
    tenants.c.weight,
    tenants.c.limits,
    tenants.c.created_us,
    tenants.c.managed_by,
    tenants.c.keep_prefixes,
)
_ALIVE = tenants.c.deleted_us.is_(None)


async def create(
    connection: AsyncConnection,
    name: str,
    now_us: int,
    weight: float = 1.0,
    limits: Limits = NO_LIMITS,
    managed_by: str | None = None,
    keep_prefixes: bool = True,
) -> Tenant:
    """Create a tenant. Raises Taken."""
    tenant = Tenant(new_id(), name, weight, limits, now_us, managed_by, keep_prefixes)
    row = {"id": tenant.id, "name": name, "weight": weight, "limits": _limits_text(limits), "created_us": now_us}
    row |= {"managed_by": managed_by, "keep_prefixes": keep_prefixes}
    with added_once("tenant", name):
        await connection.execute(tenants.insert().values(**row))
    return tenant


async def change(
    connection: AsyncConnection, tenant: Tenant, weight: float, limits: Limits, keep_prefixes: bool
) -> Tenant:
    row = {"weight": weight, "limits": _limits_text(limits), "keep_prefixes": keep_prefixes}
    await connection.execute(update(tenants).where(tenants.c.id == tenant.id).values(**row))
    return replace(tenant, weight=weight, limits=limits, keep_prefixes=keep_prefixes)


def _limits_text(limits: Limits) -> str | None:
    return None if limits == NO_LIMITS else msgspec.json.encode(limits).decode()


def _limits(text: str | None) -> Limits:
    return NO_LIMITS if text is None else msgspec.json.decode(text, type=Limits)


async def tenant(connection: AsyncConnection, name: str, lock: bool = False) -> Tenant | None:
    """Return a tenant by name. `lock` keeps the tenant from being deleted until the transaction ends."""
    query = select(*_TENANT).where(_ALIVE, tenants.c.name == name)
    row = (await connection.execute(query.with_for_update() if lock else query)).one_or_none()
    return _tenant(row) if row else None


async def by_id(connection: AsyncConnection, id: str) -> Tenant | None:
    row = (await connection.execute(select(*_TENANT).where(_ALIVE, tenants.c.id == id))).one_or_none()
    return _tenant(row) if row else None


async def listed(connection: AsyncConnection, after: str, most: int) -> list[Tenant]:
    query = select(*_TENANT).where(_ALIVE, tenants.c.id > after).order_by(tenants.c.id).limit(most)
    return [_tenant(row) for row in await connection.execute(query)]


def _tenant(row: AnyRow) -> Tenant:
    return Tenant(row[0], row[1], row[2], _limits(row[3]), row[4], row[5], row[6])


async def delete(connection: AsyncConnection, tenant: Tenant, now_us: int) -> None:
    """Delete a tenant with the tenant's models, and revoke the keys; usage stays on the bill. Raises TenantInUse."""
    alive = (deployments.c.tenant_id == tenant.id) & deployments.c.deleted_us.is_(None)
    if count := await connection.scalar(select(func.count()).select_from(deployments).where(alive)):
        raise TenantInUse(tenant.name, count)
    await connection.execute(update(tenants).where(tenants.c.id == tenant.id).values(deleted_us=now_us))
    theirs = (models.c.tenant_id == tenant.id) & models.c.deleted_us.is_(None)
    await connection.execute(update(models).where(theirs).values(deleted_us=now_us))
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
    keys.c.last_used_us,
    keys.c.priority,
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
    bound: Priority = Priority.NORMAL,
) -> tuple[Key, str]:
    """Make a key. Return the key and the secret; no later call returns the secret.

    `bound`: highest priority that requests of the key may ask for."""
    id = new_id()
    prefix = f"sk-st-{id}"
    secret = f"{prefix}-{secrets.token_hex(24)}"
    key = Key(id, tenant_id, name, prefix, scopes, now_us, expires_us, None, None, bound)
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
            priority=bound.word,
        )
    )
    return key, secret


async def rotate_key(
    connection: AsyncConnection, pepper: bytes, old: Key, overlap_us: int, now_us: int
) -> tuple[Key, str]:
    """Make a key with the old key's name, scopes and priority. The old key ends after the overlap, if not earlier."""
    ends_us = min(now_us + overlap_us, old.expires_us or now_us + overlap_us)
    await connection.execute(update(keys).where(keys.c.id == old.id).values(expires_us=ends_us))
    return await create_key(connection, pepper, old.tenant_id, old.name, old.scopes, None, now_us, old.priority)


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
    """Return the key with an HMAC, even if expired or revoked; None if unknown. A deleted tenant's keys are revoked."""
    ends = (keys.c.expires_us, keys.c.revoked_us, keys.c.priority)
    columns = (keys.c.id, tenants.c.id, tenants.c.name, tenants.c.limits, keys.c.scopes, *ends)
    row = (await connection.execute(select(*columns).join(tenants).where(keys.c.mac == mac))).one_or_none()
    if row is None:
        return None
    scopes = frozenset[str](json.loads(row[4]))
    return KnownKey(row[0], row[1], row[2], _limits(row[3]), scopes, row[5], row[6] is not None, priority(row[7]))


async def keys_used(connection: AsyncConnection, ids: list[str], now_us: int) -> None:
    """Note that the keys with the given ids were used by `now_us`. Ids of operators' keys are passed over."""
    older = keys.c.id.in_(ids) & or_(keys.c.last_used_us.is_(None), keys.c.last_used_us < now_us)
    await connection.execute(update(keys).where(older).values(last_used_us=now_us))


def _key(row: AnyRow) -> Key:
    scopes = frozenset[str](json.loads(row[4]))
    return Key(row[0], row[1], row[2], row[3], scopes, row[5], row[6], row[7], row[8], priority(row[9]))
