"""Status of a deployment: the database's wish and the runtimes' reports as one answer. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import msgspec

from gateway.core.objectives import objective, unmeetable
from runtime.core.ledgers.attainment import AttainedShares, shares
from store.contract.deployments import Canary, Deployment, Progress, Revision
from store.contract.priorities import priority
from store.contract.wire import Attained, ModelState, Residency

# If several runtimes hold the model, the most advanced residency counts.
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
    """Warning or failure of a revision, for the owner."""

    type: Literal[
        "RevisionFailed",
        "TargetFailed",
        "TargetPending",
        "CanaryServing",
        "CanaryHalted",
        "ObjectiveUnmeetable",
        "EngineShared",
        "ServedSequentially",
    ]
    revision: int
    runtime: str | None
    message: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    phase: Phase
    desired_state: Literal["awake", "asleep"]  # last order; a request wakes the deployment without changing the order
    active_revision: int
    target_revision: int | None
    residency: str
    replicas: int  # runtimes that host the active revision
    conditions: list[Condition]
    progress: Progress | None  # a runtime's reading of the model's files, or the builds before the model's own
    last_cold_start_ms: float | None
    attainment: AttainedShares | None  # None: no request has ended yet


def status(deployment: Deployment, active: States, target: States, attained: Iterable[Attained]) -> Status:
    loads_ms = [state.load_ms for state in active.values() if state.was_resident]
    return Status(
        phase=phase(deployment.desired_state, active),
        desired_state=deployment.desired_state,
        active_revision=deployment.active.number,
        target_revision=deployment.target.number if deployment.target else None,
        residency=_tier(active),
        replicas=len(active),
        conditions=_conditions(deployment, active, target),
        progress=_progress(active, deployment.active.engine.weight_bytes),
        last_cold_start_ms=round(max(loads_ms), 1) if loads_ms else None,
        attainment=shares(attained),
    )


def phase(desired_state: str, states: States) -> Phase:
    """Return the deployment's phase. Asleep is healthy; failed ends when a load succeeds."""
    if any(state.running for state in states.values()):
        # The model is in the middle of answers, even while waiting for a turn without pages on the device.
        return "awake"
    match _residency(states):
        case Residency.RESIDENT:
            return "awake"
        case Residency.LOADING:
            return "waking"
        case Residency.FAILED:
            return "failed"
        case Residency.COLD | Residency.STAGED | Residency.LEAVING:
            loaded = any(state.was_loaded for state in states.values())
            return "asleep" if loaded or desired_state == "asleep" else "deploying"
    return "deploying"


def loadable(states: Iterable[ModelState]) -> bool:
    """Whether a runtime has loaded the model: the model is, or was, on the device, now or before a restart."""
    return any(
        state.residency is Residency.RESIDENT or (state.was_loaded and state.residency is not Residency.FAILED)
        for state in states
    )


def _residency(states: States) -> Residency | None:
    known = {state.residency for state in states.values()}
    return next((residency for residency in _FURTHEST if residency in known), None)


def tier(state: ModelState) -> str:
    """The residency in lower case; `disk` if the model is COLD and an image lies on disk."""
    return "disk" if state.residency is Residency.COLD and state.on_disk is True else state.residency.name.lower()


def _tier(states: States) -> str:
    """The most advanced tier; an image on disk is more than files alone."""
    furthest = _residency(states)
    tiers = sorted(tier(state) for state in states.values() if state.residency is furthest)
    return ("disk" if "disk" in tiers else tiers[0]) if tiers else "none"


def _progress(states: States, weight_bytes: int) -> Progress | None:
    """Progress of the most advanced runtime: of the reading of files, at the average speed so far, or the place in the
    queue of builds, at the speed of the last builds. None: no runtime has to build the model."""
    reading = [state for state in states.values() if state.files_bytes > 0]
    if not reading:
        return _queued(states, weight_bytes)
    state = max(reading, key=lambda state: state.read_bytes / state.files_bytes)
    left_bytes = state.files_bytes - state.read_bytes
    eta_s = round(state.reading_s * left_bytes / state.read_bytes) if state.read_bytes else None
    return Progress(done_bytes=state.read_bytes, total_bytes=state.files_bytes, eta_s=eta_s)


def first_build(states: Iterable[ModelState]) -> ModelState | None:
    """Return the state of the runtime that will have built an engine first; None: a runtime has an engine, or no
    runtime has to build one. Runtimes that don't know the time yet come last."""
    states = [
        state for state in states if state.residency not in (Residency.COLD, Residency.FAILED) or state.build_place
    ]
    if not states or not all(state.build_place for state in states):
        return None
    return min(states, key=lambda state: (state.build_eta_s or math.inf, state.build_place))


def _queued(states: States, weight_bytes: int) -> Progress | None:
    if (state := first_build(states.values())) is None:
        return None
    before = state.build_place - 1
    return Progress(
        done_bytes=0,
        total_bytes=weight_bytes,
        eta_s=round(state.build_eta_s) if state.build_eta_s else None,
        waits_for=f"{before} model{'s are' if before > 1 else ' is'} built first" if before else None,
    )


def _conditions(deployment: Deployment, active: States, target: States) -> list[Condition]:
    conditions = _failures("RevisionFailed", deployment.active, active)
    conditions += _unmeetable(deployment, deployment.active, active)
    conditions += _sequential(deployment.active, active)
    if deployment.target is not None:
        failures = _failures("TargetFailed", deployment.target, target)
        conditions += _halted(deployment.target, deployment.canary)
        conditions += failures or _pending(deployment.target, deployment.canary, loadable(target.values()))
        conditions += _unmeetable(deployment, deployment.target, target)
        conditions += _sequential(deployment.target, target)
    return conditions


def _halted(target: Revision, canary: Canary | None) -> list[Condition]:
    if canary is None or canary.halted is None:
        return []
    return [Condition(type="CanaryHalted", revision=target.number, runtime=None, message=canary.halted)]


def _pending(target: Revision, canary: Canary | None, loaded: bool) -> list[Condition]:
    """Conditions about the event for which the target revision waits."""
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
    """Warn if even the fastest runtime can't meet the deployment's objective.

    The deployment is served nevertheless, since a late answer is better than none.
    """
    spec = revision.spec
    able = [state for state in states.values() if state.residency is not Residency.FAILED]
    message = unmeetable(
        objective(spec.slo, priority(spec.priority), deployment.tenant_weight),
        step_alone_s=_least(state.step_ms for state in able) / 1000,
        prefill_longest_s=_least(state.prefill_ms for state in able) / 1000,
        load_s=0.0 if revision.engine.pinned else _least(state.fetch_ms for state in able) / 1000,
    )
    if message is None:
        return []
    return [Condition(type="ObjectiveUnmeetable", revision=revision.number, runtime=None, message=message)]


def engine_shared(revision: int) -> Condition:
    """Condition that tells why an order to sleep has no effect now."""
    message = "the model stays on the device: another deployment that serves with the same engine is to be awake"
    return Condition(type="EngineShared", revision=revision, runtime=None, message=message)


def _sequential(revision: Revision, states: States) -> list[Condition]:
    """Warn if the model serves requests one at a time; the model's answers are right."""
    if not any(state.sequential for state in states.values()):
        return []
    message = (
        "asked twice in one batch, the model answers otherwise than alone: its requests are served one at a time and "
        "share no prefix cache, so that answers are right; another form of the model may not have this fault"
    )
    return [Condition(type="ServedSequentially", revision=revision.number, runtime=None, message=message)]


def _least(costs_ms: Iterable[float]) -> float:
    """Return the least measured cost; 0 if no cost was measured."""
    return min((cost_ms for cost_ms in costs_ms if cost_ms > 0), default=0.0)


def _failures(kind: Literal["RevisionFailed", "TargetFailed"], revision: Revision, states: States) -> list[Condition]:
    return [
        Condition(type=kind, revision=revision.number, runtime=runtime, message=state.error)
        for runtime, state in sorted(states.items())
        if state.residency is Residency.FAILED
    ]
