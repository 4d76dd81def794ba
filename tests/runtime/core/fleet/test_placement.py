"""From an old to a new placement: no device ever lacks memory, and a device takes part in one move at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.core.device.request import ModelKey
from runtime.core.fleet.kvpr import Candidate, DeviceRoom
from runtime.core.fleet.placement import ModelMove, activate, changes, rounds

GB = 10**9
DEVICES = 4


def candidate(name: str, gb: int, *devices: int, parts: int = 1) -> Candidate:
    return Candidate(ModelKey(name), 1.0, gb * GB, 0, 1.0, devices, parts=parts)


def move(name: str, source: int, target: int, gb: int = 10) -> ModelMove:
    return ModelMove(ModelKey(name), (source,), (target,), gb * GB)


def test_what_stays_is_no_move_and_only_the_parts_that_change_place_are() -> None:
    models = [candidate("a", 10, 0), candidate("b", 10), candidate("c", 20, 0, 1, parts=2), candidate("d", 5, 3)]
    names = [model.model for model in models]
    placed = dict(zip(names, [(0,), (1,), (1, 2), ()], strict=True))
    assert changes(models, placed) == [
        ModelMove(names[1], (), (1,), 10 * GB),
        ModelMove(names[2], (0,), (2,), 10 * GB),
        ModelMove(names[3], (3,), (), 5 * GB),
    ]


def test_with_room_for_all_those_with_devices_of_their_own_go_at_once() -> None:
    together, then = move("a", 0, 1), move("c", 2, 3)
    assert rounds([together, move("b", 1, 2), then], [50 * GB] * 4) == [[together, then], [move("b", 1, 2)]]


def test_who_waits_for_room_goes_after_who_makes_it() -> None:
    first, second = move("b", 1, 2), move("a", 0, 1)
    assert rounds([second, first], [0, 0, 10 * GB, 0]) == [[first], [second]]


def test_two_that_change_places_without_room_pass_through_the_host() -> None:
    small, big = move("a", 0, 1, 10), move("b", 1, 0, 12)
    assert rounds([small, big], [2 * GB, 0, 0, 0]) == [
        [small._replace(targets=())],
        [big],
        [small._replace(sources=())],
    ]


PLACES = st.lists(st.integers(0, DEVICES - 1), unique=True, max_size=2).map(tuple)
PLACEMENTS = st.lists(st.tuples(st.integers(1, 30), PLACES, PLACES), max_size=10)


@given(PLACEMENTS, st.integers(0, 20))
def test_no_device_ever_lacks_memory_and_all_arrive(
    rows: list[tuple[int, tuple[int, ...], tuple[int, ...]]], spare: int
) -> None:
    """Each device has the memory that the larger of the two placements needs, and a little more."""
    moves = [
        ModelMove(ModelKey(f"m{n}"), tuple(set(old) - set(new)), tuple(set(new) - set(old)), gb * GB)
        for n, (gb, old, new) in enumerate(rows)
    ]
    before, after = [0] * DEVICES, [0] * DEVICES
    for each in moves:
        for device in each.sources:
            before[device] += each.part_bytes
        for device in each.targets:
            after[device] += each.part_bytes
    size = [max(pair) + spare * GB for pair in zip(before, after, strict=True)]
    held = {each.model: set(each.sources) for each in moves}
    free = [whole - used for whole, used in zip(size, before, strict=True)]
    for together in rounds([each for each in moves if each.sources or each.targets], free):
        named = [device for each in together for device in (*each.sources, *each.targets)]
        assert len(named) == len(set(named)), "a device has part in two moves at once"
        for each in together:
            for device in each.targets:
                free[device] -= each.part_bytes
            held[each.model] |= set(each.targets)
        assert min(free) >= 0
        for each in together:
            for device in each.sources:
                free[device] += each.part_bytes
            held[each.model] -= set(each.sources)
    assert held == {each.model: set(each.targets) for each in moves}


def test_a_model_comes_in_where_the_pressure_would_be_least() -> None:
    rooms = [DeviceRoom(70 * GB, demand=5.0), DeviceRoom(70 * GB, demand=1.0), DeviceRoom(5 * GB)]
    assert activate(candidate("a", 10), rooms, [1.0] * 3, 10.0) == (1,)
    assert activate(candidate("a", 10, parts=2), rooms, [1.0] * 3, 10.0) == (0, 1)
    assert activate(candidate("a", 10, parts=2), rooms, [1.0] * 3, 10.0, nodes=[0, 1, 0]) == ()
    assert activate(candidate("a", 90), rooms, [1.0] * 3, 10.0) == ()


def test_a_host_that_has_it_in_its_cache_may_be_under_more_pressure() -> None:
    rooms = [DeviceRoom(70 * GB, demand=1.2), DeviceRoom(70 * GB, demand=1.0)]
    assert activate(candidate("a", 10), rooms, [1.0, 20.0], 10.0) == (0,)
    assert activate(candidate("a", 10), rooms, [1.0, 2.0], 10.0) == (1,)
