"""Prices, usage and the bill, as the control plane takes and shows them."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from datetime import datetime
from typing import Annotated

from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import JSONResponse, Response, StreamingResponse

from gateway.api import Answer, Body, Call, one_of, time_text, time_us
from gateway.errors import invalid
from store import billing, models, tenants, usage
from store.billing import Line, Price
from store.db import now_us

Pico = Annotated[int, Meta(ge=0, le=10**15)]  # of one token


class NewPrice(Body, frozen=True):
    """Per token, in 1e-12 of the currency: 2 USD for a million tokens are 2_000_000."""

    prompt_pico: Pico
    output_pico: Pico
    cached_pico: Pico | None = None  # None: as other prompt tokens
    currency: Annotated[str, Meta(pattern=r"^[A-Z]{3}$")] = "USD"
    tenant: str | None = None  # None: for every tenant
    model: str | None = None  # None: for every model
    valid_from: Annotated[datetime, Meta(tz=True)] | None = None  # None: from now on


# ── prices ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def create_price(call: Call) -> Response:
    body = await call.body(NewPrice)
    cached_pico = body.prompt_pico if body.cached_pico is None else body.cached_pico

    async def deed(connection: AsyncConnection) -> Answer:
        tenant_id, model_id = await _for_whom(connection, body)
        now = now_us()
        valid_from_us = time_us(body.valid_from) if body.valid_from else now
        if valid_from_us < now:
            raise invalid("/valid_from", "it is in the past: what is booked keeps its price")
        pico = (body.prompt_pico, cached_pico, body.output_pico)
        price = await billing.add_price(connection, tenant_id, model_id, body.currency, pico, valid_from_us, now)
        await call.record(connection, "price.created", price.id, tenant_id)
        return Answer(201, show_price(price))

    return await call.once(deed)


async def _for_whom(connection: AsyncConnection, body: NewPrice) -> tuple[str | None, str | None]:
    """Ids of the tenant and the model. Raises Problem."""
    tenant = await tenants.tenant(connection, body.tenant) if body.tenant else None
    if body.tenant and tenant is None:
        raise invalid("/tenant", f"there is no tenant {body.tenant!r}")
    tenant_id = tenant.id if tenant else None
    model = await models.find(connection, tenant_id, body.model) if body.model else None
    if body.model and model is None:
        raise invalid("/model", f"there is no model {body.model!r}")
    return tenant_id, model.id if model else None


async def list_prices(call: Call) -> Response:
    async with call.database.read() as connection:
        return call.page(await billing.listed(connection, call.after, call.limit + 1), show_price)


def show_price(price: Price) -> dict[str, object]:
    return {
        "id": price.id,
        "tenant_id": price.tenant_id,
        "model_id": price.model_id,
        "currency": price.currency,
        "prompt_pico": price.prompt_pico,
        "cached_pico": price.cached_pico,
        "output_pico": price.output_pico,
        "valid_from": time_text(price.valid_from_us),
        "created_at": time_text(price.created_us),
    }


# ── usage ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def show_usage(call: Call) -> Response:
    """Of requests that started in [from, to); without them of this month until now."""
    group_by = tuple(name for name in (call.query("group_by") or "").split(",") if name)
    for name in group_by:
        one_of("?group_by", name, usage.GROUPS)
    now = now_us()
    from_us = _moment(call, "from", _month_begin_us(now))
    to_us = _moment(call, "to", now)
    tenant_id = await call.tenant_id()
    async with call.database.read() as connection:
        totals = await usage.totals(connection, tenant_id, from_us, to_us, group_by)
    data = [show_total(total) for total in totals]
    return JSONResponse({"data": data, "from": time_text(from_us), "to": time_text(to_us), "next_cursor": None})


def _month_begin_us(us: int) -> int:
    return time_us(datetime.fromisoformat(f"{usage.period_of(us)}-01T00:00:00+00:00"))


def _moment(call: Call, name: str, default_us: int) -> int:
    said = call.query(name)
    if not said:
        return default_us
    try:
        return time_us(datetime.fromisoformat(said.replace(" ", "+")))  # a bare + in a query is a space
    except (ValueError, OverflowError) as error:
        raise invalid(f"?{name}", f"{said!r} is not a time like 2026-11-21 or 2026-11-21T12:00:00Z") from error


def show_total(total: usage.Total) -> dict[str, object]:
    return total.group | {
        "requests": total.requests,
        "prompt_tokens": total.prompt_tokens,
        "cached_tokens": total.cached_tokens,
        "output_tokens": total.output_tokens,
        "amount": billing.decimal(total.amount_pico),
        "currency": total.currency or None,
    }


# ── the bill ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def export(call: Call) -> Response:
    period = call.query("period") or ""
    if not re.fullmatch(r"[1-9]\d{3}-(0[1-9]|1[0-2])", period):
        raise invalid("?period", f"{period!r} is not a month like 2026-11")
    kind = call.query("format") or "csv"
    one_of("?format", kind, ("csv", "jsonl"))
    tenant_id = await call.tenant_id()
    async with call.database.read() as connection:
        lines = await billing.lines(connection, period, tenant_id)
    text, media_type = (_csv(lines), "text/csv") if kind == "csv" else (_jsonl(lines), "application/jsonl")
    headers = {
        "content-disposition": f'attachment; filename="staccato-{period}.{kind}"',
        "x-staccato-period": "closed" if usage.is_closed(period, now_us()) else "open",
    }
    return StreamingResponse(text, headers=headers, media_type=media_type)


def _csv(lines: Iterable[Line]) -> Iterator[str]:
    yield _row([field.name for field in fields(Line)])
    for line in lines:
        yield _row(list(asdict(line).values()))


def _row(values: list[str | int]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _jsonl(lines: Iterable[Line]) -> Iterator[str]:
    return (json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in lines)
