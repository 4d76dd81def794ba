"""A request sent twice with one Idempotency-Key is carried out once: the change and the claim share a transaction."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.db.database import insert
from store.db.tables import idempotency

KEPT_US = 24 * 3600 * 1_000_000


@dataclass(frozen=True)
class StoredAnswer:
    """Answer to the first request with an Idempotency-Key."""

    fingerprint: str
    status: int
    body: str


async def claim(
    connection: AsyncConnection, scope: str, key: str, fingerprint: str, now_us: int
) -> StoredAnswer | None:
    """Claim an Idempotency-Key. Return None if the caller must carry out the request, else the first request's answer.

    Waits until a concurrent request with the key commits or fails."""
    await connection.execute(delete(idempotency).where(idempotency.c.created_us < now_us - KEPT_US))
    row = {"scope": scope, "key": key, "fingerprint": fingerprint, "status": 0, "body": "", "created_us": now_us}
    claimed = await connection.execute(insert(connection, idempotency).values(**row).on_conflict_do_nothing())
    if claimed.rowcount:
        return None
    where = (idempotency.c.scope == scope) & (idempotency.c.key == key)
    columns = (idempotency.c.fingerprint, idempotency.c.status, idempotency.c.body)
    found = (await connection.execute(select(*columns).where(where))).one()
    return StoredAnswer(found.fingerprint, found.status, found.body)


async def answered(connection: AsyncConnection, scope: str, key: str, status: int, body: str) -> None:
    where = (idempotency.c.scope == scope) & (idempotency.c.key == key)
    await connection.execute(update(idempotency).where(where).values(status=status, body=body))
