"""Proofs that the device serves a model, kept beside the model's image on disk.

A placed model is loaded once, which proves that the device serves the model. After the end of a device process, a
thousand such proofs would keep the next process busy for minutes, and most models would leave again for the proofs of
other models. A model whose proof is noted on disk therefore waits for its first request. The first fetches of such a
model are checked all the same."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET

from runtime.core.device.events import Checked, Placed
from runtime.core.device.model import Model
from runtime.core.device.request import ModelKey
from runtime.core.engine import EngineBuilder
from runtime.ipc import Place
from store.contract.wire import EngineSpec

LOOK_S = 1.0  # between two looks whether images have come to the disk


class Proofs:
    """Proofs of models.

    Args:
        build: knows the images on disk.
        build_pages: number of pages of the pool that a model's build takes; None: a build takes no pages."""

    def __init__(self, build: EngineBuilder, build_pages: Callable[[EngineSpec], int] | None) -> None:
        self._build, self._build_pages = build, build_pages
        self._due: dict[ModelKey, EngineSpec] = {}  # models with a proof to note once the image is on disk
        self._looked_at = float("-inf")

    def placed(self, place: Place) -> Placed:
        """Return the event for the machine: a model that returns with a noted proof is not loaded to prove anything.

        A pinned model is loaded in any case: such a model is to be on the device."""
        spec = place.spec
        noted = place.returns and not spec.pinned and self._build.proved(spec)
        return Placed(spec, not noted, self._build_pages(spec) if self._build_pages else UNSET, noted)

    def checked(self, model: Model, checked: Checked) -> None:
        """Take the result of a check: the proof is to be noted, or a noted proof does not hold any more."""
        if checked.wrong is None:
            self._due[model.key] = model.spec
        else:
            self._due.pop(model.key, None)
            self._build.drop_proof(model.spec)

    @property
    def due(self) -> bool:
        """Whether a proof is still to be noted."""
        return bool(self._due)

    def look(self, now: float) -> None:
        """Note the proofs of models whose images are on disk. `now`: seconds on a monotonic clock."""
        if self._due and now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._due = {key: spec for key, spec in self._due.items() if not self._build.note_proof(spec)}
