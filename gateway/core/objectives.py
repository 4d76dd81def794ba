"""Meaning of a deployment's objective for each of its requests, and whether a device could meet the objective. Pure."""

from __future__ import annotations

from runtime.core.device.request import Objective
from store.contract.deployments import Slo
from store.contract.priorities import PATIENCE_S, Priority

BATCH_STRETCH = 10
WEIGHT_LEAST, WEIGHT_MOST = 0.1, 10.0  # bounds of a tenant's weight


def label(tenant_id: str, deployment_id: str) -> str:
    """Return the label under which runtimes count attainment: ids, since a tenant may reuse a name."""
    return f"{tenant_id}/{deployment_id}"


def objective(slo: Slo, priority: Priority, tenant_weight: float) -> Objective:
    """Return when a request's tokens are due, and how late tokens may be before the runtime gives the tokens up.

    A device with more work than time has to make some tokens late. A token later than its patience is lost already, and
    no longer makes other requests wait. Important requests therefore have the most patience and are given up last.
    Batch work has no patience: a batch request gives way as soon as it is late, and its deadlines are ten times as far
    away.
    """
    stretch = BATCH_STRETCH if priority is Priority.BATCH else 1
    return Objective(
        ttft_s=slo.ttft_ms * stretch / 1000,
        tbt_s=slo.tbt_ms * stretch / 1000,
        patience_s=PATIENCE_S[priority] * tenant_weight,
        priority=priority,
    )


def unmeetable(objective: Objective, step_alone_s: float, prefill_longest_s: float, load_s: float) -> str | None:
    """Return why a request would be late even on an idle device, with the remedy; None without a reason."""
    reasons = []
    if step_alone_s > objective.tbt_s:
        reasons.append(
            f"tokens are due every {_ms(objective.tbt_s)} ms, and one step of one request takes "
            f"{_ms(step_alone_s)} ms: raise slo.tbt_ms, or take a smaller model or dtype"
        )
    if load_s + prefill_longest_s > objective.ttft_s:
        reasons.append(
            f"the first token is due after {_ms(objective.ttft_s)} ms, and waking takes {_ms(load_s)} ms and the "
            f"longest prompt {_ms(prefill_longest_s)} ms: raise slo.ttft_ms, lower max_model_len, or keep it awake "
            "with scaling.min_resident"
        )
    return "; ".join(reasons) or None


def _ms(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.2g}"
