"""Money: exact amounts, their only rounding, and the price in force."""

from __future__ import annotations

import decimal as exact_arithmetic
from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.db import billing
from store.db.billing import EXACT_PLACES, SKUS, Counts, Price, cost, cost_pico, decimal, minor_places, price_of
from store.db.database import Database


@given(st.integers(-(10**40), 10**40), st.integers(0, EXACT_PLACES))
def test_an_amount_is_rounded_half_to_even(value: int, places: int) -> None:
    with exact_arithmetic.localcontext(prec=80):
        exact = Decimal(value).scaleb(-EXACT_PLACES)
        rounded = exact.quantize(Decimal(1).scaleb(-places), ROUND_HALF_EVEN)
        assert Decimal(decimal(value, EXACT_PLACES, places)) == rounded
        assert Decimal(decimal(value, EXACT_PLACES)) == exact


@pytest.mark.parametrize(
    ("value", "places", "text"),
    [(5, 0, "0"), (15, 0, "2"), (25, 0, "2"), (-15, 0, "-2"), (-4, 0, "0"), (7, 1, "0.7"), (-7, 1, "-0.7")],
)
def test_a_tie_goes_to_the_even_neighbour(value: int, places: int, text: str) -> None:
    assert decimal(value, 1, places) == text


@pytest.mark.parametrize(("currency", "places"), [("USD", 2), ("EUR", 2), ("JPY", 0), ("KWD", 3), ("CLF", 4), ("", 2)])
def test_a_currency_has_its_own_minor_unit(currency: str, places: int) -> None:
    assert minor_places(currency) == places


def test_a_trillion_tokens_at_a_high_price_do_not_overflow() -> None:
    price = Price("p", None, None, "USD", 10**15, 10**15, 10**15, 0, 0)
    amount = cost(price, Counts(prompt_tokens=10**12, output_tokens=10**12))
    assert decimal(amount, EXACT_PLACES, 6) == f"{2 * 10**15}.000000"


def test_each_kind_has_its_own_price_for_its_own_unit() -> None:
    price = Price("p", None, None, "USD", 100, 10, 1000, 0, 0, 10**9, 10**8, 10**7, 10**6)
    counts = Counts(7, 4, 2, gpu_us=1_500_000, switch_us=1, cache_byte_s=2 * 10**9, kv_byte_s=1)
    pico = 3 * 100 + 4 * 10 + 2 * 1000 + Fraction(3, 2) * 10**9 + 10**8 * Fraction(1, 10**6) + 2 * 10**7
    assert Fraction(cost(price, counts), 10**9) == pico + Fraction(10**6, 10**9)
    assert cost(None, counts) == 0


def test_the_tokens_of_a_running_request_cost_whole_pico_units() -> None:
    price = Price("p", None, None, "USD", 100, 10, 1000, 0, 0, gpu_s_pico=10**12)
    assert cost_pico(price, prompt_tokens=7, cached_tokens=4, output_tokens=2) == 3 * 100 + 4 * 10 + 2 * 1000
    assert cost_pico(None, 7, 4, 2) == 0


@given(
    st.builds(Counts, *([st.integers(0, 10**15)] * 7)),
    st.builds(Counts, *([st.integers(0, 10**15)] * 7)),
    st.lists(st.integers(0, 10**15), min_size=7, max_size=7),
)
def test_a_sum_costs_what_its_parts_cost(one: Counts, other: Counts, rates: list[int]) -> None:
    price = Price("p", None, None, "USD", *rates[:3], 0, 0, *rates[3:])
    assert cost(price, one) + cost(price, other) == cost(price, one + other)
    assert cost(price, one) == sum(sku.amount(price, sku.quantity(one)) for sku in SKUS)


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
            await billing.add_price(connection, None, None, "USD", {"output_pico": 1}, 9, 10)
