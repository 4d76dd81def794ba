"""How patience with a silent process grows with false losses and shrinks again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from store.contract.silence import LIMIT_S_MOST, SHRINK_S, Silence

LEAST_S = 2.0
steps = st.lists(st.tuples(st.sampled_from(["heard", "judge", "excuse", "late"]), st.floats(0.0, 100.0)), max_size=60)


def lost(silence: Silence, now: float) -> None:
    assert silence.too_long(now)
    silence.lose()


def test_a_loss_that_proved_false_doubles_the_patience_up_to_ten_seconds() -> None:
    silence, now, limits = Silence(LEAST_S, 0.0), 0.0, []
    for _ in range(4):
        now += silence.limit_s(now) + 0.001
        lost(silence, now)
        assert silence.heard(now)
        limits.append(round(silence.limit_s(now), 1))
    assert limits[0] == 4.0 and 7.0 < limits[1] < 8.0 and limits[2:] == [10.0, 10.0]
    assert silence.false_losses == 4


def test_the_patience_shrinks_by_half_of_what_was_added_in_each_minute() -> None:
    silence = Silence(LEAST_S, 0.0)
    lost(silence, 3.0)
    silence.heard(3.0)
    assert [round(silence.limit_s(3.0 + minutes * SHRINK_S), 2) for minutes in (0, 1, 2, 10)] == [4.0, 3.0, 2.5, 2.0]


def test_a_sign_of_life_before_a_loss_proves_nothing() -> None:
    silence = Silence(LEAST_S, 0.0)
    assert not silence.heard(1.0) and silence.limit_s(1.0) == LEAST_S
    silence.excuse(9.0)
    assert not silence.too_long(11.0) and silence.too_long(11.1)


def test_what_the_listener_slept_too_long_is_not_the_silence_of_the_other_side() -> None:
    silence = Silence(LEAST_S, 0.0)
    silence.late(5.0, 7.0)
    assert not silence.too_long(7.0) and silence.too_long(7.1)
    silence.late(1000.0, 8.0)
    assert silence.heard_at == 8.0, "nobody was heard in the future"


@given(steps)
def test_the_limit_stays_within_its_bounds_and_a_dead_process_is_lost_within_them(
    moves: list[tuple[str, float]],
) -> None:
    silence, now, proved = Silence(LEAST_S, 0.0), 0.0, 0
    for move, pause_s in moves:
        now += pause_s
        match move:
            case "heard":
                proved += silence.heard(now)
            case "judge":
                if silence.too_long(now):
                    silence.lose()
            case "excuse":
                silence.excuse(now)
            case _:
                silence.late(pause_s / 2, now)
        assert LEAST_S <= silence.limit_s(now) <= LIMIT_S_MOST and silence.heard_at <= now
    assert silence.false_losses == proved
    assert silence.too_long(now + LIMIT_S_MOST + 0.001)
    assert silence.limit_s(now + 100 * SHRINK_S) < LEAST_S + 0.01
