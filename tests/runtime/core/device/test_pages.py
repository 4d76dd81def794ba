"""The books of the pool: pages asked for are booked at once, and the engine's report replaces the booking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.device.pages import Pages
from runtime.core.device.request import ModelKey
from runtime.core.engine import Held

A, B = ModelKey("a"), ModelKey("b")
MIB = 1 << 20


def test_what_is_asked_for_is_not_free_any_more() -> None:
    pages = Pages(10, 2 * MIB)
    pages.book(A, weights=4, kv=2)
    assert (pages.free, pages.of(A)) == (4, Held(weights=4, kv=2))
    pages.book(A, weights=-3)
    assert (pages.free, pages.of(A)) == (7, Held(weights=1, kv=2))


def test_what_the_engine_says_takes_the_place_of_what_was_booked() -> None:
    pages = Pages(10, 2 * MIB)
    pages.book(A, weights=4, kv=3)
    pages.settle(A, Held(weights=4, kv=1, kv_wanted=3))
    assert pages.free == 5 and pages.of(A).kv_wanted == 3


def test_pages_that_are_given_back_were_the_spare_ones() -> None:
    pages = Pages(10, 2 * MIB)
    pages.settle(A, Held(weights=1, kv=5, kv_wanted=2, kv_spare=3))
    pages.book(A, kv=-2)
    assert pages.of(A) == Held(weights=1, kv=3, kv_wanted=2, kv_spare=1)
    pages.book(A, kv=1)
    assert pages.of(A).kv_spare == 1


def test_a_model_that_holds_nothing_is_in_no_book() -> None:
    pages = Pages(10, 2 * MIB)
    pages.book(A, weights=2)
    pages.settle(A, Held())
    assert not pages.held and pages.used == 0 and pages.of(A) == Held()


@pytest.mark.parametrize("held", [Held(weights=7), Held(weights=3, kv=4), Held(kv=-1)])
def test_more_than_there_is_cannot_be_held(held: Held) -> None:
    pages = Pages(10, 2 * MIB)
    pages.book(B, weights=4)
    with pytest.raises(AssertionError):
        pages.settle(A, held)


def test_pages_are_told_in_mib_too() -> None:
    assert Pages(10, 2 * MIB).mib(3) == "3 pages (6 MiB)"


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 5), st.integers(0, 5)), max_size=20))
def test_used_and_free_are_the_whole_pool(said: list[tuple[ModelKey, int, int]]) -> None:
    pages = Pages(20, 2 * MIB)
    last: dict[ModelKey, int] = {}
    for key, weights, kv in said:
        pages.settle(key, Held(weights, kv))
        last[key] = weights + kv
        pages.check()
        assert (pages.used, pages.free) == (sum(last.values()), 20 - sum(last.values()))
