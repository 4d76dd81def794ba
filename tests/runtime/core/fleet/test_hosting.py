"""Models that a runtime hosts: as ordered, and without an order by a rule common to the runtimes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.core.fleet.hosting import SETTLED_S, Hosting
from store.contract.wire import EngineSpec, Places, replace
from tests.runtime.world import spec

NAMES = [f"r{number}" for number in range(6)]


def limited(key: str, replicas: int) -> EngineSpec:
    return replace(spec(key), replicas=replicas)


def fleet(names: list[str], *specs: EngineSpec) -> dict[str, Hosting]:
    made = {name: Hosting(name) for name in names}
    for hosting in made.values():
        for each in specs:
            hosting.spec_changed(each.key, each)
    return made


def hosts(made: dict[str, Hosting], key: str, there: list[str], now: float) -> list[str]:
    return [name for name in there if key in made[name].hosted([other for other in there if other != name], now)]


def test_a_model_without_a_limit_is_everywhere() -> None:
    made = fleet(NAMES, limited("a", 0))
    assert hosts(made, "a", NAMES, 0.0) == NAMES


def test_who_is_told_hosts_it_and_who_leaves_it_still_does() -> None:
    made = fleet(NAMES, limited("a", 1))
    for hosting in made.values():
        hosting.places_changed("a", Places(runtimes=["r1"], leaving=["r2"]))
    assert hosts(made, "a", NAMES, 0.0) == ["r1", "r2"]
    assert hosts(made, "a", [name for name in NAMES if name != "r1"], 9.0) == ["r2"]


def test_what_an_earlier_leader_says_is_not_heard() -> None:
    made = fleet(NAMES, limited("a", 1))
    for hosting in made.values():
        hosting.places_changed("a", Places(runtimes=["r1"], term=7))
        hosting.places_changed("a", Places(runtimes=["r2"], term=6))
    assert hosts(made, "a", NAMES, 0.0) == ["r1"]


def test_alone_it_hosts_at_once_what_nobody_was_told_to_host() -> None:
    assert hosts(fleet(["r1"], limited("a", 1)), "a", ["r1"], 0.0) == ["r1"]


@given(st.integers(1, 8), st.lists(st.sampled_from(NAMES), min_size=2, unique=True), st.sampled_from(NAMES))
def test_without_a_word_as_many_as_are_wanted_host_it_after_a_while(replicas: int, there: list[str], gone: str) -> None:
    made = fleet(NAMES, limited("a", replicas))
    for hosting in made.values():
        hosting.places_changed("a", Places(runtimes=["lost"]))
    assert hosts(made, "a", there, 0.0) == []
    chosen = hosts(made, "a", there, SETTLED_S)
    assert len(chosen) == min(replicas, len(there))
    left = [name for name in there if name != gone]
    if len(left) > 1:
        stay = [name for name in chosen if name != gone]
        assert set(stay) <= set(hosts(made, "a", left, SETTLED_S + 1)), "one that goes moves nobody else's"


def test_a_word_that_comes_is_obeyed_and_a_model_that_is_gone_forgotten() -> None:
    made = fleet(NAMES, limited("a", 2))
    hosts(made, "a", NAMES, 0.0)
    chosen = hosts(made, "a", NAMES, SETTLED_S)
    other = next(name for name in NAMES if name not in chosen)
    for hosting in made.values():
        hosting.places_changed("a", Places(runtimes=[other]))
    assert hosts(made, "a", NAMES, 20.0) == [other]
    for hosting in made.values():
        hosting.places_changed("a", None)
    assert hosts(made, "a", NAMES, 21.0) == [], "it waits for the next word again"
    for hosting in made.values():
        hosting.spec_changed("a", None)
    assert hosts(made, "a", NAMES, 40.0) == []
