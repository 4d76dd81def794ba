"""Routes for tenants and their keys."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, get_args

from msgspec import UNSET, Meta, UnsetType, to_builtins
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import Response

from gateway.core.tenants import ManagedBy, Rank, Scope, TenantName, TenantSettings
from gateway.http.api import Answer, Body, Call, Operation, Page, Shown, Time, answered, patched, time_text, time_us
from gateway.http.auth import Caller
from gateway.http.errors import Problem, invalid, not_found
from store.contract.limits import Limits
from store.contract.priorities import priority
from store.db import operators, tenants
from store.db.database import now_us
from store.db.tenants import OVERLAP_US, Key, Tenant, TenantInUse


class NewTenant(TenantSettings, frozen=True, kw_only=True):
    name: TenantName
    managed_by: ManagedBy | None = None  # declared object that the tenant is made for; None: made by hand


class ShownTenant(Shown, frozen=True, kw_only=True):
    id: str
    name: str
    weight: float
    limits: Limits
    keep_prefixes: bool  # false: zero retention, whatever the tenant's deployments say
    managed_by: ManagedBy | None  # declared object that the tenant was made for; None: made by hand
    created_at: Time


KeyState = Literal["valid", "expired", "revoked"]


class Me(Shown, frozen=True, kw_only=True):
    """Owner of the key that the request sent."""

    admin: bool  # the owner is an operator
    tenant: str | None
    key_id: str | None  # none: the root key
    scopes: list[Scope | operators.Scope]


class NewKey(Body, frozen=True):
    name: Annotated[str, Meta(max_length=100)] = ""
    scopes: tuple[Scope, ...] = ("inference", "control")
    expires_at: Annotated[datetime, Meta(tz=True)] | None = None
    priority: Rank = "normal"  # highest priority that requests of the key may ask for


class Rotation(Body, frozen=True):
    overlap_s: Annotated[int, Meta(ge=0, le=90 * 86_400)] = OVERLAP_US // 1_000_000


class ShownKey(Shown, frozen=True, kw_only=True):
    id: str
    name: str
    prefix: str
    scopes: list[str]
    priority: str  # highest priority that requests of the key may ask for
    state: KeyState
    created_at: Time
    expires_at: Time | None
    revoked_at: Time | None
    last_used_at: Time | None  # accurate to some minutes


class MadeKey(ShownKey, frozen=True, kw_only=True):
    key: str | UnsetType = UNSET  # the secret; a replay does not show it again


# ── tenants ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@Operation(Me, operator=tuple(scope for scope in operators.SCOPES if scope != "metrics:read"))
async def me(call: Call) -> Response:
    """Say whose key was sent, and what the key may do."""
    caller = call.caller
    known: tuple[Scope | operators.Scope, ...] = operators.SCOPES if caller.admin else get_args(Scope)
    scopes = [scope for scope in known if scope in (caller.operator or caller.scopes)]
    return answered(Me(admin=caller.admin, tenant=caller.tenant, key_id=caller.key_id, scopes=scopes))


@Operation(ShownTenant, 201, body=NewTenant, once=True, problems=(409,), operator=("tenants",))
async def create(call: Call) -> Response:
    """Make a tenant."""
    body = await call.body(NewTenant)

    async def deed(connection: AsyncConnection) -> Answer:
        tenant = await tenants.create(
            connection, body.name, now_us(), body.weight, body.limits, body.managed_by, body.keep_prefixes
        )
        await call.record(connection, "tenant.created", tenant.id, tenant.id, new=show(tenant))
        return Answer(201, show(tenant))

    return await call.once(deed)


@Operation(Page[ShownTenant], paged=True, operator=("tenants", "deployments", "billing:read", "billing"))
async def listed(call: Call) -> Response:
    """List the tenants."""
    async with call.database.read() as connection:
        return call.page(await tenants.listed(connection, call.after, call.limit + 1), show)


@Operation(ShownTenant, operator=("tenants",))
async def get(call: Call) -> Response:
    """Show a tenant."""
    async with call.database.read() as connection:
        return answered(show(await _find(call, connection)))


@Operation(ShownTenant, patch=TenantSettings, operator=("tenants",))
async def change(call: Call) -> Response:
    """Change a tenant's weight, limits and retention: a merge patch."""
    patch = await call.body(dict[str, Any])
    async with call.database.write() as connection:
        was = await _find(call, connection, lock=True)
        old = TenantSettings(weight=was.weight, limits=was.limits, keep_prefixes=was.keep_prefixes)
        settings = patched(to_builtins(old), patch, TenantSettings)
        tenant = await tenants.change(connection, was, settings.weight, settings.limits, settings.keep_prefixes)
        await call.record(connection, "tenant.changed", tenant.id, tenant.id, show(was), show(tenant))
    call.auth.forget()
    return answered(show(tenant))


@Operation(status=204, problems=(409,), operator=("tenants",))
async def delete(call: Call) -> Response:
    """Delete a tenant without deployments, with the tenant's models, and revoke the tenant's keys."""
    async with call.database.write() as connection:
        tenant = await _find(call, connection, lock=True)
        try:
            await tenants.delete(connection, tenant, now_us())
        except TenantInUse as error:
            raise Problem(409, "tenant_in_use", str(error)) from error
        await call.record(connection, "tenant.deleted", tenant.id, tenant.id, old=show(tenant))
    call.auth.forget()
    return Response(status_code=204)


async def _find(call: Call, connection: AsyncConnection, lock: bool = False) -> Tenant:
    tenant = await tenants.tenant(connection, call.path("tenant"), lock)
    if tenant is None:
        raise not_found("tenant", call.path("tenant"))
    return tenant


def show(tenant: Tenant) -> ShownTenant:
    return ShownTenant(
        id=tenant.id,
        name=tenant.name,
        weight=tenant.weight,
        limits=tenant.limits,
        keep_prefixes=tenant.keep_prefixes,
        managed_by=tenant.managed_by,
        created_at=time_text(tenant.created_us),
    )


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@Operation(MadeKey, 201, body=NewKey, once=True, operator=("tenants",))
async def create_key(call: Call) -> Response:
    """Make a key. No later answer repeats the secret."""
    within = await call.tenant(call.path("tenant"))
    body = await call.body(NewKey)
    expires_us = time_us(body.expires_at) if body.expires_at else None
    if expires_us is not None and expires_us <= now_us():
        raise invalid("/expires_at", "it is in the past")
    scopes = frozenset[str](body.scopes)
    if not scopes or not scopes <= call.caller.scopes:
        raise invalid("/scopes", f"a key gives some of what its maker has: {', '.join(sorted(call.caller.scopes))}")
    bound = priority(body.priority)
    if bound > call.caller.priority:
        raise invalid("/priority", f"a key gives at most what its maker has: {call.caller.priority.word}")

    async def deed(connection: AsyncConnection) -> Answer:
        assert within.tenant_id is not None
        key, secret = await tenants.create_key(
            connection, call.auth.pepper, within.tenant_id, body.name, scopes, expires_us, now_us(), bound
        )
        await call.record(connection, "key.created", key.id, key.tenant_id, new=show_key(key))
        return Answer(201, show_key(key), {"key": secret})

    return await call.once(deed)


@Operation(Page[ShownKey], paged=True, operator=("tenants",))
async def list_keys(call: Call) -> Response:
    """List a tenant's keys."""
    within = await call.tenant(call.path("tenant"))
    assert within.tenant_id is not None
    async with call.database.read() as connection:
        found = await tenants.listed_keys(connection, within.tenant_id, call.after, call.limit + 1)
    return call.page(found, show_key)


@Operation(MadeKey, 201, body=Rotation, once=True, problems=(409,), operator=("tenants",))
async def rotate_key(call: Call) -> Response:
    """Make a key in the place of an old key; the old key ends after the overlap."""
    within = await call.tenant(call.path("tenant"))
    body = await call.body(Rotation)

    async def deed(connection: AsyncConnection) -> Answer:
        old = await _find_key(call, within, connection)
        if old.revoked_us is not None or (old.expires_us is not None and old.expires_us <= now_us()):
            raise Problem(409, "key_ended", f"key {old.id} is revoked or expired: make a new one")
        if not old.scopes <= call.caller.scopes or old.priority > call.caller.priority:
            raise Problem(403, "insufficient_scope", "this key may do more than the one that asks")
        overlap_us = body.overlap_s * 1_000_000
        key, secret = await tenants.rotate_key(connection, call.auth.pepper, old, overlap_us, now_us())
        await call.record(connection, "key.rotated", old.id, old.tenant_id, show_key(old), show_key(key))
        return Answer(201, show_key(key), {"key": secret})

    response = await call.once(deed)
    call.auth.forget()
    return response


@Operation(status=204, operator=("tenants",))
async def revoke_key(call: Call) -> Response:
    """Revoke a key."""
    within = await call.tenant(call.path("tenant"))
    async with call.database.write() as connection:
        key = await _find_key(call, within, connection)
        await tenants.revoke_key(connection, key, now_us())
        await call.record(connection, "key.revoked", key.id, key.tenant_id, show_key(key))
    call.auth.forget()
    return Response(status_code=204)


async def _find_key(call: Call, within: Caller, connection: AsyncConnection) -> Key:
    assert within.tenant_id is not None
    key = await tenants.key(connection, within.tenant_id, call.path("key"))
    if key is None:
        raise not_found("key", call.path("key"))
    return key


def show_key(key: Key) -> ShownKey:
    return ShownKey(
        id=key.id,
        name=key.name,
        prefix=key.prefix,
        scopes=sorted(key.scopes),
        priority=key.priority.word,
        state=state_of(key.expires_us, key.revoked_us, now_us()),
        created_at=time_text(key.created_us),
        expires_at=time_text(key.expires_us),
        revoked_at=time_text(key.revoked_us),
        last_used_at=time_text(key.last_used_us),
    )


def state_of(expires_us: int | None, revoked_us: int | None, now_us: int) -> KeyState:
    if revoked_us is not None:
        return "revoked"
    return "expired" if expires_us is not None and expires_us <= now_us else "valid"
