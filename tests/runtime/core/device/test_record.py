"""Checks of a model that was fetched, and pauses between tries of a failed model."""

from __future__ import annotations

import pytest

from runtime.core.device.record import CHECKED_FIRST, RETRY_S_FIRST, RETRY_S_MOST, LoadRecord, ModelFailures


@pytest.mark.parametrize("check", [1, 2, 3, 16, 32, 160])
def test_a_model_is_checked_when_it_is_new_and_now_and_then(check: int) -> None:
    assert LoadRecord(fetches=check).check_due and not LoadRecord(fetches=check + 3).check_due


def test_a_proved_model_is_checked_now_and_then_only() -> None:
    due = [fetches for fetches in range(1, 40) if LoadRecord(fetches=fetches, proved=True).check_due]
    assert due == [16 - CHECKED_FIRST, 32 - CHECKED_FIRST]


def test_pauses_between_tries_double_up_to_a_bound() -> None:
    failures, pauses = ModelFailures(), list[float | None]()
    for _ in range(12):
        failures.note("no", 0.0, mends=True)
        pauses.append(failures.retry_at)
    assert pauses[:3] == [RETRY_S_FIRST, 2 * RETRY_S_FIRST, 4 * RETRY_S_FIRST] and pauses[-1] == RETRY_S_MOST
