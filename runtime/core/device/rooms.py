"""Models of a device, grouped by the work due for them, so that no decision looks through every model. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.core.device.model import Model, Phase, Wish
from runtime.core.device.pages import Pages
from runtime.core.device.request import ModelKey
from runtime.core.device.view import ModelView


class Rooms:
    """Rooms of models. A model may be in several rooms, or in none."""

    def __init__(self) -> None:
        self.working: dict[ModelKey, Model] = {}  # models with requests, or with a wish to wake
        self.resting: dict[ModelKey, Model] = {}  # models without work that time or an operator may change
        self.upkeep: dict[ModelKey, Model] = {}  # models to be built, checked or closed
        self.unbuilt: dict[ModelKey, Model] = {}  # models to be built once there are pages for the build
        self.filed: set[ModelKey] = set()  # models that were filed or removed; see Instance.filed

    def file(self, model: Model) -> None:
        """Put the model into its rooms. Call whenever the model's phase or wish has changed, or whether it has
        requests."""
        key, phase = model.key, model.phase
        self.filed.add(key)
        if model.works:
            self.working[key] = model
            self.resting.pop(key, None)
        else:
            self.working.pop(key, None)
            if phase is Phase.RESIDENT or phase is Phase.FAILED or model.wish is Wish.ASLEEP:
                self.resting[key] = model
            else:
                self.resting.pop(key, None)
        cold = phase is Phase.COLD and model.works and not model.demand.lacks_room
        if cold and model.demand.build_pages:
            cold, self.unbuilt[key] = False, model
        elif self.unbuilt:
            self.unbuilt.pop(key, None)
        builds = cold or (phase is Phase.BUILDING and not model.loads.image_due)
        if phase is Phase.CLOSING or phase is Phase.CHECKING or builds:
            self.upkeep[key] = model
        else:
            self.upkeep.pop(key, None)

    def wait_for_host(self, model: Model, waits: bool) -> None:
        """Note whether the build of the model waits for room in the host cache."""
        model.demand.lacks_room = waits
        self.file(model)

    def remove(self, key: ModelKey) -> None:
        for room in (self.working, self.resting, self.upkeep, self.unbuilt):
            room.pop(key, None)
        self.filed.add(key)

    def first_upkeep(self) -> Model:
        """First model whose upkeep comes before any step: models to close, whose pages come back, then models to check,
        then models to build, begun builds first. Call only if `upkeep` is not empty."""
        for phase in (Phase.CLOSING, Phase.CHECKING, Phase.BUILDING):
            for model in self.upkeep.values():
                if model.phase is phase:
                    return model
        return next(iter(self.upkeep.values()))

    def upkeep_waits(self, order: Sequence[ModelView], stepper: ModelView) -> bool:
        """Whether a step of `stepper` comes before the next part of an upkeep: unless requests wait for the upkeep's
        model, and the model has an earlier turn in `order`. Call only if `upkeep` is not empty."""
        kept = self.first_upkeep()
        if not kept.queues.waiting:
            return True
        return next((model.key for model in order if model.key in (kept.key, stepper.key)), stepper.key) != kept.key

    def check(self, models: Iterable[Model], pages: Pages, fetching: ModelKey | None) -> None:
        """Assert what holds of each model between two events, and that no model but `fetching` is fetched."""
        fetched = []
        for model in models:
            model.check(pages.of(model.key))
            assert model.works == (model.key in self.working), f"{model.where} is in the wrong room"
            fetched += [model.key] if model.phase is Phase.FETCHING else []
        assert fetched == [fetching] * (fetching is not None), f"{fetched} are fetched at once"

    def put_off_proofs(self, now: float) -> None:
        """Give each model to be proved as much time again: requests then wait for one proof, not for all proofs."""
        for model in self.working.values():
            if model.loads.proving:
                model.used_at = now
                model.deadlines.changed()
