"""How a deployment is: what the database wants and what the runtimes say, as one answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import msgspec

from gateway.objectives import objective, unmeetable
from runtime.attainment import Shares, shares
from store.deployments import Canary, Deployment, Revision
from store.models import Progress
from store.wire import Attained, ModelState, Residency

# Of several runtimes the one that is furthest speaks for all.
_FURTHEST = (
    Residency.RESIDENT,
    Residency.LOADING,
    Residency.LEAVING,
    Residency.STAGED,
    Residency.COLD,
    Residency.FAILED,
)

States = Mapping[str, ModelState]  # runtime id → state of one engine


Phase: TypeAlias = Literal["deploying", "waking", "awake", "asleep", "failed"]


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """Something about a revision that its owner should know."""

    type: Literal[
        "RevisionFailed", "TargetFailed", "TargetPending", "CanaryServing", "CanaryHalted", "ObjectiveUnmeetable"
    ]
    revision: int
    runtime: str | None
    message: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    phase: Phase
    desired_state: Literal["awake", "asleep"]
    active_revision: int
    target_revision: int | None
    residency: str
    conditions: list[Condition]
    progress: Progress | None  # of what a runtime reads from its files now
    last_cold_start_ms: float | None
    attainment: Shares | None  # None: no request ended


def status(deployment: Deployment, active: States, target: States, attained: Iterable[Attained]) -> Status:
    residency = _residency(active)
    loads_ms = [state.load_ms for state in active.values() if state.load_ms > 0]
    return Status(
        phase=phase(deployment.desired_state, active),
        desired_state=deployment.desired_state,
        active_revision=deployment.active.number,
        target_revision=deployment.target.number if deployment.target else None,
        residency=residency.name.lower() if residency is not None else "none",
        conditions=_conditions(deployment, active, target),
        progress=_progress(active),
        last_cold_start_ms=round(max(loads_ms), 1) if loads_ms else None,
        attainment=shares(attained),
    )


def phase(desired_state: str, states: States) -> Phase:
    """Asleep is healthy, and failed ends when a load succeeds."""
    if any(state.running for state in states.values()):
        return "awake"  # it is in the middle of answers, also while it waits for its turn with nothing on the device
    match _residency(states):
        case Residency.RESIDENT:
            return "awake"
        case Residency.LOADING:
            return "waking"
        case Residency.FAILED:
            return "failed"
        case Residency.COLD | Residency.STAGED | Residency.LEAVING:
            loaded = any(state.load_ms > 0 for state in states.values())
            return "asleep" if loaded or desired_state == "asleep" else "deploying"
    return "deploying"


def loadable(states: Iterable[ModelState]) -> bool:
    """A runtime has loaded it: it is on the device, or was."""
    return any(
        state.residency is Residency.RESIDENT or (state.load_ms > 0 and state.residency is not Residency.FAILED)
        for state in states
    )


def _residency(states: States) -> Residency | None:
    known = {state.residency for state in states.values()}
    return next((residency for residency in _FURTHEST if residency in known), None)


def _progress(states: States) -> Progress | None:
    """Of the runtime that is furthest; at the speed that it had so far."""
    reading = [state for state in states.values() if state.files_bytes > 0]
    if not reading:
        return None
    state = max(reading, key=lambda state: state.read_bytes / state.files_bytes)
    left_bytes = state.files_bytes - state.read_bytes
    eta_s = round(state.reading_s * left_bytes / state.read_bytes) if state.read_bytes else None
    return Progress(done_bytes=state.read_bytes, total_bytes=state.files_bytes, eta_s=eta_s)


def _conditions(deployment: Deployment, active: States, target: States) -> list[Condition]:
    conditions = _failures("RevisionFailed", deployment.active, active)
    conditions += _unmeetable(deployment, deployment.active, active)
    if deployment.target is not None:
        failures = _failures("TargetFailed", deployment.target, target)
        conditions += _halted(deployment.target, deployment.canary)
        conditions += failures or _pending(deployment.target, deployment.canary, loadable(target.values()))
        conditions += _unmeetable(deployment, deployment.target, target)
    return conditions


def _halted(target: Revision, canary: Canary | None) -> list[Condition]:
    if canary is None or canary.halted is None:
        return []
    return [Condition(type="CanaryHalted", revision=target.number, runtime=None, message=canary.halted)]


def _pending(target: Revision, canary: Canary | None, loaded: bool) -> list[Condition]:
    """What the target waits for."""
    if canary is None:
        message = f"revision {target.number} takes the traffic once a runtime has loaded it"
    elif not loaded:
        message = f"revision {target.number} gets {canary.weight} % of the requests once a runtime has loaded it"
    elif canary.halted:
        return []
    else:
        message = f"revision {target.number} gets {canary.weight} % of the requests until it is promoted or rolled back"
        return [Condition(type="CanaryServing", revision=target.number, runtime=None, message=message)]
    return [Condition(type="TargetPending", revision=target.number, runtime=None, message=message)]


def _unmeetable(deployment: Deployment, revision: Revision, states: States) -> list[Condition]:
    """A warning: it is served all the same, for a late answer is better than none. The fastest runtime decides."""
    spec = revision.spec
    able = [state for state in states.values() if state.residency is not Residency.FAILED]
    message = unmeetable(
        objective(spec.slo, spec.priority, deployment.tenant_weight),
        step_alone_s=_least(state.step_ms for state in able) / 1000,
        prefill_longest_s=_least(state.prefill_ms for state in able) / 1000,
        load_s=0.0 if revision.engine.pinned else _least(state.fetch_ms for state in able) / 1000,
    )
    if message is None:
        return []
    return [Condition(type="ObjectiveUnmeetable", revision=revision.number, runtime=None, message=message)]


def _least(costs_ms: Iterable[float]) -> float:
    """Of those that were measured; 0: none was."""
    return min((cost_ms for cost_ms in costs_ms if cost_ms > 0), default=0.0)


def _failures(kind: Literal["RevisionFailed", "TargetFailed"], revision: Revision, states: States) -> list[Condition]:
    return [
        Condition(type=kind, revision=revision.number, runtime=runtime, message=state.error)
        for runtime, state in sorted(states.items())
        if state.residency is Residency.FAILED
    ]
