"""What was used: one row for each attempt at a request, booked from cumulative counters, and its sums.

A message replaces the row when it is later in the order (final, seq): whatever order and however often messages come,
the row is that of the greatest. The prompt is charged by the first attempt alone: that a second one was needed is the
platform's cost. A row stands on the bill of the month the request started in; a period closes CLOSING_US after its
month, what comes later for it stands on the next bill, and its rows don't change any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import and_, func, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from store.billing import Price, all_prices, cost_pico, price_of, prices_for
from store.db import insert
from store.tables import models, revisions, tenants, usage
from store.wire import Usage

_HOUR_US = 3600 * 1_000_000
_DAY_US = 24 * _HOUR_US
CLOSING_US = _DAY_US


def period_of(us: int) -> str:
    """YYYY-MM, UTC."""
    return f"{datetime.fromtimestamp(us / 1e6, UTC):%Y-%m}"


def is_closed(period: str, now_us: int) -> bool:
    """Its rows don't change any more."""
    return period < _first_open(now_us)


def _first_open(now_us: int) -> str:
    return period_of(now_us - CLOSING_US)


# ── booking ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def book(connection: AsyncConnection, messages: Iterable[Usage], now_us: int) -> None:
    """Carry the messages into the table; a message that is known, or older than what is known, changes nothing."""
    latest = greatest(messages)
    if not latest:
        return
    known_prices = await prices_for(connection, {message.tenant_id for message in latest})
    model_ids = await _model_ids(connection, latest)
    rows = [_row(message, model_ids, known_prices, now_us) for message in latest]
    statement = insert(connection, usage)
    new = statement.excluded
    newer = or_(
        and_(new.final, ~usage.c.final),
        and_(new.final == usage.c.final, new.seq > usage.c.seq),
    )
    counted = ("seq", "final", "prompt_tokens", "cached_tokens", "output_tokens", "ended_us", "finish")
    statement = statement.on_conflict_do_update(
        index_elements=[usage.c.request, usage.c.attempt],
        set_={name: new[name] for name in counted},
        where=and_(newer, usage.c.period >= _first_open(now_us)),
    )
    await connection.execute(statement, rows)


def greatest(messages: Iterable[Usage]) -> list[Usage]:
    """The latest message of each attempt, in an order that makes two writers wait for each other instead of lock up."""
    latest: dict[tuple[str, int], Usage] = {}
    for message in messages:
        key = (message.request, message.attempt)
        if key not in latest or _rank(message) > _rank(latest[key]):
            latest[key] = message
    return [latest[key] for key in sorted(latest)]


def _rank(message: Usage) -> tuple[bool, int]:
    return message.final, message.seq


async def _model_ids(connection: AsyncConnection, messages: list[Usage]) -> dict[tuple[str, int], str]:
    """(deployment, revision) → model."""
    wanted = sorted({(message.deployment_id, message.revision) for message in messages})
    key = (revisions.c.deployment_id, revisions.c.number)
    rows = await connection.execute(select(*key, revisions.c.model_id).where(tuple_(*key).in_(wanted)))
    return {(row[0], row[1]): row[2] for row in rows}


def _row(
    message: Usage, model_ids: dict[tuple[str, int], str], known_prices: list[Price], now_us: int
) -> dict[str, str | int | bool | None]:
    started_us = round(message.started_at * 1e6)
    model_id = model_ids.get((message.deployment_id, message.revision))
    price = price_of(known_prices, message.tenant_id, model_id, started_us)
    first = message.attempt <= 1
    return {
        "request": message.request,
        "attempt": message.attempt,
        "seq": message.seq,
        "final": message.final,
        "period": max(period_of(started_us), _first_open(now_us)),
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
    }


# ── sums ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

GROUPS = {
    "tenant": func.coalesce(tenants.c.name, usage.c.tenant_id),
    "deployment": usage.c.deployment,
    "model": func.coalesce(models.c.name, usage.c.engine_key),
    "key": usage.c.key_id,
    "day": usage.c.started_us // _DAY_US,
    "hour": usage.c.started_us // _HOUR_US,
}


@dataclass(frozen=True)
class Total:
    """Sums over the rows that agree in `group`; amounts of different currencies are never added."""

    group: dict[str, str]
    currency: str  # empty: nobody had set a price
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    amount_pico: int


async def totals(
    connection: AsyncConnection, tenant_id: str | None, from_us: int, to_us: int, group_by: tuple[str, ...]
) -> list[Total]:
    """Of requests that started in [from, to), of one tenant or (None) of all; `group_by` names GROUPS."""
    columns = [GROUPS[name] for name in group_by]
    counts = (
        func.count(usage.c.request.distinct()),
        func.sum(usage.c.prompt_tokens),
        func.sum(usage.c.cached_tokens),
        func.sum(usage.c.output_tokens),
    )
    query = (
        select(*columns, usage.c.price_id, *counts)
        .select_from(
            usage.outerjoin(tenants, tenants.c.id == usage.c.tenant_id).outerjoin(
                models, models.c.id == usage.c.model_id
            )
        )
        .where(usage.c.started_us >= from_us, usage.c.started_us < to_us)
        .where(*([usage.c.tenant_id == tenant_id] if tenant_id else []))
        .group_by(*columns, usage.c.price_id)
    )
    known = await all_prices(connection)
    sums: dict[tuple[str, ...], Total] = {}
    for *values, price_id, requests, prompt, cached, output in await connection.execute(query):
        group = {name: _shown(name, value) for name, value in zip(group_by, values, strict=True)}
        price = known.get(price_id)
        key = (*group.values(), price.currency if price else "")
        amount = cost_pico(price, int(prompt), int(cached), int(output))
        had = sums.get(key, Total(group, key[-1], 0, 0, 0, 0, 0))
        sums[key] = Total(
            group=group,
            currency=had.currency,
            requests=had.requests + requests,
            prompt_tokens=had.prompt_tokens + int(prompt),
            cached_tokens=had.cached_tokens + int(cached),
            output_tokens=had.output_tokens + int(output),
            amount_pico=had.amount_pico + amount,
        )
    return [sums[key] for key in sorted(sums)]


def _shown(name: str, value: str | int) -> str:
    if name == "hour":
        return f"{datetime.fromtimestamp(int(value) * 3600, UTC):%Y-%m-%dT%H:00:00Z}"
    if name == "day":
        return f"{datetime.fromtimestamp(int(value) * 86_400, UTC):%Y-%m-%d}"
    return str(value)
