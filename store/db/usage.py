"""Usage: a row for each attempt at a request, booked from cumulative counters, and sums over rows.

A row has the greatest value of each counter in any message. The other columns come from the latest message in the
order (final, seq). The row is therefore the same in whatever order and however often messages come. Only the first
attempt pays the prompt: the need for a second attempt is the platform's cost. A row stands on the bill of the month in
which the request started. A period closes CLOSING_US after the month; then rows of the period no longer change, and
rows booked later for the month stand on the next bill.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from sqlalchemy import (
    ColumnElement,
    FromClause,
    and_,
    case,
    func,
    literal_column,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from store.contract.wire import Usage
from store.db import billing
from store.db.billing import COUNTERS, EXACT_PER_PICO, Counts, Price, all_prices, cost, prices_for
from store.db.database import insert_in
from store.db.tables import models, revisions, tenants, usage

_HOUR_US = 3600 * 1_000_000
DAY_US = 24 * _HOUR_US
CLOSING_US = DAY_US
SETTLING_US = 600 * 1_000_000  # clocks differ, and a transaction begun before the closing may commit after the closing
LEASE_US = 900 * 1_000_000  # gateways report open requests every few seconds: a gateway silent for so long is gone

Row: TypeAlias = dict[str, str | int | bool | None]


def period_of(us: int) -> str:
    """Return the month of a time as YYYY-MM, UTC."""
    return _month(us // DAY_US)


@functools.lru_cache(400)
def _month(day: int) -> str:
    return f"{datetime.fromtimestamp(day * 86_400, UTC):%Y-%m}"


def is_closed(period: str, now_us: int) -> bool:
    """Whether the rows of a period no longer change, by the clock of any process."""
    return period < first_open(now_us - SETTLING_US)


def first_open(now_us: int) -> str:
    """Return the earliest period still open for usage booked now."""
    return period_of(now_us - CLOSING_US)


# ── booking ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def book(connection: AsyncConnection, messages: Sequence[Usage], now_us: int) -> None:
    """Book usage messages in the table. A message booked before, or older than the row, changes nothing."""
    if not messages:
        return
    known_prices = await prices_for(connection, {message.tenant_id for message in messages})
    fitting = functools.cache(functools.partial(billing.fitting, known_prices))
    model_ids = await _model_ids(connection, messages)
    open_from = first_open(now_us)
    rows = merged(_row(message, model_ids, fitting, open_from) for message in messages)
    await connection.execute(_upsert(connection.dialect.name), rows)


@functools.cache
def _upsert(dialect: str) -> sqlite.Insert | postgresql.Insert:
    """Return the statement that inserts or updates rows.

    A row is updated only while the row's period is open: after the closing, a new message carries a later period."""
    statement = insert_in(dialect, usage)
    new = statement.excluded
    newer = or_(
        and_(new.final, ~usage.c.final),
        and_(new.final == usage.c.final, new.seq > usage.c.seq),
    )
    greatest = {name: _chosen(new[name] > usage.c[name], new[name], usage.c[name]) for name in COUNTERS}
    latest = {name: _chosen(newer, new[name], usage.c[name]) for name in _LATEST}
    changes = or_(newer, *(new[name] > usage.c[name] for name in COUNTERS))
    return statement.on_conflict_do_update(
        index_elements=[usage.c.request, usage.c.attempt],
        set_=greatest | latest,
        where=and_(changes, usage.c.period >= new.period),
    )


_LATEST = ("seq", "final", "ended_us", "finish")


def _chosen(replaces: ColumnElement[bool], new: ColumnElement[Any], known: ColumnElement[Any]) -> ColumnElement[Any]:
    return case((replaces, new), else_=known)


def merged(rows: Iterable[Row]) -> list[Row]:
    """Merge rows into a row for each attempt, sorted: two writers then wait for each other instead of deadlocking."""
    found: dict[tuple[object, object], Row] = {}
    for row in rows:
        known = found.setdefault((row["request"], row["attempt"]), row)
        if known is not row:
            later = max(known, row, key=_rank)
            known.update({name: later[name] for name in _LATEST})
            known.update({name: max(known[name], row[name]) for name in COUNTERS})  # type: ignore[type-var]
    return [found[key] for key in sorted(found)]


def _rank(row: Row) -> tuple[object, object]:
    return row["final"], row["seq"]


async def _model_ids(connection: AsyncConnection, messages: Sequence[Usage]) -> dict[tuple[str, int], str]:
    """Return the model's id by (deployment, revision)."""
    wanted = sorted({(message.deployment_id, message.revision) for message in messages})
    key = (revisions.c.deployment_id, revisions.c.number)
    rows = await connection.execute(select(*key, revisions.c.model_id).where(tuple_(*key).in_(wanted)))
    return {(row[0], row[1]): row[2] for row in rows}


def _row(
    message: Usage,
    model_ids: Mapping[tuple[str, int], str],
    fitting: Callable[[str, str | None], list[Price]],
    open_from: str,
) -> Row:
    started_us = round(message.started_at * 1e6)
    model_id = model_ids.get((message.deployment_id, message.revision))
    price = billing.held_at(fitting(message.tenant_id, model_id), started_us)
    first = message.attempt <= 1
    return {
        "request": message.request,
        "attempt": message.attempt,
        "seq": message.seq,
        "final": message.final,
        "period": max(period_of(started_us), open_from),
        "tenant_id": message.tenant_id,
        "key_id": message.key_id,
        "deployment_id": message.deployment_id,
        "deployment": message.deployment,
        "revision": message.revision,
        "engine_key": message.model,
        "model_id": model_id,
        "prompt_tokens": message.prompt_tokens if first else 0,
        "cached_tokens": min(message.cached_tokens, message.prompt_tokens) if first else 0,
        "output_tokens": message.output_tokens,
        "price_id": price.id if price else None,
        "started_us": started_us,
        "ended_us": round(message.ended_at * 1e6),
        "finish": message.finish,
        "gpu_us": message.gpu_us,
        "switch_us": message.switch_us,
        "cache_byte_s": message.cache_byte_s,
        "kv_byte_s": message.kv_byte_s,
    }


# ── requests that nobody speaks of any more ───────────────────────────────────────────────────────────────────────────


async def close_lost(connection: AsyncConnection, now_us: int) -> int:
    """Close rows past their lease with the usage booked so far; return the number of closed rows.

    A final message that comes even later still counts."""
    closed = await connection.execute(update(usage).where(_past_lease(now_us)).values(final=True, finish="lost"))
    return closed.rowcount


async def unreconciled(connection: AsyncConnection, now_us: int) -> int:
    """Return the number of open rows past their lease."""
    return await connection.scalar(select(func.count()).where(_past_lease(now_us))) or 0


async def is_final(connection: AsyncConnection, request: str) -> bool:
    """Whether the end of the request's first attempt is booked."""
    query = select(usage.c.final).where(usage.c.request == request, usage.c.attempt == 1)
    return bool(await connection.scalar(query))


def _past_lease(now_us: int) -> ColumnElement[bool]:
    silent = usage.c.ended_us < now_us - LEASE_US
    return and_(~usage.c.final, silent, usage.c.period >= first_open(now_us))


# ── sums ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

MODEL = func.coalesce(models.c.name, usage.c.engine_key)
TENANT = func.coalesce(tenants.c.name, usage.c.tenant_id)
GROUPS = {
    "tenant": TENANT,
    "deployment": usage.c.deployment,
    "model": MODEL,
    "key": usage.c.key_id,
    "day": usage.c.started_us // DAY_US,
    "hour": usage.c.started_us // _HOUR_US,
}
_HALF = 1 << 31


@dataclass(frozen=True)
class Total:
    """Sums over the rows of a group and currency. Amounts of different currencies are never added."""

    group: dict[str, str]
    currency: str  # empty: no price held
    requests: int
    counts: Counts
    amount: int  # in 1e-21 of the currency

    @property
    def amount_pico(self) -> int:
        """Amount in pico-units, rounded up, so that a budget never counts too little."""
        return -(-self.amount // EXACT_PER_PICO)


def named() -> FromClause:
    """Join usage with the names of tenants and models; names of missing tenants and models are null."""
    with_tenants = usage.outerjoin(tenants, tenants.c.id == usage.c.tenant_id)
    return with_tenants.outerjoin(models, models.c.id == usage.c.model_id)


def summed() -> list[ColumnElement[int]]:
    """Return the columns that sum each counter in two halves: a month's byte-seconds may not fit SQLite's 64 bits."""
    half: ColumnElement[int] = literal_column(str(_HALF))
    return [func.sum(part) for name in COUNTERS for part in (usage.c[name] // half, usage.c[name] % half)]


def counted(sums: Sequence[int]) -> Counts:
    """Join the halves in a row of `summed`."""
    return Counts(*(int(high) * _HALF + int(low) for high, low in zip(sums[::2], sums[1::2], strict=True)))


async def totals(
    connection: AsyncConnection, tenant_id: str | None, from_us: int, to_us: int, group_by: tuple[str, ...]
) -> list[Total]:
    """Return sums over requests that started in [from, to), of a tenant or (None) of every tenant.

    `group_by` names keys of GROUPS."""
    columns = [GROUPS[name] for name in group_by]
    query = (
        select(*columns, usage.c.price_id, func.count(usage.c.request.distinct()), *summed())
        .select_from(named())
        .where(usage.c.started_us >= from_us, usage.c.started_us < to_us, *of_tenant(tenant_id))
        .group_by(*columns, usage.c.price_id)
    )
    known = await all_prices(connection)
    sums: dict[tuple[str, ...], Total] = {}
    for row in await connection.execute(query):
        price_id, requests, *parts = row[len(columns) :]
        group = {name: _shown(name, value) for name, value in zip(group_by, row, strict=False)}
        price, counts = known.get(price_id), counted(parts)
        key = (*group.values(), price.currency if price else "")
        had = sums.get(key, Total(group, key[-1], 0, Counts(), 0))
        sums[key] = Total(
            group=group,
            currency=had.currency,
            requests=had.requests + requests,
            counts=had.counts + counts,
            amount=had.amount + cost(price, counts),
        )
    return [sums[key] for key in sorted(sums)]


def of_tenant(tenant_id: str | None) -> list[ColumnElement[bool]]:
    """Return the condition for the rows of a tenant; None: no condition, so rows of every tenant."""
    return [usage.c.tenant_id == tenant_id] if tenant_id else []


def _shown(name: str, value: str | int) -> str:
    if name == "hour":
        return f"{datetime.fromtimestamp(int(value) * 3600, UTC):%Y-%m-%dT%H:00:00Z}"
    if name == "day":
        return f"{datetime.fromtimestamp(int(value) * 86_400, UTC):%Y-%m-%d}"
    return str(value)


# ── sums in pieces of time ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Bucket:
    """Usage of a group's requests that started in [index, index + 1) times the width."""

    index: int
    group: tuple[str, ...]
    requests: int
    counts: Counts


async def buckets(
    connection: AsyncConnection,
    only: Mapping[str, Sequence[str]],
    from_us: int,
    to_us: int,
    width_us: int,
    group_by: Sequence[str],
) -> list[Bucket]:
    """Return usage in buckets of time, sorted by index and group.

    `only` limits columns to values; the keys of `only` and the names in `group_by` are columns of the table `usage`."""
    index = usage.c.started_us // literal_column(str(width_us))
    columns = [usage.c[name] for name in group_by]
    query = (
        select(index, func.count(usage.c.request.distinct()), *columns, *summed())
        .where(usage.c.started_us >= from_us, usage.c.started_us < to_us)
        .where(*(usage.c[name].in_(values) for name, values in only.items()))
        .group_by(index, *columns)
    )
    found = [
        Bucket(row[0], tuple(row[2 : 2 + len(columns)]), row[1], counted(row[2 + len(columns) :]))
        for row in await connection.execute(query)
    ]
    return sorted(found, key=lambda bucket: (bucket.index, bucket.group))
