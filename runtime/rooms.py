"""The models of one device by what they wait for, so that nobody looks through all of them. Pure."""

from __future__ import annotations

from runtime.model import Model, Phase, Wish
from runtime.request import ModelKey


class Rooms:
    """Each model is in those rooms where it is looked for."""

    def __init__(self) -> None:
        self.working: dict[ModelKey, Model] = {}  # somebody waits for them
        self.resting: dict[ModelKey, Model] = {}  # without work, and time alone may change them
        self.upkeep: dict[ModelKey, Model] = {}  # to be built, checked or closed

    def file(self, model: Model) -> None:
        """To be called when its phase, its wish or whether it has requests changed."""
        key, phase = model.key, model.phase
        if model.works:
            self.working[key] = model
            self.resting.pop(key, None)
        else:
            self.working.pop(key, None)
            if phase is Phase.RESIDENT or phase is Phase.FAILED or model.wish is Wish.ASLEEP:
                self.resting[key] = model
            else:
                self.resting.pop(key, None)
        if phase is Phase.CLOSING or phase is Phase.CHECKING or (phase is Phase.COLD and model.works):
            self.upkeep[key] = model
        else:
            self.upkeep.pop(key, None)

    def remove(self, key: ModelKey) -> None:
        for room in (self.working, self.resting, self.upkeep):
            room.pop(key, None)

    def first_upkeep(self) -> Model:
        """What comes before any step: pages that come back, then models that are waited for."""
        for phase in (Phase.CLOSING, Phase.CHECKING):
            for model in self.upkeep.values():
                if model.phase is phase:
                    return model
        return next(iter(self.upkeep.values()))
