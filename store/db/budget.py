"""Facts for budgets from the database: the price of a request, and the cost booked in a month so far."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.db import usage
from store.db.billing import Price, price_of, prices_for
from store.db.tables import revisions


async def price(
    connection: AsyncConnection, tenant_id: str, deployment_id: str, revision: int, at_us: int
) -> Price | None:
    """Return the price at which a request beginning at `at_us` will be booked; None: no price holds."""
    which = (revisions.c.deployment_id == deployment_id) & (revisions.c.number == revision)
    model_id = await connection.scalar(select(revisions.c.model_id).where(which))
    return price_of(await prices_for(connection, {tenant_id}), tenant_id, model_id, at_us)


async def booked_pico(connection: AsyncConnection, tenant_id: str, month: str, currency: str) -> int:
    """Return the cost of booked requests that began in the month (YYYY-MM), in pico-units of the currency."""
    begin_us, end_us = month_us(month)
    totals = await usage.totals(connection, tenant_id, begin_us, end_us, ())
    return sum(total.amount_pico for total in totals if total.currency == currency)


def month_us(month: str) -> tuple[int, int]:
    """Return the beginning and end of a month (YYYY-MM) in UTC, as UNIX microseconds."""
    year, number = map(int, month.split("-"))
    begin = datetime(year, number, 1, tzinfo=UTC)
    end = datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)
    return round(begin.timestamp() * 1e6), round(end.timestamp() * 1e6)
