"""A dispatcher's decisions, recorded with what the dispatcher heard, are made again by a replay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.device.request import ModelKey, Objective
from runtime.core.fleet.recorded import RecordedFleet, is_dispatch_record, replay_dispatch
from runtime.core.fleet.watched import WatchedFleet
from store.contract.reports import Report, Seat
from store.contract.wire import Lease, ModelState, Residency, Role
from tests.runtime.core.fleet.test_report import LAW, spec

RUNTIMES, MODELS = ("r1", "r2", "r3"), ("a", "b")
LAW_SAID = {name: getattr(LAW, name) for name in LAW.__struct_fields__}

leases = st.builds(
    lambda runtime, residency, draining, role: Lease(
        runtime=runtime,
        epoch=1,
        engine="e",
        draining=draining,
        role=role,
        law=LAW_SAID,
        models={model: ModelState(residency=residency, running=int(runtime == "r1")) for model in MODELS},
    ),
    st.sampled_from(RUNTIMES),
    st.sampled_from(list(Residency)),
    st.booleans(),
    st.sampled_from(list(Role)),
)
reports = st.builds(
    lambda runtime, seq, count, load, here: Report(
        runtime=runtime, epoch=1, seq=seq, load=load, seats={"a": Seat(count, load)} if count else {}, here=here
    ),
    st.sampled_from(RUNTIMES),
    st.integers(1, 50),
    st.integers(0, 3),
    st.floats(0, 2),
    st.frozensets(st.sampled_from(MODELS)),
)
models = st.sampled_from([ModelKey(model) for model in MODELS])
steps = st.lists(
    st.tuples(st.just("lease"), leases)
    | st.tuples(st.just("gone"), st.sampled_from(RUNTIMES))
    | st.tuples(st.just("report"), reports)
    | st.tuples(st.just("spec"), models)
    | st.tuples(st.just("took"), st.tuples(st.sampled_from(RUNTIMES), models))
    | st.tuples(st.just("gave back"), st.tuples(st.sampled_from(RUNTIMES), models))
    | st.tuples(st.just("silent"), st.sampled_from(RUNTIMES))
    | st.tuples(st.just("choice"), st.tuples(models, st.sets(st.sampled_from(RUNTIMES)), st.booleans())),
    max_size=40,
)


def play(fleet: WatchedFleet, steps: list[tuple[str, object]]) -> None:
    for number, (kind, what) in enumerate(steps):
        now = number * 0.2
        match kind, what:
            case "lease", Lease() as lease:
                fleet.lease_changed(lease.runtime, lease, now)
            case "gone", str(runtime):
                fleet.lease_changed(runtime, None, now)
            case "report", Report() as report:
                fleet.hear(report, now)
            case "spec", str(model):
                fleet.spec_changed(model, spec(model))
            case "took", (str(runtime), str(model)):
                fleet.took(runtime, ModelKey(model), 0.1)
            case "gave back", (str(runtime), str(model)):
                fleet.gave_back(runtime, ModelKey(model))
            case "silent", str(runtime):
                fleet.refused(runtime)
            case "choice", (str(model), set(avoid), bool(decodes)):
                fleet.choose(ModelKey(model), Objective(), now, decodes, avoid)


@given(steps)
def test_a_replay_decides_as_recorded_whatever_was_heard(steps: list[tuple[str, object]]) -> None:
    said: list[bytes] = []
    play(RecordedFleet(said.append), steps)
    replayed = replay_dispatch(enumerate(said))
    assert replayed.difference == ""
    assert replayed.heard + replayed.chosen == len(steps) == len(said)


def test_a_replay_says_which_decision_differs() -> None:
    said: list[bytes] = []
    fleet = RecordedFleet(said.append)
    states = {"a": ModelState(residency=Residency.STAGED)}
    fleet.lease_changed("r1", Lease(runtime="r1", epoch=1, engine="e", models=states), 0.0)
    assert fleet.choose(ModelKey("a"), Objective(), 0.1) == "r1"
    without_lease = replay_dispatch(enumerate(said[1:]))
    assert "model a: recorded r1, now None" in without_lease.difference and without_lease.chosen == 1


def test_a_file_of_another_kind_is_no_journal_of_a_gateway() -> None:
    assert not is_dispatch_record(b"\x93\xa5began\x01\x02")
    with pytest.raises(ValueError, match="no journal of a gateway, or a broken one: the record at byte 4"):
        replay_dispatch([(4, b"\xc0")])
