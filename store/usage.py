"""What was used: one row for each attempt at a request, booked from cumulative counters, and its sums.

A row has the greatest value that any message said of each counter; the rest is of the latest message in the order
(final, seq). So whatever order and however often messages come, the row is the same. The prompt is charged by the
first attempt alone: that a second one was needed is the platform's cost. A row stands on the bill of the month the
request started in; a period closes CLOSING_US after its month, what comes later for it stands on the next bill, and
its rows don't change any more.
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

from store import billing
from store.billing import COUNTERS, EXACT_PER_PICO, Counts, Price, all_prices, cost, prices_for
from store.db import insert_in
from store.tables import models, revisions, tenants, usage
from store.wire import Usage

_HOUR_US = 3600 * 1_000_000
DAY_US = 24 * _HOUR_US
CLOSING_US = DAY_US
SETTLING_US = 600 * 1_000_000  # clocks of processes differ, and what was begun before the closing is committed after it
LEASE_US = 900 * 1_000_000  # gateways speak of open requests every few seconds: who was silent for so long is gone

Row: TypeAlias = dict[str, str | int | bool | None]


def period_of(us: int) -> str:
    """YYYY-MM, UTC."""
    return _month(us // DAY_US)


@functools.lru_cache(400)
def _month(day: int) -> str:
    return f"{datetime.fromtimestamp(day * 86_400, UTC):%Y-%m}"


def is_closed(period: str, now_us: int) -> bool:
    """Its rows don't change any more, whichever clock is asked."""
    return period < first_open(now_us - SETTLING_US)


def first_open(now_us: int) -> str:
    """The earliest period that what is booked now can stand on."""
    return period_of(now_us - CLOSING_US)


# ── booking ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def book(connection: AsyncConnection, messages: Sequence[Usage], now_us: int) -> None:
    """Carry the messages into the table; a message that is known, or older than what is known, changes nothing."""
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
    """The period of a row that is written again is its own as long as that is open, and a later one after that."""
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
    """One for each attempt, in an order that makes two writers wait for each other instead of lock up."""
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
    """(deployment, revision) → model."""
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
    """Rows past their lease end with what is booked of them. How many; a last word that comes yet still counts."""
    closed = await connection.execute(update(usage).where(_past_lease(now_us)).values(final=True, finish="lost"))
    return closed.rowcount


async def unreconciled(connection: AsyncConnection, now_us: int) -> int:
    """Rows past their lease that are still open."""
    return await connection.scalar(select(func.count()).where(_past_lease(now_us))) or 0


async def is_final(connection: AsyncConnection, request: str) -> bool:
    """Whether the end of this request's first attempt is booked."""
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
    """Sums over the rows that agree in `group`; amounts of different currencies are never added."""

    group: dict[str, str]
    currency: str  # empty: nobody had set a price
    requests: int
    counts: Counts
    amount: int  # in 1e-21 of the currency

    @property
    def amount_pico(self) -> int:
        """In pico-units, rounded up: at least so much is spent."""
        return -(-self.amount // EXACT_PER_PICO)


def named() -> FromClause:
    """The rows with the names of their tenants and models, which may be gone."""
    with_tenants = usage.outerjoin(tenants, tenants.c.id == usage.c.tenant_id)
    return with_tenants.outerjoin(models, models.c.id == usage.c.model_id)


def summed() -> list[ColumnElement[int]]:
    """Of every counter, in two halves: the whole of a month's byte-seconds may not fit SQLite's 64 bits."""
    half: ColumnElement[int] = literal_column(str(_HALF))
    return [func.sum(part) for name in COUNTERS for part in (usage.c[name] // half, usage.c[name] % half)]


def counted(sums: Sequence[int]) -> Counts:
    """What `summed` gave."""
    return Counts(*(int(high) * _HALF + int(low) for high, low in zip(sums[::2], sums[1::2], strict=True)))


async def totals(
    connection: AsyncConnection, tenant_id: str | None, from_us: int, to_us: int, group_by: tuple[str, ...]
) -> list[Total]:
    """Of requests that started in [from, to), of one tenant or (None) of all; `group_by` names GROUPS."""
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
    """Of one tenant, or (None) of all."""
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
    """What requests used that started in [index, index + 1) times the width, of one group."""

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
    """In order. `only` says which values of a column count; both it and `group_by` name columns of the table."""
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
