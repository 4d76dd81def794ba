"""A model that ends the device process at every load stays away, for longer each time. Other models stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.core.fleet.crash_backoff import ENDED_MOST, PAUSE_S_FIRST, PAUSE_S_MOST, Quarantine
from store.contract.wire import ModelState, Residency

RESIDENT = {"m": ModelState(residency=Residency.RESIDENT, load_ms=1.0)}


def ended(quarantine: Quarantine, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        quarantine.ended("m", "while its engine was built", now)


def test_it_is_tried_again_until_it_has_done_so_three_times_in_a_row() -> None:
    quarantine = Quarantine()
    ended(quarantine, ENDED_MOST - 1)
    assert quarantine.reason("m", 0.0) == ""
    ended(quarantine, 1)
    assert quarantine.reason("m", 0.0) == (
        "the model ended the runtime's device process 3 times in a row, while its engine was built; "
        "it is tried again in 5 min, or when the runtime is started anew: its log says more"
    )
    assert quarantine.reason("other", 0.0) == "" and quarantine.reason("m", PAUSE_S_FIRST) == ""


def test_each_try_that_ends_likewise_doubles_the_pause() -> None:
    quarantine, now = Quarantine(), 0.0
    ended(quarantine, ENDED_MOST - 1)
    for pause_s in (300.0, 600.0, 1200.0, 2400.0, 4800.0, 9600.0, 19200.0, PAUSE_S_MOST, PAUSE_S_MOST):
        ended(quarantine, 1, now)
        assert quarantine.reason("m", now + pause_s - 1.0) and not quarantine.reason("m", now + pause_s)
        now += pause_s


def test_who_could_be_loaded_begins_anew() -> None:
    quarantine = Quarantine()
    ended(quarantine, ENDED_MOST - 1)
    quarantine.heard({"m": ModelState(residency=Residency.LOADING), "other": RESIDENT["m"]})
    quarantine.heard(RESIDENT)
    ended(quarantine, ENDED_MOST - 1)
    assert quarantine.reason("m", 0.0) == ""


def test_a_built_engine_ends_a_row_of_failed_builds_and_no_row_with_an_end_in_first_steps() -> None:
    staged = {"m": ModelState(residency=Residency.STAGED)}
    quarantine = Quarantine()
    ended(quarantine, ENDED_MOST - 1)
    quarantine.heard(staged)
    ended(quarantine, ENDED_MOST - 1)
    assert quarantine.reason("m", 0.0) == ""
    quarantine.ended("m", "in its first steps", 0.0, built=True)
    assert quarantine.reason("m", 0.0)
    quarantine.heard(staged)
    assert quarantine.reason("m", 0.0)


def test_who_stays_away_is_shown_as_failed_where_it_is_hosted() -> None:
    quarantine = Quarantine()
    ended(quarantine, ENDED_MOST)
    shown = quarantine.shown_in({"other": RESIDENT["m"]}, ["m", "other"], 1.0)
    assert shown["other"] == RESIDENT["m"] and shown["m"].residency is Residency.FAILED
    assert shown["m"].error == quarantine.reason("m", 1.0)
    assert quarantine.shown_in({}, ["other"], 1.0) == {} == quarantine.shown_in({}, ["m"], PAUSE_S_FIRST)


@given(st.lists(st.tuples(st.sampled_from("mno"), st.booleans(), st.floats(0, 30_000)), max_size=40))
def test_who_stays_away_ended_it_three_times_since_it_was_last_resident(events: list[tuple[str, bool, float]]) -> None:
    quarantine, now, times = Quarantine(), 0.0, dict.fromkeys("mno", 0)
    for model, was_resident, after_s in events:
        now += after_s
        if was_resident:
            quarantine.heard({model: RESIDENT["m"]})
            times[model] = 0
        else:
            quarantine.ended(model, "in its first steps", now)
            times[model] += 1
            assert bool(quarantine.reason(model, now)) == (times[model] >= ENDED_MOST)
        for each, count in times.items():
            assert not quarantine.reason(each, now) or count >= ENDED_MOST
        assert all(not quarantine.reason(each, now + PAUSE_S_MOST) for each in times)
