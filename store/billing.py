"""Prices and the bill. Money is counted in whole pico-units and rounded once, on the line of the bill, half to even."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.db import new_id
from store.tables import models, prices, tenants, usage

LINE_PLACES = 6  # decimals of an amount on the bill


@dataclass(frozen=True)
class Price:
    """Of one token of each kind. It never changes: another one follows it."""

    id: str
    tenant_id: str | None  # None: for every tenant
    model_id: str | None  # None: for every model
    currency: str
    prompt_pico: int
    cached_pico: int
    output_pico: int
    valid_from_us: int
    created_us: int


@dataclass(frozen=True)
class Line:
    """One kind of token of one deployment on one day, at one price."""

    period: str
    day: str  # UTC
    tenant: str
    deployment_id: str
    deployment: str
    model: str
    sku: str  # prompt | cached | output
    quantity: int  # tokens
    unit_price: str
    amount: str
    currency: str
    price_id: str


# ── money ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def cost_pico(price: Price | None, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
    """`cached_tokens` are among `prompt_tokens`. Nothing, where nobody set a price."""
    if price is None:
        return 0
    fresh = prompt_tokens - cached_tokens
    return fresh * price.prompt_pico + cached_tokens * price.cached_pico + output_tokens * price.output_pico


def decimal(pico: int, places: int = 12) -> str:
    """The amount in whole units, rounded half to even to `places` (at most 12) decimals."""
    step = 10 ** (12 - places)
    whole, rest = divmod(pico, step)
    whole += rest * 2 > step or (rest * 2 == step and whole % 2 == 1)
    return f"{whole // 10**places}.{whole % 10**places:0{places}d}"


# ── prices ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def price_of(known: list[Price], tenant_id: str, model_id: str | None, started_us: int) -> Price | None:
    """The one that held when the request started: the tenant's before everybody's, the model's before every model's."""
    fitting = [
        price
        for price in known
        if price.tenant_id in (None, tenant_id)
        and price.model_id in (None, model_id)
        and price.valid_from_us <= started_us
    ]
    return max(fitting, key=_precedence, default=None)


def _precedence(price: Price) -> tuple[bool, bool, int, str]:
    return price.tenant_id is not None, price.model_id is not None, price.valid_from_us, price.id


async def add_price(
    connection: AsyncConnection,
    tenant_id: str | None,
    model_id: str | None,
    currency: str,
    pico: tuple[int, int, int],
    valid_from_us: int,
    now_us: int,
) -> Price:
    """`pico` for a prompt, a cached and an output token. A price of the past would change what was booked: assert."""
    assert valid_from_us >= now_us, f"valid from {valid_from_us}, before now, {now_us}"
    price = Price(new_id(), tenant_id, model_id, currency, *pico, valid_from_us, now_us)
    await connection.execute(prices.insert().values(**vars(price)))
    return price


async def listed(connection: AsyncConnection, after: str, most: int) -> list[Price]:
    rows = await connection.execute(select(prices).where(prices.c.id > after).order_by(prices.c.id).limit(most))
    return [Price(*row) for row in rows]


async def all_prices(connection: AsyncConnection) -> dict[str, Price]:
    """By id."""
    return {row.id: Price(*row) for row in await connection.execute(select(prices))}


async def prices_for(connection: AsyncConnection, tenant_ids: set[str]) -> list[Price]:
    """All that may concern these tenants."""
    theirs = or_(prices.c.tenant_id.is_(None), prices.c.tenant_id.in_(sorted(tenant_ids)))
    return [Price(*row) for row in await connection.execute(select(prices).where(theirs))]


# ── the bill ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_DAY_US = 24 * 3600 * 1_000_000


async def lines(connection: AsyncConnection, period: str, tenant_id: str | None) -> Iterator[Line]:
    """In an order that depends on nothing but what was used. Of one tenant, or (None) of all.

    The database is done when this returns; the lines are made as they are taken.
    """
    keys = (
        func.coalesce(tenants.c.name, usage.c.tenant_id).label("tenant"),
        usage.c.deployment_id,
        usage.c.deployment,
        func.coalesce(models.c.name, usage.c.engine_key).label("model"),
        usage.c.started_us // _DAY_US,
        usage.c.price_id,
    )
    tokens = (usage.c.prompt_tokens, usage.c.cached_tokens, usage.c.output_tokens)
    query = (
        select(*keys, *(func.sum(column) for column in tokens))
        .outerjoin(tenants, tenants.c.id == usage.c.tenant_id)
        .outerjoin(models, models.c.id == usage.c.model_id)
        .where(usage.c.period == period, *([usage.c.tenant_id == tenant_id] if tenant_id else []))
        .group_by(*keys)
    )
    known = await all_prices(connection)
    # Sorted here, not in SQL: databases disagree on the order of texts and of nulls. A row is a deployment's day.
    rows = [tuple(row) for row in await connection.execute(query)]
    rows.sort(key=lambda row: (*row[:5], row[5] or ""))
    return (line for row in rows for line in _lines(period, known.get(row[5]), *row))


def _lines(
    period: str,
    price: Price | None,
    tenant: str,
    deployment_id: str,
    deployment: str,
    model: str,
    day: int,
    price_id: str | None,
    prompt: int,
    cached: int,
    output: int,
) -> Iterator[Line]:
    rates = (price.prompt_pico, price.cached_pico, price.output_pico) if price else (0, 0, 0)
    counted = (("prompt", int(prompt) - int(cached)), ("cached", int(cached)), ("output", int(output)))
    for (sku, quantity), rate in zip(counted, rates, strict=True):
        if quantity:
            yield Line(
                period=period,
                day=f"{datetime.fromtimestamp(day * 86_400, UTC):%Y-%m-%d}",
                tenant=tenant,
                deployment_id=deployment_id,
                deployment=deployment,
                model=model,
                sku=sku,
                quantity=quantity,
                unit_price=decimal(rate),
                amount=decimal(rate * quantity, LINE_PLACES),
                currency=price.currency if price else "",
                price_id=price_id or "",
            )
