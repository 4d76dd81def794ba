"""The report of a runtime, from the states of the runtime's models."""

from __future__ import annotations

import pytest

from runtime.core.fleet.dispatch import LOAD_SHARE
from runtime.core.fleet.headroom import HEADROOM
from runtime.core.fleet.report import report_of
from runtime.core.fleet.watched import WatchedFleet
from runtime.core.ledgers.costs import Law, LawCosts
from store.contract.wire import EngineSpec, Lease, ModelState, Residency, replace

PAGE = 1 << 20
LAW = Law(
    step_s=0.01,
    step_s_per_weight_byte=0,
    step_s_per_request=0.001,
    step_s_per_parameter=0,
    step_s_per_kv_byte=0,
    prefill_s=0.01,
    prefill_s_per_parameter=0,
    prefill_s_per_parameter2=0,
    load_s=0.8,
    load_s_per_byte=0,
    switch_s=0.0,
    copy_s_per_byte=0,
)


def spec(key: str, weight_pages: int = 10) -> EngineSpec:
    return EngineSpec(
        key=key,
        path=key,
        digest="d",
        architecture="a",
        dtype="bfloat16",
        max_model_len=100,
        weight_bytes=weight_pages * PAGE,
        kv_bytes_per_token=1000,
    )


def lease(**models: ModelState) -> Lease:
    return Lease(runtime="r", epoch=7, engine="e", page_bytes=PAGE, pages_total=100, models=models)


COSTS = LawCosts(LAW, {key: spec(key) for key in "abc"})


def test_a_parked_model_has_its_seat_and_a_model_without_requests_has_none() -> None:
    parked = ModelState(residency=Residency.STAGED, running=2, busy=0.25)
    report = report_of(lease(a=parked, b=ModelState(residency=Residency.RESIDENT)), 3, COSTS, {"a": 2, "b": 0})
    assert (report.runtime, report.epoch, report.seq) == ("r", 7, 3)
    assert report.seats.keys() == {"a"} and report.here == {"b"}
    assert (report.seats["a"].requests, report.seats["a"].busy) == (2, 0.25)
    assert report.load == pytest.approx(0.25 + LOAD_SHARE * 0.8), "a model that is away needs time for its way in"
    assert report.reload == pytest.approx(0.8 / 10)


def test_requests_that_the_device_has_not_heard_of_count_by_the_costs_of_the_model() -> None:
    report = report_of(lease(a=ModelState(residency=Residency.RESIDENT)), 1, COSTS, {"a": 5})
    assert report.seats["a"].busy == pytest.approx((0.01 + 5 * 0.001) / 0.1) and report.load == report.seats["a"].busy


def test_memory_counts_what_requests_have_and_what_they_wait_for() -> None:
    full = ModelState(residency=Residency.RESIDENT, weights_pages=50, kv_pages=30, head_bytes=15 * PAGE)
    waits = ModelState(residency=Residency.STAGED, queued_bytes=10 * PAGE)
    idle = ModelState(residency=Residency.RESIDENT, weights_pages=20)  # gives way
    report = report_of(lease(a=full, b=waits, c=idle), 1, COSTS, {"a": 1, "b": 1})
    assert report.full == pytest.approx(55 / 50)
    assert report.seats["a"].kv == pytest.approx(45 / 50) and report.seats["b"].kv == pytest.approx(10 / 50)


def test_prefixes_of_ended_requests_fill_no_memory() -> None:
    """Blocks of a prefix cache go as soon as a request needs the memory."""
    cache = ModelState(residency=Residency.RESIDENT, weights_pages=50, kv_pages=50, spare_pages=45)
    report = report_of(lease(a=cache), 1, COSTS, {"a": 1})
    assert report.full == report.seats["a"].kv == pytest.approx(5 / 50)


def test_a_running_request_of_high_priority_keeps_other_requests_away() -> None:
    """The headroom does not grow with the number of such requests, and belongs to no model."""
    usual = ModelState(residency=Residency.RESIDENT, weights_pages=50, kv_pages=10, running=3, busy=0.25)
    none, one, two = (
        report_of(lease(a=replace(usual, high=high)), 1, COSTS, {"a": 3, "b": 0, "c": 0}) for high in (0, 1, 2)
    )
    assert one.load == two.load == pytest.approx(none.load + HEADROOM)
    assert one.full == two.full == pytest.approx(none.full + HEADROOM)
    assert one.seats == none.seats


def test_weights_are_here_when_all_are_on_the_device_or_coming_in() -> None:
    states = {
        "a": ModelState(residency=Residency.LOADING),
        "b": ModelState(residency=Residency.STAGED, weights_pages=10),  # parked, and no page was taken
        "c": ModelState(residency=Residency.STAGED, weights_pages=9),
    }
    report = report_of(lease(**states), 1, COSTS, {})
    assert report.here == {"a", "b"} and report.loading


def test_costs_follow_the_law_of_the_lease_and_the_size_of_the_model() -> None:
    fleet = WatchedFleet()
    fleet.spec_changed("a", spec("a"))
    states = {"a": ModelState(residency=Residency.STAGED)}
    for load_s in (0.5, 2.0):
        law = {name: getattr(LAW, name) for name in LAW.__struct_fields__} | {"load_s": load_s}
        fleet.lease_changed("r", Lease(runtime="r", epoch=1, engine="e", law=law, models=states), 0.0)
        assert fleet.runtimes["r"].costs["a"].load_s == load_s  # type: ignore[index]
    fleet.spec_changed("a", None)
    assert fleet.runtimes["r"].costs["a"].weight_bytes == 1, "a model without a spec looks small"  # type: ignore[index]
