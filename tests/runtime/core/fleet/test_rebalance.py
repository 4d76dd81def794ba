"""Migration: reports of devices, pairs of source and target, and the choice of the request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.core.device.request import ModelKey, RequestId
from runtime.core.fleet.headroom import HEADROOM
from runtime.core.fleet.rebalance import (
    FULL_STEPS,
    HIGH_STEPS,
    LOW_STEPS,
    PART_MOST,
    LackingModel,
    Load,
    RequestMemory,
    freeness,
    helps,
    load_of,
    pairs,
    pick,
    pick_model,
    pick_part,
    pooled,
    total,
    without,
)
from store.contract.priorities import Priority

GB = 1e9
NOBODY: frozenset[int] = frozenset()


def usage(
    name: str, gb: float, waits: bool = False, rank: Priority = Priority.NORMAL, moves: bool = False
) -> RequestMemory:
    return RequestMemory(RequestId(name), ModelKey("m"), rank, gb * GB, 1e6, waits, moves)


def load(device: int, used_gb: float, running: int = 4, gb: float = 10.0, busy: float = 0.0, waiting: int = 0) -> Load:
    return Load(device, 0.0, gb * GB, used_gb * GB, running * 1e6, running, waiting, busy)


def test_of_those_that_wait_only_the_first_uses_what_it_waits_for() -> None:
    told = load_of(0, 0.0, 10 * GB, [usage("a", 3), usage("b", 8, waits=True), usage("c", 5, waits=True)], {})
    assert (told.used_bytes, told.running, told.waiting) == (11 * GB, 1, 2)
    assert told.queued_bytes == 5 * GB
    assert freeness(told) == -1 * GB / 2e6  # the request counts to the batch, too


def test_the_space_around_requests_of_high_priority_is_theirs_together() -> None:
    one = [usage("a", 1, rank=Priority.HIGH), usage("b", 1)]
    two = [usage("a", 1, rank=Priority.HIGH), usage("b", 1, rank=Priority.HIGH)]
    waits = [usage("a", 2, rank=Priority.HIGH, waits=True)]
    loads = [load_of(0, 0.0, 10 * GB, each, {ModelKey("m"): 0.25}) for each in (one, two, one[1:], waits)]
    assert [each.used_bytes / GB for each in loads] == [2 + 10 * HEADROOM, 2 + 10 * HEADROOM, 1, 2]
    assert [each.busy for each in loads] == [0.25 + HEADROOM, 0.25 + HEADROOM, 0.25, 0.25]


def test_freeness_is_the_number_of_steps_until_memory_or_time_is_used_up() -> None:
    assert freeness(load(0, 6.0)) == 1000.0
    assert freeness(load(0, 6.0, busy=0.5)) == FULL_STEPS / 2
    assert freeness(load(0, 6.0, busy=1.5)) < 0
    assert freeness(load(0, 0.0, running=0)) == float("inf")


def test_one_idle_device_does_not_make_a_fleet_infinitely_free() -> None:
    busy, idle = load(0, 10.0), load(1, 0.0, running=0)
    assert pooled(total([busy, idle])) == pooled(total([busy]), idle=1) == 10 * GB / 4e6
    assert without(total([busy, idle]), [idle]) == 0.0
    assert without(total([busy]), [busy]) == -float("inf") and without(total([idle]), [idle]) == float("inf")


@given(st.lists(st.tuples(st.floats(0, 15), st.integers(1, 30), st.floats(0, 1.5)), min_size=2, max_size=8))
def test_a_fleet_without_a_device_is_less_free(rows: list[tuple[float, int, float]]) -> None:
    loads = [load(number, used, running, busy=busy) for number, (used, running, busy) in enumerate(rows)]
    assert all(without(total(loads), [each]) <= pooled(total(loads)) for each in loads)


def test_the_fullest_gives_to_the_freest() -> None:
    loads = [load(0, 10.0, waiting=1), load(1, 2.0), load(2, 11.0, waiting=1), load(3, 1.0), load(4, 9.9)]
    assert pairs(loads, NOBODY) == [(2, 3), (0, 1)]


def test_a_device_that_drains_gives_whatever_it_says_and_takes_nothing() -> None:
    loads = [load(0, 1.0), load(1, 2.0), load(2, 10.0)]
    assert pairs(loads, frozenset({0})) == [(0, 1)]
    assert pairs(loads[:1] + loads[2:], frozenset({0})) == []


def test_the_only_request_of_a_device_does_not_change_places() -> None:
    assert not helps(load(0, 10.0, running=1), load(1, 0.0, running=0), drains=False)
    assert helps(load(0, 10.0, running=1), load(1, 0.0, running=0, gb=20), drains=True)


def test_what_can_go_counts_and_not_what_a_mean_request_would_be() -> None:
    """A long prompt waits for room, and a short prompt waits only behind the long prompt."""
    usages = [usage("a", 4), usage("b", 4), usage("c", 5, waits=True), usage("d", 0.1, waits=True)]
    source = load_of(0, 0.0, 10 * GB, usages, {})
    target = load(1, 7.0)
    assert not helps(source, target, drains=False)
    assert pairs([source, target], NOBODY) == [(0, 1)]
    on_its_way = [replace(each, moves=True) for each in usages[2:]]
    assert load_of(0, 0.0, 10 * GB, [*usages[:2], *on_its_way], {}).least_bytes == 4 * GB
    assert pick(usages, 3 * GB) == usages[3]


def test_a_target_that_cannot_take_what_the_fullest_has_is_the_next_ones() -> None:
    fullest, next_one, target = load(0, 19.0, running=2), load(1, 10.0, waiting=1), load(2, 6.0)
    assert pairs([fullest, target], NOBODY) == []
    assert pairs([fullest, next_one, target], NOBODY) == [(1, 2)]


LOADS = st.lists(
    st.builds(
        lambda used, running, busy, waiting: (used, running, busy, waiting),
        st.floats(0, 15),
        st.integers(0, 30),
        st.sampled_from([0.0, 0.3, 0.99, 1.4]),
        st.integers(0, 2),
    ),
    max_size=12,
).map(
    lambda rows: [
        load(number, used if running or waiting else 0.0, running or waiting, busy=busy, waiting=waiting)
        for number, (used, running, busy, waiting) in enumerate(rows)
    ]
)


@given(LOADS, st.sets(st.integers(0, 11)))
def test_pairs_are_of_different_devices_and_from_full_to_free(loads: list[Load], leave: set[int]) -> None:
    found = pairs(loads, frozenset(leave))
    named = [number for pair in found for number in pair]
    assert len(named) == len(set(named))
    for source, target in found:
        assert target not in leave and loads[source].requests
        assert freeness(loads[target]) > HIGH_STEPS
        assert source in leave or freeness(loads[source]) < LOW_STEPS


@given(LOADS)
def test_moved_as_paired_again_and_again_it_comes_to_rest(loads: list[Load]) -> None:
    """With constant loads, requests do not move in circles."""
    for _ in range(400):
        found = pairs(loads, NOBODY)
        if not found:
            return
        for source, target in found:
            loads[source], loads[target] = moved(loads[source], loads[target])
    raise AssertionError(f"still moving: {[freeness(each) for each in loads]}")


@given(st.lists(st.lists(st.floats(0.01, 6), max_size=8), min_size=2, max_size=5))
def test_requests_moved_one_by_one_come_to_rest(devices: list[list[float]]) -> None:
    """Requests of different sizes come to rest, too."""
    names = iter(range(100))
    there = [[usage(f"{next(names)}", gb) for gb in sizes] for sizes in devices]
    for _ in range(400):
        loads = [load_of(number, 0.0, 10 * GB, usages, {}) for number, usages in enumerate(there)]
        goes = []
        for source, target in pairs(loads, NOBODY):
            chosen = pick(there[source], loads[target].kv_bytes - loads[target].used_bytes)
            if chosen and helps(loads[source], loads[target], drains=False, request_bytes=chosen.kv_bytes):
                goes.append((source, target, chosen))
        if not goes:
            return
        for source, target, chosen in goes:
            there[source].remove(chosen)
            there[target].append(chosen)
    raise AssertionError(f"still moving: {[[each.kv_bytes for each in usages] for usages in there]}")


def moved(source: Load, target: Load) -> tuple[Load, Load]:
    """Loads after the move of a mean request, as planned."""
    count = source.running + (source.waiting > 0)
    used, step, busy = source.used_bytes / count, source.step_bytes / count, source.busy / count
    runs = source.running > 0
    given_away = replace(
        source,
        used_bytes=source.used_bytes - used,
        step_bytes=source.step_bytes - step,
        busy=source.busy - busy,
        running=source.running - runs,
        waiting=source.waiting - (not runs),
    )
    taken = replace(
        target,
        used_bytes=target.used_bytes + used,
        step_bytes=target.step_bytes + step,
        busy=target.busy + busy,
        running=target.running + 1,
    )
    return given_away, taken


def test_who_waits_goes_first_then_the_lowest_priority_then_the_shortest() -> None:
    batch, short, long = usage("c", 3, rank=Priority.BATCH), usage("b", 1), usage("a", 2)
    waiting = usage("w", 4, waits=True)
    order = [waiting, batch, short, long]
    for gone in range(len(order)):
        assert pick(list(reversed(order[gone:])), 10 * GB) == order[gone]
    assert pick([waiting, long, short], 2.5 * GB) == short  # no room for the waiting request
    assert pick([usage("a", 1, moves=True), usage("b", 3)], 2 * GB) is None


def test_the_largest_model_goes_that_makes_two_devices_more_alike() -> None:
    shares = {ModelKey("a"): 0.5, ModelKey("b"): 0.3, ModelKey("c"): 0.1}
    source = load_of(0, 0.0, 10 * GB, [], shares)
    assert source.busy == sum(shares.values())
    assert pick_model(source, load(1, 0.0, busy=0.2), drains=False) == "b"
    assert pick_model(source, load(1, 0.0, busy=0.85), drains=False) is None
    assert pick_model(source, load(1, 0.0, busy=0.8), drains=True) == "c"
    assert pick_model(source, load(1, 0.0, busy=0.95), drains=True) is None


def lacking(number: int, used: float, requests: int = 20, **models: float) -> Load:
    """Load of a device with 10 GB for keys and values, whose `models` need so many GB; weights have 4 GB."""
    lacks = {ModelKey(name): LackingModel(requests, need * GB, 4 * GB) for name, need in models.items()}
    return replace(load(number, used), lacking=lacks)


def test_of_a_model_that_lacks_memory_by_itself_a_quarter_of_the_requests_goes_eight_at_most() -> None:
    free = lacking(1, used=1)
    assert pick_part(lacking(0, 12, a=12), free) == ("a", 5)
    assert pick_part(lacking(0, 12, requests=3, a=12), free) == ("a", 1)
    assert pick_part(lacking(0, 12, requests=100, a=12), free) == ("a", PART_MOST)
    assert pick_part(lacking(0, 30, a=12, b=18), free) == ("b", 5), "the model that lacks most"


def test_no_part_of_a_model_goes_that_finds_no_room_or_leaves_nothing() -> None:
    assert pick_part(lacking(0, 12), lacking(1, used=1)) is None, "models that lack memory together take turns"
    assert pick_part(lacking(0, 12, requests=1, a=12), lacking(1, used=1)) is None
    assert pick_part(lacking(0, 12, a=12), lacking(1, used=4)) == ("a", 3), "2 GB beside the weights: three of 0.6 GB"
    there = replace(lacking(1, used=4), shares={ModelKey("a"): 0.1})
    assert pick_part(lacking(0, 12, a=12), there) == ("a", 5)
    assert pick_part(lacking(0, 12, a=12), lacking(1, used=6.5)) is None
