"""Routes for join tokens, and for the runtimes that joined. Every route needs the scope `fleet`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import Response

from gateway.control.operators import Moment
from gateway.http.api import Answer, Body, Call, Operation, Page, Shown, Time, answered, time_text, time_us
from gateway.http.errors import invalid, not_found
from store.contract.joining.proofs import RUNTIME_ID, JoinedRuntime, JoinToken
from store.db.database import now_us
from store.db.fleet import joining

HOUR_US = 3600 * 1_000_000
TOKEN_US, TOKEN_US_MOST = HOUR_US, 30 * 24 * HOUR_US  # life of a token: unless said, and at most

RuntimeId = Annotated[
    str,
    Meta(pattern=f"^{RUNTIME_ID.pattern}$", description="1 to 63 letters, digits and dashes, as r1"),
]
TokenState = Literal["valid", "used", "expired", "revoked"]


class NewJoinToken(Body, frozen=True, kw_only=True):
    runtime: RuntimeId | None = None  # None: any id that is free
    expires_at: Moment | None = None  # None: an hour from now


class ShownJoinToken(Shown, frozen=True, kw_only=True):
    id: str
    runtime: str | None
    state: TokenState
    created_at: Time
    expires_at: Time
    used_at: Time | None
    used_by: str | None
    revoked_at: Time | None


class MadeJoinToken(ShownJoinToken, frozen=True, kw_only=True):
    key: str | UnsetType = UNSET  # the token itself; absent from a replayed answer


class ShownJoinedRuntime(Shown, frozen=True, kw_only=True):
    id: str
    public_key: str
    token_id: str
    state: Literal["joined", "revoked"]
    joined_at: Time
    revoked_at: Time | None


@Operation(MadeJoinToken, 201, body=NewJoinToken, once=True, operator=("fleet",))
async def create_token(call: Call) -> Response:
    """Make a token with which a runtime joins the bus once. No later answer repeats the token."""
    body, now = await call.body(NewJoinToken), now_us()
    expires_us = now + TOKEN_US if body.expires_at is None else time_us(body.expires_at)
    if not now < expires_us <= now + TOKEN_US_MOST:
        raise invalid("/expires_at", f"it is not within the next {TOKEN_US_MOST // HOUR_US // 24} days")

    async def deed(connection: AsyncConnection) -> Answer:
        token, secret = await joining.create_token(connection, call.auth.pepper, body.runtime, expires_us, now)
        await call.record(connection, "join_token.created", token.id, None, new=show_token(token))
        return Answer(201, show_token(token), {"key": secret})

    return await call.once(deed)


@Operation(Page[ShownJoinToken], paged=True, operator=("fleet",))
async def list_tokens(call: Call) -> Response:
    """List join tokens, used, expired and revoked tokens included."""
    async with call.database.read() as connection:
        return call.page(await joining.tokens(connection, call.after, call.limit + 1), show_token)


@Operation(status=204, operator=("fleet",))
async def revoke_token(call: Call) -> Response:
    """Revoke a join token. A runtime that has joined with the token stays joined."""
    async with call.database.write() as connection:
        token = await joining.token(connection, call.path("token"))
        if token is None:
            raise not_found("join_token", call.path("token"))
        await joining.revoke_token(connection, token, now_us())
        await call.record(connection, "join_token.revoked", token.id, None, show_token(token))
    return Response(status_code=204)


@Operation(Page[ShownJoinedRuntime], operator=("fleet",))
async def list_runtimes(call: Call) -> Response:
    """List the runtimes that joined by proof, revoked runtimes included."""
    async with call.database.read() as connection:
        found = await joining.runtimes(connection)
    return answered(Page(data=[show_runtime(each) for each in found], next_cursor=None))


@Operation(status=204, operator=("fleet",))
async def revoke_runtime(call: Call) -> Response:
    """Refuse a runtime's key, and end the runtime's connection. The id is free for a new join token."""
    async with call.database.write() as connection:
        found = await joining.runtime(connection, call.path("runtime"))
        if found is None:
            raise not_found("joined_runtime", call.path("runtime"))
        await joining.revoke_runtime(connection, found, now_us())
        await call.record(connection, "runtime.revoked", found.id, None, show_runtime(found))
    return Response(status_code=204)


def show_token(token: JoinToken) -> ShownJoinToken:
    return ShownJoinToken(
        id=token.id,
        runtime=token.runtime,
        state=token_state(token, now_us()),
        created_at=time_text(token.created_us),
        expires_at=time_text(token.expires_us),
        used_at=time_text(token.used_us),
        used_by=token.used_by,
        revoked_at=time_text(token.revoked_us),
    )


def token_state(token: JoinToken, now_us: int) -> TokenState:
    if token.used_us is not None:
        return "used"
    if token.revoked_us is not None:
        return "revoked"
    return "expired" if token.expires_us <= now_us else "valid"


def show_runtime(runtime: JoinedRuntime) -> ShownJoinedRuntime:
    return ShownJoinedRuntime(
        id=runtime.id,
        public_key=runtime.public_key,
        token_id=runtime.token_id,
        state="joined" if runtime.revoked_us is None else "revoked",
        joined_at=time_text(runtime.joined_us),
        revoked_at=time_text(runtime.revoked_us),
    )
