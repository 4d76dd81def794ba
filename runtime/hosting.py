"""Which of the fleet's models one runtime hosts. Pure.

A model without a limit is everywhere. Where the others are says the scheduler, by the bucket `places`; a model that it
has not placed, or only with runtimes that are gone, is hosted by as many of those that are there, which all of them
choose alike: so a fleet without a scheduler serves every model too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

from runtime.trial import Trials
from store.wire import EngineSpec, ModelState, Places

SETTLED_S = 5.0  # for so long nobody has hosted a model before it is chosen who does: they may only be starting


class Hosting:
    """Of the runtime `id`."""

    def __init__(self, id: str) -> None:
        self._id = id
        self._specs: dict[str, EngineSpec] = {}
        self._places: dict[str, Places] = {}
        self._homeless_at: dict[str, float] = {}  # since when nobody who is there was told to host it
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
        """By key. `others`: the runtimes that are there besides this one."""
        there = {self._id, *others}
        return {key: spec for key, spec in self._specs.items() if self._id in self._hosts(spec, there, now)}

    def waits(self, key: str, others: Mapping[str, ModelState | None], now: float) -> bool:
        """Whether another runtime first tries if this model can be loaded. `others`: how they say that it is there."""
        hosts = sorted(self._hosts(self._specs[key], {self._id, *others}, now), key=lambda id: _rank(key, id))
        earlier = hosts[: hosts.index(self._id)] if self._id in hosts else hosts
        return self.trials.waits(key, earlier, others, now)

    def _hosts(self, spec: EngineSpec, there: set[str], now: float) -> Collection[str]:
        """Who of those that are there does."""
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
    """An order of the runtimes for each model, in which few change their place when one comes or goes."""
    return hashlib.blake2b(f"{key} {id}".encode(), digest_size=8).digest()
