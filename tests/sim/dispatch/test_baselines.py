"""Dispatch where any device may serve any model: to the freest device, or in turns."""

from __future__ import annotations

from runtime.core.device.request import ModelKey, Request, request_id
from runtime.core.fleet.cluster import Cluster, Rules
from runtime.core.fleet.rebalance import Load
from runtime.core.ledgers.costs import ModelSize, unknown
from runtime.sim.dispatch.base import Dispatch
from runtime.sim.dispatch.baselines import Freest, InTurns

MODEL = ModelKey("m")
COSTS = {MODEL: unknown(ModelSize("m", 1 << 20, 1.0, 1 << 20))}


def asked(dispatch: Dispatch, cluster: Cluster, count: int, now: float) -> list[int]:
    """Devices that get `count` requests of a hundred tokens, which arrive at once and do not end."""
    numbers = []
    for stream in range(count):
        request = Request(request_id("g", stream), "g", stream, MODEL, b"", now, prompt_tokens=99)
        for assigned in dispatch.arrived(request, cluster, now):
            cluster.assigned(*assigned)
            numbers.append(assigned.device)
    return numbers


def fleet(*used_bytes: float) -> Cluster:
    cluster = Cluster(len(used_bytes), COSTS, Rules(whole=False))
    for number, used in enumerate(used_bytes):
        cluster.hear(Load(number, 1.0, 1000.0, used, 1.0, 1))
    return cluster


def test_the_freest_device_is_asked_and_those_asked_at_once_spread() -> None:
    assert asked(Freest(), fleet(800, 0, 500), 3, 1.0) == [1, 2, 1]


def test_without_fresh_reports_devices_take_turns() -> None:
    assert asked(Freest(), fleet(800, 0, 500), 4, 100.0) == [0, 1, 2, 0]


def test_a_device_that_died_is_left_out() -> None:
    cluster = fleet(800, 0, 500)
    cluster.died(1)
    assert asked(Freest(), cluster, 1, 1.0) == [2]
    assert asked(InTurns(), cluster, 4, 1.0) == [0, 2, 0, 2]
