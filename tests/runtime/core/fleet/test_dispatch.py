"""The rule that chooses runtimes: requests stay together, hot models flow over, and dispatchers agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
from msgspec.structs import replace

from runtime.core.device.request import ModelKey, Objective
from runtime.core.fleet import dispatch
from runtime.core.fleet.dispatch import CANDIDATES, FRESH_S, Coldness, SeenFleet, SeenRuntime
from runtime.core.ledgers.costs import ModelCosts
from store.contract.reports import Report, Seat
from store.contract.wire import Role

A, B = ModelKey("a"), ModelKey("b")
OBJECTIVE = Objective(ttft_s=8.0, tbt_s=0.125)
COSTS = ModelCosts(
    weight_bytes=1 << 34,
    kv_bytes_per_token=1 << 17,
    step_s=1 / 64,
    step_s_per_request=1 / 1024,
    step_s_per_token=0.0,
    prefill_s=1 / 64,
    prefill_s_per_token=1 / 4096,
    prefill_s_per_token2=0.0,
    load_s=0.5,
    switch_s=0.0,
    copy_s_per_byte=1e-10,
)
STEP = COSTS.step(1, 0) / OBJECTIVE.tbt_s


def fleet_of(
    *reports: Report, costs: Mapping[str, ModelCosts] | None = None, coldness: Mapping[str, Coldness] | None = None
) -> SeenFleet:
    """Return a fleet that heard the reports at the time 0; every runtime can serve the models a and b.

    `costs` and `coldness` give the values of both models by runtime; runtimes left out have the usual values."""
    fleet = SeenFleet()
    for report in reports:
        id = report.runtime
        where = (coldness or {}).get(id, Coldness.HOST)
        fleet.hosts(id, {A: where, B: where}, dict.fromkeys((A, B), (costs or {}).get(id, COSTS)))
        fleet.hear(report, 0.0)
    return fleet


def runtime(
    id: str, seats: Mapping[ModelKey, Seat] | None = None, here: Iterable[ModelKey] = (), **rest: object
) -> Report:
    load = sum(seat.busy for seat in (seats or {}).values())
    given = {"load": load, "seq": 1, **rest}
    return Report(runtime=id, epoch=1, seats=dict(seats or {}), here=frozenset(here), **given)  # type: ignore[arg-type]


def chosen(fleet: SeenFleet, model: ModelKey = A, now: float = 0.0, **rest: object) -> str | None:
    return fleet.choose(model, OBJECTIVE, now, **rest)  # type: ignore[arg-type]


def idle(count: int) -> list[Report]:
    return [runtime(f"r{number}") for number in range(count)]


# ── requests of a model stay together ─────────────────────────────────────────────────────────────────────────────────


def check_a_model_with_parked_requests_stays() -> None:
    """The runtime with the requests has more to do than any other runtime, and the weights have left."""
    parked = runtime("busy", {A: Seat(2, 0.2), B: Seat(3, 0.5)}, here=[B])
    assert chosen(fleet_of(*idle(4), parked)) == "busy"


def test_a_model_with_parked_requests_stays() -> None:
    check_a_model_with_parked_requests_stays()


def check_own_requests_count_before_they_are_reported() -> None:
    fleet = fleet_of(*idle(8))
    first = chosen(fleet)
    assert first is not None
    fleet.took(first, A, OBJECTIVE.tbt_s)
    for number in range(8):  # more to do there than anywhere else, by requests of other dispatchers
        busy = {B: Seat(4, 0.6)} if f"r{number}" == first else {}
        fleet.hear(runtime(f"r{number}", busy, seq=2), 0.1)
    assert chosen(fleet, now=0.1) == first
    loads = [fleet.runtimes[id].load for id in (first, "r0" if first != "r0" else "r1")]
    assert loads == [pytest.approx(0.6 + STEP + dispatch.LOAD_SHARE * COSTS.load_s), 0.0]


def test_own_requests_count_before_they_are_reported() -> None:
    check_own_requests_count_before_they_are_reported()


def test_where_a_model_was_split_the_place_with_most_requests_gets_the_next() -> None:
    fleet = fleet_of(*idle(2), runtime("few", {A: Seat(1, 0.1)}), runtime("most", {A: Seat(3, 0.3)}))
    assert chosen(fleet) == "most"


def test_when_the_last_request_has_ended_the_model_is_placed_anew() -> None:
    fleet = fleet_of(runtime("r0"), runtime("r1", {B: Seat(9, 0.9)}))
    fleet.took("r1", A, OBJECTIVE.tbt_s)
    assert chosen(fleet) == "r1"
    fleet.gave_back("r1", A)
    assert chosen(fleet) == "r0"


# ── a hot model flows over ────────────────────────────────────────────────────────────────────────────────────────────


def check_a_hot_model_flows_over_by_time_and_by_memory() -> None:
    slow = runtime("hot", {A: Seat(20, 0.8), B: Seat(1, 0.3)}, here=[A])
    full = runtime("hot", {A: Seat(20, 0.4, kv=0.6), B: Seat(1, 0.1, kv=0.4)}, here=[A], full=1.0)
    for hot in (slow, full):
        assert chosen(fleet_of(hot, runtime("free"))) == "free"


def test_a_hot_model_flows_over_by_time_and_by_memory() -> None:
    check_a_hot_model_flows_over_by_time_and_by_memory()


def test_a_model_that_needs_less_than_half_of_an_overloaded_runtime_stays() -> None:
    slow = runtime("full", {A: Seat(2, 0.4), B: Seat(20, 0.8)}, here=[A])
    assert chosen(fleet_of(slow, runtime("free"))) == "full"


def test_a_hot_model_goes_to_the_least_loaded_place_that_is_not_hot() -> None:
    hot = runtime("hot", {A: Seat(20, 1.2)}, here=[A])
    cool = [runtime("cool", {A: Seat(1, 0.5)}), runtime("cooler", {A: Seat(1, 0.4)})]
    assert chosen(fleet_of(hot, *cool, runtime("free"))) == "cooler"


def test_a_hot_model_stays_where_the_fleet_is_full() -> None:
    hot = [runtime("hot", {A: Seat(20, 1.3)}, here=[A]), runtime("less hot", {A: Seat(20, 1.2)}, here=[A])]
    assert chosen(fleet_of(*hot, runtime("slow", {B: Seat(9, 1.1)}), runtime("full", full=0.95))) == "less hot"


# ── placement ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_goes_to_its_weights_unless_the_load_there_is_dearer_than_the_way_in() -> None:
    others = [runtime(f"r{number}") for number in range(3)]
    assert chosen(fleet_of(*others, runtime("there", {B: Seat(1, 0.05)}, here=[A]))) == "there"
    assert chosen(fleet_of(*others, runtime("there", {B: Seat(9, 0.5)}, here=[A]))) != "there"


def test_weights_in_host_memory_are_nearer_than_weights_on_disk() -> None:
    coldness = {"r0": Coldness.DISK, "r1": Coldness.HOST, "r2": Coldness.DISK}
    assert chosen(fleet_of(*idle(3), coldness=coldness)) == "r1"


def test_a_runtime_where_weights_are_coming_in_or_must_come_in_again_is_dearer() -> None:
    assert chosen(fleet_of(runtime("r0", loading=True), runtime("r1"))) == "r1"
    assert chosen(fleet_of(runtime("r0", reload=0.5), runtime("r1"))) == "r1"
    fleet = fleet_of(runtime("r0"), runtime("r1", {B: Seat(1, 0.05)}))
    fleet.took("r0", B, OBJECTIVE.tbt_s)  # the weights of b are on their way, though no report says so
    assert fleet.runtimes["r0"].loading and not fleet.runtimes["r1"].loading


def test_each_runtime_counts_by_its_own_costs() -> None:
    """A load of 20 requests on a slow device, where a step takes twice as long, is larger, though equally reported."""
    slow = replace(COSTS, step_s=COSTS.step_s * 2, load_s=COSTS.load_s * 2)
    assert chosen(fleet_of(*idle(2), costs={"r0": slow})) == "r1"
    fleet = fleet_of(*idle(2), costs={"r0": slow})
    for id in ("r0", "r1"):
        fleet.took(id, B, OBJECTIVE.tbt_s)
    assert fleet.runtimes["r0"].load > 1.5 * fleet.runtimes["r1"].load


def test_a_model_is_placed_among_few_runtimes_and_models_spread_over_all() -> None:
    fleet = fleet_of(*idle(64))
    models = [ModelKey(f"m{number}") for number in range(400)]
    for runtime_id in list(fleet.runtimes):
        fleet.hosts(runtime_id, dict.fromkeys(models, Coldness.HOST), dict.fromkeys(models, COSTS))
    firsts = {model: chosen(fleet, model) for model in models}
    assert len(set(firsts.values())) > 32
    for model in models[:20]:
        assert firsts[model] in _order(fleet, model)[:CANDIDATES]


def _order(fleet: SeenFleet, model: ModelKey) -> list[str]:
    return [seen.id for seen in fleet.in_order(model)]


def test_every_runtime_is_once_in_the_order_of_a_model_and_a_runtime_that_goes_changes_nothing_else() -> None:
    fleet = fleet_of(*idle(40))
    models = [ModelKey(f"m{number}") for number in range(100)]
    before = {model: _order(fleet, model) for model in models}
    assert all(sorted(order) == sorted(fleet.runtimes) for order in before.values())
    assert len({tuple(order[:CANDIDATES]) for order in before.values()}) > 60
    fleet.gone("r7")
    for model in models:
        assert _order(fleet, model) == [id for id in before[model] if id != "r7"]
    fleet.hosts("r7", {A: Coldness.HOST}, {A: COSTS})
    assert {model: _order(fleet, model) for model in models} == before


def check_dispatchers_with_equal_knowledge_agree() -> None:
    reports = [runtime(f"r{number}", {B: Seat(1, 0.1)} if number % 3 else {}) for number in range(32)]
    models = [ModelKey(f"m{number}") for number in range(50)]
    answers = []
    for order in (reports, list(reversed(reports))):
        fleet = SeenFleet()
        for report in order:
            fleet.hosts(report.runtime, dict.fromkeys(models, Coldness.HOST), dict.fromkeys(models, COSTS))
            fleet.hear(report, 0.0)
        answers.append([chosen(fleet, model) for model in models])
    assert answers[0] == answers[1]


def test_dispatchers_with_equal_knowledge_agree() -> None:
    check_dispatchers_with_equal_knowledge_agree()


# ── runtimes that may not be chosen ───────────────────────────────────────────────────────────────────────────────────


def test_roles_are_preferred_and_are_no_obstacle() -> None:
    prefill, decode = runtime("prefill", role=Role.PREFILL), runtime("decode", role=Role.DECODE)
    assert chosen(fleet_of(prefill, decode)) == "prefill"
    assert chosen(fleet_of(prefill, decode), decodes=True) == "decode"
    assert chosen(fleet_of(decode)) == "decode"
    assert chosen(fleet_of(prefill), decodes=True) == "prefill"
    assert chosen(fleet_of(runtime("decode", {A: Seat(3, 0.3)}, role=Role.DECODE), prefill)) == "prefill"


def test_avoided_draining_unknown_and_silent_runtimes_get_nothing() -> None:
    holder = runtime("holder", {A: Seat(3, 0.3)})
    fleet = fleet_of(holder, runtime("next"))
    assert chosen(fleet, avoid={"holder"}) == "next"
    assert chosen(fleet, avoid={"holder", "next"}) is None
    assert chosen(fleet, ModelKey("unknown")) is None
    assert chosen(fleet_of(replace(holder, draining=True), runtime("next"))) == "next"
    assert chosen(fleet, now=FRESH_S) == "holder"
    assert chosen(fleet, now=FRESH_S + 0.1) is None
    fleet.hear(runtime("next", seq=2), FRESH_S)
    assert chosen(fleet, now=FRESH_S + 0.1) == "next"


def test_a_runtime_that_refused_gets_nothing_until_the_next_report() -> None:
    fleet = fleet_of(runtime("holder", {A: Seat(3, 0.3)}), runtime("next"))
    fleet.refused("holder")
    assert chosen(fleet) == "next"
    assert fleet.hear(runtime("holder", {A: Seat(3, 0.3)}, seq=2), 0.1)  # takes requests again
    assert chosen(fleet) == "holder"


def test_a_report_older_than_the_last_is_passed_over() -> None:
    fleet = fleet_of(runtime("r0", {A: Seat(3, 0.3)}, seq=5), runtime("r1"))
    assert not fleet.hear(runtime("r0", seq=4), 0.1)
    assert chosen(fleet) == "r0"
    restarted = Report(runtime="r0", epoch=2, seq=1)
    fleet.hear(restarted, 0.1)
    assert fleet.runtimes["r0"].report is restarted


def test_a_runtime_that_is_gone_gets_nothing_and_comes_back_without_its_requests() -> None:
    fleet = fleet_of(runtime("r0", {A: Seat(3, 0.3)}, here=[A]), runtime("r1"))
    fleet.took("r0", A, OBJECTIVE.tbt_s)
    fleet.gone("r0")
    assert chosen(fleet) == "r1"
    fleet.gave_back("r0", A)
    assert "r0" not in fleet.runtimes
    fleet.hosts("r0", {A: Coldness.HOST}, {A: COSTS})
    fleet.hear(runtime("r0", {B: Seat(3, 0.3)}), 0.1)
    assert chosen(fleet) == "r1"


def test_a_runtime_that_can_serve_no_model_any_more_is_known_until_its_lease_ends() -> None:
    """The last own request ends while the runtime still reports requests of the model."""
    fleet = fleet_of(runtime("r0", {A: Seat(3, 0.3)}, here=[A]), runtime("r1"))
    fleet.took("r0", A, OBJECTIVE.tbt_s)
    fleet.hosts("r0", {}, {A: COSTS})
    fleet.gave_back("r0", A)
    assert chosen(fleet) == "r1" and "r0" in fleet.runtimes
    fleet.gone("r0")
    assert chosen(fleet) == "r1" and "r0" not in fleet.runtimes


# ── the checks notice faults ──────────────────────────────────────────────────────────────────────────────────────────


def count_resident_models_alone(patch: pytest.MonkeyPatch) -> None:
    hear = SeenFleet.hear

    def wrong(fleet: SeenFleet, report: Report, now: float) -> bool:
        resident = {model: seat for model, seat in report.seats.items() if model in report.here}
        return hear(fleet, replace(report, seats=resident), now)

    patch.setattr(SeenFleet, "hear", wrong)


def forget_own_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SeenFleet, "took", lambda fleet, id, model, tbt_s: None)


def never_flow_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SeenRuntime, "hot", lambda runtime, model: False)


def rank_by_the_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    made = iter(range(1, 1 << 20))
    patch.setattr(dispatch, "_points", lambda id: [next(made)])


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (count_resident_models_alone, check_a_model_with_parked_requests_stays),
        (forget_own_requests, check_own_requests_count_before_they_are_reported),
        (never_flow_over, check_a_hot_model_flows_over_by_time_and_by_memory),
        (rank_by_the_order_of_arrival, check_dispatchers_with_equal_knowledge_agree),
    ],
)
def test_a_fault_of_the_rule_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_model_points", {})
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check()
