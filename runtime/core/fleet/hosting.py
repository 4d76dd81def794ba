"""Models of the fleet that a runtime hosts. Pure.

Every runtime hosts a model without a limit on replicas. The scheduler places limited models through the bucket
`places`. If a limited model has no place, or only places at runtimes that are gone, running runtimes host the model:
every runtime computes an equal choice of as many runtimes as the model has replicas. Thus a fleet without a scheduler
serves every model, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

from runtime.core.fleet.first_load import Trials
from store.contract.wire import EngineSpec, ModelState, Places

SETTLED_S = 5.0  # a model must be without a host for 5 s before runtimes choose hosts: hosts may only be starting


class Hosting:
    """Models hosted by the runtime `id`."""

    def __init__(self, id: str) -> None:
        self._id = id
        self._specs: dict[str, EngineSpec] = {}
        self._places: dict[str, Places] = {}
        self._homeless_at: dict[str, float] = {}  # by model: since when no running runtime is told to host the model
        self.trials = Trials()

    def spec_changed(self, key: str, spec: EngineSpec | None) -> None:
        if spec is None:
            self._specs.pop(key, None)
            self._homeless_at.pop(key, None)
            self.trials.forget(key)
        else:
            self._specs[key] = spec

    def places_changed(self, key: str, places: Places | None) -> None:
        known = self._places.get(key)
        if places is None:
            self._places.pop(key, None)
        elif known is None or places.term >= known.term:
            self._places[key] = places

    def hosted(self, others: Iterable[str], now: float) -> dict[str, EngineSpec]:
        """Specs of the models to host now, by key. The remaining running runtimes of the fleet are `others`."""
        there = {self._id, *others}
        return {key: spec for key, spec in self._specs.items() if self._id in self._hosts(spec, there, now)}

    def waits(self, key: str, others: Mapping[str, ModelState | None], now: float) -> bool:
        """Whether the runtime must wait for an earlier runtime to try to load the model first.

        The states of the model at the remaining running runtimes are `others`; None if not reported."""
        hosts = sorted(self._hosts(self._specs[key], {self._id, *others}, now), key=lambda id: _rank(key, id))
        earlier = hosts[: hosts.index(self._id)] if self._id in hosts else hosts
        return self.trials.waits(key, earlier, others, now)

    def _hosts(self, spec: EngineSpec, there: set[str], now: float) -> Collection[str]:
        """Running runtimes, among `there`, that host the model."""
        if not spec.replicas:
            return there
        places = self._places.get(spec.key)
        told = there.intersection([*places.runtimes, *places.leaving] if places else ())
        if told:
            self._homeless_at.pop(spec.key, None)
            return told
        since = self._homeless_at.setdefault(spec.key, now)
        if len(there) > 1 and now - since < SETTLED_S:
            return ()
        return sorted(there, key=lambda id: _rank(spec.key, id))[: spec.replicas]


def _rank(key: str, id: str) -> bytes:
    """Sort key of runtimes for a model: few runtimes change their place when a runtime comes or goes."""
    return hashlib.blake2b(f"{key} {id}".encode(), digest_size=8).digest()
