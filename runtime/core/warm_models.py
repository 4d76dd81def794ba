"""Models of a runtime that a tenant's schedule keeps warm, and when each begins and ceases to be warm. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from store.contract.warm.schedule import Schedule, Zone, schedule
from store.contract.wire import EngineSpec

LEAD_S = 120.0  # a model is warm 2 minutes before a window opens: the image may have to come from disk


@dataclass(slots=True)
class _Scheduled:
    """The schedule of a model, and what the device was told last."""

    schedule: Schedule
    warm: bool = False
    look_at: float = 0.0  # UNIX seconds; before, nothing changes


class WarmModels:
    """Models with a schedule that a device process hosts. `zone` finds a time zone by name."""

    def __init__(self, zone: Zone) -> None:
        self._zone = zone
        self._models: dict[str, _Scheduled] = {}

    def placed(self, spec: EngineSpec) -> None:
        """Follow the schedule of a model that the device process hosts from now on.

        Raises ValueError for a time zone that this host does not know, if the gateway's host did."""
        self.withdrawn(spec.key)
        if spec.warm:
            self._models[spec.key] = _Scheduled(schedule(spec.warm, self._zone))

    def withdrawn(self, model: str) -> None:
        self._models.pop(model, None)

    def changes(self, at: float) -> list[tuple[str, bool]]:
        """Models that begin (True) or cease (False) to be warm at `at`, in UNIX seconds, since the last call."""
        changed = []
        for model, kept in self._models.items():
            if at < kept.look_at:
                continue
            ahead = at + LEAD_S
            warm = kept.schedule.open(at) or kept.schedule.open(ahead)
            kept.look_at = min(_next(kept.schedule, at), _next(kept.schedule, ahead) - LEAD_S)
            if warm != kept.warm:
                kept.warm = warm
                changed.append((model, warm))
        return changed


def _next(kept: Schedule, at: float) -> float:
    change = kept.next_change(at)
    return float("inf") if change is None else change
