"""Tenants and their keys, as the control plane shows them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, get_args

from msgspec import UNSET, Meta, UnsetType, to_builtins
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import Response

from gateway.api import (
    Answer,
    Body,
    Call,
    Operation,
    Page,
    Shown,
    Time,
    answered,
    patched,
    time_text,
    time_us,
)
from gateway.auth import Caller
from gateway.errors import Problem, invalid, not_found
from gateway.objectives import WEIGHT_LEAST, WEIGHT_MOST
from store import tenants
from store.db import now_us
from store.tenants import NO_LIMITS, OVERLAP_US, Key, Limits, Tenant, TenantInUse

TenantName = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class TenantSettings(Body, frozen=True, kw_only=True):
    weight: Annotated[float, Meta(ge=WEIGHT_LEAST, le=WEIGHT_MOST)] = 1.0  # of its patience, see gateway/objectives.py
    limits: Limits = NO_LIMITS


class NewTenant(TenantSettings, frozen=True, kw_only=True):
    name: TenantName


class ShownTenant(Shown, frozen=True, kw_only=True):
    id: str
    name: str
    weight: float
    limits: Limits
    created_at: Time


Scope = Literal["inference", "control"]


class Me(Shown, frozen=True, kw_only=True):
    """Whose key was sent."""

    admin: bool
    tenant: str | None
    key_id: str | None
    scopes: list[Scope]


class NewKey(Body, frozen=True):
    name: Annotated[str, Meta(max_length=100)] = ""
    scopes: tuple[Scope, ...] = ("inference", "control")
    expires_at: Annotated[datetime, Meta(tz=True)] | None = None


class Rotation(Body, frozen=True):
    overlap_s: Annotated[int, Meta(ge=0, le=90 * 86_400)] = OVERLAP_US // 1_000_000


class ShownKey(Shown, frozen=True, kw_only=True):
    id: str
    name: str
    prefix: str
    scopes: list[str]
    created_at: Time
    expires_at: Time | None
    revoked_at: Time | None


class MadeKey(ShownKey, frozen=True, kw_only=True):
    key: str | UnsetType = UNSET  # the secret; a replay does not show it again


# ── tenants ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@Operation(Me)
async def me(call: Call) -> Response:
    """Say whose key was sent, and what it is for."""
    caller = call.caller
    scopes = [scope for scope in get_args(Scope) if scope in caller.scopes]
    return answered(Me(admin=caller.admin, tenant=caller.tenant, key_id=caller.key_id, scopes=scopes))


@Operation(ShownTenant, 201, body=NewTenant, once=True, problems=(409,))
async def create(call: Call) -> Response:
    """Make a tenant."""
    body = await call.body(NewTenant)

    async def deed(connection: AsyncConnection) -> Answer:
        tenant = await tenants.create(connection, body.name, now_us(), body.weight, body.limits)
        await call.record(connection, "tenant.created", tenant.id, tenant.id, new=show(tenant))
        return Answer(201, show(tenant))

    return await call.once(deed)


@Operation(Page[ShownTenant], paged=True)
async def listed(call: Call) -> Response:
    """List the tenants."""
    async with call.database.read() as connection:
        return call.page(await tenants.listed(connection, call.after, call.limit + 1), show)


@Operation(ShownTenant)
async def get(call: Call) -> Response:
    """Show a tenant."""
    async with call.database.read() as connection:
        return answered(show(await _find(call, connection)))


@Operation(ShownTenant, patch=TenantSettings)
async def change(call: Call) -> Response:
    """Change a tenant's weight and limits: a merge patch."""
    patch = await call.body(dict[str, Any])
    async with call.database.write() as connection:
        was = await _find(call, connection, lock=True)
        old = TenantSettings(weight=was.weight, limits=was.limits)
        settings = patched(to_builtins(old), patch, TenantSettings)
        tenant = await tenants.change(connection, was, settings.weight, settings.limits)
        await call.record(connection, "tenant.changed", tenant.id, tenant.id, show(was), show(tenant))
    call.auth.forget()
    return answered(show(tenant))


@Operation(status=204, problems=(409,))
async def delete(call: Call) -> Response:
    """Delete a tenant that has nothing any more."""
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
        created_at=time_text(tenant.created_us),
    )


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@Operation(MadeKey, 201, body=NewKey, once=True)
async def create_key(call: Call) -> Response:
    """Make a key. Its secret is in this answer alone."""
    within = await call.tenant(call.path("tenant"))
    body = await call.body(NewKey)
    expires_us = time_us(body.expires_at) if body.expires_at else None
    if expires_us is not None and expires_us <= now_us():
        raise invalid("/expires_at", "it is in the past")
    scopes = frozenset[str](body.scopes)
    if not scopes or not scopes <= call.caller.scopes:
        raise invalid("/scopes", f"a key gives some of what its maker has: {', '.join(sorted(call.caller.scopes))}")

    async def deed(connection: AsyncConnection) -> Answer:
        assert within.tenant_id is not None
        key, secret = await tenants.create_key(
            connection, call.auth.pepper, within.tenant_id, body.name, scopes, expires_us, now_us()
        )
        await call.record(connection, "key.created", key.id, key.tenant_id, new=show_key(key))
        return Answer(201, show_key(key), {"key": secret})

    return await call.once(deed)


@Operation(Page[ShownKey], paged=True)
async def list_keys(call: Call) -> Response:
    """List a tenant's keys."""
    within = await call.tenant(call.path("tenant"))
    assert within.tenant_id is not None
    async with call.database.read() as connection:
        found = await tenants.listed_keys(connection, within.tenant_id, call.after, call.limit + 1)
    return call.page(found, show_key)


@Operation(MadeKey, 201, body=Rotation, once=True, problems=(409,))
async def rotate_key(call: Call) -> Response:
    """Make a key in the place of this one, which ends after the overlap."""
    within = await call.tenant(call.path("tenant"))
    body = await call.body(Rotation)

    async def deed(connection: AsyncConnection) -> Answer:
        old = await _find_key(call, within, connection)
        if old.revoked_us is not None or (old.expires_us is not None and old.expires_us <= now_us()):
            raise Problem(409, "key_ended", f"key {old.id} is revoked or expired: make a new one")
        if not old.scopes <= call.caller.scopes:
            raise Problem(403, "insufficient_scope", "this key may do more than the one that asks")
        overlap_us = body.overlap_s * 1_000_000
        key, secret = await tenants.rotate_key(connection, call.auth.pepper, old, overlap_us, now_us())
        await call.record(connection, "key.rotated", old.id, old.tenant_id, show_key(old), show_key(key))
        return Answer(201, show_key(key), {"key": secret})

    response = await call.once(deed)
    call.auth.forget()
    return response


@Operation(status=204)
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
        created_at=time_text(key.created_us),
        expires_at=time_text(key.expires_us),
        revoked_at=time_text(key.revoked_us),
    )
