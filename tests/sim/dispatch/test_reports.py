"""Reports of simulated devices: as the node of production makes reports, and as old as said."""

from __future__ import annotations

import pytest

from runtime.core.device.request import Objective
from runtime.core.fleet.report import report_of
from runtime.core.turns.slack import Slack
from runtime.sim.dispatch.gateways import GatewayDispatch
from runtime.sim.dispatch.reports import Sightings, device_report
from runtime.sim.dispatch.sight import AS_GATEWAYS_SEE, Sight
from runtime.sim.workload import base
from runtime.sim.world import World
from store.contract.reports import Report
from store.contract.wire import Lease
from tests.sim.dispatch.test_gateways import profile


def world(devices: int, models: int, sight: Sight = AS_GATEWAYS_SEE) -> World:
    work = base(models, 1, duration_s=60.0)
    return World(work, profile("h100"), Slack, GatewayDispatch(sight), devices, Objective())


def node_report(world: World, number: int, seq: int) -> Report:
    """Return the report that a node would make of the device's state."""
    device, booked = world.devices[number], world.cluster.devices[number]
    pages = device.instance.pages
    lease = Lease(
        runtime=str(number),
        epoch=0,
        engine="",
        pages_total=pages.total,
        page_bytes=pages.page_bytes,
        models={key: model.state(pages.of(key)) for key, model in device.instance.models.items()},
    )
    return report_of(lease, seq, device.costs, {key: count for key, count in booked.work.items()})


def test_a_simulated_report_is_the_report_of_a_node() -> None:
    fleet, compared = world(2, 26), []

    def compare(_: object) -> None:
        for number in range(2):
            real = node_report(fleet, number, 7)
            own = device_report(fleet.devices[number], fleet.cluster.devices[number], 7)
            assert (own.runtime, own.here, own.draining, own.loading) == (real.runtime, real.here, False, real.loading)
            assert own.reload == pytest.approx(real.reload)
            assert own.load == pytest.approx(real.load, abs=1e-3)  # nodes round `busy`
            assert own.full == pytest.approx(real.full)
            assert own.seats.keys() == real.seats.keys()
            for model, seat in own.seats.items():
                assert seat.requests == real.seats[model].requests
                assert seat.busy == pytest.approx(real.seats[model].busy, abs=1e-4)
                assert seat.kv == pytest.approx(real.seats[model].kv)
            compared.append(len(own.seats))
        fleet.at(fleet.now + 0.37, compare, None)

    fleet.at(1.0, compare, None)
    fleet.run(0.0)
    assert len(compared) > 200 and max(compared) >= 5


@pytest.mark.parametrize("period_s", [0.25, 1.0])
def test_what_a_gateway_sees_is_a_quarter_to_nearly_two_periods_old(period_s: float) -> None:
    fleet = world(4, 8)
    sight = Sightings(fleet, fleet.devices, Sight(3, period_s), 3)
    ages: list[float] = []

    def look(_: object) -> None:
        for gateway in range(3):
            heard = sight.look(gateway).heard
            ages.extend(fleet.now - sent.at for sent in heard if sent is not None)
        fleet.at(fleet.now + 0.07, look, None)

    fleet.at(3.0, look, None)
    fleet.run(0.0)
    assert 0.25 * period_s <= min(ages) and max(ages) <= 1.96 * period_s
    assert sum(ages) / len(ages) == pytest.approx(period_s, rel=0.1)


def test_with_exact_sight_no_report_is_under_way() -> None:
    fleet = world(2, 8, Sight(exact=True))
    events = fleet._heap
    assert events == []
    fleet.run(0.0)
    assert fleet.result(0.0).finished > 0.5
