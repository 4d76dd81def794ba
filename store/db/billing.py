"""Prices and money. An amount is an exact integer until a line of the bill rounds it: once, half to even.

Prices are whole pico-units (1e-12 of the currency) for a token, a second or a GB-second (10^9 bytes for a second).
Usage is counted in tokens, microseconds and byte-seconds, so an amount is a whole number of 1e-21 of the currency.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.db.database import new_id
from store.db.tables import prices

PICO_PLACES = 12  # decimals of a price
EXACT_PLACES = 21  # decimals of an unrounded amount
EXACT_PER_PICO = 10**9

# ISO 4217: the decimals of currencies without two decimals.
_MINOR_PLACES = {
    **dict.fromkeys("BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF".split(), 0),
    **dict.fromkeys("BHD IQD JOD KWD LYD OMR TND".split(), 3),
    **dict.fromkeys("CLF UYW".split(), 4),
}


@dataclass(frozen=True)
class Counts:
    """Counters of usage. While a request is open, the counters only grow."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # part of prompt_tokens
    output_tokens: int = 0
    gpu_us: int = 0
    switch_us: int = 0
    cache_byte_s: int = 0  # in the host cache
    kv_byte_s: int = 0  # in the device's KV cache

    @property
    def fresh_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


COUNTERS = tuple(field.name for field in fields(Counts))


@dataclass(frozen=True)
class Sku:
    """Kind of usage with a price. The counter counts 10**-places of the unit; the rate is for a unit."""

    name: str
    counter: str  # field of Counts
    rate: str  # field of Price
    unit: str
    places: int

    def quantity(self, counts: Counts) -> int:
        return int(getattr(counts, self.counter))

    def pico(self, price: Price | None) -> int:
        """Return the price of a unit, in pico-units; 0 without a price."""
        return int(getattr(price, self.rate)) if price else 0

    def amount(self, price: Price | None, quantity: int) -> int:
        """Return the price of a quantity, in 1e-21 of the currency."""
        parts: int = 10**self.places
        return quantity * self.pico(price) * EXACT_PER_PICO // parts


SKUS = (
    Sku("prompt", "fresh_tokens", "prompt_pico", "Tokens", 0),
    Sku("cached", "cached_tokens", "cached_pico", "Tokens", 0),
    Sku("output", "output_tokens", "output_pico", "Tokens", 0),
    Sku("gpu", "gpu_us", "gpu_s_pico", "Seconds", 6),
    Sku("switch", "switch_us", "switch_s_pico", "Seconds", 6),
    Sku("cache", "cache_byte_s", "cache_gb_s_pico", "GB-Seconds", 9),
    Sku("kv", "kv_byte_s", "kv_gb_s_pico", "GB-Seconds", 9),
)
RATES = tuple(sku.rate for sku in SKUS)


@dataclass(frozen=True)
class Price:
    """Price for a tenant and a model. A price never changes: a later price replaces it."""

    id: str
    tenant_id: str | None  # None: for every tenant
    model_id: str | None  # None: for every model
    currency: str
    prompt_pico: int
    cached_pico: int
    output_pico: int
    valid_from_us: int
    created_us: int
    gpu_s_pico: int = 0
    switch_s_pico: int = 0
    cache_gb_s_pico: int = 0
    kv_gb_s_pico: int = 0


# ── money ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def cost(price: Price | None, counts: Counts) -> int:
    """Return the price of the usage, in 1e-21 of the currency: the sum over SKUS."""
    if price is None:
        return 0
    tokens = counts.fresh_tokens * price.prompt_pico + counts.cached_tokens * price.cached_pico
    tokens += counts.output_tokens * price.output_pico
    us = counts.gpu_us * price.gpu_s_pico + counts.switch_us * price.switch_s_pico
    byte_s = counts.cache_byte_s * price.cache_gb_s_pico + counts.kv_byte_s * price.kv_gb_s_pico
    return tokens * EXACT_PER_PICO + us * 10**3 + byte_s


def cost_pico(price: Price | None, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
    """Return the price of the tokens alone, in pico-units. Only tokens are known while a request runs."""
    return cost(price, Counts(prompt_tokens, cached_tokens, output_tokens)) // EXACT_PER_PICO


def minor_places(currency: str) -> int:
    """Return the number of decimals of the currency's minor unit."""
    return _MINOR_PLACES.get(currency, 2)


def decimal(value: int, scale: int, places: int | None = None) -> str:
    """Write value / 10**scale, rounded half to even to `places` decimals (at most `scale`; None: `scale`)."""
    places = scale if places is None else places
    step = 10 ** (scale - places)
    whole, rest = divmod(value, step)
    whole += rest * 2 > step or (rest * 2 == step and whole % 2 == 1)
    digits = f"{abs(whole):0{places + 1}d}"
    sign = "-" if whole < 0 else ""
    return f"{sign}{digits[:-places]}.{digits[-places:]}" if places else sign + digits


# ── prices ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def price_of(known: Iterable[Price], tenant_id: str, model_id: str | None, started_us: int) -> Price | None:
    """Return the price that held when the request started; None: no price held.

    A tenant's price goes before prices for every tenant, then a model's price before prices for every model."""
    return held_at(fitting(known, tenant_id, model_id), started_us)


def fitting(known: Iterable[Price], tenant_id: str, model_id: str | None) -> list[Price]:
    """Return the prices that may ever hold for a tenant's model, in order of precedence."""
    found = [price for price in known if price.tenant_id in (None, tenant_id) and price.model_id in (None, model_id)]
    return sorted(found, key=_precedence, reverse=True)


def held_at(fitting: Iterable[Price], started_us: int) -> Price | None:
    return next((price for price in fitting if price.valid_from_us <= started_us), None)


def _precedence(price: Price) -> tuple[bool, bool, int, str]:
    return price.tenant_id is not None, price.model_id is not None, price.valid_from_us, price.id


async def add_price(
    connection: AsyncConnection,
    tenant_id: str | None,
    model_id: str | None,
    currency: str,
    rates: Mapping[str, int],
    valid_from_us: int,
    now_us: int,
) -> Price:
    """Add a price. `rates` by name; usage without a rate costs nothing.

    `valid_from_us` must not lie in the past (asserted): an earlier price would change booked usage."""
    assert valid_from_us >= now_us, f"valid from {valid_from_us}, before now, {now_us}"
    every = {name: rates.get(name, 0) for name in RATES}
    price = Price(new_id(), tenant_id, model_id, currency, valid_from_us=valid_from_us, created_us=now_us, **every)
    await connection.execute(prices.insert().values(**vars(price)))
    return price


async def listed(connection: AsyncConnection, after: str, most: int) -> list[Price]:
    rows = await connection.execute(select(prices).where(prices.c.id > after).order_by(prices.c.id).limit(most))
    return [Price(*row) for row in rows]


async def all_prices(connection: AsyncConnection) -> dict[str, Price]:
    """Return every price by id."""
    return {row.id: Price(*row) for row in await connection.execute(select(prices))}


async def prices_for(connection: AsyncConnection, tenant_ids: set[str]) -> list[Price]:
    """Return the prices that may hold for the given tenants."""
    theirs = or_(prices.c.tenant_id.is_(None), prices.c.tenant_id.in_(sorted(tenant_ids)))
    return [Price(*row) for row in await connection.execute(select(prices).where(theirs))]
