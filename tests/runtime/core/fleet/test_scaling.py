"""Scaling: few changes keep freeness in its band."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.core.fleet.rebalance import Load
from runtime.core.fleet.scaling import NOTHING, Band, FleetChange, FleetScaling

GB = 1e9
BAND = Band(1, 8)


def fleet(numbers: list[int], used_gb: float, requests: int, busy: float = 0.0) -> list[Load]:
    """Equal loads of the devices `numbers`, which share the work."""
    count = len(numbers)
    each = requests // count
    return [
        Load(number, 0.0, 10 * GB, used_gb * GB / count, requests * 1e6 / count, each, 0, busy / count)
        for number in numbers
    ]


def checked(
    scaling: FleetScaling, loads: list[Load], times: int, joining: int = 0, began: float = 100.0
) -> list[FleetChange]:
    changes = [scaling.check(loads, joining, began + each) for each in range(times)]
    return [change for change in changes if change != NOTHING]


def test_devices_join_when_freeness_stays_low_and_not_before() -> None:
    full = fleet([0, 1], 20.0, 20)
    assert checked(FleetScaling(BAND), full, 2) == []
    assert checked(FleetScaling(BAND), full, 3) == [FleetChange(join=1)]
    one_dip = FleetScaling(BAND)
    checked(one_dip, full, 2)
    checked(one_dip, fleet([0, 1], 18.0, 20), 1)
    assert checked(one_dip, full, 2) == []


def test_as_many_join_as_are_short_but_no_more_than_there_may_be() -> None:
    assert checked(FleetScaling(BAND), fleet([0, 1], 50.0, 20), 3) == [FleetChange(join=4)]
    assert checked(FleetScaling(Band(1, 3)), fleet([0, 1], 50.0, 20), 3) == [FleetChange(join=1)]
    assert checked(FleetScaling(BAND), fleet([0, 1], 2.0, 20, busy=5.0), 3) == [FleetChange(join=4)]


def test_who_is_asked_for_and_not_there_yet_is_not_asked_for_again() -> None:
    assert checked(FleetScaling(BAND), fleet([0, 1], 20.5, 20), 20, joining=1) == []


def test_all_who_wait_count_and_not_only_the_first_of_each_device() -> None:
    loads = [replace(each, waiting=4, queued_bytes=15 * GB) for each in fleet([0, 1], 20.0, 20)]
    assert checked(FleetScaling(BAND), loads, 3) == [FleetChange(join=4)]


def test_to_join_nobody_waits_for_the_last_change() -> None:
    scaling = FleetScaling(BAND)
    assert checked(scaling, fleet([0, 1, 2], 1.0, 3), 6) == [FleetChange(leave=(2,))]
    assert checked(scaling, fleet([0, 1], 20.0, 20), 3, began=106.0) == [FleetChange(join=1)]
    assert checked(scaling, fleet([0, 1], 40.0, 20), 3, joining=1, began=109.0) == [FleetChange(join=2)]


def test_the_one_with_the_fewest_requests_leaves_when_the_others_suffice() -> None:
    loads = [*fleet([0, 1], 2.0, 20), Load(2, 0.0, 10 * GB, 1 * GB, 3e6, 3, 0, 0.0)]
    assert checked(FleetScaling(BAND), loads, 5) == []
    assert checked(FleetScaling(BAND), loads, 6) == [FleetChange(leave=(2,))]
    assert checked(FleetScaling(Band(3, 8)), loads, 20) == []


def test_between_two_changes_there_is_a_pause() -> None:
    idle = FleetScaling(BAND)
    assert len(checked(idle, fleet([0, 1, 2], 1.0, 3), 15)) == 1
    assert len(checked(idle, fleet([0, 1], 1.0, 3), 2, began=115.0)) == 1


def test_a_whole_node_leaves_and_it_is_the_last_node_whatever_its_load() -> None:
    nodes = {0: 0, 1: 0, 2: 1, 3: 1, 4: None}  # device 4 is of no node that may leave
    loads = [replace(load, node=nodes[load.device]) for load in fleet([0, 1, 2, 3, 4], 1.0, 5)]
    idle = [replace(load, running=0 if load.device == 0 else load.running) for load in loads]
    assert checked(FleetScaling(Band(1, 8, node_devices=2)), idle, 6) == [FleetChange(leave=(2, 3))]
    first = [load for load in idle if load.node != 1]
    assert checked(FleetScaling(Band(1, 8, node_devices=2)), first, 6) == [FleetChange(leave=(0, 1))]
    assert checked(FleetScaling(Band(2, 8, node_devices=2)), first, 20) == [], "one device would be left"
    assert checked(FleetScaling(Band(1, 8, node_devices=2)), first[2:], 20) == []


def test_a_node_stays_if_its_last_device_would_be_missed() -> None:
    loads = [replace(load, node=load.device // 2) for load in fleet([0, 1, 2, 3], 20.0, 40)]
    assert checked(FleetScaling(Band(1, 8)), loads, 6) == [FleetChange(leave=(3,))]
    assert checked(FleetScaling(Band(1, 8, node_devices=2)), loads, 20) == []


def test_nodes_join_as_a_whole() -> None:
    loads = [replace(load, node=0) for load in fleet([0, 1], 20.0, 20)]
    assert checked(FleetScaling(BAND), loads, 3) == [FleetChange(join=1)]
    assert checked(FleetScaling(Band(1, 8, node_devices=2)), loads, 3) == [FleetChange(join=2)]
    assert checked(FleetScaling(Band(1, 3, node_devices=2)), loads, 3) == [FleetChange(join=1)], "no more than may be"


def test_no_more_leave_at_the_same_time_than_may() -> None:
    band, loads = replace(BAND, leaving_most=1), fleet([0, 1], 1.0, 3)
    assert FleetScaling(BAND).check(loads, 0, 0.0, leaving=1) == NOTHING
    for leaving, changes in ((0, [FleetChange(leave=(1,))]), (1, [])):
        scaling = FleetScaling(band)
        checks = [scaling.check(loads, 0, float(second), leaving) for second in range(10)]
        assert [change for change in checks if change != NOTHING] == changes


def test_a_fleet_below_its_least_is_filled_at_once() -> None:
    assert checked(FleetScaling(Band(3, 8)), [], 1) == [FleetChange(join=3)]
    assert checked(FleetScaling(Band(3, 8)), [], 5, joining=3) == []


@given(st.floats(0, 100), st.integers(0, 400), st.floats(0, 8), st.integers(1, 8))
def test_under_a_load_that_stays_the_same_the_number_goes_one_way_and_rests(
    used_gb: float, requests: int, busy: float, count: int
) -> None:
    scaling, numbers, steps = FleetScaling(BAND), list(range(count)), []
    for second in range(400):
        change = scaling.check(fleet(numbers, used_gb if requests else 0.0, requests, busy), 0, float(second))
        if change != NOTHING:
            steps.append(change.join - len(change.leave))
            numbers = [number for number in numbers if number not in change.leave]
            numbers += range(max(numbers) + 1, max(numbers) + 1 + change.join)
        assert BAND.least <= len(numbers) <= BAND.most
    assert all(step > 0 for step in steps) or all(step < 0 for step in steps)
