"""KVPR placement: on the device with the least pressure, never without room, and without moves that do not pay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.core.device.request import ModelKey
from runtime.core.fleet.kvpr import MARGIN, MOVED_AGAIN_S, Candidate, DeviceRoom, demand, fits, place, score

GB = 10**9


def candidate(name: str, demand: float, gb: float = 10, device: int | None = None, **fields: float) -> Candidate:
    where = () if device is None else (device,)
    return replace(Candidate(ModelKey(name), demand, int(gb * GB), GB, move_s=1.0, devices=where), **fields)


def alone(placed: dict[ModelKey, tuple[int, ...]]) -> dict[str, int | None]:
    """The device of each unsplit model, or None."""
    return {model: devices[0] if devices else None for model, devices in placed.items()}


def test_demand_is_more_urgent_with_a_shorter_objective() -> None:
    assert demand(50.0, 1000.0, 0.1) == 500_000.0 == 2 * demand(50.0, 1000.0, 0.2)


def test_the_pressure_is_the_one_with_the_model_on_it() -> None:
    room = DeviceRoom(70 * GB, GB, demand=3.0)
    assert score(room, candidate("a", 2.0, gb=20)) == 5.0 / (50 * GB)


def test_without_room_the_pressure_is_infinite_and_never_negative() -> None:
    assert score(DeviceRoom(10 * GB), candidate("a", 1.0, gb=20)) == float("inf")
    assert score(DeviceRoom(10 * GB), replace(candidate("a", 1.0), kv_bytes_least=0)) == float("inf")


def test_a_longest_request_of_each_model_and_a_margin_must_fit() -> None:
    assert fits(DeviceRoom(32 * GB, 19 * GB), candidate("a", 1.0))
    assert not fits(DeviceRoom(31 * GB, 19 * GB), candidate("a", 1.0))


def test_the_most_demanding_are_spread_and_the_others_fill_up() -> None:
    models = [candidate("a", 4.0), candidate("b", 3.0), candidate("c", 2.0), candidate("d", 1.0)]
    assert alone(place(models, [80 * GB, 80 * GB], 0.0)) == {"a": 0, "b": 1, "c": 1, "d": 0}


def test_models_that_nobody_asks_for_spread_too() -> None:
    placed = place([candidate(name, 0.0) for name in "abcd"], [80 * GB, 80 * GB], 0.0)
    assert sorted(placed.values()) == [(0,), (0,), (1,), (1,)]


def test_who_finds_no_room_is_not_placed() -> None:
    assert alone(place([candidate("a", 2.0, gb=60), candidate("b", 1.0, gb=60)], [80 * GB], 0.0)) == {"a": 0, "b": None}
    assert alone(place([candidate("a", 1.0)], [], 0.0)) == {"a": None}


def test_a_model_moves_when_that_relieves_enough_and_not_otherwise() -> None:
    big = candidate("a", 4.0, device=0)
    assert alone(place([big, candidate("b", 3.0, device=0)], [80 * GB] * 2, 0.0))["b"] == 1
    assert alone(place([big, candidate("b", 3.0, device=0)], [80 * GB, 27 * GB], 0.0))["b"] == 0  # 7/60 against 3/17


def test_a_gain_below_either_threshold_is_not_worth_a_move() -> None:
    heavy, light = candidate("a", 4.0, device=0), candidate("b", 3.0, device=0)
    here, there = 7.0 / (60 * GB), 3.0 / (70 * GB)
    assert alone(place([heavy, light], [80 * GB] * 2, 0.0, gain_least=(here - there) * 0.99))["b"] == 1
    assert alone(place([heavy, light], [80 * GB] * 2, 0.0, gain_least=(here - there) * 1.01))["b"] == 0
    alike = [candidate("a", 0.1, gb=1, device=1), candidate("b", 3.0, device=0)]
    assert alone(place(alike, [80 * GB, 90 * GB], 0.0))["b"] == 0  # 1/70 against 1/80: a gain of an eighth


def test_a_move_has_to_pay_for_its_load_and_is_not_followed_by_another_at_once() -> None:
    heavy = candidate("a", 4.0, device=0)
    assert alone(place([heavy, candidate("b", 3.0, device=0, move_s=50.0)], [80 * GB] * 2, 0.0))["b"] == 0
    moved = candidate("b", 3.0, device=0, moved_at=100.0)
    assert alone(place([heavy, moved], [80 * GB] * 2, 100.0 + MOVED_AGAIN_S))["b"] == 0
    assert alone(place([heavy, moved], [80 * GB] * 2, 101.0 + MOVED_AGAIN_S))["b"] == 1


def test_a_model_that_no_longer_fits_where_it_is_moves_however_little_it_gains() -> None:
    models = [candidate("a", 4.0, gb=60, device=0), candidate("b", 3.0, device=0, moved_at=0.0, move_s=999.0)]
    assert alone(place(models, [70 * GB, 30 * GB], 1.0))["b"] == 1


MODELS = st.lists(
    st.tuples(st.floats(0, 1e12), st.integers(1, 90), st.integers(0, 9), st.sampled_from([(), (0,), (1,), (2,)])),
    max_size=12,
).map(
    lambda rows: [
        Candidate(ModelKey(f"{n:02}"), demand, gb * GB, least * GB, 1.0, devices)
        for n, (demand, gb, least, devices) in enumerate(rows)
    ]
)


@given(MODELS, st.lists(st.integers(10, 140).map(lambda gb: gb * GB), min_size=3, max_size=3), st.floats(0, 1.0))
def test_each_placement_fits_and_who_is_left_out_fits_nowhere(
    models: list[Candidate], devices: list[int], tau: float
) -> None:
    placed = place(models, devices, 0.0, tau)
    assert set(placed) == {model.model for model in models}
    rooms = [DeviceRoom(size) for size in devices]
    for model in models:
        for device in placed[model.model]:
            rooms[device].add(model)
    for room in rooms:
        assert room.kv_bytes >= MARGIN * room.kv_bytes_least and room.demand >= 0
    left_out = [model for model in models if not placed[model.model]]
    assert not any(fits(room, model) for room in rooms for model in left_out)


@given(MODELS, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(models: list[Candidate], random) -> None:  # type: ignore[no-untyped-def]
    shuffled = random.sample(models, len(models))
    assert place(models, [80 * GB] * 3, 0.0) == place(shuffled, [80 * GB] * 3, 0.0)


@given(MODELS)
def test_placed_as_it_says_and_asked_again_it_moves_nobody(models: list[Candidate]) -> None:
    placed = place(models, [80 * GB] * 3, 0.0)
    again = [replace(model, devices=placed[model.model]) for model in models]
    assert place(again, [80 * GB] * 3, 0.0) == placed


def test_parts_go_to_devices_of_their_own_on_one_node_or_nowhere() -> None:
    wide = replace(candidate("a", 4.0, gb=80), parts=2)
    assert place([wide], [60 * GB] * 4, 0.0, nodes=[0, 1, 1, 0]) == {"a": (0, 3)}
    assert place([wide], [60 * GB] * 2, 0.0, nodes=[0, 1]) == {"a": ()}
    assert place([wide], [160 * GB], 0.0) == {"a": ()}
    busy = replace(candidate("b", 9.0, gb=10), model=ModelKey("b"))
    assert place([wide, busy], [60 * GB, 60 * GB, 60 * GB], 0.0) == {"a": (1, 2), "b": (0,)}


@given(
    MODELS, st.lists(st.integers(1, 4), min_size=12, max_size=12), st.lists(st.integers(0, 1), min_size=5, max_size=5)
)
def test_of_a_model_in_parts_all_are_placed_or_none(
    models: list[Candidate], parts: list[int], nodes: list[int]
) -> None:
    wide = [replace(model, parts=count, devices=()) for model, count in zip(models, parts, strict=False)]
    placed, rooms = place(wide, [80 * GB] * 5, 0.0, nodes=nodes), [DeviceRoom(80 * GB) for _ in range(5)]
    for model in wide:
        devices = placed[model.model]
        assert len(devices) in (0, model.parts) and len(set(devices)) == len(devices)
        assert len({nodes[device] for device in devices}) <= 1
        for device in devices:
            rooms[device].add(model.part)
    assert all(room.kv_bytes >= MARGIN * room.kv_bytes_least for room in rooms)
