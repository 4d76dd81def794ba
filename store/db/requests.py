"""Ended requests and the parts of their time, kept for some days. Rows have numbers and ids, no text.

The ledger writes rows in the transaction that books the requests' usage: no request waits for a row, and the bill does
not depend on the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.contract.elapsed import Elapsed
from store.contract.wire import Usage
from store.db.database import AnyRow, insert
from store.db.tables import requests

DAY_US = 86_400 * 1_000_000
DELETED_MOST = 5_000  # rows in a transaction: other writers wait for the end of a transaction
SCANNED_MOST = 50_000  # newest requests searched for slow requests


@dataclass(frozen=True)
class Past:
    """A request that has ended. `started_us`: UNIX microseconds."""

    id: str
    tenant_id: str
    deployment_id: str
    revision: int
    started_us: int
    finish: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    elapsed: Elapsed


async def keep(connection: AsyncConnection, messages: Iterable[Usage]) -> None:
    """Write a row for each message with `elapsed`, the last message of a request. A repeated message has no effect."""
    rows = {message.request: _row(message, message.elapsed) for message in messages if message.elapsed is not None}
    if rows:
        statement = insert(connection, requests).on_conflict_do_nothing()
        await connection.execute(statement, [rows[id] for id in sorted(rows)])


def _row(message: Usage, elapsed: Elapsed) -> dict[str, object]:
    return {
        "id": message.request,
        "tenant_id": message.tenant_id,
        "deployment_id": message.deployment_id,
        "revision": message.revision,
        "started_us": round(message.started_at * 1e6),
        "finish": message.finish,
        "prompt_tokens": message.prompt_tokens,
        "cached_tokens": message.cached_tokens,
        "output_tokens": message.output_tokens,
        "cold": elapsed.cold,
        "total_us": elapsed.total_us,
        "first_token_us": elapsed.first_token_us,
        "parts": msgspec.json.encode(elapsed.parts_us).decode(),
    }


async def forget(connection: AsyncConnection, before_us: int) -> int:
    """Delete the oldest requests that started before `before_us` (UNIX microseconds), DELETED_MOST at most.

    Returns the number of requests deleted."""
    oldest = (
        select(requests.c.id)
        .where(requests.c.started_us < before_us)
        .order_by(requests.c.started_us)
        .limit(DELETED_MOST)
    )
    return (await connection.execute(delete(requests).where(requests.c.id.in_(oldest)))).rowcount


async def find(connection: AsyncConnection, tenant_id: str | None, id: str) -> Past | None:
    """The request `id` of the tenant `tenant_id`, or of any tenant if `tenant_id` is None. None if not found."""
    query = select(requests).where(requests.c.id == id, *_of(tenant_id))
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else _past(row)


async def listed(
    connection: AsyncConnection, tenant_id: str | None, deployment_id: str | None, slower_than_us: int, most: int
) -> list[Past]:
    """The newest requests that took `slower_than_us` or longer, `most` requests at most.

    `tenant_id` and `deployment_id` select requests; None selects every tenant or deployment. Only the newest
    SCANNED_MOST requests of the tenant are searched."""
    query = select(requests).where(*_of(tenant_id)).order_by(requests.c.started_us.desc()).limit(SCANNED_MOST)
    newest = query.subquery()
    wanted = [newest.c.total_us >= slower_than_us]
    if deployment_id is not None:
        wanted.append(newest.c.deployment_id == deployment_id)
    slow = select(newest).where(*wanted).order_by(newest.c.started_us.desc(), newest.c.id).limit(most)
    return [_past(row) for row in await connection.execute(slow)]


def _of(tenant_id: str | None) -> list[ColumnElement[bool]]:
    return [requests.c.tenant_id == tenant_id] if tenant_id else []


def _past(row: AnyRow) -> Past:
    parts_us = msgspec.json.decode(row.parts, type=dict[str, int])
    return Past(
        id=row.id,
        tenant_id=row.tenant_id,
        deployment_id=row.deployment_id,
        revision=row.revision,
        started_us=row.started_us,
        finish=row.finish,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        output_tokens=row.output_tokens,
        elapsed=Elapsed(row.cold, row.total_us, row.first_token_us, parts_us),
    )
