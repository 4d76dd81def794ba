"""Join tokens and joined runtimes. The database keeps the HMAC of a token under the pepper.

A lookup reads, and only the use of a good token writes: strangers cost a read of an index.
"""

from __future__ import annotations

import secrets

from sqlalchemy import func, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from store.contract.joining.proofs import (
    TOKEN_PREFIX,
    Admission,
    JoinedRuntime,
    JoinProof,
    JoinsNow,
    JoinToken,
    NotAdmitted,
    decide,
)
from store.db import audit
from store.db.database import Database, insert, new_id, now_us
from store.db.tables import join_tokens, joined_runtimes
from store.db.tenants import key_mac

_TOKEN = tuple(join_tokens.c[name] for name in JoinToken.__dataclass_fields__)
_RUNTIME = tuple(joined_runtimes.c[name] for name in JoinedRuntime.__dataclass_fields__)
PLATFORM = "platform"  # author of audit rows for deeds without a caller


class _LostRace(Exception):
    """Another runtime used the token, or took the id or the key, since the token was read: rolls the deed back."""


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def create_token(
    connection: AsyncConnection, pepper: bytes, runtime: str | None, expires_us: int, now_us: int
) -> tuple[JoinToken, str]:
    """Make a token. Returns the token and the secret; no later call returns the secret.

    `runtime`: the only id that may use the token; None: any id. `expires_us`: end of the token."""
    id = new_id()
    secret = f"{TOKEN_PREFIX}{id}-{secrets.token_hex(24)}"
    token = JoinToken(id, runtime, now_us, expires_us, None, None, None)
    await connection.execute(join_tokens.insert().values(**vars(token), mac=key_mac(pepper, secret)))
    return token, secret


async def revoke_token(connection: AsyncConnection, token: JoinToken, now_us: int) -> None:
    """Refuse a token from `now_us` on. A token revoked earlier keeps the first moment of revocation."""
    alive = (join_tokens.c.id == token.id) & join_tokens.c.revoked_us.is_(None)
    await connection.execute(update(join_tokens).where(alive).values(revoked_us=now_us))


async def token(connection: AsyncConnection, id: str) -> JoinToken | None:
    row = (await connection.execute(select(*_TOKEN).where(join_tokens.c.id == id))).one_or_none()
    return JoinToken(*row) if row else None


async def tokens(connection: AsyncConnection, after: str, most: int) -> list[JoinToken]:
    query = select(*_TOKEN).where(join_tokens.c.id > after).order_by(join_tokens.c.id).limit(most)
    return [JoinToken(*row) for row in await connection.execute(query)]


async def _token_of(connection: AsyncConnection, mac: str | None) -> JoinToken | None:
    if mac is None:
        return None
    row = (await connection.execute(select(*_TOKEN).where(join_tokens.c.mac == mac))).one_or_none()
    return JoinToken(*row) if row else None


# ── runtimes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def runtime(connection: AsyncConnection, id: str) -> JoinedRuntime | None:
    """Return the binding of the runtime's id, even if revoked; None: no runtime joined under the id."""
    row = (await connection.execute(select(*_RUNTIME).where(joined_runtimes.c.id == id))).one_or_none()
    return JoinedRuntime(*row) if row else None


async def runtimes(connection: AsyncConnection) -> list[JoinedRuntime]:
    """Return every binding in the order of ids, revoked bindings included."""
    found = await connection.execute(select(*_RUNTIME).order_by(joined_runtimes.c.id))
    return [JoinedRuntime(*row) for row in found]


async def revoke_runtime(connection: AsyncConnection, found: JoinedRuntime, now_us: int) -> None:
    """Refuse the runtime's key from `now_us` on. A binding revoked earlier keeps the first moment of revocation."""
    alive = (joined_runtimes.c.id == found.id) & joined_runtimes.c.revoked_us.is_(None)
    await connection.execute(update(joined_runtimes).where(alive).values(revoked_us=now_us))


async def revocations(connection: AsyncConnection) -> tuple[int, int]:
    """Return the number of revoked runtimes and the last moment, in UNIX microseconds; every revocation changes a part,
    even if the clocks of two gateways differ."""
    revoked = joined_runtimes.c.revoked_us
    count, last_us = (await connection.execute(select(func.count(revoked), func.max(revoked)))).one()
    return count, last_us or 0


async def admit(database: Database, proof: JoinProof, mac: str | None) -> Admission:
    """Decide on a proof, and use the token if the runtime joins now. Raises DatabaseError.

    `mac`: HMAC of the token that came with the proof, as `key_mac` makes it; None: no token came."""
    async with database.read() as connection:
        admission = await _decided(connection, proof, mac)
    if not isinstance(admission, JoinsNow):
        return admission
    try:
        async with database.write() as connection:
            again = await _decided(connection, proof, mac)
            if isinstance(again, JoinsNow):
                await _bind(connection, proof, again.token_id)
            return again
    except (_LostRace, IntegrityError):
        return NotAdmitted("another runtime used the join token, the id or the key at the same time")


async def _decided(connection: AsyncConnection, proof: JoinProof, mac: str | None) -> Admission:
    matches = or_(joined_runtimes.c.id == proof.runtime, joined_runtimes.c.public_key == proof.public_key)
    rows = await connection.execute(select(*_RUNTIME).where(matches))
    return decide(proof, await _token_of(connection, mac), [JoinedRuntime(*row) for row in rows], now_us())


async def _bind(connection: AsyncConnection, proof: JoinProof, token_id: str) -> None:
    """Mark the token as used, and bind the id to the key. Raises _LostRace, IntegrityError.

    Conditions in the statements decide between two runtimes: PostgreSQL lets transactions read at the same time."""
    now = now_us()
    free = (join_tokens.c.id == token_id) & join_tokens.c.used_us.is_(None) & join_tokens.c.revoked_us.is_(None)
    used = await connection.execute(update(join_tokens).where(free).values(used_us=now, used_by=proof.runtime))
    joined = JoinedRuntime(proof.runtime, proof.public_key, token_id, now, None)
    change = {name: value for name, value in vars(joined).items() if name != "id"}
    statement = insert(connection, joined_runtimes).values(**vars(joined))
    bound = await connection.execute(
        statement.on_conflict_do_update(
            index_elements=[joined_runtimes.c.id], set_=change, where=joined_runtimes.c.revoked_us.is_not(None)
        )
    )
    if not (used.rowcount and bound.rowcount):
        raise _LostRace
    await audit.record(connection, "runtime.joined", proof.runtime, None, PLATFORM, None, None, vars(joined))
