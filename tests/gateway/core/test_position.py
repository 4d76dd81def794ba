"""Ids of events: each place of a client in a stream has one id, and no other text is an id."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.position import Part, Position

NUMBERS = st.integers(0, 10**9 - 1)
POSITIONS = st.one_of(
    st.just(Position()), st.builds(Position, NUMBERS, NUMBERS, st.sampled_from([Part.TEXT, Part.END, Part.USAGE]))
)


@given(POSITIONS)
def test_an_id_says_the_place_again(position: Position) -> None:
    assert Position.of(str(position)) == position


@given(st.text())
def test_a_text_is_the_id_of_a_place_or_no_id(said: str) -> None:
    position = Position.of(said)
    assert position is None or Position.of(str(position)) == position


@pytest.mark.parametrize("said", ["", "1", "-1.2", "1.2.", "1.2.done", " 1.2", "1.2\n", "٣.٤", "1" * 10 + ".1"])
def test_a_wrong_id_is_no_place(said: str) -> None:
    assert Position.of(said) is None
