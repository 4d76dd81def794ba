"""A request sent twice with one Idempotency-Key is carried out once: the claim is in the transaction of the deed."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.db import insert
from store.tables import idempotency

KEPT_US = 24 * 3600 * 1_000_000


@dataclass(frozen=True)
class Answered:
    """What the first request was told."""

    fingerprint: str
    status: int
    body: str


async def claim(connection: AsyncConnection, scope: str, key: str, fingerprint: str, now_us: int) -> Answered | None:
    """None: the deed is ours to do. Waits for a concurrent request with the same key to commit or fail."""
    await connection.execute(delete(idempotency).where(idempotency.c.created_us < now_us - KEPT_US))
    row = {"scope": scope, "key": key, "fingerprint": fingerprint, "status": 0, "body": "", "created_us": now_us}
    claimed = await connection.execute(insert(connection, idempotency).values(**row).on_conflict_do_nothing())
    if claimed.rowcount:
        return None
    where = (idempotency.c.scope == scope) & (idempotency.c.key == key)
    columns = (idempotency.c.fingerprint, idempotency.c.status, idempotency.c.body)
    found = (await connection.execute(select(*columns).where(where))).one()
    return Answered(found.fingerprint, found.status, found.body)


async def answered(connection: AsyncConnection, scope: str, key: str, status: int, body: str) -> None:
    where = (idempotency.c.scope == scope) & (idempotency.c.key == key)
    await connection.execute(update(idempotency).where(where).values(status=status, body=body))
