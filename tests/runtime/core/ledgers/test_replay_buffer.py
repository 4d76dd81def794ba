"""Frames that the ring keeps, and frames that the ring admits to have lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.core.ledgers import replay_buffer
from runtime.core.ledgers.replay_buffer import Ring


@given(kept=st.integers(0, 60), most=st.integers(1, 40), first=st.integers(1, 80), length=st.integers(1, 80))
def test_the_ring_gives_what_it_still_has_and_says_whether_that_is_all(
    kept: int, most: int, first: int, length: int
) -> None:
    ring_most, replay_buffer.FRAMES_MOST = replay_buffer.FRAMES_MOST, most
    try:
        frames = Ring()
        for seq in range(1, kept + 1):
            frames.keep(b"%d" % seq)
    finally:
        replay_buffer.FRAMES_MOST = ring_most
    last = first + length - 1
    got, complete = frames.since(first, last)
    alive = range(max(1, kept - most + 1), kept + 1)
    assert got == [b"%d" % seq for seq in range(first, last + 1) if seq in alive]
    assert complete == all(seq in alive for seq in range(first, last + 1))


def test_a_cleared_ring_goes_on_counting() -> None:
    frames = Ring()
    frames.keep(b"1")
    frames.clear()
    frames.keep(b"2")
    assert frames.last == 2
    assert frames.since(1, 2) == ([b"2"], False)
