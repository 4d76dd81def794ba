"""States of a device's models, for the node. The state of a model without requests is made once, and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import structs

from runtime.core.device.instance import Instance
from runtime.core.device.model import Model
from runtime.core.device.request import ModelKey
from runtime.core.engine import Engine
from store.contract.wire import EngineSpec, ModelState, Residency

LOOK_S = 0.5  # between two looks whether images of models at rest lie on the disk


class ModelStates:
    """The states of all models of a device.

    Args:
        instance: the device's machine, with the models.
        engines: the engines of the models that have an engine.
        on_disk: whether an image of the model lies on the disk.
        clock: monotonic, in seconds."""

    def __init__(
        self,
        instance: Instance,
        engines: Mapping[ModelKey, Engine],
        on_disk: Callable[[EngineSpec], bool],
        clock: Callable[[], float],
    ) -> None:
        self._instance, self._engines, self._on_disk, self._clock = instance, engines, on_disk, clock
        self._kept: dict[ModelKey, ModelState] = {}  # states of models at rest that have not changed
        self._looked_at = float("-inf")

    def all(self) -> dict[str, ModelState]:
        """Return the state of each model, in the order of the models."""
        kept, filed = self._kept, self._instance.filed
        for key in filed:
            kept.pop(key, None)
        filed.clear()
        if (now := self._clock()) - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._look()
        return {str(key): kept.get(key) or self._of(key, model) for key, model in self._instance.models.items()}

    def _of(self, key: ModelKey, model: Model) -> ModelState:
        engine = self._engines.get(key)
        state = model.state(self._instance.pages.of(key), engine.kv_fragmentation() if engine else 0.0)
        if state.residency is Residency.COLD and self._on_disk(model.spec):
            state = structs.replace(state, on_disk=True)
        if model.at_rest:
            self._kept[key] = state
        return state

    def _look(self) -> None:
        """Forget the states of models whose images have come to the disk, or have left the disk."""
        models = self._instance.models
        cold = [key for key, state in self._kept.items() if state.residency is Residency.COLD]
        for key in cold:
            if self._on_disk(models[key].spec) != (self._kept[key].on_disk is True):
                del self._kept[key]
