"""Requests in parts: whole in any order of requests, and refused if a part is missing, wrong or from nowhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store import parts
from store.parts import HEADER, PART_BYTES, REQUEST_MOST, STALE_S, Joiner, TooManyParts, WrongPart, in_parts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def sent(data: bytes) -> list[tuple[str, bytes]]:
    return [(headers[HEADER], part) for headers, part in in_parts(data)]


@given(
    st.lists(st.integers(1, 3 * PART_BYTES).map(lambda size: size.to_bytes(4, "big") * (size // 4 + 1)), max_size=4),
    st.data(),
)
def test_requests_are_joined_however_their_parts_are_mixed(requests: list[bytes], data: st.DataObject) -> None:
    joiner, whole = Joiner(), list[bytes]()
    left = [sent(request) for request in requests]
    while waiting := [parts for parts in left if parts]:
        chosen = data.draw(st.sampled_from(range(len(waiting))))
        if (joined := joiner.take(*waiting[chosen].pop(0))) is not None:
            whole.append(joined)
    assert sorted(whole) == sorted(requests)
    assert joiner.held_bytes == 0


def test_a_part_that_does_not_follow_the_parts_before_is_refused_and_the_request_is_forgotten() -> None:
    first, second, third = sent(bytes(3 * PART_BYTES))
    joiner = Joiner()
    with pytest.raises(WrongPart, match="without the parts before"):
        joiner.take(*second)
    assert joiner.take(*first) is None
    with pytest.raises(WrongPart, match=f"at {2 * PART_BYTES} of {3 * PART_BYTES} follows {PART_BYTES} bytes"):
        joiner.take(*third)
    assert joiner.held_bytes == 0


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ("", b"x", "can't be read"),
        ("id 0", b"x", "can't be read"),
        ("id zero 3", b"x", "can't be read"),
        ("id 0 -1", b"x", "has -1 bytes"),
        (f"id 0 {REQUEST_MOST + 1}", b"x", f"at most {REQUEST_MOST} are taken"),
        ("id -1 3", b"x", "without the parts before"),
        ("id 0 3", b"long", "a part of 4 bytes at 0 of 3"),
        ("id 0 3", b"", "a part of 0 bytes"),
    ],
)
def test_a_part_with_a_wrong_header_is_refused(header: str, data: bytes, reason: str) -> None:
    joiner = Joiner()
    with pytest.raises(WrongPart, match=reason):
        joiner.take(header, data)
    assert joiner.held_bytes == 0


def test_memory_for_unfinished_requests_is_bounded_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "JOINED_MOST", 5 * PART_BYTES)
    clock = Clock()
    joiner = Joiner(clock)
    left_off, finished, late = sent(bytes(3 * PART_BYTES)), sent(bytes(2 * PART_BYTES)), sent(bytes(3 * PART_BYTES))
    assert joiner.take(*left_off[0]) is None and joiner.take(*finished[0]) is None
    with pytest.raises(TooManyParts, match=f"{5 * PART_BYTES} bytes of requests are coming in"):
        joiner.take(*late[0])
    assert joiner.take(*finished[1]) == bytes(2 * PART_BYTES)
    clock.now += STALE_S + 1  # the asker of the first request is gone
    assert joiner.take(*late[0]) is None
    with pytest.raises(WrongPart, match="without the parts before"):
        joiner.take(*left_off[1])
