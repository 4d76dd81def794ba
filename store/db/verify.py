"""Check of a month's bill: lines are computed again from rows and prices, by a second, independent arithmetic."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.db import bill
from store.db.bill import CORRECTION, Correction, Line
from store.db.billing import COUNTERS, Price, all_prices, decimal, fitting, held_at, minor_places
from store.db.database import AnyRow, pages
from store.db.tables import usage
from store.db.usage import MODEL, first_open, is_closed, named, period_of

FLAWS_SHOWN = 100
CLOCKS_US = 1_000_000  # the gateway times a request, the runtime times the device: the two clocks differ
DEVICES_MOST = 1000  # a request's prompts and choices may run on so many devices at once, and device times add up


@dataclass(frozen=True)
class Flaw:
    """Flaw of a bill: `check` is the violated rule, `where` the row or line, `said` a sentence with the numbers."""

    check: str
    where: str
    said: str


@dataclass
class Verification:
    """Result of a check. Only the first FLAWS_SHOWN flaws are kept; `flawed` counts every flaw, by check."""

    period: str
    closed: bool
    rows: int = 0
    lines: int = 0
    amounts: dict[str, str] = field(default_factory=dict)  # currency → amount to be paid
    flawed: dict[str, int] = field(default_factory=dict)
    flaws: list[Flaw] = field(default_factory=list)

    def add(self, flaws: Iterable[Flaw]) -> None:
        for flaw in flaws:
            self.flawed[flaw.check] = self.flawed.get(flaw.check, 0) + 1
            if len(self.flaws) < FLAWS_SHOWN:
                self.flaws.append(flaw)


_Key = tuple[str, str, str, str, str, str, str]  # month, tenant's id, deployment's id and name, model, price's id, sku


async def verify(connection: AsyncConnection, period: str, now_us: int) -> Verification:
    """Check the bill of a period. `connection` must be a snapshot."""
    report = Verification(period, is_closed(period, now_us))
    known = await all_prices(connection)
    prices = functools.cache(functools.partial(fitting, known.values()))
    used: Counter[_Key] = Counter()
    before: AnyRow | None = None
    columns = (*usage.c, MODEL.label("model"))
    order = (bill.by_bytes(connection, usage.c.request), usage.c.attempt)
    query = select(*columns).select_from(named()).where(usage.c.period == period).order_by(*order)
    async for page in pages(connection, query):
        for row in page:
            report.rows += 1
            right = held_at(prices(row.tenant_id, row.model_id), row.started_us)
            report.add(_flaws(row, before, right, report.closed))
            _count(row, used)
            before = row
    lines = await bill.lines(connection, period, None)
    report.lines, report.amounts = len(lines), _amounts(lines)
    report.add(_line_flaws(lines, used, known))
    report.add(_correction_flaws(lines, await bill.corrections_of(connection, period)))
    return report


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _flaws(row: AnyRow, before: AnyRow | None, right: Price | None, closed: bool) -> Iterator[Flaw]:
    """Yield the flaws of a row. `before`: the previous row; `right`: the price that held when the request started."""
    for check, said in chain(_counter_flaws(row), _time_flaws(row), _booking_flaws(row, before, right, closed)):
        yield Flaw(check, f"request {row.request} attempt {row.attempt}", said)


def _counter_flaws(row: AnyRow) -> Iterator[tuple[str, str]]:
    for name in COUNTERS:
        if (count := getattr(row, name)) < 0:
            yield "counters", f"{name} is {count}, less than nothing"
    cached, prompt = row.cached_tokens, row.prompt_tokens
    if cached > prompt:
        yield "counters", f"{cached} cached tokens of a prompt of {prompt}"
    if row.attempt > 1 and prompt:
        yield "counters", f"a prompt of {prompt} tokens is charged by a later attempt again"


def _time_flaws(row: AnyRow) -> Iterator[tuple[str, str]]:
    wall_us = row.ended_us - row.started_us
    if wall_us < 0:
        yield "times", f"it ended {-wall_us} us before it started"
    for name in ("gpu_us", "switch_us"):
        if (charged := getattr(row, name)) > (wall_us + CLOCKS_US) * DEVICES_MOST:
            yield "times", f"{name} is {charged} in a request of {wall_us} us"


def _booking_flaws(row: AnyRow, before: AnyRow | None, right: Price | None, closed: bool) -> Iterator[tuple[str, str]]:
    if row.price_id != (right.id if right else None):
        held = f"{right.id} held" if right else "none held"
        yield "price", f"it has the price {row.price_id}, at its start {held}"
    if row.period < (began := period_of(row.started_us)):
        yield "period", f"it stands on the bill of {row.period} and started in {began}"
    if closed and not row.final:
        yield "open", f"its last word never came and the period is closed: finish is {row.finish}"
    if before is not None and before.request == row.request:
        if before.attempt == row.attempt:
            yield "unique", "it is booked twice"
        if before.tenant_id != row.tenant_id:
            yield "unique", f"it is of tenant {row.tenant_id}, its attempt before was of {before.tenant_id}"


# ── lines ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _count(row: AnyRow, used: Counter[_Key]) -> None:
    counted = {
        "prompt": row.prompt_tokens - row.cached_tokens,
        "cached": row.cached_tokens,
        "output": row.output_tokens,
        "gpu": row.gpu_us,
        "switch": row.switch_us,
        "cache": row.cache_byte_s,
        "kv": row.kv_byte_s,
    }
    month, price_id = period_of(row.started_us), row.price_id or ""
    place = (month, row.tenant_id, row.deployment_id, row.deployment, row.model, price_id)
    for sku, count in counted.items():
        if count:
            used[(*place, sku)] += count


# Number of counted parts in the unit of a price, by kind; 1 for tokens.
_PARTS = {"gpu": 10**6, "switch": 10**6, "cache": 10**9, "kv": 10**9}
_RATES = {"gpu": "gpu_s_pico", "switch": "switch_s_pico", "cache": "cache_gb_s_pico", "kv": "kv_gb_s_pico"}


def _line_flaws(lines: list[Line], used: Mapping[_Key, int], known: Mapping[str, Price]) -> Iterator[Flaw]:
    billed = {_key(line): line for line in lines if line.sku != CORRECTION}
    for key in sorted(used.keys() | billed.keys()):
        *_, price_id, sku = key
        quantity = Fraction(used.get(key, 0), _PARTS.get(sku, 1))
        price = known.get(price_id)
        rate = getattr(price, _RATES.get(sku, f"{sku}_pico")) if price else 0
        exact = quantity * Fraction(rate, 10**12)
        unit = 10 ** minor_places(price.currency if price else "")
        yield from _differences(key, billed.get(key), quantity, exact, Fraction(round(exact * unit), unit))


def _key(line: Line) -> _Key:
    place = (line.month, line.tenant_id, line.deployment_id, line.deployment, line.model)
    return (*place, line.price_id, line.sku)


def _differences(key: _Key, line: Line | None, quantity: Fraction, exact: Fraction, amount: Fraction) -> Iterator[Flaw]:
    if line is None:
        yield Flaw("lines", " ".join(key), f"no line of the bill has the {float(quantity)} of its rows")
        return
    expected = {"quantity": quantity, "unrounded": exact, "amount": amount}
    for name, value in expected.items():
        shown = getattr(line, name)
        if Fraction(shown) != value:
            yield Flaw("lines", " ".join(key), f"{name} is {shown} on the bill, {float(value)} by its rows")


def _amounts(lines: list[Line]) -> dict[str, str]:
    sums: dict[str, Fraction] = {}
    for line in lines:
        sums[line.currency] = sums.get(line.currency, Fraction(0)) + Fraction(line.amount)
    return {currency: _text(value, minor_places(currency)) for currency, value in sorted(sums.items())}


def _text(value: Fraction, places: int) -> str:
    return decimal(round(value * 10**places), places)


def _correction_flaws(lines: list[Line], made: list[Correction]) -> Iterator[Flaw]:
    for correction in made:
        where, open_then = f"correction {correction.id}", first_open(correction.created_us)
        if correction.period != open_then:
            said = f"it stands on the bill of {correction.period}, open was {open_then} when it was made"
            yield Flaw("corrections", where, said)
    billed = sum(Fraction(line.amount) for line in lines if line.sku == CORRECTION)
    booked = sum(Fraction(one.amount_minor, 10 ** minor_places(one.currency)) for one in made)
    if billed != booked:
        said = f"they are {float(billed)} on the bill, {float(booked)} was booked"
        yield Flaw("corrections", "all of them", said)
