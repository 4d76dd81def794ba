"""Room in the host cache for images of a device's models: images go down when another image must come up. Pure.

An image that leaves the host cache comes back from disk, or from the model's files. The model's engine is closed: the
model is COLD then, and the model's requests wait in the machine. Models without work go first, in the order in which
models give pages; idle thresholds weigh the measured time of a model to come back against the time that the image's
bytes cost the remaining models. If every model has work, the model with the latest turn retires: no further request
joins the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.core.device.eviction import ModelHolding, let_images_go
from runtime.core.device.idle import IdlePrice, threshold_s
from runtime.core.device.model import WITH_ENGINE, Model, Phase
from runtime.core.device.request import ModelKey

LOOK_S = 0.02  # shortest time between two looks at all models
RETRY_S = 1.0  # an image that is being written to disk, or used by another runtime, may go at any time
RETIRE_S = 5.0  # a model with work retires for an image that has lacked room for 5 s
GIVE_UP_S = 20.0  # if no model here could ever give room, a build fails after 20 s
MEMORY_S = 600.0  # loads of the last ten minutes, about, make the price of room
_STILL = (Phase.STAGED, Phase.RESIDENT)


@dataclass(slots=True)
class ImageLack:
    """A model whose image lacks room."""

    model: Model
    since: float
    bytes: int
    kept: Collection[ModelKey]
    error: str
    tried_at: float


class RoomStep(NamedTuple):
    """Next step for a model whose image lacks room."""

    model: Model
    error: str
    tick_at: float  # time of the next look, if no event comes before
    going: Sequence[Model] = ()  # models to close
    retries: bool = False  # the model is to be built again, once the models in `going` are closed
    fails: bool = False  # the model fails with the error


class HostRoom:
    """Models of one device whose images lack room in the host cache, and the price of the room."""

    def __init__(self) -> None:
        self._lacks: dict[ModelKey, ImageLack] = {}
        self._retiring: Model | None = None
        self._look_at = 0.0
        self._rate, self._rated_at = 0.0, 0.0  # seconds of loads in a second, from below the host cache

    def lack(self, model: Model, lacks_bytes: int, kept: Collection[ModelKey], error: str, now: float) -> None:
        """Note that the model can't be built until images of `lacks_bytes` bytes have left the host cache."""
        known = self._lacks.get(model.key)
        since = known.since if known else now
        self._lacks[model.key] = ImageLack(model, since, lacks_bytes, kept, error, now)

    def came(self, took_s: float, now: float) -> None:
        """Note that a model came back from below the host cache within `took_s` seconds."""
        self._rate = self._rate_at(now) + took_s / MEMORY_S
        self._rated_at = now

    def _rate_at(self, now: float) -> float:
        return self._rate * max(0.0, 1 - (now - self._rated_at) / MEMORY_S)

    def decide(self, models: Iterable[Model], now: float) -> RoomStep | None:
        """Next step for the first model whose image lacks room; None if no image lacks room."""
        lack = self._first() if self._lacks else None
        if lack is None:
            if self._retiring is not None:
                self._retiring.demand.retires, self._retiring = False, None
            return None
        model, error = lack.model, lack.error
        if now < self._look_at:
            return RoomStep(model, error, self._look_at)
        self._look_at = now + LOOK_S
        held = [each for each in models if each.phase in WITH_ENGINE and each.key not in lack.kept]
        out = [each for each in held if each.retired and each.phase in _STILL]
        going = self.going(lack.bytes, held, now)
        if going is not None:
            return RoomStep(model, error, now + RETRY_S, [*out, *going], retries=True)
        if not held and now - lack.since >= GIVE_UP_S:
            return RoomStep(model, error, now + RETRY_S, fails=True)
        if now - lack.since >= RETIRE_S and not any(each.demand.retires for each in held):
            self._retire(held, now)
        return RoomStep(model, error, now + RETRY_S, out, retries=bool(out) or now - lack.tried_at >= RETRY_S)

    def _first(self) -> ImageLack | None:
        """The lack to be met first: of a model with requests, then the oldest."""
        for key, lack in list(self._lacks.items()):
            if lack.model.phase not in (Phase.COLD, Phase.BUILDING) or not lack.model.works:
                del self._lacks[key]  # the model is built, has failed, or is not wanted
                lack.model.demand.lacks_room = False
        return min((lack for lack in self._lacks.values() if lack.model.demand.lacks_room), key=_urgency, default=None)

    def going(self, lacks_bytes: int, held: Sequence[Model], now: float) -> list[Model] | None:
        """Models of `held` without work whose images go now, for `lacks_bytes` bytes; None: too few bytes would go."""
        total = sum(image_bytes(model) for model in held)
        taken = let_images_go(lacks_bytes, [self._holding(model, total, now) for model in held])
        return None if taken is None else [model for model in held if model.key in taken]

    def _retire(self, held: Sequence[Model], now: float) -> None:
        """Have the model with the latest turn take no further requests into its batch."""
        working = [model for model in held if model.has_requests]
        if working:
            self._retiring = max(working, key=lambda model: (model.next_due(now), model.key))
            self._retiring.demand.retires = True

    def _holding(self, model: Model, total: int, now: float) -> ModelHolding:
        size, busy = image_bytes(model), model.works or bool(model.queues.leaving) or model.phase not in _STILL
        return_s = model.loads.return_s or model.loads.load_s
        price = IdlePrice(hold=self._rate_at(now) * size / max(total, 1), reactivation=return_s)
        worth_s = threshold_s(model.queues.idle.gaps(now), return_s, price)
        return ModelHolding(
            model.key,
            size,
            kv=0,
            kv_spare=0,
            resident=False,
            works=busy,
            kept=busy,
            used_at=model.used_at,
            pinned=model.spec.pinned or model.staging.warm,
            idle=(now - model.used_at) / worth_s,
            unused_s=now - model.loads.came_at,
            ttft_s=model.queues.ttft_s,
            reload_s=return_s,
        )


def image_bytes(model: Model) -> int:
    """Bytes of the image of a model with an engine."""
    return model.demand.weights_pages * model.page_bytes


def _urgency(lack: ImageLack) -> tuple[bool, float, ModelKey]:
    return not lack.model.has_requests, lack.since, lack.model.key
