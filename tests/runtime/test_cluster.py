"""The books of a fleet: the cheapest device is the one that a look at all of them would find."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.cluster import Cluster
from runtime.costs import ModelSize, unknown
from runtime.request import ModelKey, Request, request_id

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
    """What can happen of these, in their order."""
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
        cluster.cheapest(model, 0.1, 0.2)  # which throws away what it finds to be stale
    return cluster


@given(st.lists(HAPPENS, max_size=60), st.sampled_from([*MODELS]), st.floats(0, 1), st.floats(0, 1))
def test_the_cheapest_device_is_the_one_that_a_look_at_all_would_find(
    events: list[tuple[str, int, ModelKey]], model: ModelKey, idle_cost: float, more: float
) -> None:
    cluster = happened(events)
    costs = [
        (each.load + (0.0 if model in each.resident else idle_cost + more * each.loading), each.number)
        for each in cluster.devices
    ]
    assert cluster.cheapest(model, idle_cost, idle_cost + more) == min(costs)[1]


@given(st.lists(HAPPENS, max_size=60))
def test_loads_are_the_sums_of_their_shares_and_nothing_without_requests(
    events: list[tuple[str, int, ModelKey]],
) -> None:
    for device in happened(events).devices:
        assert abs(device.load - sum(share.load for share in device.work.values())) < 1e-9
        assert all(share.requests > 0 for share in device.work.values())
        assert device.work or device.load == 0.0
