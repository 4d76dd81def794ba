"""Routes for prices, usage, the bill and its corrections."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType, convert, field
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import Response

from gateway.http.api import (
    OF_TENANT,
    Answer,
    Body,
    Call,
    Operation,
    Page,
    Query,
    Shown,
    Time,
    answered,
    moment,
    month,
    one_of,
    time_text,
    time_us,
)
from gateway.http.errors import Problem, invalid
from store.db import bill, billing, models, tenants, usage
from store.db.bill import Correction
from store.db.billing import EXACT_PLACES, PICO_PLACES, Price
from store.db.database import now_us

Pico = Annotated[int, Meta(ge=0, le=10**15)]
Currency = Annotated[str, Meta(pattern=r"^[A-Z]{3}$", description="a currency in three capital letters, as USD")]


class NewPrice(Body, frozen=True):
    """Rates in 1e-12 of the currency: 2 USD for a million tokens are 2_000_000, 3.60 USD for a GPU-hour are 10**9."""

    prompt_pico: Pico  # per token
    output_pico: Pico
    cached_pico: Pico | None = None  # None: the price of other prompt tokens
    gpu_s_pico: Pico = 0  # per second of device steps
    switch_s_pico: Pico = 0  # per second of the model's way to the device
    cache_gb_s_pico: Pico = 0  # per second of 10**9 bytes in the host cache
    kv_gb_s_pico: Pico = 0  # per second of 10**9 bytes in the device's KV cache
    currency: Currency = "USD"
    tenant: str | None = None  # None: for every tenant
    model: str | None = None  # None: for every model
    valid_from: Annotated[datetime, Meta(tz=True)] | None = None  # None: from now on


class ShownPrice(Shown, frozen=True, kw_only=True):
    id: str
    tenant_id: str | None
    model_id: str | None
    currency: str
    prompt_pico: int
    cached_pico: int
    output_pico: int
    gpu_s_pico: int
    switch_s_pico: int
    cache_gb_s_pico: int
    kv_gb_s_pico: int
    valid_from: Time
    created_at: Time


class ShownTotal(Shown, frozen=True, kw_only=True):
    """Sum of usage. The amount is exact; the device's figures are rounded for people, and exact in the bill."""

    tenant: str | UnsetType = UNSET  # set if the query groups by the field
    deployment: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    day: str | UnsetType = UNSET
    hour: str | UnsetType = UNSET
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    gpu_ms: float
    switch_ms: float
    cache_gb_s: float
    kv_gb_s: float
    amount: str
    currency: str | None  # None: no price was set


class ShownUsage(Shown, frozen=True, kw_only=True):
    data: list[ShownTotal]
    from_: Time = field(name="from")
    to: Time
    next_cursor: None


class NewCorrection(Body, frozen=True):
    """Correction on the bill that is open now, whichever bill it corrects: -1250 are 12.50 USD for the tenant."""

    tenant: str
    amount_minor: Annotated[int, Meta(ge=-(10**15), le=10**15)]  # minor units of the currency; negative: a credit
    reason: Annotated[str, Meta(min_length=1, max_length=500)]
    currency: Currency = "USD"
    corrects: str | None = None  # the corrected bill, as 2026-10; None: the open bill


class ShownCorrection(Shown, frozen=True, kw_only=True):
    id: str
    period: str
    corrects: str
    tenant_id: str
    currency: str
    amount_minor: int
    amount: str  # in whole units of the currency, as in the export: -12.50
    reason: str
    created_at: Time


# ── prices ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@Operation(ShownPrice, 201, body=NewPrice, once=True, problems=(409,), operator=("billing",))
async def create_price(call: Call) -> Response:
    """Set a price from some moment on; booked usage keeps its price."""
    body = await call.body(NewPrice)
    rates = {name: getattr(body, name) for name in billing.RATES}
    if body.cached_pico is None:
        rates["cached_pico"] = body.prompt_pico

    async def deed(connection: AsyncConnection) -> Answer:
        tenant_id, model_id = await _for_whom(connection, body)
        now = now_us()
        valid_from_us = time_us(body.valid_from) if body.valid_from else now
        if valid_from_us < now:
            raise invalid("/valid_from", "it is in the past: what is booked keeps its price")
        price = await billing.add_price(connection, tenant_id, model_id, body.currency, rates, valid_from_us, now)
        await call.record(connection, "price.created", price.id, tenant_id, new=show_price(price))
        return Answer(201, show_price(price))

    return await call.once(deed)


async def _for_whom(connection: AsyncConnection, body: NewPrice) -> tuple[str | None, str | None]:
    """Return the ids of the price's tenant and model. Raises Problem."""
    tenant_id = await _tenant_id(connection, body.tenant) if body.tenant else None
    model = await models.find(connection, tenant_id, body.model) if body.model else None
    if body.model and model is None:
        raise invalid("/model", f"there is no model {body.model!r}")
    return tenant_id, model.id if model else None


async def _tenant_id(connection: AsyncConnection, name: str) -> str:
    tenant = await tenants.tenant(connection, name)
    if tenant is None:
        raise invalid("/tenant", f"there is no tenant {name!r}")
    return tenant.id


@Operation(Page[ShownPrice], paged=True, operator=("billing:read", "billing"))
async def list_prices(call: Call) -> Response:
    """List the prices, also those of the past."""
    async with call.database.read() as connection:
        return call.page(await billing.listed(connection, call.after, call.limit + 1), show_price)


def show_price(price: Price) -> ShownPrice:
    return ShownPrice(
        id=price.id,
        tenant_id=price.tenant_id,
        model_id=price.model_id,
        currency=price.currency,
        **{name: getattr(price, name) for name in billing.RATES},
        valid_from=time_text(price.valid_from_us),
        created_at=time_text(price.created_us),
    )


# ── usage ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@Operation(
    ShownUsage,
    query=(
        OF_TENANT,
        Query("from", str, "The first moment, as 2026-11-21 or 2026-11-21T12:00:00Z; else the month's begin."),
        Query("to", str, "The moment that it ends before; else now."),
        Query("group_by", str, f"Some of {', '.join(usage.GROUPS)}, with commas."),
    ),
    operator=("billing:read", "billing"),
)
async def show_usage(call: Call) -> Response:
    """Sum up the usage of requests that started in [from, to)."""
    group_by = tuple(name for name in call.query("group_by", "").split(",") if name)
    for name in group_by:
        one_of("?group_by", name, usage.GROUPS)
    now = now_us()
    from_us = moment(call, "from", _month_begin_us(now))
    to_us = moment(call, "to", now)
    tenant_id = await call.tenant_id()
    async with call.database.read() as connection:
        totals = await usage.totals(connection, tenant_id, from_us, to_us, group_by)
    data = [show_total(total) for total in totals]
    return answered(ShownUsage(data=data, from_=time_text(from_us), to=time_text(to_us), next_cursor=None))


def _month_begin_us(us: int) -> int:
    return time_us(datetime.fromisoformat(f"{usage.period_of(us)}-01T00:00:00+00:00"))


def show_total(total: usage.Total) -> ShownTotal:
    counts = total.counts
    shown = total.group | {
        "requests": total.requests,
        "prompt_tokens": counts.prompt_tokens,
        "cached_tokens": counts.cached_tokens,
        "output_tokens": counts.output_tokens,
        "gpu_ms": counts.gpu_us / 1e3,
        "switch_ms": counts.switch_us / 1e3,
        "cache_gb_s": counts.cache_byte_s / 1e9,
        "kv_gb_s": counts.kv_byte_s / 1e9,
        "amount": billing.decimal(total.amount, EXACT_PLACES, PICO_PLACES),
        "currency": total.currency or None,
    }
    return convert(shown, ShownTotal)


# ── corrections ───────────────────────────────────────────────────────────────────────────────────────────────────────


@Operation(ShownCorrection, 201, body=NewCorrection, once=True, operator=("billing",))
async def create_correction(call: Call) -> Response:
    """Correct a bill by a separate row: booked usage and earlier bills stay unchanged."""
    body = await call.body(NewCorrection)
    if "idempotency-key" not in call.request.headers:
        detail = "a correction that is sent twice would be paid twice: send an Idempotency-Key"
        raise Problem(400, "idempotency_key_missing", detail)
    if body.amount_minor == 0:
        raise invalid("/amount_minor", "it is 0: a credit is negative, a debit is positive")

    async def deed(connection: AsyncConnection) -> Answer:
        now = now_us()
        if body.corrects is not None and month("/corrects", body.corrects) > usage.period_of(now):
            raise invalid("/corrects", f"{body.corrects} has not begun")
        tenant_id = await _tenant_id(connection, body.tenant)
        about = (body.corrects, body.currency, body.amount_minor, body.reason)
        made = await bill.correct(connection, tenant_id, *about, now)
        await call.record(connection, "billing.corrected", made.id, tenant_id, new=show_correction(made))
        return Answer(201, show_correction(made))

    return await call.once(deed)


@Operation(Page[ShownCorrection], query=(OF_TENANT,), paged=True, operator=("billing:read", "billing"))
async def list_corrections(call: Call) -> Response:
    """List the corrections."""
    tenant_id = await call.tenant_id()
    async with call.database.read() as connection:
        return call.page(await bill.listed(connection, tenant_id, call.after, call.limit + 1), show_correction)


def show_correction(correction: Correction) -> ShownCorrection:
    return ShownCorrection(
        id=correction.id,
        period=correction.period,
        corrects=correction.corrects,
        tenant_id=correction.tenant_id,
        currency=correction.currency,
        amount_minor=correction.amount_minor,
        amount=billing.decimal(correction.amount_minor, billing.minor_places(correction.currency)),
        reason=correction.reason,
        created_at=time_text(correction.created_us),
    )
