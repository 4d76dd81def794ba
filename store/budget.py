"""What a budget must know of the database: the price of a request, and what is booked of a month already."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from store import usage
from store.billing import Price, price_of, prices_for
from store.tables import revisions


async def price(
    connection: AsyncConnection, tenant_id: str, deployment_id: str, revision: int, at_us: int
) -> Price | None:
    """The one at which a request that begins now will be booked; None: nobody has set one."""
    which = (revisions.c.deployment_id == deployment_id) & (revisions.c.number == revision)
    model_id = await connection.scalar(select(revisions.c.model_id).where(which))
    return price_of(await prices_for(connection, {tenant_id}), tenant_id, model_id, at_us)


async def booked_pico(connection: AsyncConnection, tenant_id: str, month: str, currency: str) -> int:
    """What the requests cost that began in the month (YYYY-MM) and are booked."""
    begin_us, end_us = month_us(month)
    totals = await usage.totals(connection, tenant_id, begin_us, end_us, ())
    return sum(total.amount_pico for total in totals if total.currency == currency)


def month_us(month: str) -> tuple[int, int]:
    """Its begin and its end, UTC."""
    year, number = map(int, month.split("-"))
    begin = datetime(year, number, 1, tzinfo=UTC)
    end = datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)
    return round(begin.timestamp() * 1e6), round(end.timestamp() * 1e6)
