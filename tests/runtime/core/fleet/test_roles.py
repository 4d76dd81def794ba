"""Roles of devices: given while prompts make tokens late, taken back when roles no longer help, and never in haste."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.core.device.request import ModelKey
from runtime.core.fleet.roles import RolePolicy, RoleRule, RoleView
from store.contract.wire import Role

RULE = RoleRule()
GIB = 1 << 30
SMALL = {ModelKey("a"): 8 * GIB, ModelKey("b"): 8 * GIB}


@dataclass(frozen=True)
class Pressure:
    """Load of every device within a second."""

    prompts: float = 0.2  # share of a device's time
    late: float = 0.0  # share of the tokens
    busy: float = 0.3
    weights: dict[ModelKey, int] = field(default_factory=lambda: SMALL)


STARVED, CALM = Pressure(late=0.1), Pressure()


class PlayedFleet:
    """A fleet that reports each second and obeys the policy at once."""

    def __init__(self, devices: int, rule: RoleRule = RULE) -> None:
        self.policy, self.now = RolePolicy(rule), 0.0
        self.views = {number: RoleView(number, 0.0, Role.BOTH, 80 * GIB, given=True) for number in range(devices)}
        self.changes: list[tuple[float, dict[int, Role]]] = []

    def second(self, pressure: Pressure) -> dict[int, Role]:
        self.now += 1.0
        for number, view in self.views.items():
            self.views[number] = replace(
                view,
                at=self.now,
                prompt_s=view.prompt_s + pressure.prompts,
                tokens=view.tokens + 100,
                late=view.late + round(100 * pressure.late),
                busy=pressure.busy,
                weights=pressure.weights,
            )
        new = self.policy.check(list(self.views.values()), self.now)
        for number, role in new.items():
            self.views[number] = replace(self.views[number], role=role, given=True)
        if new:
            self.changes.append((self.now, new))
        return new

    def seconds(self, count: int, pressure: Pressure) -> None:
        for _ in range(count):
            self.second(pressure)

    @property
    def roles(self) -> list[Role]:
        return [view.role for view in self.views.values()]


def until_given(devices: int = 4) -> PlayedFleet:
    fleet = PlayedFleet(devices)
    while not fleet.changes:
        fleet.second(STARVED)
        assert fleet.now < 60
    return fleet


def test_prompts_that_make_tokens_late_get_the_least_busy_device() -> None:
    fleet = until_given()
    assert fleet.roles == [Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE]
    assert fleet.now >= RULE.checks


def test_roles_stay_while_tokens_are_on_time_and_go_when_there_are_few_prompts() -> None:
    fleet = until_given()
    fleet.seconds(300, CALM)
    assert len(fleet.changes) == 1
    fleet.seconds(60, Pressure(prompts=0.01))
    assert fleet.roles == [Role.BOTH] * 4 and len(fleet.changes) == 2


def test_a_trial_that_does_not_help_ends_and_the_next_trials_wait_longer_each_time() -> None:
    fleet = PlayedFleet(4)
    fleet.seconds(1500, STARVED)
    given_at = [at for at, new in fleet.changes if Role.PREFILL in new.values()]
    waits = [later - sooner for sooner, later in zip(given_at, given_at[1:], strict=False)]
    assert len(waits) >= 3
    assert all(later > 1.5 * sooner for sooner, later in zip(waits, waits[1:], strict=False))


@pytest.mark.parametrize(
    "pressure",
    [
        CALM,
        Pressure(prompts=0.05, late=0.3),  # tokens are late for another reason
        Pressure(late=0.3, weights={ModelKey(f"m{number}"): 16 * GIB for number in range(12)}),  # models take turns
        Pressure(late=0.3, busy=0.9),  # decoding needs every device
    ],
    ids=["on time", "few prompts", "many models", "busy"],
)
def test_where_roles_would_not_pay_devices_keep_both(pressure: Pressure) -> None:
    fleet = PlayedFleet(4)
    fleet.seconds(200, pressure)
    assert fleet.changes == []


def test_a_single_device_keeps_both_roles() -> None:
    fleet = PlayedFleet(1)
    fleet.seconds(100, STARVED)
    assert fleet.changes == []


def test_more_prompts_get_more_devices_while_the_others_can_bear_the_decoding() -> None:
    fleet = until_given(8)
    before = fleet.roles.count(Role.PREFILL)
    fleet.seconds(40, Pressure(prompts=0.4, late=0.1))
    assert fleet.roles.count(Role.PREFILL) > before
    assert fleet.roles.count(Role.DECODE) >= 8 * 0.3 / RULE.decodes


def test_without_the_devices_of_a_role_the_others_take_both() -> None:
    for gone in (Role.PREFILL, Role.DECODE):
        fleet = until_given()
        fleet.views = {number: view for number, view in fleet.views.items() if view.role is not gone}
        fleet.seconds(4, CALM)
        assert set(fleet.roles) == {Role.BOTH}


def test_a_device_that_joins_decodes() -> None:
    fleet = until_given()
    fleet.views[9] = RoleView(9, fleet.now, Role.BOTH, 80 * GIB)
    fleet.seconds(4, CALM)
    assert fleet.views[9].role is Role.DECODE


def test_a_role_of_an_operator_stands_and_the_policy_takes_its_own_roles_back() -> None:
    fleet = until_given()
    fleet.views[1] = replace(fleet.views[1], role=Role.PREFILL, given=False)
    fleet.seconds(100, STARVED)
    assert fleet.roles == [Role.BOTH, Role.PREFILL, Role.BOTH, Role.BOTH]


def test_the_next_leader_goes_on_with_the_roles_that_the_last_leader_gave() -> None:
    fleet = until_given()
    fleet.policy, before = RolePolicy(RULE), fleet.roles
    fleet.seconds(100, CALM)
    assert fleet.roles == before
    fleet.seconds(60, Pressure(prompts=0.01))
    assert set(fleet.roles) == {Role.BOTH}


def test_counters_of_a_process_started_again_are_no_load() -> None:
    fleet = PlayedFleet(2)
    fleet.seconds(30, Pressure(prompts=0.9, late=0.0))
    for number, view in fleet.views.items():
        fleet.views[number] = replace(view, prompt_s=0.0, tokens=0, late=0)
    fleet.seconds(3, CALM)
    needed = fleet.policy._needed(list(fleet.views.values()))
    assert needed.prompts == pytest.approx(0.4) and needed.late == 0.0


def test_prompts_of_a_device_count_no_more_than_a_device_can_compute() -> None:
    """Every request is on a single device, and the costs of prompts are guessed too high."""
    fleet = PlayedFleet(2)
    for _ in range(30):
        fleet.second(Pressure(prompts=0.0, late=0.1))
        fleet.views[0] = replace(fleet.views[0], prompt_s=fleet.views[0].prompt_s + 2.6)
    assert sorted(fleet.roles) == [Role.DECODE, Role.PREFILL]


PRESSURES = st.builds(
    Pressure,
    prompts=st.sampled_from([0.0, 0.05, 0.2, 0.5]),
    late=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
    busy=st.sampled_from([0.0, 0.3, 0.9]),
    weights=st.sampled_from([SMALL, {ModelKey("large"): 79 * GIB}]),
)
EVENTS = st.lists(st.tuples(st.integers(1, 60), PRESSURES, st.sampled_from(["", "", "dies", "joins"])), max_size=12)


@given(st.integers(1, 5), EVENTS)
def test_under_any_load_some_device_decodes_some_computes_prompts_and_no_device_changes_often(
    devices: int, events: list[tuple[int, Pressure, str]]
) -> None:
    fleet, changed = PlayedFleet(devices), dict[int, float]()
    for seconds, pressure, event in events:
        hasty = _happen(fleet, event)
        for _ in range(seconds):
            new = fleet.second(pressure)
            roles = fleet.roles
            apart = Role.PREFILL in roles and Role.DECODE in roles and Role.BOTH not in roles
            settling = fleet.changes and fleet.now < fleet.changes[-1][0] + RULE.settle_s
            assert apart or settling or set(roles) <= {Role.BOTH}
            for number in () if _joins(new) else new:
                assert hasty or fleet.now - changed.get(number, -1e9) >= RULE.hold_s
                changed[number] = fleet.now
            hasty = bool(hasty and settling)


def _happen(fleet: PlayedFleet, event: str) -> bool:
    """A device dies or joins. Returns whether the devices of a role are gone: then other devices change at once."""
    before = set(fleet.roles)
    if event == "dies" and len(fleet.views) > 1:
        del fleet.views[next(iter(fleet.views))]
    elif event == "joins":
        number = max(fleet.views) + 1
        fleet.views[number] = RoleView(number, fleet.now, Role.BOTH, 80 * GIB)
    return not before <= set(fleet.roles)


def _joins(new: dict[int, Role]) -> bool:
    """Return whether the change only gives joined devices their first role."""
    return set(new.values()) == {Role.DECODE}
