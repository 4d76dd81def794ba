"""Who asks, and which engine serves what they ask for: from memory, the database is asked every few seconds.

A revoked key is refused everywhere within KEY_TTL_S; a change of a deployment is seen within TARGET_TTL_S, and at once
by the process that made it (`forget`).
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.cache import Cache
from store import deployments, tenants
from store.db import Database, now_us
from store.deployments import Target

__all__ = ["Auth", "Caller", "Target"]

KEY_TTL_S = 4.0
TARGET_TTL_S = 2.0


@dataclass(frozen=True, slots=True)
class Caller:
    """The operator (no tenant, no key of the table) or a tenant's key."""

    tenant_id: str | None
    tenant: str | None
    key_id: str | None
    scopes: frozenset[str]
    limits: tenants.Limits = tenants.NO_LIMITS

    @property
    def admin(self) -> bool:
        return self.key_id is None


ADMIN = Caller(None, None, None, tenants.SCOPES)


class Auth:
    """`pepper` and `admin_key` are secrets of the installation, kept in its data folder."""

    def __init__(self, database: Database, pepper: bytes, admin_key: str, now: Callable[[], int] = now_us) -> None:
        self.pepper = pepper
        self._database, self._admin_key, self._now = database, admin_key.encode(), now
        self._keys: Cache[str, tenants.KnownKey | None] = Cache(KEY_TTL_S)
        self._targets: Cache[tuple[str, str], Target | None] = Cache(TARGET_TTL_S)

    async def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """None without a key, or with one that is wrong, expired or revoked. Raises DatabaseError."""
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        secret = secret.strip()
        if scheme.lower() != "bearer" or not secret:
            return None
        if hmac.compare_digest(secret.encode(), self._admin_key):
            return ADMIN
        mac = tenants.key_mac(self.pepper, secret)
        key = await self._keys.get(mac, lambda: self._find_key(mac))
        if key is None or (key.expires_us is not None and key.expires_us <= self._now()):
            return None
        return Caller(key.tenant_id, key.tenant, key.id, key.scopes, key.limits)

    async def within(self, caller: Caller, tenant: str) -> Caller | None:
        """The caller on the ground of this tenant: a key of its own, or the operator. None for everybody else."""
        if caller.tenant == tenant:
            return caller
        if not caller.admin:
            return None
        async with self._database.read() as connection:
            found = await tenants.tenant(connection, tenant)
        return Caller(found.id, found.name, None, caller.scopes, found.limits) if found else None

    async def deployment(self, tenant_id: str, name: str) -> Target | None:
        """What serves `name` or `name@revision` of this tenant; None: it has no such thing. Raises DatabaseError."""
        return await self._targets.get((tenant_id, name), lambda: self._find_target(tenant_id, name))

    async def deployments(self, tenant_id: str) -> list[Target]:
        """Everything the tenant can ask for, by name."""
        async with self._database.read() as connection:
            return await deployments.targets(connection, tenant_id)

    def forget(self) -> None:
        """A key or a deployment changed: ask the database again."""
        self._keys.clear()
        self._targets.clear()

    async def _find_key(self, mac: str) -> tenants.KnownKey | None:
        async with self._database.read() as connection:
            return await tenants.key_by_mac(connection, mac)

    async def _find_target(self, tenant_id: str, name: str) -> Target | None:
        async with self._database.read() as connection:
            return await deployments.target(connection, tenant_id, name)
