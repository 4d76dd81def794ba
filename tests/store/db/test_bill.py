"""The bill: lines rounded once, corrections beside the lines, and months that never change."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, select

from store.db import bill, billing, models, tables, tenants, usage
from store.db.bill import Line, UsedRow
from store.db.billing import minor_places
from store.db.database import Database
from tests.store.db.test_usage import DAY_US, NOVEMBER_US, message

CLOSED_US = NOVEMBER_US + 32 * DAY_US  # closing of November


async def _lines(database: Database, period: str, tenant_id: str | None = None) -> list[Line]:
    async with database.read() as connection:
        return await bill.lines(connection, period, tenant_id)


async def test_a_line_is_one_kind_of_one_deployment_in_one_month_at_one_price(database: Database) -> None:
    async with database.write() as connection:
        tenant = await tenants.create(connection, "acme", 1)
        rates = {"prompt_pico": 10**9, "cached_pico": 10**8, "output_pico": 25 * 10**8, "gpu_s_pico": 10**10}
        price = await billing.add_price(connection, None, None, "EUR", rates, 1, 1)
        sent = [
            message("a", tenant_id=tenant.id, prompt_tokens=10, cached_tokens=4, output_tokens=3, gpu_us=400_000),
            message("b", tenant_id=tenant.id, prompt_tokens=1, output_tokens=1, gpu_us=100_001),
            message("c", tenant_id=tenant.id, prompt_tokens=8, started_us=NOVEMBER_US + DAY_US),
        ]
        await usage.book(connection, sent, NOVEMBER_US + 2 * DAY_US)
    lines = await _lines(database, "2026-11")
    assert [(line.sku, line.quantity, line.unit, line.unrounded[:10], line.amount) for line in lines] == [
        ("prompt", "15", "Tokens", "0.01500000", "0.02"),  # half to even
        ("cached", "4", "Tokens", "0.00040000", "0.00"),
        ("output", "4", "Tokens", "0.01000000", "0.01"),
        ("gpu", "0.500001", "Seconds", "0.00500001", "0.01"),  # more than the half
    ]
    assert {(line.tenant, line.currency, line.month, line.price_id) for line in lines} == {
        ("acme", "EUR", "2026-11", price.id)
    }
    assert lines[0].unit_price == "0.001000000000" and lines[3].unrounded == "0.005000010000000000000"


@pytest.mark.parametrize(("currency", "amount"), [("JPY", "2"), ("USD", "1.50"), ("KWD", "1.500"), ("CLF", "1.5000")])
async def test_an_amount_has_the_places_of_its_currency(database: Database, currency: str, amount: str) -> None:
    async with database.write() as connection:
        await billing.add_price(connection, None, None, currency, {"output_pico": 3 * 10**11}, 1, 1)
        await usage.book(connection, [message("a", output_tokens=5)], NOVEMBER_US)
    (line,) = await _lines(database, "2026-11")
    assert (line.amount, line.currency) == (amount, currency)


async def test_what_has_no_price_stands_on_the_bill_with_nothing_to_pay(database: Database) -> None:
    async with database.write() as connection:
        await usage.book(connection, [message("a", output_tokens=5)], NOVEMBER_US)
    (line,) = await _lines(database, "2026-11")
    assert (line.quantity, line.amount, line.currency, line.price_id) == ("5", "0.00", "", "")


async def test_a_later_price_does_not_touch_what_was_booked(database: Database) -> None:
    async with database.write() as connection:
        await usage.book(connection, [message("a", output_tokens=5)], NOVEMBER_US)
        await billing.add_price(connection, None, None, "USD", {"output_pico": 9}, NOVEMBER_US + 1, NOVEMBER_US + 1)
        await usage.book(connection, [message("a", seq=2, output_tokens=6)], NOVEMBER_US)
    (line,) = await _lines(database, "2026-11")
    assert (line.quantity, line.price_id) == ("6", "")


async def test_a_closed_period_stays_as_it_is_whatever_still_comes(database: Database) -> None:
    async with database.write() as connection:
        tenant = await tenants.create(connection, "acme", 1)
        await usage.book(connection, [message("a", tenant_id=tenant.id, output_tokens=5, final=False)], NOVEMBER_US)
    before = await _lines(database, "2026-11")
    async with database.write() as connection:
        late = [
            message("a", seq=2, tenant_id=tenant.id, output_tokens=9),  # for a row already billed
            message("b", tenant_id=tenant.id, output_tokens=7),  # first heard of after the closing
        ]
        await usage.book(connection, late, CLOSED_US)
        await tenants.delete(connection, tenant, CLOSED_US)
    assert usage.is_closed("2026-11", CLOSED_US) and not usage.is_closed("2026-12", CLOSED_US)
    assert await _lines(database, "2026-11") == before
    (line,) = await _lines(database, "2026-12")
    assert (line.quantity, line.month) == ("7", "2026-11")


async def test_a_period_stays_open_for_a_day_after_its_month(database: Database) -> None:
    async with database.write() as connection:
        end = NOVEMBER_US + 30 * DAY_US
        await usage.book(connection, [message("a", output_tokens=5)], end + DAY_US - 1)
        await usage.book(connection, [message("b", output_tokens=5)], end + DAY_US)
    assert [len(await _lines(database, period)) for period in ("2026-11", "2026-12")] == [1, 1]
    # A booking that a second process began just before is committed before a reader takes the month for closed.
    moments = (end + DAY_US, end + DAY_US + usage.SETTLING_US - 1, end + DAY_US + usage.SETTLING_US)
    assert [usage.is_closed("2026-11", now) for now in moments] == [False, False, True]


async def test_a_bill_of_one_tenant_has_nothing_of_another(database: Database) -> None:
    async with database.write() as connection:
        one, other = [await tenants.create(connection, name, 1) for name in ("one", "other")]
        sent = [message(t.name, tenant_id=t.id, output_tokens=5) for t in (one, other)]
        await usage.book(connection, sent, NOVEMBER_US)
    assert {line.tenant for line in await _lines(database, "2026-11", one.id)} == {"one"}
    assert {line.tenant for line in await _lines(database, "2026-11")} == {"one", "other"}


async def test_the_model_on_the_bill_is_named_though_it_is_gone(database: Database) -> None:
    from store.contract.deployments import Spec
    from store.db import deployments
    from store.files.artefact import Artefact

    async with database.write() as connection:
        tenant = await tenants.create(connection, "acme", 1)
        made = await models.create(connection, None, "llama", "/m", "/m", 1)
        await models.accept(connection, made.id, Artefact("d" * 64, "L", "float32", 8, 8, 64, ()), 1)
        model = await models.by_id(connection, made.id)
        assert model is not None
        chat = await deployments.create(connection, tenant.id, "chat", Spec(model="llama"), model, 1)
        await usage.book(connection, [message("a", deployment_id=chat.id, output_tokens=1)], NOVEMBER_US)
        await deployments.delete(connection, chat, 2)
        await models.delete(connection, model, None, 3)
    assert [line.model for line in await _lines(database, "2026-11")] == ["llama"]


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _rows(database: Database, period: str, tenant_id: str | None = None) -> list[UsedRow]:
    async with database.snapshot() as connection:
        return [used async for page in bill.rows(connection, period, tenant_id) for used in page]


async def test_a_row_has_its_own_exact_amount_and_rows_come_in_the_order_of_time(database: Database) -> None:
    async with database.write() as connection:
        price = await billing.add_price(connection, None, None, "USD", {"output_pico": 2, "kv_gb_s_pico": 3}, 1, 1)
        starts = {"Z": 2, "a": 1, "B": 1, "é": 1}
        sent = [
            message(name, output_tokens=n, kv_byte_s=1, started_us=NOVEMBER_US + us)
            for n, (name, us) in enumerate(starts.items())
        ]
        await usage.book(connection, sent, NOVEMBER_US)
    rows = await _rows(database, "2026-11")
    assert [row.request for row in rows] == ["B", "a", "é", "Z"]
    assert [row.amount for row in rows[:2]] == ["0.000000000004000000003", "0.000000000002000000003"]
    assert (rows[0].started_at, rows[0].price_id) == ("2026-11-01T00:00:00.000001Z", price.id)


_used = st.tuples(
    st.sampled_from(["acme", "globex"]),
    st.sampled_from(["chat", "poet"]),
    st.integers(0, 10**6),
    st.integers(0, 70 * DAY_US),
)


@given(st.lists(_used, max_size=15), st.permutations(range(15)), st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_a_bill_says_the_same_in_any_order_of_booking_and_whatever_other_months_get(
    database: Database, used: list[tuple[str, str, int, int]], order: list[int], data: st.DataObject
) -> None:
    sent = [
        message(
            f"r{n}",
            tenant_id=name,
            deployment_id=on,
            output_tokens=count,
            gpu_us=count,
            started_us=NOVEMBER_US + after_us,
        )
        for n, (name, on, count, after_us) in enumerate(used)
    ]
    async with database.write() as connection:
        await connection.execute(delete(tables.usage))
        await connection.execute(delete(tables.prices))
        await billing.add_price(connection, None, None, "USD", {"output_pico": 1234567, "gpu_s_pico": 89}, 1, 1)
        await usage.book(connection, sent, NOVEMBER_US)
    before = await _lines(database, "2026-11"), await _rows(database, "2026-11")
    lines, rows = before
    for currency in {line.currency for line in lines}:
        exact = sum((Decimal(line.unrounded) for line in lines if line.currency == currency), Decimal(0))
        assert exact == sum((Decimal(row.amount) for row in rows if row.currency == currency), Decimal(0))
    async with database.write() as connection:
        await connection.execute(delete(tables.usage))
        for n in [n for n in order if n < len(sent)]:
            await usage.book(connection, [sent[n]], NOVEMBER_US)
        count = data.draw(st.integers(0, 9))
        others = [message(f"o{n}", output_tokens=n, started_us=NOVEMBER_US + 31 * DAY_US) for n in range(count)]
        await usage.book(connection, others, NOVEMBER_US)
    assert (await _lines(database, "2026-11"), await _rows(database, "2026-11")) == before


# ── corrections ───────────────────────────────────────────────────────────────────────────────────────────────────────


_correction = st.tuples(st.integers(-(10**6), 10**6), st.sampled_from(["USD", "JPY", "KWD"]), st.integers(1, 65))


@given(st.lists(_correction, max_size=6))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_corrections_conserve_what_was_billed_and_stand_on_the_open_bill(
    database: Database, made: list[tuple[int, str, int]]
) -> None:
    async with database.write() as connection:
        for table in (tables.usage, tables.corrections, tables.prices):
            await connection.execute(delete(table))
        tenant = await tenants.tenant(connection, "acme") or await tenants.create(connection, "acme", 1)
        await billing.add_price(connection, None, None, "USD", {"output_pico": 10**10}, 1, 1)
        await usage.book(connection, [message("a", tenant_id=tenant.id, output_tokens=123)], NOVEMBER_US)
    months = ("2026-11", "2026-12", "2027-01")
    before = [await _lines(database, month) for month in months]
    for amount_minor, currency, days in made:
        async with database.write() as connection:
            about = ("2026-11", currency, amount_minor, "a bad day")
            await bill.correct(connection, tenant.id, *about, NOVEMBER_US + days * DAY_US)
    after = [await _lines(database, month) for month in months]
    corrected = [line for lines in after for line in lines if line.sku == bill.CORRECTION]
    assert [[line for line in lines if line.sku != bill.CORRECTION] for lines in after] == before
    for currency in ("USD", "JPY", "KWD"):
        paid = sum((Decimal(line.amount) for line in corrected if line.currency == currency), Decimal(0))
        assert paid.scaleb(minor_places(currency)) == sum(amount for amount, of, _ in made if of == currency)
    on_bill = {month: sum(line.period == month for line in corrected) for month in months}
    closes = (31, 62)  # days after the first of November: a day after the end of November, and of December
    assert on_bill == {
        "2026-11": sum(days < closes[0] for *_, days in made),
        "2026-12": sum(closes[0] <= days < closes[1] for *_, days in made),
        "2027-01": sum(days >= closes[1] for *_, days in made),
    }


async def test_a_correction_changes_no_closed_bill_and_no_row(database: Database) -> None:
    async with database.write() as connection:
        tenant = await tenants.create(connection, "acme", 1)
        await usage.book(connection, [message("a", tenant_id=tenant.id, output_tokens=5)], NOVEMBER_US)
    before, rows = await _lines(database, "2026-11"), await _rows(database, "2026-11")
    async with database.write() as connection:
        await bill.correct(connection, tenant.id, "2026-11", "USD", -1250, "the outage of the 5th", CLOSED_US)
    assert (await _lines(database, "2026-11"), await _rows(database, "2026-11")) == (before, rows)
    (line,) = await _lines(database, "2026-12")
    said = (line.sku, line.month, line.amount, line.unrounded, line.currency, line.reason, line.tenant)
    assert said == ("correction", "2026-11", "-12.50", "-12.50", "USD", "the outage of the 5th", "acme")


async def test_the_first_digest_of_an_export_stays(database: Database) -> None:
    export = bill.Export("2026-10", "", "csv", "lines", "1")
    async with database.write() as connection:
        assert await bill.first_sha256(connection, export, "aa", 5, 1) == "aa"
    async with database.write() as connection:
        assert await bill.first_sha256(connection, export, "bb", 6, 2) == "aa"
        assert await bill.exported(connection, "2026-10") == {export: "aa"}
        assert (await connection.execute(select(tables.exports.c.bytes))).scalars().all() == [5]
