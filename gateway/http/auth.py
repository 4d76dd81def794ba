"""Callers by API key, and engines by deployment name: from memory, with a look into the database every few seconds.

A revoked key is refused everywhere within KEY_TTL_S. A changed deployment is seen within TARGET_TTL_S, and at once by
the process that made the change (`forget`). While a gateway can't reach the database, keys and deployments known to the
gateway go on for `kept_s` seconds. A key's end by time is kept even then.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import structlog

from gateway.http.cache import Cache
from gateway.http.errors import unauthorized
from store.contract.deployments import Target
from store.contract.limits import NO_LIMITS, Limits
from store.contract.priorities import Priority
from store.db import deployments, operators, tenants
from store.db.database import Database, DatabaseError, now_us
from store.db.operators import EVERYTHING, OperatorKey

__all__ = ["Auth", "Caller", "Target"]

log = structlog.get_logger()

KEY_TTL_S = 4.0
TARGET_TTL_S = 2.0
USES_S = 300.0  # between two notes of when keys were last used
USES_MOST = 10_000  # keys in one note


@dataclass(frozen=True, slots=True)
class Caller:
    """An operator, on the ground of a tenant or of none, or the holder of a tenant's key."""

    tenant_id: str | None
    tenant: str | None
    key_id: str | None  # None: the root key
    scopes: frozenset[str]  # scopes of a tenant's key
    limits: Limits = NO_LIMITS
    operator: frozenset[str] = frozenset()  # scopes of an operator's key; empty: a tenant's key
    holder: str = ""  # name of an operator's key
    expires_us: int | None = None  # of an operator's key
    priority: Priority = Priority.NORMAL  # highest priority that requests of the caller may ask for

    @property
    def admin(self) -> bool:
        return bool(self.operator)

    @property
    def by(self) -> str:
        """The name of the caller in the audit log."""
        if self.key_id is None:
            return "admin"
        return f"operator:{self.key_id}:{self.holder}" if self.operator else self.key_id

    def permits(self, scopes: tuple[str, ...]) -> bool:
        """Whether an operator's key may do what needs one of `scopes`."""
        return EVERYTHING in self.operator or not self.operator.isdisjoint(scopes)


ADMIN = Caller(None, None, None, tenants.SCOPES, operator=frozenset({EVERYTHING}), priority=Priority.HIGH)
METRICS = Caller(None, None, "metrics", frozenset(), operator=frozenset({"metrics:read"}), holder="metrics")


class Auth:
    """Answers who a caller is, and what serves a deployment.

    `pepper`, `admin_key` and `metrics_key` are secrets of the installation. An empty `metrics_key` is no key. `kept_s`:
    seconds for which known keys and deployments go on without the database.
    """

    def __init__(
        self,
        database: Database,
        pepper: bytes,
        admin_key: str,
        now: Callable[[], int] = now_us,
        metrics_key: str = "",
        kept_s: float = 0.0,
    ) -> None:
        self.pepper, self.kept_s = pepper, kept_s
        self._database, self._now = database, now
        given = {admin_key: ADMIN} if admin_key == metrics_key else {admin_key: ADMIN, metrics_key: METRICS}
        self._given = [(secret.encode(), caller) for secret, caller in given.items() if secret]
        self._keys: Cache[str, tenants.KnownKey | OperatorKey | None] = Cache(KEY_TTL_S, kept_s)
        self._targets: Cache[tuple[str, str], Target | None] = Cache(TARGET_TTL_S, kept_s)
        self._every: Cache[str, list[Target]] = Cache(TARGET_TTL_S, kept_s)  # by tenant
        self._used: set[str] = set()

    async def caller(self, headers: Mapping[str, str]) -> Caller:
        """The holder of the key that the headers carry.

        Raises Problem: 401 with a sentence for no key, an unknown key, an expired and a revoked key. Only a holder of
        the whole secret hears that the key has ended. Raises DatabaseError."""
        secret = _secret(headers)
        for given, caller in self._given:
            if hmac.compare_digest(secret.encode(), given):
                return caller
        mac = tenants.key_mac(self.pepper, secret)
        key = await self._keys.get(mac, lambda: self._find_key(secret, mac))
        self._check(key)
        assert key is not None
        if len(self._used) < USES_MOST:
            self._used.add(key.id)
        if isinstance(key, OperatorKey):
            ground = tenants.SCOPES if {"tenants", EVERYTHING} & key.scopes else frozenset[str]()
            return Caller(
                None,
                None,
                key.id,
                ground,
                operator=key.scopes,
                holder=key.name,
                expires_us=key.expires_us,
                priority=Priority.HIGH,
            )
        return Caller(key.tenant_id, key.tenant, key.id, key.scopes, key.limits, priority=key.priority)

    def _check(self, key: tenants.KnownKey | OperatorKey | None) -> None:
        """Check that the key is known, not revoked and not expired. Raises Problem: 401."""
        if key is None:
            raise unauthorized("this API key is not known here: check that the whole key was copied, sk-st-…")
        revoked = key.revoked_us is not None if isinstance(key, OperatorKey) else key.revoked
        if revoked:
            raise unauthorized("this API key was revoked: ask for a new key", "revoked_api_key")
        if key.expires_us is not None and key.expires_us <= self._now():
            raise unauthorized("this API key has expired: ask for a new key", "expired_api_key")

    async def within(self, caller: Caller, tenant: str) -> Caller | None:
        """The caller on the ground of `tenant`: a key of the tenant, or the operator. None for any other caller."""
        if caller.tenant == tenant:
            return caller
        if not caller.admin:
            return None
        async with self._database.read() as connection:
            found = await tenants.tenant(connection, tenant)
        return replace(caller, tenant_id=found.id, tenant=found.name, limits=found.limits) if found else None

    async def deployment(self, tenant_id: str, name: str) -> Target | None:
        """The target that serves the tenant's `name` or `name@revision`; None without a match. Raises DatabaseError."""
        return await self._targets.get((tenant_id, name), lambda: self._find_target(tenant_id, name))

    async def deployments(self, tenant_id: str) -> list[Target]:
        """Targets of all deployments of the tenant, by name. Raises DatabaseError."""
        return await self._every.get(tenant_id, lambda: self._find_targets(tenant_id))

    async def _find_targets(self, tenant_id: str) -> list[Target]:
        async with self._database.read() as connection:
            return await deployments.targets(connection, tenant_id)

    def forget(self) -> None:
        """A key or a deployment changed: ask the database again."""
        self._keys.clear()
        self._targets.clear()
        self._every.clear()

    async def note_uses(self) -> None:
        """Write down every USES_S seconds which keys were used, until the task is cancelled; then once more."""
        try:
            while True:
                await asyncio.sleep(USES_S)
                await self.write_uses()
        finally:
            await self.write_uses()

    async def write_uses(self) -> None:
        """Write uses of keys in one transaction, off the path of requests. Uses are dropped if the database fails:
        keys are used again."""
        used, self._used = sorted(self._used), set()
        if not used:
            return
        try:
            async with self._database.write() as connection:
                await tenants.keys_used(connection, used, self._now())
                await operators.used(connection, used, self._now())
        except DatabaseError as error:
            log.warning("auth.uses_not_written", error=str(error))

    async def _find_key(self, secret: str, mac: str) -> tenants.KnownKey | OperatorKey | None:
        async with self._database.read() as connection:
            if secret.startswith(operators.PREFIX):
                return await operators.by_mac(connection, mac)
            return await tenants.key_by_mac(connection, mac)

    async def _find_target(self, tenant_id: str, name: str) -> Target | None:
        async with self._database.read() as connection:
            return await deployments.target(connection, tenant_id, name)


def _secret(headers: Mapping[str, str]) -> str:
    """The key of `Authorization: Bearer` or, as Anthropic's clients send a key, of `x-api-key`. Raises Problem: 401."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    bearer = bearer.strip() if scheme.lower() == "bearer" else ""
    plain = headers.get("x-api-key", "").strip()
    if bearer and plain and bearer != plain:
        raise unauthorized("Authorization and x-api-key carry two different API keys: send one key")
    if not bearer and not plain:
        raise unauthorized()
    return bearer or plain
