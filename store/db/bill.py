"""The bill of a month: lines, rows behind the lines, corrections, and digests of exported bills of closed months.

A line sums a deployment's usage of one kind in a month at one price. The line's amount is to be paid, rounded to the
minor unit of the currency. A correction is a line of its own, on the bill open at the time of the correction.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, collate, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.db.billing import (
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
from store.db.database import AnyRow, insert, new_id, pages
from store.db.tables import corrections, exports, tenants, usage
from store.db.usage import DAY_US, MODEL, TENANT, counted, first_open, named, of_tenant, period_of, summed

CORRECTION = "correction"  # the sku of a correction's line


class Line(msgspec.Struct, frozen=True):
    """Line of a bill. Numbers are decimal texts: quantity x unit_price is `unrounded`, exactly."""

    period: str  # the bill's month, UTC
    month: str  # month of the usage, or of the corrected bill
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
    currency: str  # empty: no price held
    price_id: str
    reason: str  # why a correction was made; empty on other lines


class UsedRow(msgspec.Struct, frozen=True):
    """Usage of an attempt at a request, as a row behind a bill."""

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
    amount: str  # share of the bill, before any rounding
    currency: str
    price_id: str


# ── lines ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, order=True)
class _LineKey:
    """Fields common to a deployment's lines of several kinds.

    Sorted in Python, not by the database: databases disagree on the order of texts."""

    tenant: str
    tenant_id: str
    deployment_id: str
    deployment: str
    model: str
    month: str
    price_id: str


async def lines(connection: AsyncConnection, period: str, tenant_id: str | None) -> list[Line]:
    """Return the lines of a bill, of a tenant or (None) of every tenant. The order depends only on the usage."""
    known = await all_prices(connection)
    names = (TENANT, usage.c.tenant_id, usage.c.deployment_id, usage.c.deployment, MODEL)
    keys = (*names, usage.c.started_us // DAY_US, usage.c.price_id)
    where = (usage.c.period == period, *of_tenant(tenant_id))
    query = select(*keys, *summed()).select_from(named()).where(*where).group_by(*keys)
    sums: dict[_LineKey, Counts] = {}
    async for page in pages(connection, query):
        for row in page:
            *said, day, price_id = row[: len(keys)]
            values: tuple[str, ...] = (*said, period_of(day * DAY_US), price_id or "")
            place = _LineKey(*values)
            sums[place] = sums.get(place, Counts()) + counted(row[len(keys) :])
    made = [
        _line(period, place, sku, known.get(place.price_id), sku.quantity(sums[place]))
        for place in sorted(sums)
        for sku in SKUS
        if sku.quantity(sums[place])
    ]
    return made + await _corrected(connection, period, tenant_id)


def _line(period: str, place: _LineKey, sku: Sku, price: Price | None, quantity: int) -> Line:
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


async def rows(connection: AsyncConnection, period: str, tenant_id: str | None) -> AsyncIterator[list[UsedRow]]:
    """Yield the rows behind the lines, page by page, in the order in which the requests began."""
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


def _used(row: AnyRow, known: dict[str, Price]) -> UsedRow:
    period, started_us, ended_us, *said, price_id = row
    price = known.get(price_id)
    amount = cost(price, Counts(*said[-len(COUNTERS) :]))
    money = (decimal(amount, EXACT_PLACES), price.currency if price else "", price_id or "")
    values: tuple[Any, ...] = (period, _time(started_us), _time(ended_us), *said, *money)
    return UsedRow(*values)


def _time(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def by_bytes(connection: AsyncConnection, column: ColumnElement[str]) -> ColumnElement[str]:
    """Return a text column sorted by bytes, as SQLite sorts; PostgreSQL's order of texts depends on the machine."""
    return column if connection.dialect.name == "sqlite" else collate(column, "C")


# ── corrections ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, order=True)
class Correction:
    """Credit or debit on a bill. A correction never changes: a further correction takes it back."""

    id: str
    period: str  # period of the bill with the correction
    corrects: str  # period of the corrected bill
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
    """Add a correction to the bill open now. `corrects`: period of the corrected bill; None: the open bill."""
    period = first_open(now_us)
    made = Correction(new_id(), period, corrects or period, tenant_id, currency, amount_minor, reason, now_us)
    await connection.execute(corrections.insert().values(**vars(made)))
    return made


async def listed(connection: AsyncConnection, tenant_id: str | None, after: str, most: int) -> list[Correction]:
    query = select(corrections).where(corrections.c.id > after, *_owned_by(tenant_id))
    return [Correction(*row) for row in await connection.execute(query.order_by(corrections.c.id).limit(most))]


async def corrections_of(connection: AsyncConnection, period: str) -> list[Correction]:
    """Return the corrections on a bill, of every tenant."""
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
    """Name of a text that must never change: a closed period's bill in one format, written by one version."""

    period: str
    tenant_id: str  # empty: every tenant
    format: str
    detail: str
    version: str


async def first_sha256(connection: AsyncConnection, export: Export, sha256: str, size: int, now_us: int) -> str:
    """Return the digest of the first export; if there was none, record and return `sha256`."""
    row = vars(export) | {"sha256": sha256, "bytes": size, "created_us": now_us}
    await connection.execute(insert(connection, exports).values(**row).on_conflict_do_nothing())
    where = (exports.c[name] == value for name, value in vars(export).items())
    recorded: str = (await connection.execute(select(exports.c.sha256).where(*where))).scalar_one()
    return recorded


async def exported(connection: AsyncConnection, period: str) -> dict[Export, str]:
    """Return the digests of a period's first exports."""
    columns = (exports.c.period, exports.c.tenant_id, exports.c.format, exports.c.detail, exports.c.version)
    found = await connection.execute(select(*columns, exports.c.sha256).where(exports.c.period == period))
    return {export: sha256 for export, sha256 in sorted((Export(*row[:-1]), row[-1]) for row in found)}
