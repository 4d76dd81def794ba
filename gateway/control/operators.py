"""Routes of the control plane for operators' keys: to make, list, rotate or revoke a key needs the scope `everything`.

So no caller gives a scope beyond the caller's own scopes. Time is limited likewise: a caller whose key ends can't make
a key with a later end.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import Response

from gateway.control.tenants import KeyState, state_of
from gateway.http.api import Answer, Body, Call, Operation, Page, Shown, Time, time_text, time_us
from gateway.http.errors import Problem, invalid, not_found
from store.db import operators
from store.db.database import now_us
from store.db.operators import EVERYTHING, OperatorKey, Scope
from store.db.tenants import OVERLAP_US

# A name without a colon or a space: the audit log writes operator:ID:NAME.
HolderName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$",
        description="1 to 63 small letters, digits, dots, underscores, dashes; a letter or digit at both ends, as ada",
    ),
]
Moment = Annotated[datetime, Meta(tz=True)]


class NewOperatorKey(Body, frozen=True, kw_only=True):
    name: HolderName
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1, max_length=len(operators.SCOPES))]
    expires_at: Moment | None = None


class OperatorRotation(Body, frozen=True):
    overlap_s: Annotated[int, Meta(ge=0, le=90 * 86_400)] = OVERLAP_US // 1_000_000
    expires_at: Moment | None = None  # None: the successor gets the old key's lifetime, from now on


class ShownOperatorKey(Shown, frozen=True, kw_only=True):
    id: str
    name: str
    prefix: str
    scopes: list[Scope]
    state: KeyState
    created_at: Time
    expires_at: Time | None
    revoked_at: Time | None
    last_used_at: Time | None  # within some minutes


class MadeOperatorKey(ShownOperatorKey, frozen=True, kw_only=True):
    key: str | UnsetType = UNSET  # the secret; absent from a replayed answer


@Operation(MadeOperatorKey, 201, body=NewOperatorKey, once=True, operator=(EVERYTHING,))
async def create(call: Call) -> Response:
    """Make a key of an operator. No later answer repeats the secret."""
    body = await call.body(NewOperatorKey)
    scopes = frozenset[str](body.scopes)
    expires_us = _end(call, body.expires_at)

    async def deed(connection: AsyncConnection) -> Answer:
        key, secret = await operators.create(connection, call.auth.pepper, body.name, scopes, expires_us, now_us())
        await call.record(connection, "operator_key.created", key.id, None, new=show(key))
        return Answer(201, show(key), {"key": secret})

    return await call.once(deed)


@Operation(Page[ShownOperatorKey], paged=True, operator=(EVERYTHING,))
async def listed(call: Call) -> Response:
    """List operators' keys, revoked and expired keys included."""
    async with call.database.read() as connection:
        return call.page(await operators.listed(connection, call.after, call.limit + 1), show)


@Operation(MadeOperatorKey, 201, body=OperatorRotation, once=True, problems=(409,), operator=(EVERYTHING,))
async def rotate(call: Call) -> Response:
    """Make a key in the place of an old key; the old key ends after the overlap."""
    body = await call.body(OperatorRotation)

    async def deed(connection: AsyncConnection) -> Answer:
        old, now = await _find(call, connection), now_us()
        if state_of(old.expires_us, old.revoked_us, now) != "valid":
            raise Problem(409, "key_ended", f"key {old.id} is revoked or expired: make a new one")
        lifetime_us = None if old.expires_us is None else old.expires_us - old.created_us
        wanted_us = _end(call, body.expires_at, None if lifetime_us is None else now + lifetime_us)
        overlap_us = body.overlap_s * 1_000_000
        key, secret = await operators.rotate(connection, call.auth.pepper, old, overlap_us, wanted_us, now)
        await call.record(connection, "operator_key.rotated", old.id, None, show(old), show(key))
        return Answer(201, show(key), {"key": secret})

    response = await call.once(deed)
    call.auth.forget()
    return response


@Operation(status=204, operator=(EVERYTHING,))
async def revoke(call: Call) -> Response:
    """Revoke a key of an operator."""
    async with call.database.write() as connection:
        key = await _find(call, connection)
        await operators.revoke(connection, key, now_us())
        await call.record(connection, "operator_key.revoked", key.id, None, show(key))
    call.auth.forget()
    return Response(status_code=204)


def _end(call: Call, said: datetime | None, default_us: int | None = None) -> int | None:
    """UNIX microseconds at which a new key is to end; None: the key has no end.

    Args:
        said: the end that the caller asked for, if any.
        default_us: the end without `said`, in UNIX microseconds, cut to the end of the caller's own key.

    Raises Problem for an end in the past, or for an end after the end of the caller's own key."""
    least_us = call.caller.expires_us
    if said is None:
        ends = [end for end in (default_us, least_us) if end is not None]
        return min(ends, default=None)
    end_us = time_us(said)
    if end_us <= now_us():
        raise invalid("/expires_at", "it is in the past")
    if least_us is not None and end_us > least_us:
        raise invalid("/expires_at", f"the key that asks ends at {time_text(least_us)}, and gives no longer time")
    return end_us


async def _find(call: Call, connection: AsyncConnection) -> OperatorKey:
    key = await operators.key(connection, call.path("key"))
    if key is None:
        raise not_found("operator_key", call.path("key"))
    return key


def show(key: OperatorKey) -> ShownOperatorKey:
    return ShownOperatorKey(
        id=key.id,
        name=key.name,
        prefix=key.prefix,
        scopes=[scope for scope in operators.SCOPES if scope in key.scopes],
        state=state_of(key.expires_us, key.revoked_us, now_us()),
        created_at=time_text(key.created_us),
        expires_at=time_text(key.expires_us),
        revoked_at=time_text(key.revoked_us),
        last_used_at=time_text(key.last_used_us),
    )
