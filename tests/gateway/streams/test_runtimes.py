"""The choice of a runtime for a request, from the leases of the runtimes."""

from __future__ import annotations

import asyncio

from runtime.core.fleet.dispatch import COLDNESS, Coldness
from store.bus import Responder
from store.contract import wire
from store.contract.reports import Report, Seat, report_subject
from store.contract.wire import ModelState, Residency, Role
from tests.conftest import soon
from tests.gateway.plane import Plane


async def test_a_request_goes_where_the_model_is_nearest_to_the_device(plane: Plane) -> None:
    for number, residency in enumerate([Residency.COLD, Residency.STAGED, Residency.RESIDENT]):  # nearest last
        runtime = f"r{number}"
        await plane.report({"m": ModelState(residency=residency)}, runtime)
        assert plane.fleet.choose("m") == runtime
        assert plane.fleet.coldness("m", runtime).name == ("DISK", "HOST", "NONE")[number]
    assert plane.fleet.choose("m", avoid=frozenset({"r2"})) == "r1"


async def test_a_model_stays_where_it_has_requests_though_it_is_parked_there(plane: Plane) -> None:
    await plane.report({"m": ModelState(residency=Residency.STAGED, running=1, waiting=1)}, "r1")
    await plane.report({"m": ModelState(residency=Residency.RESIDENT)}, "r2")
    await plane.report({"m": ModelState(residency=Residency.LOADING, waiting=1)}, "r3")
    assert plane.fleet.choose("m") == "r1", "the other part of the requests is smaller"
    assert plane.fleet.choose("m", avoid=frozenset({"r1"})) == "r3"


async def test_a_report_counts_at_once_and_before_the_next_lease(plane: Plane) -> None:
    for runtime in ("r1", "r2"):
        await plane.report({"m": ModelState(residency=Residency.STAGED)}, runtime)
    for seq, holder in enumerate(("r1", "r2"), 1):
        for runtime in ("r1", "r2"):
            seats = {"m": Seat(3, 0.1)} if runtime == holder else {}
            report = Report(runtime=runtime, epoch=1, seq=seq, seats=seats)
            await plane.bus.publish(report_subject(runtime), wire.encode(report))
        await soon(lambda holder=holder: plane.fleet.choose("m") == holder)  # type: ignore[misc]
        other = {"r1": "r2", "r2": "r1"}[holder]
        await plane.report({"m": ModelState(residency=Residency.STAGED, running=9)}, other)
        assert plane.fleet.choose("m") == holder, "a lease does not count for a runtime that reports"


async def test_a_runtime_that_did_not_answer_gets_nothing_until_it_reports(plane: Plane) -> None:
    for runtime in ("r1", "r2"):
        await plane.report({"m": ModelState(residency=Residency.STAGED, running=int(runtime == "r1"))}, runtime)
    assert plane.fleet.choose("m") == "r1"
    plane.fleet.silent("r1")
    assert plane.fleet.choose("m") == "r2"
    report = Report(runtime="r1", epoch=1, seq=1, seats={"m": Seat(1, 0.1)})
    await plane.bus.publish(report_subject("r1"), wire.encode(report))
    await soon(lambda: plane.fleet.choose("m") == "r1")


async def test_models_that_sleep_everywhere_spread_before_the_next_report_says_so(plane: Plane) -> None:
    for runtime in ("r1", "r2", "r3"):
        states = {model: ModelState(residency=Residency.STAGED) for model in "abc"}
        await plane.report(states, runtime)
    chosen = []
    for model in "abc":
        runtime = plane.fleet.choose(model)
        assert runtime is not None
        plane.fleet.took(runtime, model, 0.1)
        chosen.append(runtime)
    assert chosen == ["r1", "r2", "r3"]
    plane.fleet.gave_back("r2", "b")
    assert plane.fleet.choose("b") == "r2"
    assert plane.fleet.choose("a") == "r1", "the model has a request there"


async def test_a_runtime_where_the_model_failed_is_not_chosen(plane: Plane) -> None:
    await plane.report({"m": ModelState(residency=Residency.FAILED, error="it can't be read")})
    assert plane.fleet.choose("m") is None


async def test_a_model_is_woken_where_it_can_be_and_refused_where_no_runtime_can_load_it(plane: Plane) -> None:
    replies = {"r1": wire.Refusal.MODEL_FAILED, "r2": None, "r3": wire.Refusal.MODEL_FAILED}
    asked = []

    def says(runtime: str) -> Responder:
        async def answer(data: bytes) -> wire.Reply:
            asked.append((runtime, wire.decode(wire.Control, data).op))
            return wire.Reply(refusal=replies[runtime], reason="it ends the device")

        return answer

    for runtime in replies:
        await plane.report({"m": ModelState(residency=Residency.STAGED)}, runtime)
        await plane.bus.respond(wire.control_subject(runtime), says(runtime))
    assert (await plane.fleet.control("m", "wake")).refusal is None
    assert sorted(asked) == [("r1", "wake"), ("r2", "wake"), ("r3", "wake")]
    replies["r2"] = wire.Refusal.MODEL_FAILED
    assert (await plane.fleet.control("m", "wake")).refusal is wire.Refusal.MODEL_FAILED
    replies["r2"] = wire.Refusal.BUSY
    assert (await plane.fleet.control("m", "wake")).refusal is wire.Refusal.BUSY


def test_every_residency_but_failed_has_its_coldness() -> None:
    assert set(COLDNESS) == set(Residency) - {Residency.FAILED}
    assert COLDNESS[Residency.STAGED] is Coldness.HOST and COLDNESS[Residency.COLD] is Coldness.DISK


async def test_prompts_go_to_who_computes_them_and_to_others_when_nobody_does(plane: Plane) -> None:
    roles = {"r1": Role.DECODE, "r2": Role.PREFILL}
    for runtime, role in roles.items():
        busy = ModelState(residency=Residency.RESIDENT, running=40 if role is Role.PREFILL else 0)
        await plane.report({"m": busy}, runtime, role=role)
    assert plane.fleet.choose("m") == "r2"
    assert plane.fleet.choose("m", avoid=frozenset({"r2"})) == "r1"


async def test_who_only_asks_for_the_lead_is_not_taken_for_the_leader(plane: Plane) -> None:
    lead = await plane.bus.take_lead("scheduler", "s")
    assert lead and plane.fleet.leader is None  # the leader has said nothing yet
    leader = wire.Leader(holder="s", term=lead.term, wanted=3)
    last = await plane.bus.keep_lead("scheduler", leader, lead.last)
    await soon(lambda: plane.fleet.leader == leader)
    assert last and await plane.bus.take_lead("scheduler", "other") is None
    await asyncio.sleep(0.2)  # the refused bid is heard
    assert plane.fleet.leader == leader
    late = wire.Leader(holder="before", term=lead.term - 1)
    assert await plane.bus.keep_lead("scheduler", late, last - 1) is None
    await asyncio.sleep(0.2)
    assert plane.fleet.leader == leader
