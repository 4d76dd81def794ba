"""Which runtime a request goes to, from what the runtimes say."""

from __future__ import annotations

import asyncio

from gateway.fleet import COLDNESS, Coldness
from store import wire
from store.bus import Responder
from store.wire import ModelState, Residency, Role
from tests.conftest import soon
from tests.gateway.plane import Plane


async def test_a_request_goes_where_the_model_is_nearest_to_the_device(plane: Plane) -> None:
    nearest_last = [Residency.COLD, Residency.STAGED, Residency.RESIDENT]
    for number, residency in enumerate(nearest_last):
        runtime = f"r{number}"
        await plane.report({"m": ModelState(residency=residency, running=number)}, runtime)
        assert plane.fleet.choose("m") == runtime
    assert plane.fleet.choose("m", avoid=frozenset({"r2"})) == "r1"


async def test_of_runtimes_equally_near_the_one_with_the_fewest_requests_is_taken(plane: Plane) -> None:
    await plane.report({"m": ModelState(residency=Residency.STAGED, running=1, waiting=1)}, "r1")
    await plane.report({"m": ModelState(residency=Residency.LEAVING, running=1)}, "r2")
    await plane.report({"m": ModelState(residency=Residency.LOADING, waiting=3)}, "r3")
    assert plane.fleet.choose("m") == "r2"


async def test_many_requests_of_one_model_are_worth_its_way_to_another_runtime(plane: Plane) -> None:
    for busy, chosen in ((15, "r1"), (17, "r2")):
        await plane.report({"m": ModelState(residency=Residency.RESIDENT, running=busy)}, "r1")
        await plane.report({"m": ModelState(residency=Residency.STAGED)}, "r2")
        assert plane.fleet.choose("m") == chosen


async def test_models_that_sleep_everywhere_spread_before_the_next_lease_says_so(plane: Plane) -> None:
    for runtime in ("r1", "r2", "r3"):
        states = {model: ModelState(residency=Residency.STAGED) for model in "abc"}
        await plane.report(states, runtime)
    chosen = []
    for model in "abc":
        runtime = plane.fleet.choose(model)
        assert runtime is not None
        plane.fleet.took(runtime)
        chosen.append(runtime)
    assert chosen == ["r1", "r2", "r3"]
    plane.fleet.gave_back("r2")
    assert plane.fleet.choose("a") == "r2"


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
    term = await plane.bus.take_lead("scheduler", "s")
    assert term and plane.fleet.leader is None  # it has said nothing yet
    leader = wire.Leader(holder="s", term=term, wanted=3)
    last = await plane.bus.keep_lead("scheduler", leader, term)
    await soon(lambda: plane.fleet.leader == leader)
    assert last and await plane.bus.take_lead("scheduler", "other") is None
    await asyncio.sleep(0.2)  # it is heard, though it was refused
    assert plane.fleet.leader == leader
    late = wire.Leader(holder="before", term=term - 1)
    assert await plane.bus.keep_lead("scheduler", late, last - 1) is None
    await asyncio.sleep(0.2)
    assert plane.fleet.leader == leader
