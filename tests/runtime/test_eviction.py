"""Whose pages are taken: what costs least first, exactly as many as are short, and nobody's who must keep them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.events import Evict, Park, Shrink
from runtime.policy.eviction import Action, Holding, make_room, spare_room
from runtime.request import ModelKey

A, B, C, D = (ModelKey(key) for key in "abcd")


def clean(model: ModelKey, weights: int, works: bool = False, kept: bool = False, used_at: float = 0.0) -> Holding:
    """Out, its weights still there."""
    return Holding(model, weights, 0, 0, resident=False, works=works, kept=kept, used_at=used_at)


def resident(
    model: ModelKey, weights: int, kv: int, spare: int = 0, works: bool = True, kept: bool = False, used_at: float = 0.0
) -> Holding:
    return Holding(model, weights, kv, spare, resident=True, works=works, kept=kept, used_at=used_at)


def test_nothing_is_taken_when_nothing_is_short() -> None:
    assert make_room(0, [clean(A, 4)], None) == make_room(-3, [clean(A, 4)], None) == []
    assert spare_room(0, [clean(A, 4)]) == []


def test_clean_weights_nobody_waits_for_go_first_the_least_recently_used_before_others() -> None:
    holdings = [clean(A, 3, used_at=2.0), clean(B, 3, used_at=1.0), resident(C, 5, 5, spare=5, used_at=0.0)]
    assert make_room(4, holdings, None) == [Evict(B, 3), Evict(A, 1)]


def test_then_spare_pages_those_of_models_without_requests_before_those_of_others() -> None:
    holdings = [
        resident(A, 4, 3, spare=2),
        resident(B, 4, 3, spare=2),
        resident(C, 4, 3, spare=3, works=False),
        clean(D, 1),
    ]
    assert make_room(7, holdings, None) == [Evict(D, 1), Shrink(C, 3), Shrink(B, 2), Shrink(A, 1)]


def test_then_models_without_requests_are_parked_and_the_rest_waits_until_they_are() -> None:
    holdings = [resident(A, 4, 2, works=False, used_at=2.0), resident(B, 4, 2, works=False, used_at=1.0), clean(C, 2)]
    assert make_room(3, holdings, None) == [Park(B)]
    assert make_room(9, holdings, None) == [Park(B), Park(A)]


def test_then_clean_weights_somebody_waits_for_the_last_turn_first() -> None:
    holdings = [clean(A, 3, works=True), clean(B, 3, works=True)]
    assert make_room(4, holdings, None) == [Evict(B, 3), Evict(A, 1)]


def test_then_models_with_requests_the_last_turn_first() -> None:
    holdings = [resident(A, 4, 2), resident(B, 4, 2), clean(C, 1, works=True)]
    assert make_room(2, holdings, None) == [Park(B)]


def test_who_would_step_meanwhile_is_parked_last() -> None:
    holdings = [resident(A, 4, 2), resident(B, 4, 2)]
    assert make_room(2, holdings, stepping=B) == [Park(A)]
    assert make_room(9, holdings, stepping=B) == [Park(A), Park(B)]


def test_who_must_be_kept_is_not_parked_and_loses_no_weights_but_spare_pages() -> None:
    holdings = [resident(A, 4, 3, spare=1, kept=True), clean(B, 5, works=True, kept=True)]
    assert make_room(1, holdings, None) == [Shrink(A, 1)]
    assert make_room(2, holdings, None) is None


def test_to_be_kept_is_for_those_with_work() -> None:
    assert make_room(2, [resident(A, 4, 1, works=False, kept=True)], None) == [Park(A)]


def test_a_park_that_a_larger_one_makes_needless_is_left_out() -> None:
    holdings = [resident(A, 8, 2), resident(B, 2, 1), resident(C, 3, 1)]
    assert make_room(9, holdings, None) == [Park(A)]
    assert make_room(13, holdings, None) == [Park(C), Park(A)]


def test_a_park_is_not_left_out_for_weights_of_which_only_a_part_is_needed() -> None:
    holdings = [clean(A, 9, works=True), resident(B, 2, 1, works=False)]
    assert make_room(4, holdings, None) == [Park(B)]


def test_spare_room_harms_nobodys_work_and_gives_what_there_is() -> None:
    holdings = [resident(A, 4, 2, spare=1), clean(B, 3, works=True), clean(C, 2), resident(D, 3, 1, works=False)]
    assert spare_room(2, holdings) == [Evict(C, 2)]
    assert spare_room(9, holdings) == [Evict(C, 2), Shrink(A, 1), Park(D)]


@st.composite
def some_holdings(draw: st.DrawFn) -> list[Holding]:
    holdings = []
    for number in range(draw(st.integers(0, 6))):
        is_resident = draw(st.booleans())
        kv = draw(st.integers(0, 4)) if is_resident else 0
        holdings.append(
            Holding(
                ModelKey(str(number)),
                weights=draw(st.integers(1 if is_resident else 0, 6)),
                kv=kv,
                kv_spare=draw(st.integers(0, kv)),
                resident=is_resident,
                works=draw(st.booleans()),
                kept=draw(st.booleans()),
                used_at=draw(st.integers(0, 3)),
            )
        )
    return holdings


def takes(holding: Holding) -> int:
    """Pages that may be had from it at most."""
    if not holding.works or not holding.kept:
        return holding.weights + holding.kv
    return holding.kv_spare


def gives(holding: Holding) -> int:
    """Pages that may be had from it at once, without harm to its work."""
    return holding.kv_spare if holding.resident else 0 if holding.works else holding.weights


def pages(actions: list[Action], holdings: list[Holding]) -> int:
    """What they bring, parks included."""
    by_key = {holding.model: holding for holding in holdings}
    brought = {}
    for action in actions:
        holding = by_key[action.model]
        brought[action.model] = holding.weights + holding.kv if isinstance(action, Park) else action.pages
    return sum(brought.values())


@given(some_holdings(), st.integers(1, 40), st.integers(-1, 6))
def test_room_is_made_when_it_can_be_and_no_page_or_park_too_many(
    holdings: list[Holding], short: int, stepping: int
) -> None:
    actions = make_room(short, holdings, ModelKey(str(stepping)))
    assert (actions is None) == (sum(map(takes, holdings)) < short)
    if not actions:
        return
    by_key = {holding.model: holding for holding in holdings}
    parked = [action.model for action in actions if isinstance(action, Park)]
    assert len({(type(action), action.model) for action in actions}) == len(actions)
    assert all(by_key[key].resident and not (by_key[key].works and by_key[key].kept) for key in parked)
    if not parked:
        assert pages(actions, holdings) == short
        return
    assert len(parked) == len(actions), "what goes at once is decided on when the parks are done"
    others = [holding for holding in holdings if holding.model not in parked]
    at_once = sum(holding.kv_spare if holding.resident else takes(holding) for holding in others)
    assert at_once + pages(actions, holdings) >= short
    assert sum(map(gives, holdings)) < short, "no park was needed"


@given(some_holdings(), st.integers(1, 40))
def test_spare_room_never_parks_or_evicts_who_works(holdings: list[Holding], short: int) -> None:
    by_key = {holding.model: holding for holding in holdings}
    for action in spare_room(short, holdings):
        assert not by_key[action.model].works or isinstance(action, Shrink)
        assert isinstance(action, Park) or 0 < action.pages <= short
