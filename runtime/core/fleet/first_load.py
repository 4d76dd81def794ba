"""Turns of runtimes in trying to load a model that no runtime has loaded yet. Pure.

A faulty model may end the device process that loads the model, and every stream of the process must go on elsewhere.
Therefore runtimes try an unproven model one after another. Once a runtime has loaded the model, every runtime may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from store.contract.wire import ModelState, Residency

TRIED_S_MOST = 120.0  # how long runtimes wait for a runtime that tries
BEGIN_S = 3.0  # how long runtimes wait for a runtime that does not begin
RESTART_S = 30.0  # a runtime still counts as trying if its device process is away for 30 s meanwhile
_NEVER = float("-inf")


@dataclass
class _Trial:
    """Try of a model by an earlier runtime."""

    by: str = ""  # runtime
    since: float = 0.0
    seen_at: float = _NEVER  # when the runtime last reported the model
    over: set[str] = field(default_factory=set)  # runtimes that were waited for long enough


class Trials:
    """Tries of models, as a runtime sees them."""

    def __init__(self) -> None:
        self._loaded: set[str] = set()  # models loaded by the own device at least once
        self._trials: dict[str, _Trial] = {}

    def heard(self, models: Mapping[str, ModelState]) -> None:
        """Note models that the runtime's own device has loaded, by their states."""
        self._loaded.update(key for key, state in models.items() if state.was_loaded)

    def forget(self, key: str) -> None:
        self._loaded.discard(key)
        self._trials.pop(key, None)

    def waits(self, key: str, earlier: Sequence[str], others: Mapping[str, ModelState | None], now: float) -> bool:
        """Whether the runtime must wait for an earlier runtime to try the model first.

        Args:
            key: the model.
            earlier: runtimes that try before the asking runtime, in order.
            others: states of the model at the earlier and the later runtimes; None if not reported.
            now: seconds on a monotonic clock.

        An earlier runtime is skipped if the model has failed on its device, or if it was waited for long enough."""
        if key in self._loaded or any(state.was_loaded for state in others.values() if state):
            return False
        trial = self._trials.setdefault(key, _Trial())
        for id in earlier:
            state = others[id]
            if id in trial.over or (state and state.residency is Residency.FAILED):
                continue
            if trial.by != id:
                trial.by, trial.since, trial.seen_at = id, now, _NEVER
            if state:
                trial.seen_at = now
            if now - trial.since < (TRIED_S_MOST if now - trial.seen_at < RESTART_S else BEGIN_S):
                return True
            trial.over.add(id)
        return False
