"""What was done to tenants, keys, models and deployments, and by whom: written in the transaction of the change."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from store.db import new_id, now_us
from store.tables import events


async def record(
    connection: AsyncConnection, kind: str, subject_id: str, tenant_id: str | None, by: str, detail: str = ""
) -> None:
    """`by` is a key's id, "admin" or "platform"."""
    row = {"id": new_id(), "at_us": now_us(), "kind": kind, "subject_id": subject_id}
    await connection.execute(events.insert().values(**row, tenant_id=tenant_id, by=by, detail=detail))
