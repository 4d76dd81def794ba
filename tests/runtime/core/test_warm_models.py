"""A runtime's models with a schedule: the device hears of each change once, and two minutes before a window opens."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from msgspec.structs import replace

from runtime.core.warm_models import LEAD_S, WarmModels
from tests.runtime.world import spec


def at(hour: int, minute: int = 0, second: int = 0) -> float:
    return datetime(2026, 6, 1, hour, minute, second, tzinfo=UTC).timestamp()  # a Monday


def warm(*windows: str) -> WarmModels:
    models = WarmModels(ZoneInfo)
    models.placed(replace(spec("a"), warm=windows))
    models.placed(spec("b"))
    return models


def test_a_model_becomes_warm_two_minutes_before_its_window_and_ceases_at_the_end() -> None:
    models = warm("Mon 8:00-9:00 UTC")
    said = {
        minute: changes
        for minute in range(7 * 60, 10 * 60)
        if (changes := models.changes(at(minute // 60, minute % 60)))
    }
    assert LEAD_S == 120 and said == {7 * 60 + 58: [("a", True)], 9 * 60: [("a", False)]}


def test_windows_that_follow_within_two_minutes_do_not_let_the_model_go_in_between() -> None:
    models = warm("Mon 8:00-9:00 UTC", "Mon 9:01-10:00 UTC")
    assert models.changes(at(8, 30)) == [("a", True)]
    assert not [models.changes(at(9, 0, second)) for second in range(60) if models.changes(at(9, 0, second))]
    assert models.changes(at(10)) == [("a", False)]


def test_a_runtime_that_starts_within_a_window_says_so_at_once_and_a_withdrawn_model_is_forgotten() -> None:
    models = warm("Mon-Sun 0:00-24:00 UTC")
    assert models.changes(at(3)) == [("a", True)] and models.changes(at(4)) == []
    models.withdrawn("a")
    models.placed(replace(spec("a"), warm=("Mon-Sun 0:00-24:00 UTC",)))
    assert models.changes(at(5)) == [("a", True)], "the new device process has not heard of it"


def test_an_unknown_time_zone_is_said_and_the_model_has_no_schedule() -> None:
    models = WarmModels(ZoneInfo)
    with pytest.raises(ValueError, match="Europe/Bonn"):
        models.placed(replace(spec("a"), warm=("Mon 8:00-9:00 Europe/Bonn",)))
    assert models.changes(at(8, 30)) == []
