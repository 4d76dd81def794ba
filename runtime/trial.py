"""Who tries first if a model can be loaded at all. Pure.

What is wrong with a model may end the device process that loads it, and all streams there have to go on elsewhere. So
one runtime after the other tries what nobody has loaded yet, and when one could, all the others do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from store.wire import ModelState, Residency

TRIED_S_MOST = 120.0  # the others wait so long for one that tries
BEGIN_S = 3.0  # and so long for one that does not begin to
RESTART_S = 30.0  # its device process may be away for so long meanwhile
_NEVER = float("-inf")


@dataclass
class _Trial:
    """Of one model, by others."""

    by: str = ""
    since: float = 0.0
    seen_at: float = _NEVER  # at it
    over: set[str] = field(default_factory=set)  # runtimes that were waited for long enough


class Trials:
    """As one runtime sees them."""

    def __init__(self) -> None:
        self._loaded: set[str] = set()  # here, once
        self._trials: dict[str, _Trial] = {}

    def heard(self, models: Mapping[str, ModelState]) -> None:
        """Of the device here."""
        self._loaded.update(key for key, state in models.items() if state.load_ms > 0)

    def forget(self, key: str) -> None:
        self._loaded.discard(key)
        self._trials.pop(key, None)

    def waits(self, key: str, earlier: Sequence[str], others: Mapping[str, ModelState | None], now: float) -> bool:
        """Whether one of the runtimes `earlier`, in this order, is to try it first. `others`: how they say that it is
        there, and those that come later."""
        if key in self._loaded or any(state.load_ms > 0 for state in others.values() if state):
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
