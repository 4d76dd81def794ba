"""Behaviour of a simulated device that a real device shares where pages run out."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.core.device.request import Objective
from runtime.core.ledgers.costs import ModelSize
from runtime.core.turns.registry import POLICIES
from runtime.core.turns.slack import Slack
from runtime.sim.dispatch.baselines import InTurns
from runtime.sim.workload import Workload
from runtime.sim.world import World
from tests.sim.small import COSTS, profile


@pytest.mark.parametrize("policy", ["slack", "aegaeon", "request", "resident", "round-robin"])
def test_requests_that_outgrow_the_pool_step_aside_and_end(policy: str) -> None:
    """Ten prompts of a page each fit beside the weights; with their answers they take five times the free pages."""
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
    world = World(work, profile(pages), POLICIES[policy], InTurns(), 1, Objective(), checks=True)
    world.run(drain_s=300.0)
    assert [request.sent for request in world.requests] == [448] * count


@pytest.mark.parametrize("relieves", [True, False])
def test_a_burst_gets_the_pages_of_a_model_with_a_lead(relieves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first model's request has 22 of 46 pages, and soon a lead of many seconds. The second model is on the device
    when twenty requests for the second model arrive at once, and beside both models there is room for few requests.
    Requests that join later are late."""
    monkeypatch.setattr(Slack, "relieves", relieves)
    work = Workload(
        models=[ModelSize(f"m{n}", COSTS.weight_bytes, COSTS.kv_bytes_per_token, 1e6) for n in (0, 1)],
        rates=[1.0, 1.0],
        duration_s=6.0,
        at_s=np.array([0.0, 4.5, *[5.0] * 20]),
        model=np.array([0, 1, *[1] * 20], np.int32),
        prompt_tokens=np.array([1000, 60, *[60] * 20], np.int32),
        output_tokens=np.array([900, 200, *[200] * 20], np.int32),
    )
    world = World(work, profile(46), Slack, InTurns(), 1, Objective(ttft_s=2.0), checks=True)
    world.run(drain_s=300.0)
    assert [request.sent for request in world.requests] == work.output_tokens.tolist()
    late = sum(request.progress.first_late for request in world.requests)
    assert late == 0 if relieves else late > 5
