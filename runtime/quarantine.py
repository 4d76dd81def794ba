"""Which models a device is not given for a while: its process ended again and again while it loaded them. Pure.

A build runs the artefact through native code of vLLM and its libraries; what crashes there takes everybody's engines
with it. No request is to blame, so nothing else would keep the next process from trying the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from store.wire import ModelState, Residency

ENDED_MOST = 3  # in a row: once it may have been anybody's fault
PAUSE_S_FIRST, PAUSE_S_MOST = 300.0, 6 * 3600.0  # a try may cost all models of the device their place on it


@dataclass
class _Ends:
    count: int
    until: float
    why: str


class Quarantine:
    """Of one runtime; it outlives the device processes."""

    def __init__(self) -> None:
        self._ends: dict[str, _Ends] = {}  # by model, since it was last resident

    def ended(self, model: str, why: str, now: float) -> None:
        """The process did, while it loaded this model."""
        count = 1 + (self._ends[model].count if model in self._ends else 0)
        doublings = count - ENDED_MOST
        pause_s = min(PAUSE_S_MOST, PAUSE_S_FIRST * 2.0 ** min(doublings, 10)) if doublings >= 0 else 0.0
        self._ends[model] = _Ends(count, now + pause_s, why)

    def heard(self, models: dict[str, ModelState]) -> None:
        """Those that could be loaded after all begin anew."""
        for model in [model for model in self._ends if model in models and models[model].load_ms > 0]:
            del self._ends[model]

    def reason(self, model: str, now: float) -> str:
        """Why it is not to be loaded; empty if it may be."""
        ends = self._ends.get(model)
        if ends is None or now >= ends.until:
            return ""
        minutes = max(1, round((ends.until - now) / 60))
        again = f"it is tried again in {minutes} min, or when the runtime is started anew: its log says more"
        return f"the model ended the runtime's device process {ends.count} times in a row, {ends.why}; {again}"

    def shown_in(self, models: dict[str, ModelState], hosted: Iterable[str], now: float) -> dict[str, ModelState]:
        """With those of `hosted` that stay away."""
        away = {model: reason for model in self._ends if model in hosted and (reason := self.reason(model, now))}
        return models | {model: ModelState(residency=Residency.FAILED, error=why) for model, why in away.items()}
