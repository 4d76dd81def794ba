"""Operators' keys, with names, scopes and optional ends. The database keeps the HMAC of a key under the pepper.

The root key (STACCATO_ADMIN_KEY or DATA/admin.key) has no row in the table: the root key may do everything, and makes
the first operator's key.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Literal, get_args

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.db.database import AnyRow, new_id
from store.db.tables import operator_keys
from store.db.tenants import key_mac

Scope = Literal[
    "metrics:read",  # /api/v1/metrics: the series of tenants, for Prometheus
    "billing:read",  # usage, prices, corrections, exports
    "billing",  # billing:read, and to set prices and write corrections
    "fleet",  # to see and drain runtimes, to give roles to runtimes, to let runtimes join and to revoke them
    "deployments",  # models, deployments, breakdowns of requests, events
    "tenants",  # tenants, limits and keys of tenants; and so whatever a tenant's key permits
    "audit:read",  # the audit log and its check
    "everything",  # every scope above, and operators' keys
]
SCOPES: tuple[Scope, ...] = get_args(Scope)
EVERYTHING: Scope = "everything"
PREFIX = "sk-st-op-"  # tells an operator's key from a tenant's, so a single table is searched


@dataclass(frozen=True)
class OperatorKey:
    """An operator's key without the secret. Times are UNIX microseconds."""

    id: str
    name: str
    prefix: str
    scopes: frozenset[str]
    created_us: int
    expires_us: int | None
    revoked_us: int | None
    last_used_us: int | None


_COLUMNS = tuple(operator_keys.c[name] for name in OperatorKey.__dataclass_fields__)


async def create(
    connection: AsyncConnection,
    pepper: bytes,
    name: str,
    scopes: frozenset[str],
    expires_us: int | None,
    now_us: int,
) -> tuple[OperatorKey, str]:
    """Make a key. Returns the key and the secret; no later call returns the secret.

    `pepper`: the secret under which the database keeps keys. `expires_us`: end of the key; None: the key has no end."""
    id = new_id()
    prefix = PREFIX + id
    secret = f"{prefix}-{secrets.token_hex(24)}"
    key = OperatorKey(id, name, prefix, scopes, now_us, expires_us, None, None)
    row = vars(key) | {"scopes": json.dumps(sorted(scopes)), "mac": key_mac(pepper, secret)}
    await connection.execute(operator_keys.insert().values(**row))
    return key, secret


async def rotate(
    connection: AsyncConnection,
    pepper: bytes,
    old: OperatorKey,
    overlap_us: int,
    expires_us: int | None,
    now_us: int,
) -> tuple[OperatorKey, str]:
    """Make a key with the old key's name and scopes. Returns the new key and the secret, as `create` does.

    The old key ends after `overlap_us`, or at the end the old key had before, if earlier."""
    ends_us = min(now_us + overlap_us, old.expires_us or now_us + overlap_us)
    await connection.execute(update(operator_keys).where(operator_keys.c.id == old.id).values(expires_us=ends_us))
    return await create(connection, pepper, old.name, old.scopes, expires_us, now_us)


async def revoke(connection: AsyncConnection, key: OperatorKey, now_us: int) -> None:
    """Refuse a key from `now_us` on. A key revoked earlier keeps the first moment of revocation."""
    alive = (operator_keys.c.id == key.id) & operator_keys.c.revoked_us.is_(None)
    await connection.execute(update(operator_keys).where(alive).values(revoked_us=now_us))


async def key(connection: AsyncConnection, id: str) -> OperatorKey | None:
    row = (await connection.execute(select(*_COLUMNS).where(operator_keys.c.id == id))).one_or_none()
    return _key(row) if row else None


async def by_mac(connection: AsyncConnection, mac: str) -> OperatorKey | None:
    """The key with the HMAC `mac`, even if expired or revoked; None if no key has the HMAC."""
    row = (await connection.execute(select(*_COLUMNS).where(operator_keys.c.mac == mac))).one_or_none()
    return _key(row) if row else None


async def listed(connection: AsyncConnection, after: str, most: int) -> list[OperatorKey]:
    query = select(*_COLUMNS).where(operator_keys.c.id > after).order_by(operator_keys.c.id).limit(most)
    return [_key(row) for row in await connection.execute(query)]


async def used(connection: AsyncConnection, ids: list[str], now_us: int) -> None:
    """Note that the keys with the ids `ids` were used by `now_us`. Ids of tenants' keys are passed over."""
    last = operator_keys.c.last_used_us
    older = operator_keys.c.id.in_(ids) & or_(last.is_(None), last < now_us)
    await connection.execute(update(operator_keys).where(older).values(last_used_us=now_us))


def _key(row: AnyRow) -> OperatorKey:
    return OperatorKey(row[0], row[1], row[2], frozenset(json.loads(row[3])), *row[4:])
