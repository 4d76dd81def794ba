"""Placement of models with a limit of replicas. The test plays the runtimes: runtimes host models as ordered, and
report the models in leases."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.core.fleet.assignment import PLAN_S, Placing
from runtime.core.fleet.kvpr import MOVED_AGAIN_S
from store.contract import wire
from store.contract.wire import EngineSpec, Lease, ModelState, Places, Residency
from tests.runtime.world import spec

PAGE = 1 << 20


def limited(key: str, replicas: int, megabytes: int = 10) -> EngineSpec:
    return wire.replace(spec(key, kv_bytes_per_token=1024), replicas=replicas, weight_bytes=megabytes * PAGE)


@dataclass
class Fleet:
    """Runtimes that host models as ordered by the bucket. A new model is ready one lease after its first lease."""

    there: set[str]
    placing: Placing = field(default_factory=Placing)
    specs: dict[str, EngineSpec] = field(default_factory=dict)
    places: dict[str, Places] = field(default_factory=dict)
    hosted: dict[str, dict[str, int]] = field(default_factory=dict)  # runtime → model → leases since the model came
    tokens: Counter[str] = field(default_factory=Counter)
    rates: dict[str, float] = field(default_factory=dict)  # tokens/s of each model, divided among its hosts
    draining: set[str] = field(default_factory=set)
    ready_after: int = 1
    now: float = 0.0
    writes: int = 0

    def serve(self, *specs: EngineSpec) -> None:
        for each in specs:
            self.specs[each.key] = each
            self.placing.spec_changed(each.key, each)

    def lease(self, name: str, seconds: float) -> Lease:
        hosted = self.hosted.setdefault(name, {})
        wanted = {key for key, places in self.places.items() if name in (*places.runtimes, *places.leaving)}
        hosted = self.hosted[name] = {key: hosted.get(key, -1) + 1 for key in sorted(wanted)}
        models = {}
        for key, age in hosted.items():
            ready = age >= self.ready_after
            self.tokens[name + key] += round(self.rates.get(key, 0.0) * seconds / self.hosts(key)) if ready else 0
            residency = Residency.RESIDENT if ready else Residency.LOADING
            models[key] = ModelState(residency=residency, tokens=self.tokens[name + key], running=1)
        return Lease(
            runtime=name,
            epoch=1,
            engine="e",
            draining=name in self.draining,
            host_cache="h",
            page_bytes=PAGE,
            pages_total=64,
            models=models,
        )

    def hosts(self, key: str) -> int:
        return max(1, len(self.places[key].runtimes))

    def told(self, key: str) -> set[str]:
        """Live runtimes that are ordered to host the model."""
        places = self.places[key]
        return self.there.intersection([*places.runtimes, *places.leaving])

    def go_on(self, seconds: float = 1.0) -> None:
        self.now += seconds
        for name in sorted(self.there):
            self.placing.hear(self.lease(name, seconds), self.now)
        for key, places in self.placing.decide(self.now).items():
            self.writes += 1
            self.placing.places_changed(key, places)
            if places is None:
                del self.places[key]
            else:
                self.places[key] = places

    def settle(self) -> None:
        for _ in range(12):
            self.go_on()

    def die(self, name: str) -> None:
        self.there.discard(name)
        self.hosted.pop(name, None)
        self.placing.gone(name)


def test_models_spread_over_the_runtimes_and_stay() -> None:
    fleet = Fleet({"r1", "r2", "r3"})
    fleet.serve(*(limited(f"m{number}", 1) for number in range(6)))
    fleet.settle()
    assert Counter(places.runtimes[0] for places in fleet.places.values()) == {"r1": 2, "r2": 2, "r3": 2}
    writes = fleet.writes
    for _ in range(20):
        fleet.go_on(PLAN_S)
    assert fleet.writes == writes, "nothing changed, so nothing moves"


def test_a_model_whose_runtime_died_is_placed_at_once_and_the_others_stay() -> None:
    fleet = Fleet({"r1", "r2", "r3"})
    fleet.serve(*(limited(f"m{number}", 2) for number in range(3)))
    fleet.settle()
    before = {key: set(places.runtimes) for key, places in fleet.places.items()}
    fleet.die("r1")
    fleet.go_on()
    for key, places in fleet.places.items():
        assert before[key] - {"r1"} <= set(places.runtimes) == {"r2", "r3"}


def test_a_model_that_moves_is_hosted_by_both_until_the_new_one_could_load_it() -> None:
    fleet = Fleet({"r1"}, ready_after=3)
    fleet.serve(limited("m", 1))
    fleet.settle()
    fleet.there.add("r2")
    fleet.draining.add("r1")
    fleet.go_on()
    assert fleet.places["m"] == Places(runtimes=["r2"], leaving=["r1"])
    fleet.go_on()
    assert fleet.places["m"].leaving == ["r1"], "it is not there yet"
    fleet.settle()
    assert fleet.places["m"] == Places(runtimes=["r2"])


def test_two_that_are_asked_for_much_part() -> None:
    fleet = Fleet({"r1", "r2"})
    fleet.serve(limited("hot", 1), limited("warm", 1), limited("cold", 1), limited("still", 1))
    fleet.settle()
    together = next(
        name for name in fleet.there if sum(name in places.runtimes for places in fleet.places.values()) == 2
    )
    for key, places in fleet.places.items():
        fleet.rates[key] = 100.0 if together in places.runtimes else 1.0
    for _ in range(round(3 * MOVED_AGAIN_S)):
        fleet.go_on()
    busy = Counter(places.runtimes[0] for key, places in fleet.places.items() if fleet.rates[key] > 1)
    assert sorted(busy.values()) == [1, 1]


def test_more_models_than_fit_take_turns_and_one_larger_than_any_device_has_a_place_too() -> None:
    fleet = Fleet({"r1", "r2"})
    fleet.serve(*(limited(f"m{number}", 1, megabytes=60) for number in range(7)), limited("huge", 1, megabytes=10**9))
    fleet.settle()
    assert all(len(places.runtimes) == 1 for places in fleet.places.values())
    counts = Counter(places.runtimes[0] for key, places in fleet.places.items() if key != "huge")
    assert sorted(counts.values()) == [3, 4]


def test_what_is_no_longer_served_or_no_longer_limited_is_forgotten() -> None:
    fleet = Fleet({"r1"})
    fleet.serve(limited("a", 1), limited("b", 1))
    fleet.settle()
    fleet.placing.spec_changed("a", None)
    fleet.serve(limited("b", 0))
    fleet.go_on()
    assert fleet.places == {}


NAMES = ("r1", "r2", "r3", "r4")
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("die"), st.sampled_from(NAMES)),
        st.tuples(st.just("join"), st.sampled_from(NAMES)),
        st.tuples(st.just("drain"), st.sampled_from(NAMES)),
        st.tuples(st.just("ask"), st.integers(0, 5)),
        st.tuples(st.just("replace"), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.integers(1, 30)),
    ),
    max_size=25,
)


@example([("die", "r2"), ("drain", "r3"), ("replace", 0), ("die", "r1")], [1] * 6)
@settings(max_examples=60)
@given(ACTIONS, st.lists(st.integers(1, 4), min_size=6, max_size=6))
def test_whatever_happens_a_model_is_where_it_can_be_and_never_nowhere(
    actions: list[tuple[str, str | int]], replicas: list[int]
) -> None:
    fleet = Fleet(set(NAMES))
    fleet.serve(*(limited(f"m{number}", count, megabytes=5 + 7 * number) for number, count in enumerate(replicas)))
    fleet.settle()
    for action, what in actions:
        match action, what:
            case "die", str(name) if len(fleet.there - fleet.draining - {name}) > 0:
                fleet.die(name)
            case "join", str(name):
                fleet.there.add(name)
                fleet.draining.discard(name)
            case "drain", str(name) if len(fleet.there - fleet.draining - {name}) > 0:
                fleet.draining.add(name)
            case "ask", int(number):
                fleet.rates[f"m{number}"] = 500.0
            case "replace", int(number):  # a new scheduler takes over
                fleet.placing = Placing()
                fleet.serve(*fleet.specs.values())
                for key, places in fleet.places.items():
                    fleet.placing.places_changed(key, places)
                for _ in range(3):
                    fleet.go_on()
            case "wait", int(seconds):
                fleet.now += seconds
        before = {key: [name for name in fleet.told(key) if _ready(fleet, name, key)] for key in fleet.places}
        fleet.go_on()
        up = fleet.there - fleet.draining
        for number, count in enumerate(replicas):
            key = f"m{number}"
            places = fleet.places[key]
            assert len(places.runtimes) == min(count, len(up)) and set(places.runtimes) <= up
            if before.get(key):
                assert any(_ready(fleet, name, key) for name in fleet.told(key)), "who served it no longer does"
    fleet.rates.clear()
    for _ in range(120):  # until nothing is left in the means
        fleet.go_on(PLAN_S)
    writes = fleet.writes
    for _ in range(30):
        fleet.go_on(PLAN_S)
    assert fleet.writes == writes, "what is asked for no longer changes, and models still move"
    assert all(not places.leaving for places in fleet.places.values())


def _ready(fleet: Fleet, name: str, key: str) -> bool:
    return fleet.hosted.get(name, {}).get(key, 0) >= fleet.ready_after
