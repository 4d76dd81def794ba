"""Quarantine of models whose loading ended the device process again and again. Pure.

A build runs the artefact through native code of vLLM and its libraries. A crash in native code takes the engines of
every model with it. No request is to blame, so only the quarantine keeps the next process from loading the model again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from store.contract.wire import ModelState, Residency

ENDED_MOST = 3  # ends of the process in a row: a single end may have another cause than the model
PAUSE_S_FIRST, PAUSE_S_MOST = 300.0, 6 * 3600.0  # long, since a try may cost every model its place on the device


@dataclass
class _Ends:
    count: int
    until: float
    why: str
    built: bool  # at least one end came after the model's engine was built


class Quarantine:
    """Models that a runtime does not give to its device for a while. The quarantine outlives device processes."""

    def __init__(self) -> None:
        self._ends: dict[str, _Ends] = {}  # by model, since the model was last loaded

    def ended(self, model: str, why: str, now: float, built: bool = False) -> None:
        """Note that the device process ended while loading the model.

        Args:
            model: the model.
            why: a clause for the sentence of `reason`.
            now: seconds on a monotonic clock.
            built: the engine was built, and the process ended in the first steps.

        From the ENDED_MOST-th end in a row on, the model stays away for PAUSE_S_FIRST seconds, and with every further
        end twice as long, up to PAUSE_S_MOST."""
        count = 1 + (self._ends[model].count if model in self._ends else 0)
        doublings = count - ENDED_MOST
        pause_s = min(PAUSE_S_MOST, PAUSE_S_FIRST * 2.0 ** min(doublings, 10)) if doublings >= 0 else 0.0
        built = built or (model in self._ends and self._ends[model].built)
        self._ends[model] = _Ends(count, now + pause_s, why, built)

    def heard(self, models: dict[str, ModelState]) -> None:
        """Forget the ends of models that have been loaded, by the states reported by the device.

        Ends in builds are also over once the engine is built: a model that returns after the end of a device process
        may then wait for days for its first request."""
        for model, ends in list(self._ends.items()):
            state = models.get(model)
            if state and (state.was_resident or (state.residency is Residency.STAGED and not ends.built)):
                del self._ends[model]

    def reason(self, model: str, now: float) -> str:
        """Sentence why the model must not be loaded now; empty if the model may be loaded."""
        ends = self._ends.get(model)
        if ends is None or now >= ends.until:
            return ""
        minutes = max(1, round((ends.until - now) / 60))
        again = f"it is tried again in {minutes} min, or when the runtime is started anew: its log says more"
        return f"the model ended the runtime's device process {ends.count} times in a row, {ends.why}; {again}"

    def shown_in(self, models: dict[str, ModelState], hosted: Iterable[str], now: float) -> dict[str, ModelState]:
        """States of models, with the hosted models in quarantine shown as failed."""
        away = {model: reason for model in self._ends if model in hosted and (reason := self.reason(model, now))}
        return models | {model: ModelState(residency=Residency.FAILED, error=why) for model, why in away.items()}
