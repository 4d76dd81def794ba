"""Each choice is the choice of the plain rule and the books stay right, whatever a dispatcher hears in any order.

The plain rule looks at every runtime for every choice, and keeps only reports, costs and counts of requests. Costs are
sums of powers of two, so that sums in any order are equal to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from functools import partial
from random import Random

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from msgspec.structs import replace

from runtime.core.device.request import ModelKey, Objective
from runtime.core.fleet.dispatch import BUILD_S, READ_S_PER_BYTE, Coldness, SeenFleet
from runtime.core.ledgers.costs import ModelCosts
from store.contract.reports import Report, Seat
from store.contract.wire import Role
from tests.runtime.core.fleet.test_dispatch import COSTS, OBJECTIVE

MODELS = [ModelKey(name) for name in "abc"]
RUNTIMES = [f"r{number}" for number in range(7)]
FRESH_S = 3.0


@dataclass
class PlainRuntime:
    """A runtime as a dispatcher was told about the runtime."""

    costs: ModelCosts
    coldness: dict[ModelKey, Coldness]
    report: Report
    heard_at: float = -float("inf")
    gone: bool = False
    suspect: bool = False
    own: Counter[ModelKey] = field(default_factory=Counter)

    def reported(self, model: ModelKey) -> Seat:
        return self.report.seats.get(model, Seat(0))

    def requests(self, model: ModelKey) -> int:
        return max(self.reported(model).requests, self.own[model])

    def added(self, model: ModelKey) -> float:
        """Load of own requests that the report does not count."""
        before, after = self.reported(model).requests, self.own[model]
        if after <= before or model not in self.coldness:
            return 0.0
        load = self.costs.step(after, 0) / OBJECTIVE.tbt_s
        if before:
            return load - self.costs.step(before, 0) / OBJECTIVE.tbt_s
        return load if model in self.report.here else load + self.way_in_s(model) / 16

    def load(self) -> float:
        return self.report.load + sum(self.added(model) for model in MODELS)

    def loading(self) -> bool:
        came = [model for model in MODELS if self.added(model) and not self.reported(model).requests]
        return self.report.loading or any(model not in self.report.here for model in came)

    def hot(self, model: ModelKey) -> bool:
        seat, load = self.reported(model), self.load()
        by_time = load > 1.0 and seat.busy + self.added(model) > 0.5 * load
        return by_time or (self.report.full > 0.9 and seat.kv > 0.5 * self.report.full)

    def way_in_s(self, model: ModelKey) -> float:
        disk_s = BUILD_S + READ_S_PER_BYTE * self.costs.weight_bytes
        return self.costs.load_s + (disk_s if self.coldness[model] is Coldness.DISK else 0.0)

    def cost(self, model: ModelKey) -> float:
        cost = self.load() + self.costs.step(1, 0) / OBJECTIVE.tbt_s
        if model in self.report.here:
            return cost
        way_in = max(0.08, self.way_in_s(model) / OBJECTIVE.ttft_s)
        return cost + 0.15 * self.report.reload + way_in * (1.6 if self.loading() else 1.0)


class PlainFleet:
    """The rule as written down, without any index."""

    def __init__(self) -> None:
        self.runtimes: dict[str, PlainRuntime] = {}

    def choose(self, model: ModelKey, now: float, decodes: bool, avoid: Set[str], order: list[str]) -> str | None:
        """Return the runtime for a request. `order`: every runtime, by rank for the model."""
        last = Role.PREFILL if decodes else Role.DECODE
        able = [id for id in order if id not in avoid and self._able(self.runtimes[id], model, now)]
        preferred = [id for id in able if self.runtimes[id].report.role is not last]
        found = self._choose(model, preferred)
        return found if found is not None else self._choose(model, able)

    def _able(self, runtime: PlainRuntime, model: ModelKey, now: float) -> bool:
        fresh = runtime.heard_at >= now - FRESH_S and not runtime.suspect
        return fresh and not runtime.report.draining and model in runtime.coldness

    def _choose(self, model: ModelKey, able: list[str]) -> str | None:
        runtimes = self.runtimes
        holders = [id for id in able if runtimes[id].requests(model)]
        cool = [id for id in holders if not runtimes[id].hot(model)]
        if cool and cool == holders:
            return max(cool, key=lambda id: (runtimes[id].requests(model), -able.index(id)))
        if cool:
            return min(cool, key=lambda id: (runtimes[id].load(), id))
        if holders:
            able = [
                id
                for id in able
                if not runtimes[id].requests(model) and runtimes[id].load() < 1.0 and runtimes[id].report.full < 0.9
            ]
        few = [id for number, id in enumerate(able) if number < 4 or model in runtimes[id].report.here]
        if few:
            return min(few, key=lambda id: (runtimes[id].cost(model), id))
        return min(holders, key=lambda id: (runtimes[id].load(), id), default=None)


# ── what happens ──────────────────────────────────────────────────────────────────────────────────────────────────────

SHARES = st.integers(0, 80).map(lambda count: count / 64)
SEATS = st.builds(Seat, st.integers(1, 4), SHARES, SHARES)
SLOWNESS = st.sampled_from([1, 2, 4])
REPORTS = st.builds(
    Report,
    runtime=st.just(""),
    epoch=st.integers(1, 2),
    seq=st.integers(1, 5),
    draining=st.sampled_from([False, False, False, True]),
    role=st.sampled_from(Role),
    loading=st.booleans(),
    load=SHARES,
    reload=SHARES,
    full=SHARES,
    seats=st.dictionaries(st.sampled_from(MODELS), SEATS),
    here=st.frozensets(st.sampled_from(MODELS)),
)
HOSTED = st.dictionaries(st.sampled_from(MODELS), st.sampled_from([Coldness.HOST, Coldness.DISK]))
EVENTS = st.sampled_from(["hosts", "hear", "hear", "hear", "took", "took", "gave back", "refused", "gone"])


@given(st.data())
@settings(max_examples=60, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # to shrink would take minutes
def test_each_choice_is_the_choice_of_the_plain_rule(data: DataObject) -> None:
    fleet, plain, now = SeenFleet(FRESH_S), PlainFleet(), 0.0
    for id in RUNTIMES:
        _happen(data, "hosts", id, fleet, plain, now)
    for event in data.draw(st.lists(EVENTS, max_size=25)):
        now += data.draw(st.sampled_from([0.0, 0.25, 2.0]))
        _happen(data, event, data.draw(st.sampled_from(RUNTIMES)), fleet, plain, now)
        _check_books(fleet, plain)
    for model in MODELS:
        avoid = data.draw(st.sets(st.sampled_from(RUNTIMES), max_size=3))
        order = [seen.id for seen in fleet.in_order(model)]
        for decodes in (False, True):
            said = plain.choose(model, now, decodes, avoid, order)
            assert fleet.choose(model, OBJECTIVE, now, decodes, avoid) == said


def _happen(data: DataObject, event: str, id: str, fleet: SeenFleet, plain: PlainFleet, now: float) -> None:
    known = plain.runtimes.get(id)
    if event == "hosts":
        costs, coldness = _slow(data.draw(SLOWNESS)), data.draw(HOSTED)
        fleet.hosts(id, coldness, dict.fromkeys(MODELS, costs))
        if known is None:
            plain.runtimes[id] = PlainRuntime(costs, coldness, Report(runtime=id, epoch=0, seq=0))
        else:
            known.costs, known.coldness, known.gone = costs, coldness, False
        _happen(data, "hear", id, fleet, plain, now)  # a lease that changes stands for a report
        return
    model = data.draw(st.sampled_from(MODELS))
    if event == "hear":
        report = replace(data.draw(REPORTS), runtime=id)
        fleet.hear(report, now)
        if known is not None and (report.epoch, report.seq) >= (known.report.epoch, known.report.seq):
            known.report, known.heard_at, known.suspect = report, now, False
    elif event == "refused":
        fleet.refused(id)
        if known is not None:
            known.suspect = True
    elif event == "gone":
        fleet.gone(id)
        if known is not None:
            known.coldness, known.report, known.gone = {}, Report(runtime=id, epoch=0, seq=0), True
    elif event == "took":
        fleet.took(id, model, OBJECTIVE.tbt_s)
        if known is not None:
            known.own[model] += 1
    elif known is None or known.own[model]:
        fleet.gave_back(id, model)
        if known is not None:
            known.own[model] -= 1
            _forget(id, plain)
    if event == "gone":
        _forget(id, plain)


def _forget(id: str, plain: PlainFleet) -> None:
    known = plain.runtimes.get(id)
    if known is not None and known.gone and not +known.own:
        del plain.runtimes[id]


def _slow(times: int) -> ModelCosts:
    return replace(COSTS, step_s=COSTS.step_s * times, load_s=COSTS.load_s * times)


def _check_books(fleet: SeenFleet, plain: PlainFleet) -> None:
    """Assert that the indexes agree with the runtimes, and that no own request is lost or counted twice."""
    assert fleet.runtimes.keys() == plain.runtimes.keys()
    for id, known in plain.runtimes.items():
        assert fleet.runtimes[id].own == dict(+known.own)
    for model in MODELS:
        holders = {id for id, known in plain.runtimes.items() if known.requests(model)}
        here = {id for id, known in plain.runtimes.items() if model in known.report.here}
        assert fleet._holders.get(model, set()) == holders
        assert fleet._here.get(model, set()) == here


@given(st.lists(st.tuples(st.sampled_from(RUNTIMES), st.sampled_from(MODELS)), max_size=30), st.randoms())
def test_when_all_requests_were_given_back_and_all_runtimes_are_gone_nothing_is_left(
    sent: list[tuple[str, ModelKey]], random: Random
) -> None:
    fleet = SeenFleet(FRESH_S)
    for id in RUNTIMES:
        fleet.hosts(id, dict.fromkeys(MODELS, Coldness.HOST), dict.fromkeys(MODELS, COSTS))
    acts = [partial(fleet.gave_back, *each) for each in sent] + [partial(fleet.gone, id) for id in RUNTIMES]
    for id, model in sent:
        fleet.took(id, model, OBJECTIVE.tbt_s)
    random.shuffle(acts)
    for act in acts:
        act()
    assert (fleet.runtimes, fleet._holders, fleet._here) == ({}, {}, {})


@given(st.lists(st.integers(0, 6), min_size=1, max_size=7, unique=True), st.sampled_from(MODELS))
def test_the_order_of_runtimes_does_not_depend_on_the_order_in_which_a_dispatcher_learnt_of_runtimes(
    numbers: list[int], model: ModelKey
) -> None:
    orders = []
    for learnt in (numbers, sorted(numbers)):
        fleet = SeenFleet()
        for number in learnt:
            fleet.hosts(f"r{number}", {model: Coldness.HOST}, {model: COSTS})
        orders.append([seen.id for seen in fleet.in_order(model)])
    assert orders[0] == orders[1]


def test_a_request_with_hardly_any_time_left_is_placed_as_if_a_tenth_of_a_second_were_left() -> None:
    fleet = SeenFleet()
    fleet.hosts("r0", dict.fromkeys(MODELS, Coldness.HOST), dict.fromkeys(MODELS, COSTS))
    runtime = fleet.runtimes["r0"]
    costs = [runtime.cost(MODELS[0], Objective(ttft_s=ttft_s, tbt_s=0.1)) for ttft_s in (-5.0, 0.0, 0.1)]
    assert costs[0] == costs[1] == costs[2] < float("inf")
