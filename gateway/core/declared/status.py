"""The status of a declared object: phase, conditions and facts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct, structs

SYNCED, READY = "Synced", "Ready"
Truth = Literal["True", "False", "Unknown"]


class DeclaredCondition(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Condition of a declared object, in Kubernetes' form."""

    type: str
    status: Truth
    reason: str  # a word for programs
    message: str  # a sentence for people
    observed_generation: int
    last_transition_time: str = ""  # RFC 3339, UTC: when `status` became what it is


class TenantStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Status of a `Tenant`."""

    phase: str
    conditions: tuple[DeclaredCondition, ...]
    observed_generation: int
    id: str | None = None
    key_id: str | None = None  # the API key in the Secret


class ModelDeploymentStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Status of a `ModelDeployment`."""

    phase: str
    conditions: tuple[DeclaredCondition, ...]
    observed_generation: int
    id: str | None = None
    url: str | None = None  # base URL for clients of OpenAI
    model: str | None = None  # name of the registered model
    revision: int | None = None  # serves the requests
    target_revision: int | None = None  # newer, and not in charge so far
    residency: str | None = None
    replicas: int | None = None  # runtimes that host the serving revision


ObjectStatus = TenantStatus | ModelDeploymentStatus


def condition(type: str, holds: bool, reason: str, message: str, generation: int) -> DeclaredCondition:
    return DeclaredCondition(
        type=type,
        status="True" if holds else "False",
        reason=reason,
        message=message,
        observed_generation=generation,
    )


def found(status: ObjectStatus, type: str) -> DeclaredCondition | None:
    """Return the condition of a type, if there is one."""
    return next((condition for condition in status.conditions if condition.type == type), None)


def troubled(status: ObjectStatus, reason: str, message: str) -> ObjectStatus:
    """The status after a call failed: not synced, for that reason, and not ready unless ready before."""
    synced = condition(SYNCED, False, reason, message, status.observed_generation)
    others = [condition for condition in status.conditions if condition.type != SYNCED]
    return structs.replace(status, conditions=(synced, *others))


def with_times(status: ObjectStatus, before: Iterable[DeclaredCondition], now: str) -> ObjectStatus:
    """Date the conditions. A condition whose `status` is as before keeps the time of the last change.

    `now`: RFC 3339, UTC."""
    known = {condition.type: condition for condition in before}

    def dated(new: DeclaredCondition) -> DeclaredCondition:
        old = known.get(new.type)
        same = old is not None and old.status == new.status and old.last_transition_time
        return structs.replace(new, last_transition_time=old.last_transition_time if old and same else now)

    return structs.replace(status, conditions=tuple(dated(condition) for condition in status.conditions))
