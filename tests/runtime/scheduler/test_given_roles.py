"""Roles that the scheduler gives: orders that follow from leases, and on a real bus an order with the term."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from runtime.core.fleet.cluster import Rules
from runtime.core.fleet.roles import RoleRule
from runtime.scheduler import controller
from runtime.scheduler.controller import LeasedFleet, Scheduler
from store.bus import Bus
from store.contract import wire
from store.contract.wire import Attained, Role
from store.tasks import ended
from tests.conftest import NatsServer, soon
from tests.runtime.scheduler.test_scheduler import lease
from tests.runtime.world import spec

RULE = RoleRule(window_s=10.0, checks=2, hold_s=5.0)


def starved(runtime: str, seconds: float) -> wire.Lease:
    """A lease of a runtime that for `seconds` computed prompts half of the time, with a tenth of the tokens late."""
    tokens = round(50 * seconds)
    attained = {"acme": Attained(requests=tokens, tokens=tokens, on_time=round(0.9 * tokens))}
    return replace(lease(runtime, a=0.1), prompt_s=0.5 * seconds, attainment=attained)


def fleet_of(rules: Rules) -> LeasedFleet:
    fleet = LeasedFleet(rules)
    for name in "ab":
        small = wire.replace(spec(name), weight_bytes=10 << 20)
        fleet.spec_changed(name, wire.encode(small))
    return fleet


def orders(fleet: LeasedFleet, now: float, leases: list[wire.Lease]) -> dict[str, Role]:
    for each in leases:
        fleet.heard(each, now)
    return {runtime: order.role for runtime, order in fleet.tick(now) if isinstance(order, wire.SetRole)}


def until_given(fleet: LeasedFleet) -> tuple[float, dict[str, Role]]:
    for now in range(1, 20):
        if new := orders(fleet, float(now), [starved(name, float(now)) for name in ("r1", "r2", "r3")]):
            return float(now), new
    raise AssertionError("no role was given")


def test_runtimes_get_roles_by_their_leases() -> None:
    _, new = until_given(fleet_of(Rules(migrate=True, roles=RULE)))
    assert new == {"r1": Role.PREFILL, "r2": Role.PREFILL, "r3": Role.DECODE}


def test_without_the_setting_no_role_is_given() -> None:
    with pytest.raises(AssertionError):
        until_given(fleet_of(Rules(migrate=True)))


def test_no_model_moves_to_a_runtime_that_computes_prompts() -> None:
    fleet = fleet_of(Rules(migrate=True, roles=RULE))
    full = lease("r1", a=0.7, b=0.4)
    for each in (full, replace(lease("r2"), role=Role.PREFILL, role_given=True)):
        fleet.heard(each, 1.0)
    assert not [order for _, order in fleet.tick(1.0) if isinstance(order, wire.Migrate)]
    fleet.heard(lease("r2"), 2.0)
    assert [order.target for _, order in fleet.tick(2.0) if isinstance(order, wire.Migrate)] == ["r2"]


def test_a_role_that_a_runtime_did_not_take_is_ordered_again() -> None:
    fleet = fleet_of(Rules(migrate=True, roles=RULE))
    now, new = until_given(fleet)
    taken = [replace(starved(name, now), role=new[name], role_given=True) for name in ("r1", "r2")]
    later = now + RULE.settle_s
    assert orders(fleet, later, [*taken, starved("r3", now)]) == {"r3": Role.DECODE}


def test_of_roles_that_a_runtime_leaves_behind_nothing_stays() -> None:
    fleet = fleet_of(Rules(migrate=True, roles=RULE))
    decodes = [replace(lease(name), role=Role.DECODE, role_given=True) for name in ("r1", "r2")]
    assert orders(fleet, 1.0, decodes) == {"r1": Role.BOTH, "r2": Role.BOTH}


async def test_an_order_has_the_term_of_the_leader(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "TICK_S", 0.05)
    heard: list[wire.SetRole] = []

    async def role(data: bytes) -> wire.Reply:
        heard.append(wire.decode(wire.SetRole, data))
        return wire.Reply()

    async with Bus.connect(nats_server.url, "test") as bus:
        await bus.respond(wire.role_subject("r1"), role)
        stop, scheduler = asyncio.Event(), Scheduler(bus, Rules(roles=RULE), "s1")
        running = asyncio.create_task(scheduler.run(stop))
        left = replace(lease("r1"), role=Role.DECODE, role_given=True)  # the runtime for prompts is gone
        await bus.put(wire.LEASES, "r1", left, 1.0)
        await soon(lambda: bool(heard))
        assert heard[0].role is Role.BOTH and heard[0].term == scheduler._term > 0
        stop.set()
        await ended(running)
