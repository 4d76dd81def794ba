"""Of several controllers at most one may act, and a controller that is gone is followed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.declared.lease import ACT_S, DURATION_S, LeaseCandidate, LeaseRecord
from gateway.declared.platform import CallFailed

WALL = datetime(2026, 11, 27, tzinfo=UTC)


@dataclass
class Kept:
    """A Lease in memory that compares versions. `fails`: the next calls fail, before or after their effect."""

    record: LeaseRecord = field(default_factory=LeaseRecord)
    fails: str = ""
    rival: LeaseRecord | None = None  # written between the next read and write

    def read(self) -> LeaseRecord:
        if self.fails == "before":
            raise CallFailed("away", "Unreachable")
        return self.record

    def write(self, record: LeaseRecord) -> bool:
        if record.version != self.record.version:
            return False
        self.record = replace(record, version=str(int(self.record.version or 0) + 1))
        if self.fails == "after":
            raise CallFailed("away", "Unreachable")
        return True


STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["", "", "before", "after", "resign"]), st.floats(0, 20)),
    max_size=40,
)


@settings(max_examples=100)
@given(STEPS)
def test_two_candidates_never_act_at_once(steps: list[tuple[str, str, float]]) -> None:
    now, store = [0.0], Kept()
    candidates = {id: LeaseCandidate(id, store, lambda: now[0], lambda: WALL) for id in "abc"}
    for id, what, wait_s in steps:
        store.fails = what if what != "resign" else ""
        try:
            candidates[id].resign() if what == "resign" else candidates[id].campaign()
        except CallFailed:
            pass
        assert sum(candidate.may_act for candidate in candidates.values()) <= 1
        now[0] += wait_s
        assert sum(candidate.may_act for candidate in candidates.values()) <= 1


def test_a_gone_holder_is_followed_after_the_duration_and_a_resigned_holder_at_once() -> None:
    now, store = [0.0], Kept()
    first, second, third = (LeaseCandidate(id, store, lambda: now[0], lambda: WALL) for id in "abc")
    assert first.campaign() and not second.campaign()
    now[0] += ACT_S
    assert not first.may_act and not second.campaign()
    now[0] += DURATION_S
    assert second.campaign() and store.record.transitions == 1
    second.resign()
    assert third.campaign() and not first.campaign()


def test_the_holder_stops_before_another_may_begin() -> None:
    assert ACT_S < DURATION_S
