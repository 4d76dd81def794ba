"""Requests of high priority on an overloaded device, in virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.core.device.request import Objective
from runtime.core.ledgers.costs import load_profile
from runtime.sim.fleet import simulate
from runtime.sim.workload import base, flooded, prioritised
from runtime.sim.world import SimulationResult
from tests.conftest import ROOT

H100 = load_profile((ROOT / "deploy" / "profiles" / "h100.json").read_bytes(), "h100.json")


def result(share: float | None) -> SimulationResult:
    """The result of a device with twice the models that the device bears."""
    workload = base(24, 3, duration_s=120.0)
    if share is not None:
        workload = prioritised(workload, share, 3)
    return simulate(workload, H100, "slack", 1, Objective(), checks=True)


def test_requests_of_high_priority_keep_their_tokens_on_an_overloaded_device() -> None:
    plain, mixed = result(None), result(0.1)
    high, normal = mixed.priorities["high"], mixed.priorities["normal"]
    assert plain.priorities == {} and plain.token_attainment < 0.8
    assert high.requests + normal.requests == plain.requests
    assert high.token_attainment > 0.97 > plain.token_attainment > normal.token_attainment
    assert mixed.token_attainment > plain.token_attainment - 0.05


def test_if_all_requests_have_high_priority_none_has() -> None:
    assert result(1.0).token_attainment == pytest.approx(result(None).token_attainment, abs=0.05)


def test_priorities_are_drawn_by_request_and_change_nothing_else() -> None:
    plain = base(4, 1, duration_s=200.0)
    drawn, again = prioritised(plain, 0.25, 1), prioritised(plain, 0.25, 1)
    assert drawn.high is not None and again.high is not None
    assert (drawn.high == again.high).all() and 0.1 < drawn.high.mean() < 0.4
    assert (drawn.at_s == plain.at_s).all()
    more = flooded(drawn, 3, 1)
    assert more.high is not None and more.high.sum() == 3 * drawn.high.sum()
    assert np.isin(drawn.at_s[drawn.high], more.at_s[more.high]).all()
