"""Calls in slices: where a call pauses, what a pause puts aside, and how a call ends."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.slices import Sliced, pause

SET: list[str] = []  # what stands for variables of the process


def aside() -> Callable[[], None]:
    before, SET[:] = list(SET), []
    return lambda: SET.extend(before)


def test_a_call_without_a_pause_is_over_after_one_slice_and_returns_its_result() -> None:
    call = Sliced(lambda: 7)
    assert call.go_on(0.0) and call.over and call.result == 7


def test_a_call_pauses_where_it_says_so_and_finds_its_variables_again() -> None:
    seen: list[str] = []

    def work() -> str:
        SET.append("the call's")
        for part in "abc":
            seen.append(part)
            pause(aside)
            assert SET == ["the call's"]
        SET.clear()
        return "done"

    call = Sliced(work)
    for parts in ("a", "ab", "abc"):
        assert not call.go_on(0.0)
        assert "".join(seen) == parts and SET == []
    assert call.go_on(0.0) and call.result == "done"


def test_a_slice_that_is_not_used_up_goes_on() -> None:
    def work() -> None:
        for _ in range(100):
            pause(aside)

    assert Sliced(work).go_on(60.0)


def test_a_pause_outside_of_a_call_does_nothing() -> None:
    pause(lambda: pytest.fail("nothing is to be put aside"))


def test_an_error_comes_out_of_the_slice_in_which_it_was_raised() -> None:
    def work() -> None:
        pause(aside)
        raise ValueError("boom")

    call = Sliced(work)
    assert not call.go_on(0.0)
    with pytest.raises(ValueError, match="boom"):
        call.go_on(0.0)
    assert call.over


def test_a_dropped_call_cleans_up() -> None:
    ended: list[str] = []

    def work() -> None:
        SET.append("the call's")
        try:
            pause(aside)
        finally:
            ended.append(SET.pop())

    call = Sliced(work)
    assert not call.go_on(0.0)
    call.drop()
    assert call.over and ended == ["the call's"] and SET == []


def test_a_call_has_context_variables_of_its_own() -> None:
    variable: ContextVar[str] = ContextVar("variable")
    variable.set("ours")

    def work() -> str:
        before = variable.get()
        variable.set("the call's")
        pause(aside)
        return before + ", " + variable.get()

    call = Sliced(work)
    assert not call.go_on(0.0)
    assert variable.get() == "ours"
    variable.set("ours, later")
    assert call.go_on(0.0) and call.result == "ours, the call's"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_calls_in_any_mixture_each_find_their_own_variables(pauses: list[int], random: object) -> None:
    SET.clear()

    def work(name: str, count: int) -> str:
        SET.append(name)
        for _ in range(count):
            pause(aside)
            assert SET == [name]
        return SET.pop()

    calls = {str(n): Sliced(lambda n=n, count=count: work(str(n), count)) for n, count in enumerate(pauses)}  # type: ignore[misc]
    left = dict(calls)
    while left:
        name = random.choice(sorted(left))  # type: ignore[attr-defined]
        if left[name].go_on(0.0):
            assert left.pop(name).result == name
        assert SET == []
