"""What a simulated device has in common with a real one where pages run out."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.costs import ModelSize
from runtime.policy.by_name import POLICIES
from runtime.policy.dispatch import LeastLoaded
from runtime.request import Objective
from runtime.sim.workload import Workload
from runtime.sim.world import World
from tests.sim.small import COSTS, profile


@pytest.mark.parametrize("policy", ["slack", "aegaeon", "request", "resident", "round-robin"])
def test_requests_that_outgrow_the_pool_step_aside_and_end(policy: str) -> None:
    """Ten prompts of a page each fit beside the weights; with their answers they take five times what there is."""
    count, pages = 10, 8 + 16
    size = ModelSize("m0", COSTS.weight_bytes, COSTS.kv_bytes_per_token, 1e6)
    work = Workload(
        models=[size],
        rates=[1.0],
        duration_s=2.0,
        at_s=np.linspace(0, 1, count),
        model=np.zeros(count, np.int32),
        prompt_tokens=np.full(count, 64, np.int32),
        output_tokens=np.full(count, 448, np.int32),
    )
    world = World(work, profile(pages), POLICIES[policy], LeastLoaded(), 1, Objective(), checks=True)
    world.run(drain_s=300.0)
    assert [request.sent for request in world.requests] == [448] * count
