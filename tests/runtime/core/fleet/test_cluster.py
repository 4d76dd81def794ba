"""The machine of a fleet: the books are right, and orders make sense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.core.device.request import ModelKey, Request, request_id
from runtime.core.fleet.cluster import MOVE_S_MOST, STALE, Cluster, DrainOrder, Join, MigrateOrder, Order, Retire, Rules
from runtime.core.fleet.rebalance import LackingModel, Load
from runtime.core.fleet.scaling import Band
from runtime.core.ledgers.costs import ModelSize, unknown

MODELS = {
    ModelKey(name): unknown(ModelSize(name, 1 << size, 100.0, 1 << size))
    for name, size in zip("abc", (20, 24, 28), strict=True)
}
NUMBERS = st.integers(0, 3)
HAPPENS = st.tuples(
    st.sampled_from(["assigned", "ended", "loads", "loaded", "left"]), NUMBERS, st.sampled_from([*MODELS])
)


def asked(model: ModelKey, stream: int) -> Request:
    return Request(request_id("g", stream), "g", stream, model, b"", 0.0)


def happened(events: list[tuple[str, int, ModelKey]]) -> Cluster:
    """A cluster after the possible events of `events`, in order."""
    cluster, open_requests = Cluster(4, MODELS), [[] for _ in range(4)]  # type: ignore[var-annotated]
    for stream, (what, number, model) in enumerate(events):
        device = cluster.devices[number]
        if what == "assigned":
            open_requests[number].append(asked(model, stream))
            cluster.assigned(open_requests[number][-1], number)
        elif what == "ended" and open_requests[number]:
            cluster.ended(open_requests[number].pop(), number)
        elif what == "loads" and not device.loading and model not in device.resident:
            cluster.loads(number, model)
        elif what == "loaded" and device.loading:
            cluster.loaded(number)
        elif what == "left" and model in device.resident:
            cluster.left(number, model)
    return cluster


@given(st.lists(HAPPENS, max_size=60))
def test_books_name_models_with_requests_and_devices_with_weights(events: list[tuple[str, int, ModelKey]]) -> None:
    cluster = happened(events)
    for device in cluster.devices:
        assert all(count > 0 for count in device.work.values())
    for model in MODELS:
        there = {device.number for device in cluster.devices if model in device.resident}
        assert cluster.residents.get(model, set()) == there
        where = cluster.where.get(model)
        assert where is None or model in cluster.devices[where].work


# ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def load(number: int, at: float, used: float, requests: int = 4, **shares: float) -> Load:
    """The load of a device with 1000 bytes for KV cache."""
    by_model = {ModelKey(name): share for name, share in shares.items()}
    return Load(number, at, 1000.0, used, float(requests), requests, 0, sum(shares.values()), by_model)


def told(cluster: Cluster, *loads: Load) -> Cluster:
    for each in loads:
        cluster.hear(each)
    return cluster


ONE_BY_ONE = Rules(migrate=True, whole=False)


def test_requests_go_from_the_full_to_the_free_while_their_reports_are_fresh() -> None:
    cluster = told(Cluster(3, MODELS, ONE_BY_ONE), load(0, 1.0, 1000), load(1, 1.0, 500), load(2, 1.0, 100))
    assert cluster.tick(1.0) == [MigrateOrder(0, 2)]
    assert cluster.tick(1.0 + 2 * STALE) == []


def test_a_report_that_comes_late_changes_nothing() -> None:
    cluster = told(Cluster(2, MODELS, ONE_BY_ONE), load(0, 2.0, 0), load(1, 2.0, 0), load(0, 1.0, 1000))
    assert cluster.tick(2.0) == []


def test_a_model_with_one_place_moves_whole_and_new_requests_are_for_its_next_place() -> None:
    cluster = Cluster(2, MODELS, Rules(migrate=True))
    cluster.assigned(asked(ModelKey("a"), 1), 0)
    told(cluster, load(0, 1.0, 10, a=0.5, b=0.7), load(1, 1.0, 10, c=0.1))
    assert cluster.tick(1.0) == [MigrateOrder(0, 1, ModelKey("a"))]
    assert cluster.where == {ModelKey("a"): 1}
    assert cluster.tick(1.0) == []  # a single move at a time
    cluster.settled(0)
    assert cluster.tick(1.0) == [MigrateOrder(0, 1, ModelKey("a"))]


def test_a_move_that_was_never_heard_of_is_forgotten() -> None:
    cluster = told(Cluster(2, MODELS, Rules(migrate=True)), load(0, 1.0, 10, a=0.5, b=0.7), load(1, 1.0, 10))
    cluster.tick(1.0)
    later = 1.0 + MOVE_S_MOST
    told(cluster, load(0, later, 10, a=0.5, b=0.7), load(1, later, 10))
    assert cluster.tick(later) == [MigrateOrder(0, 1, ModelKey("a"))]


def test_a_move_is_over_when_the_target_reports_the_model_or_its_requests_have_ended() -> None:
    """Without the end, both devices would be left out for half a minute, even with much work to do."""
    full, empty = load(0, 1.0, 10, a=0.5, b=0.4, c=0.3), load(1, 1.0, 10)
    cluster = told(Cluster(2, MODELS, Rules(migrate=True)), full, empty)
    assert cluster.tick(1.0) == [MigrateOrder(0, 1, ModelKey("a"))]
    told(cluster, load(0, 2.0, 10, b=0.8, c=0.4), load(1, 2.0, 10))
    assert cluster.tick(2.0) == []  # the target's report may be older than the move
    told(cluster, load(0, 2.5, 10, b=0.8, c=0.4), load(1, 2.5, 10, a=0.2))
    assert cluster.tick(2.5) == [MigrateOrder(0, 1, ModelKey("c"))]
    for at in (3.0, 2.5 + STALE):  # requests of c ended on the way
        told(cluster, load(0, at, 10, b=0.8, a=0.4), load(1, at, 10))
        assert cluster.tick(at) == ([] if at == 3.0 else [MigrateOrder(0, 1, ModelKey("a"))])


def test_requests_of_a_model_that_lacks_memory_by_itself_move_in_parts() -> None:
    """The next part waits for reports that count the part before."""
    lacks = {ModelKey("a"): LackingModel(20, 1200.0, 100.0)}
    full, there = replace(load(0, 1.0, 1200, a=0.5), lacking=lacks), load(1, 1.0, 10)
    cluster = told(Cluster(2, MODELS, Rules(migrate=True)), full, there)
    cluster.where[ModelKey("a")] = 0
    assert cluster.tick(1.0) == [MigrateOrder(0, 1, ModelKey("a"), 5)]
    assert cluster.where == {ModelKey("a"): 0}, "the model keeps its place"
    for at in (2.0, 1.0 + STALE):
        cluster.settled(0)
        told(cluster, replace(full, at=at), replace(there, at=at))
        assert cluster.tick(at) == ([] if at == 2.0 else [MigrateOrder(0, 1, ModelKey("a"), 5)])


def test_the_freest_is_the_one_whose_batch_goes_on_longest_and_counts_what_it_was_given() -> None:
    cluster = told(Cluster(3, MODELS, ONE_BY_ONE), load(0, 1.0, 400), load(1, 1.0, 0, requests=0), load(2, 1.0, 0))
    assert [cluster.freest(asked(ModelKey("a"), stream), 1.0 + stream) for stream in range(2)] == [1, 2]
    told(cluster, load(1, 1.5, 0, requests=0), load(2, 1.5, 0))
    assert cluster.freest(asked(ModelKey("a"), 2), 2.0) == 1  # by the report, the first request is over
    assert cluster.freest(asked(ModelKey("a"), 3), 9.0) is None  # no device has reported lately


def test_a_queue_counts_where_the_next_one_goes() -> None:
    """The first request of the queue alone would have room."""
    queue = replace(load(0, 1.0, 300), queued_bytes=500)
    cluster = told(Cluster(2, MODELS, ONE_BY_ONE), queue, load(1, 1.0, 400))
    assert cluster.freest(asked(ModelKey("a"), 1), 1.0) == 1


def test_who_was_to_leave_and_stays_takes_requests_again() -> None:
    cluster = Cluster(2, MODELS, Rules(band=Band(1, 4)))
    cluster.assigned(asked(ModelKey("a"), 1), 1)
    cluster.leaves(1)
    assert [device.serves for device in cluster.devices] == [True, False]
    orders = []
    for second in range(3):
        told(cluster, load(0, second, 1000), load(1, second, 10, requests=1))
        orders += cluster.tick(second)
    assert orders == [Join(1)]
    cluster.stays(1)
    assert (cluster.where, cluster.wanted) == ({ModelKey("a"): 1}, 2)
    assert [device.serves for device in cluster.devices] == [True, True]


def test_devices_join_drain_and_retire_when_nothing_is_left_on_them() -> None:
    cluster = Cluster(2, MODELS, Rules(band=Band(1, 4)))
    request = asked(ModelKey("a"), 1)
    cluster.assigned(request, 1)
    orders = []
    for second in range(10):
        told(cluster, load(0, second, 10), load(1, second, 10, requests=1))
        orders += cluster.tick(second)
    assert orders == [DrainOrder(1)]
    assert "a" not in cluster.where
    assert [device.serves for device in cluster.devices] == [True, False]
    cluster.ended(request, 1)
    told(cluster, load(0, 10.0, 10), load(1, 10.0, 0, requests=0))
    assert cluster.tick(10.0) == [Retire(1)]
    full = []
    for second in range(30, 40):
        told(cluster, load(0, second, 2500))
        full += cluster.tick(second)
    assert full == [Join(2)]
    cluster.joined(1)
    cluster.joined(2)
    assert [device.serves for device in cluster.devices] == [True] * 3


@pytest.mark.parametrize(("leaving_most", "drained"), [(None, [3, 2]), (1, [3])])
def test_who_leaves_counts_until_it_has_drained(leaving_most: int | None, drained: list[int]) -> None:
    cluster = Cluster(4, MODELS, Rules(band=Band(1, 4, leaving_most=leaving_most)))
    orders = []
    for second in range(20):
        told(cluster, *(load(number, second, 10, requests=4 - number) for number in range(4)))
        orders += cluster.tick(second)
    assert orders == [DrainOrder(number) for number in drained]


def test_who_died_is_given_nothing_and_is_waited_for() -> None:
    cluster = Cluster(2, MODELS, Rules(migrate=True, whole=False, band=Band(2, 4)))
    cluster.loads(1, ModelKey("a"))
    told(cluster, load(0, 1.0, 1000), load(1, 1.0, 0, requests=0))
    cluster.died(1)
    told(cluster, load(1, 1.5, 0, requests=0))  # sent before the device died
    assert cluster.tick(2.0) == []
    assert not cluster.devices[1].serves
    assert cluster.freest(asked(ModelKey("a"), 1), 2.0) == 0
    cluster.joined(1)
    assert cluster.devices[1].serves and not cluster.devices[1].resident and not cluster.residents[ModelKey("a")]


REPORTS = st.lists(st.tuples(NUMBERS, st.floats(0, 1100), st.integers(0, 9), st.floats(0, 1.5)), max_size=12)


@given(st.lists(REPORTS, max_size=12), st.sets(st.integers(0, 11)), st.booleans())
def test_whatever_is_reported_no_device_takes_and_gives_and_a_leaving_one_takes_nothing(
    ticks: list[list[tuple[int, float, int, float]]], deaths: set[int], whole: bool
) -> None:
    cluster = Cluster(4, MODELS, Rules(migrate=True, whole=whole, band=Band(1, 4, low_checks=1, high_checks=1)))
    drained: set[int] = set()
    for second, reports in enumerate(ticks):
        there = [device.number for device in cluster.devices if device.there]
        told(cluster, *(load(number, second, used, count, a=busy) for number, used, count, busy in reports))
        if second in deaths and len(there) > 1:
            cluster.died(there[0])
            drained.discard(there[0])
        orders = cluster.tick(float(second))
        moves = [order for order in orders if isinstance(order, MigrateOrder)]
        named = [number for order in moves for number in (order.source, order.target)]
        assert len(named) == len(set(named))
        assert all(cluster.devices[number].there for number in named if number not in retired(orders))
        assert not {order.target for order in moves} & drained
        drained |= {order.device for order in orders if isinstance(order, DrainOrder)}
        assert retired(orders) <= drained
        for order in orders:
            if isinstance(order, Join):
                gone = [device.number for device in cluster.devices if not device.there and not device.died]
                for number in [*gone, *range(len(cluster.devices), 20)][: order.count]:
                    cluster.joined(number)
                    drained.discard(number)


def retired(orders: list[Order]) -> set[int]:
    return {order.device for order in orders if isinstance(order, Retire)}
