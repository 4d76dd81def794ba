"""The bill of a month: its lines, the rows below them, corrections, and what was exported of closed months.

A line is everything of one kind that a deployment used in a month at one price; its amount is what is paid, rounded to
the minor unit of the currency. Corrections are lines of their own, on the bill that is open when they are made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, collate, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.billing import (
    COUNTERS,
    EXACT_PLACES,
    PICO_PLACES,
    SKUS,
    Counts,
    Price,
    Sku,
    all_prices,
    cost,
    decimal,
    minor_places,
)
from store.db import AnyRow, insert, new_id, pages
from store.tables import corrections, exports, tenants, usage
from store.usage import DAY_US, MODEL, TENANT, counted, first_open, named, of_tenant, period_of, summed

CORRECTION = "correction"  # the sku of a correction's line


class Line(msgspec.Struct, frozen=True):
    """Numbers are decimal texts: quantity x unit_price is `unrounded`, exactly."""

    period: str  # the bill's month, UTC
    month: str  # in which it was used, or the bill that is corrected
    tenant_id: str
    tenant: str
    deployment_id: str
    deployment: str
    model: str
    sku: str
    quantity: str
    unit: str
    unit_price: str
    unrounded: str
    amount: str  # to be paid
    currency: str  # empty: nobody had set a price
    price_id: str
    reason: str  # of a correction


class Used(msgspec.Struct, frozen=True):
    """One attempt at a request."""

    period: str
    started_at: str  # RFC 3339, UTC
    ended_at: str
    request: str
    attempt: int
    seq: int
    tenant_id: str
    tenant: str
    key_id: str
    deployment_id: str
    deployment: str
    revision: int
    model: str
    finish: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    gpu_us: int
    switch_us: int
    cache_byte_s: int
    kv_byte_s: int
    amount: str  # what it adds to the bill, before anything is rounded
    currency: str
    price_id: str


# ── lines ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, order=True)
class _Place:
    """What lines of several kinds have in common. They are sorted here: databases disagree on the order of texts."""

    tenant: str
    tenant_id: str
    deployment_id: str
    deployment: str
    model: str
    month: str
    price_id: str


async def lines(connection: AsyncConnection, period: str, tenant_id: str | None) -> list[Line]:
    """In an order that depends on nothing but what was used. Of one tenant, or (None) of all."""
    known = await all_prices(connection)
    names = (TENANT, usage.c.tenant_id, usage.c.deployment_id, usage.c.deployment, MODEL)
    keys = (*names, usage.c.started_us // DAY_US, usage.c.price_id)
    where = (usage.c.period == period, *of_tenant(tenant_id))
    query = select(*keys, *summed()).select_from(named()).where(*where).group_by(*keys)
    sums: dict[_Place, Counts] = {}
    async for page in pages(connection, query):
        for row in page:
            *said, day, price_id = row[: len(keys)]
            values: tuple[str, ...] = (*said, period_of(day * DAY_US), price_id or "")
            place = _Place(*values)
            sums[place] = sums.get(place, Counts()) + counted(row[len(keys) :])
    made = [
        _line(period, place, sku, known.get(place.price_id), sku.quantity(sums[place]))
        for place in sorted(sums)
        for sku in SKUS
        if sku.quantity(sums[place])
    ]
    return made + await _corrected(connection, period, tenant_id)


def _line(period: str, place: _Place, sku: Sku, price: Price | None, quantity: int) -> Line:
    currency = price.currency if price else ""
    amount = sku.amount(price, quantity)
    return Line(
        period=period,
        month=place.month,
        tenant_id=place.tenant_id,
        tenant=place.tenant,
        deployment_id=place.deployment_id,
        deployment=place.deployment,
        model=place.model,
        sku=sku.name,
        quantity=decimal(quantity, sku.places),
        unit=sku.unit,
        unit_price=decimal(sku.pico(price), PICO_PLACES),
        unrounded=decimal(amount, EXACT_PLACES),
        amount=decimal(amount, EXACT_PLACES, minor_places(currency)),
        currency=currency,
        price_id=place.price_id,
        reason="",
    )


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def rows(connection: AsyncConnection, period: str, tenant_id: str | None) -> AsyncIterator[list[Used]]:
    """What is behind the lines, piece by piece, in the order in which the requests began."""
    known = await all_prices(connection)
    query = (
        select(*USED)
        .select_from(named())
        .where(usage.c.period == period, *of_tenant(tenant_id))
        .order_by(usage.c.started_us, by_bytes(connection, usage.c.request), usage.c.attempt)
    )
    async for page in pages(connection, query):
        yield [_used(row, known) for row in page]


USED = (
    usage.c.period,
    usage.c.started_us,
    usage.c.ended_us,
    usage.c.request,
    usage.c.attempt,
    usage.c.seq,
    usage.c.tenant_id,
    TENANT.label("tenant"),
    usage.c.key_id,
    usage.c.deployment_id,
    usage.c.deployment,
    usage.c.revision,
    MODEL.label("model"),
    usage.c.finish,
    *(usage.c[name] for name in COUNTERS),
    usage.c.price_id,
)


def _used(row: AnyRow, known: dict[str, Price]) -> Used:
    period, started_us, ended_us, *said, price_id = row
    price = known.get(price_id)
    amount = cost(price, Counts(*said[-len(COUNTERS) :]))
    money = (decimal(amount, EXACT_PLACES), price.currency if price else "", price_id or "")
    values: tuple[Any, ...] = (period, _time(started_us), _time(ended_us), *said, *money)
    return Used(*values)


def _time(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def by_bytes(connection: AsyncConnection, column: ColumnElement[str]) -> ColumnElement[str]:
    """As SQLite sorts; PostgreSQL's order of texts depends on the machine."""
    return column if connection.dialect.name == "sqlite" else collate(column, "C")


# ── corrections ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, order=True)
class Correction:
    """It never changes: another one takes it back."""

    id: str
    period: str  # of the bill it stands on
    corrects: str  # period of the bill it is about
    tenant_id: str
    currency: str
    amount_minor: int  # minor units of the currency; negative: a credit
    reason: str
    created_us: int


async def correct(
    connection: AsyncConnection,
    tenant_id: str,
    corrects: str | None,
    currency: str,
    amount_minor: int,
    reason: str,
    now_us: int,
) -> Correction:
    """On the bill that is open now. `corrects` None: about that one."""
    period = first_open(now_us)
    made = Correction(new_id(), period, corrects or period, tenant_id, currency, amount_minor, reason, now_us)
    await connection.execute(corrections.insert().values(**vars(made)))
    return made


async def listed(connection: AsyncConnection, tenant_id: str | None, after: str, most: int) -> list[Correction]:
    query = select(corrections).where(corrections.c.id > after, *_owned_by(tenant_id))
    return [Correction(*row) for row in await connection.execute(query.order_by(corrections.c.id).limit(most))]


async def corrections_of(connection: AsyncConnection, period: str) -> list[Correction]:
    """Those on a bill, of all tenants."""
    query = select(corrections).where(corrections.c.period == period).order_by(corrections.c.id)
    return [Correction(*row) for row in await connection.execute(query)]


def _owned_by(tenant_id: str | None) -> list[ColumnElement[bool]]:
    return [corrections.c.tenant_id == tenant_id] if tenant_id else []


async def _corrected(connection: AsyncConnection, period: str, tenant_id: str | None) -> list[Line]:
    query = select(tenants.c.name, *corrections.c).join_from(corrections, tenants)
    found = await connection.execute(query.where(corrections.c.period == period, *_owned_by(tenant_id)))
    ordered = sorted((row[0], Correction(*row[1:])) for row in found)
    return [_correction_line(tenant, correction) for tenant, correction in ordered]


def _correction_line(tenant: str, correction: Correction) -> Line:
    amount = decimal(correction.amount_minor, minor_places(correction.currency))
    return Line(
        period=correction.period,
        month=correction.corrects,
        tenant_id=correction.tenant_id,
        tenant=tenant,
        deployment_id="",
        deployment="",
        model="",
        sku=CORRECTION,
        quantity="1",
        unit="Corrections",
        unit_price=amount,
        unrounded=amount,
        amount=amount,
        currency=correction.currency,
        price_id="",
        reason=correction.reason,
    )


# ── what was exported ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, order=True)
class Export:
    """Names a text that must never change: the bill of a closed period, written in one way by one version."""

    period: str
    tenant_id: str  # empty: of all
    format: str
    detail: str
    version: str


async def first_sha256(connection: AsyncConnection, export: Export, sha256: str, size: int, now_us: int) -> str:
    """What the first export was, if need be this one."""
    row = vars(export) | {"sha256": sha256, "bytes": size, "created_us": now_us}
    await connection.execute(insert(connection, exports).values(**row).on_conflict_do_nothing())
    where = (exports.c[name] == value for name, value in vars(export).items())
    recorded: str = (await connection.execute(select(exports.c.sha256).where(*where))).scalar_one()
    return recorded


async def exported(connection: AsyncConnection, period: str) -> dict[Export, str]:
    """Of a period: the digest of each first export."""
    columns = (exports.c.period, exports.c.tenant_id, exports.c.format, exports.c.detail, exports.c.version)
    found = await connection.execute(select(*columns, exports.c.sha256).where(exports.c.period == period))
    return {export: sha256 for export, sha256 in sorted((Export(*row[:-1]), row[-1]) for row in found)}
