"""Two tenants on one device: the first floods, the second stays within its share and loses no service."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from runtime.core.device.request import Objective
from runtime.core.ledgers import fair_share
from runtime.core.ledgers.costs import load_profile
from runtime.sim.fleet import simulate
from runtime.sim.workload import base, divided, flooded
from runtime.sim.world import Kept, SimulationResult
from tests.bench.fleet.bench_fairness import MIXES, POINTS, TIMES, points
from tests.conftest import ROOT

H100 = load_profile((ROOT / "deploy" / "profiles" / "h100.json").read_bytes(), "h100.json")


def tenants(mix: str, seed: int, times: int) -> dict[str, Kept]:
    of = MIXES[mix]
    workload = of.workload(seed, times)
    return simulate(workload, H100, "slack", 1, Objective(ttft_s=of.ttft_s), checks=times == 1).tenants


@pytest.mark.parametrize("mix", ["apart", "heavy", "long", "three"])
def test_a_flood_takes_no_more_than_two_points_from_who_stays_within_its_share(mix: str) -> None:
    calm, flood = tenants(mix, 0, 1), tenants(mix, 0, TIMES)
    for tenant in sorted(calm)[1:]:
        assert max(points(calm[tenant], flood[tenant])) <= POINTS, (tenant, flood)


def test_who_floods_still_gets_its_share() -> None:
    flood = tenants("apart", 0, TIMES)["t0"]
    alone = tenants("apart", 0, 1)["t0"]
    assert flood.token_attainment * flood.requests > 5 * alone.token_attainment * alone.requests


def results(tenants: int) -> SimulationResult:
    workload = divided(base(8, 3, duration_s=120.0), [1.0] * tenants, 3)
    return simulate(workload, H100, "slack", 1, Objective())


def test_tenants_change_nothing_until_one_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    several, one = results(4), results(1)
    assert (several.min, one.min) == (1.0, 1.0)
    monkeypatch.setattr(fair_share, "OVER_S", 1e9)
    assert replace(results(4), tenants={}) == one


def test_a_flood_is_of_the_first_tenant_alone_and_of_lengths_that_it_has() -> None:
    calm = divided(base(4, 1, duration_s=200.0), [1.0, 1.0], 1)
    flood = flooded(calm, 20, 1)
    assert calm.tenant is not None and flood.tenant is not None
    for column in ("at_s", "model", "prompt_tokens", "output_tokens"):
        assert (getattr(calm, column)[calm.tenant == 1] == getattr(flood, column)[flood.tenant == 1]).all()
    assert (flood.tenant == 0).sum() == 20 * (calm.tenant == 0).sum()
    lengths = calm.output_tokens[calm.tenant == 0]
    assert np.isin(flood.output_tokens[flood.tenant == 0], lengths).all()
