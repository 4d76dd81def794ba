"""A model that no runtime has loaded yet is tried by runtimes in turn, and loaded by every runtime after a success."""

from __future__ import annotations

import pytest

from runtime.core.fleet.first_load import BEGIN_S, RESTART_S, TRIED_S_MOST
from runtime.core.fleet.hosting import Hosting
from store.contract.wire import EngineSpec, ModelState, Places, Residency, replace
from tests.runtime.world import spec

NAMES = [f"r{number}" for number in range(6)]
LOADING, FAILED = ModelState(residency=Residency.LOADING), ModelState(residency=Residency.FAILED, error="no")
LOADED = ModelState(residency=Residency.STAGED, load_ms=1.0)  # as sent by earlier versions, without `ever_resident`
States = dict[str, ModelState | None]


def fleet(model: EngineSpec) -> dict[str, Hosting]:
    made = {name: Hosting(name) for name in NAMES}
    for hosting in made.values():
        hosting.spec_changed(model.key, model)
    return made


def free(made: dict[str, Hosting], states: States, now: float, key: str = "a") -> list[str]:
    """Runtimes that need not wait with the load of `key`. `states`: the model's state by runtime, if reported."""
    return [
        name
        for name, hosting in made.items()
        if not hosting.waits(key, {other: states.get(other) for other in made if other != name}, now)
    ]


@pytest.mark.parametrize(
    "loaded",
    [
        LOADED,
        replace(LOADED, load_ms=0.0, ever_resident=True),
        ModelState(residency=Residency.COLD, loaded_before=True),
    ],
    ids=["earlier", "now", "before a restart"],
)
def test_one_tries_and_the_others_follow_when_it_could(loaded: ModelState) -> None:
    made = fleet(spec("a"))
    (first,) = free(made, {}, 0.0)
    assert free(made, {first: LOADING}, 2.0) == [first]
    assert free(made, {first: loaded}, 3.0) == NAMES


def test_where_it_fails_the_next_one_tries_and_never_two_at_once() -> None:
    made, states, tried, now = fleet(spec("a")), States(), list[str](), 0.0
    for _ in NAMES:
        (one,) = (name for name in free(made, states, now) if name not in tried)
        tried.append(one)
        while now < 100.0 * len(tried):  # the device process ends meanwhile
            states[one] = LOADING if now % 25 < 5 else None
            assert set(free(made, states, now)) == set(tried), now
            now += 5.0
        states[one] = FAILED
    assert sorted(tried) == NAMES


def test_who_does_not_begin_is_soon_not_waited_for() -> None:
    made, begun = fleet(spec("a")), 0
    for now in range(0, len(NAMES) * int(BEGIN_S), int(BEGIN_S)):
        begun += 1
        assert len(free(made, {}, float(now))) == begun


def test_who_takes_too_long_is_not_waited_for_either() -> None:
    made = fleet(spec("a"))
    (first,) = free(made, {}, 0.0)
    step = int(RESTART_S) - 1
    for now in range(0, int(TRIED_S_MOST), step):
        assert free(made, {first: LOADING}, float(now)) == [first]
    assert len(free(made, {first: LOADING}, TRIED_S_MOST)) == 2


def test_who_has_loaded_it_before_waits_for_nobody() -> None:
    made = fleet(spec("a"))
    for hosting in made.values():
        hosting.trials.heard({"a": LOADED})
    assert free(made, {}, 0.0) == NAMES
    for hosting in made.values():
        hosting.spec_changed("a", None)
        hosting.spec_changed("a", spec("a"))
    assert len(free(made, {}, 0.0)) == 1


def test_each_model_is_tried_by_another_one() -> None:
    first = {key: free(fleet(spec(key)), {}, 0.0, key) for key in "abcdefghijkl"}
    assert all(len(each) == 1 for each in first.values()) and len({each[0] for each in first.values()}) > 2


def test_nobody_waits_for_who_does_not_host_it() -> None:
    made = fleet(replace(spec("a"), replicas=1))
    for hosting in made.values():
        hosting.places_changed("a", Places(runtimes=["r4"]))
    assert "r4" in free(made, {}, 0.0)
