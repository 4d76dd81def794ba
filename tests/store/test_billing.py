"""Money: prices, rounding, and a bill that stays what it was."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store import billing, models, tenants, usage
from store.billing import Price, cost_pico, decimal, price_of
from store.db import Database
from tests.store.test_usage import DAY_US, NOVEMBER_US, message


@given(st.integers(0, 10**30), st.integers(0, 12))
def test_an_amount_is_rounded_half_to_even(pico: int, places: int) -> None:
    exact = Decimal(pico).scaleb(-12)
    with_places = Decimal(1).scaleb(-places)
    import decimal as exact_arithmetic

    with exact_arithmetic.localcontext(prec=60):
        assert Decimal(decimal(pico, places)) == exact.quantize(with_places, ROUND_HALF_EVEN)


def test_a_trillion_tokens_at_a_high_price_do_not_overflow() -> None:
    price = Price("p", None, None, "USD", 10**15, 10**15, 10**15, 0, 0)
    assert decimal(cost_pico(price, 10**12, 0, 10**12), 6) == f"{2 * 10**15}.000000"


def test_cached_tokens_have_their_own_price() -> None:
    price = Price("p", None, None, "USD", 100, 10, 1000, 0, 0)
    assert cost_pico(price, prompt_tokens=7, cached_tokens=4, output_tokens=2) == 3 * 100 + 4 * 10 + 2 * 1000
    assert cost_pico(None, 7, 4, 2) == 0


def test_the_nearest_price_that_held_at_the_start_is_taken() -> None:
    def price(id: str, tenant: str | None, model: str | None, since: int) -> Price:
        return Price(id, tenant, model, "USD", 1, 1, 1, since, since)

    known = [
        price("all", None, None, 0),
        price("all later", None, None, 50),
        price("model", None, "m", 0),
        price("tenant", "t", None, 0),
        price("tenant later", "t", None, 50),
        price("tenant and model", "t", "m", 70),
    ]
    chosen = [
        price_of(known, tenant, model, at)
        for tenant, model, at in (("x", "y", 49), ("x", "y", 50), ("x", "m", 99), ("t", "m", 60), ("t", "m", 70))
    ]
    assert [price.id if price else None for price in chosen] == [
        "all",
        "all later",
        "model",
        "tenant later",
        "tenant and model",
    ]
    assert price_of(known[1:2], "t", "m", 49) is None


async def test_a_price_of_the_past_can_not_be_made(database: Database) -> None:
    async with database.write() as connection:
        with pytest.raises(AssertionError, match="before now"):
            await billing.add_price(connection, None, None, "USD", (1, 1, 1), 9, 10)


async def _lines(database: Database, period: str, tenant_id: str | None = None) -> list[billing.Line]:
    async with database.read() as connection:
        return list(await billing.lines(connection, period, tenant_id))


async def test_a_line_is_one_kind_of_token_of_one_deployment_on_one_day(database: Database) -> None:
    async with database.write() as connection:
        tenant = await tenants.create(connection, "acme", 1)
        price = await billing.add_price(connection, None, None, "EUR", (1_500_000, 500_000, 6_000_000), 1, 1)
        now = NOVEMBER_US + 2 * DAY_US
        sent = [
            message("a", tenant_id=tenant.id, prompt_tokens=10, cached_tokens=4, output_tokens=3),
            message("b", tenant_id=tenant.id, prompt_tokens=1, output_tokens=1),
            message("c", tenant_id=tenant.id, prompt_tokens=1, started_us=NOVEMBER_US + DAY_US),
        ]
        await usage.book(connection, sent, now)
    lines = await _lines(database, "2026-11")
    assert [(line.day, line.sku, line.quantity, line.amount) for line in lines] == [
        ("2026-11-01", "prompt", 7, "0.000010"),  # 10.5 micro: half to even
        ("2026-11-01", "cached", 4, "0.000002"),
        ("2026-11-01", "output", 4, "0.000024"),
        ("2026-11-02", "prompt", 1, "0.000002"),  # 1.5 micro
    ]
    assert {(line.tenant, line.currency, line.unit_price, line.price_id) for line in lines if line.sku == "prompt"} == {
        ("acme", "EUR", "0.000001500000", price.id)
    }


async def test_what_has_no_price_stands_on_the_bill_with_nothing_to_pay(database: Database) -> None:
    async with database.write() as connection:
        await usage.book(connection, [message("a", output_tokens=5)], NOVEMBER_US)
    (line,) = await _lines(database, "2026-11")
    assert (line.quantity, line.amount, line.currency, line.price_id) == (5, "0.000000", "", "")


async def test_a_later_price_does_not_touch_what_was_booked(database: Database) -> None:
    async with database.write() as connection:
        await usage.book(connection, [message("a", output_tokens=5)], NOVEMBER_US)
        await billing.add_price(connection, None, None, "USD", (9, 9, 9), NOVEMBER_US + 1, NOVEMBER_US + 1)
        await usage.book(connection, [message("a", seq=2, output_tokens=6)], NOVEMBER_US)
    (line,) = await _lines(database, "2026-11")
    assert (line.quantity, line.price_id) == (6, "")


async def test_a_closed_period_stays_as_it_is_whatever_still_comes(database: Database) -> None:
    closed = NOVEMBER_US + 32 * DAY_US
    async with database.write() as connection:
        tenant = await tenants.create(connection, "acme", 1)
        await usage.book(connection, [message("a", tenant_id=tenant.id, output_tokens=5, final=False)], NOVEMBER_US)
    before = await _lines(database, "2026-11")
    async with database.write() as connection:
        late = [
            message("a", seq=2, tenant_id=tenant.id, output_tokens=9),  # of a row that was billed
            message("b", tenant_id=tenant.id, output_tokens=7),  # first heard of after the closing
        ]
        await usage.book(connection, late, closed)
        await tenants.delete(connection, tenant, closed)
    assert usage.is_closed("2026-11", closed) and not usage.is_closed("2026-12", closed)
    assert await _lines(database, "2026-11") == before
    (line,) = await _lines(database, "2026-12")
    assert (line.quantity, line.day) == (7, "2026-11-01")


async def test_a_period_stays_open_for_a_day_after_its_month(database: Database) -> None:
    async with database.write() as connection:
        end = NOVEMBER_US + 30 * DAY_US
        await usage.book(connection, [message("a", output_tokens=5)], end + DAY_US - 1)
        await usage.book(connection, [message("b", output_tokens=5)], end + DAY_US)
    assert [len(await _lines(database, period)) for period in ("2026-11", "2026-12")] == [1, 1]


async def test_a_bill_of_one_tenant_has_nothing_of_another(database: Database) -> None:
    async with database.write() as connection:
        one, other = [await tenants.create(connection, name, 1) for name in ("one", "other")]
        sent = [message(t.name, tenant_id=t.id, output_tokens=5) for t in (one, other)]
        await usage.book(connection, sent, NOVEMBER_US)
    assert {line.tenant for line in await _lines(database, "2026-11", one.id)} == {"one"}
    assert {line.tenant for line in await _lines(database, "2026-11")} == {"one", "other"}


async def test_the_model_on_the_bill_is_named_though_it_is_gone(database: Database) -> None:
    from store import deployments
    from store.artefact import Artefact
    from store.deployments import Spec

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
