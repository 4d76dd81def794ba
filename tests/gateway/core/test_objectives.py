"""The objective of a deployment's requests, and the warning about an objective that can't be kept."""

from __future__ import annotations

import pytest

from gateway.core.objectives import objective, unmeetable
from runtime.core.device.request import Objective
from store.contract.deployments import Slo
from store.contract.priorities import Priority

BATCH, HIGH = Priority.BATCH, Priority.HIGH


@pytest.mark.parametrize(
    ("priority", "weight", "expected"),
    [
        (HIGH, 1.0, Objective(ttft_s=2.0, tbt_s=0.05, patience_s=6.0, priority=HIGH)),
        (Priority.NORMAL, 1.0, Objective(ttft_s=2.0, tbt_s=0.05, patience_s=1.5)),
        (Priority.NORMAL, 10.0, Objective(ttft_s=2.0, tbt_s=0.05, patience_s=15.0)),
        (BATCH, 10.0, Objective(ttft_s=20.0, tbt_s=0.5, patience_s=0.0, priority=BATCH)),
    ],
)
def test_patience_is_that_of_the_priority_times_the_tenants_weight(
    priority: Priority, weight: float, expected: Objective
) -> None:
    assert objective(Slo(ttft_ms=2000, tbt_ms=50), priority, weight) == expected


def test_an_objective_that_a_device_alone_can_keep_is_not_remarked_upon() -> None:
    assert unmeetable(Objective(ttft_s=0.5, tbt_s=0.05), 0.05, 0.2, 0.3) is None
    assert unmeetable(Objective(), 0.0, 0.0, 0.0) is None  # nothing is known yet


def test_tokens_due_faster_than_one_step_are_said_with_both_numbers_and_the_remedy() -> None:
    said = unmeetable(Objective(tbt_s=0.001), 0.008, 0.0, 0.0)
    assert said is not None and "every 1 ms" in said and "takes 8 ms" in said and "raise slo.tbt_ms" in said


def test_a_first_token_due_before_the_model_could_be_awake_is_said() -> None:
    said = unmeetable(Objective(ttft_s=0.1), 0.008, 0.0255, 1.25)
    assert said is not None and "after 100 ms" in said and "takes 1250 ms" in said and "prompt 26 ms" in said
    assert "scaling.min_resident" in said and "tbt" not in said
