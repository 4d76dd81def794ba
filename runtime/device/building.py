"""Builds and checks of engines in the device process: in slices, so that other models step in between.

An image is made from the model's files, which takes seconds and reads gigabytes. The node has the image made in a
process of its own (runtime/imaging.py), and the device then builds the engine around the image.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import structlog
from msgspec import structs

from runtime.core.device.events import BuildFailed, Built, Checked, Event, ImageOver, Unfinished
from runtime.core.device.model import Model
from runtime.core.device.request import ModelKey
from runtime.core.engine import Engine, EngineBuilder, EngineError, NoHostRoom, WeightSource
from runtime.device.stepping import Stepping
from runtime.ipc import ImageMade, MakeImage, StopImage
from runtime.memory import heap
from runtime.slices import Sliced
from store.contract.wire import EngineSpec, ModelState

log = structlog.get_logger()

SLICE_S = 2e-3  # about a step of a small model
PACED = 16  # builds whose durations tell how long further builds take


class ImageOrders:
    """Orders for images that builds wait for, one at a time.

    Args:
        has_image: whether the host cache has the image of a model.
        waited_for: whether requests wait for a model; the images of such models come first.
        send: sends an order to the node."""

    def __init__(
        self,
        has_image: Callable[[EngineSpec], bool],
        waited_for: Callable[[ModelKey], bool],
        send: Callable[[MakeImage | StopImage], None],
    ) -> None:
        self._has_image, self._waited_for, self._send = has_image, waited_for, send
        self._waiting: dict[ModelKey, EngineSpec] = {}
        self._under_way: ModelKey | None = None

    @property
    def queue(self) -> list[ModelKey]:
        """Models whose images are ordered, in the order in which the images are made."""
        first = [self._under_way] if self._under_way is not None else []
        return [*first, *sorted(self._waiting, key=lambda model: not self._waited_for(model))]

    def order(self, spec: EngineSpec) -> bool:
        """Order the model's image, unless the host cache has the image. Returns whether the build must wait."""
        if self._has_image(spec):
            return False
        self._waiting[ModelKey(spec.key)] = spec
        self._next()
        return True

    def made(self, model: ModelKey) -> None:
        """Take the end of an order, and send the next order."""
        if model == self._under_way:
            self._under_way = None
            self._next()

    def cancel(self, model: ModelKey) -> None:
        """Take back the order for a withdrawn model, if any. The node answers all the same."""
        if model == self._under_way or self._waiting.pop(model, None) is not None:
            self._send(StopImage(model))

    def _next(self) -> None:
        if self._under_way is None and self._waiting:
            self._under_way = self.queue[0]
            self._send(MakeImage(self._waiting.pop(self._under_way)))


class BuildPace:
    """How long the last builds took, to tell how long builds to come take."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=PACED)  # bytes of the weights, seconds
        self._s_per_byte = self._shortest_s = 0.0  # of these builds

    def note(self, weight_bytes: int, took_s: float) -> None:
        """Note that an engine with weights of `weight_bytes` bytes was built in `took_s` seconds."""
        self._last.append((max(1, weight_bytes), took_s))
        times = [took_s for _, took_s in self._last]
        self._s_per_byte = sum(times) / sum([size for size, _ in self._last])
        self._shortest_s = min(times)

    def expected_s(self, weight_bytes: int) -> float | None:
        """Seconds for a build at the speed of the last builds, and no less than their shortest; None: not known."""
        return max(weight_bytes * self._s_per_byte, self._shortest_s) if self._last else None


class Builds:
    """Builds under way.

    Args:
        build: builds an engine, and may pause meanwhile (runtime/slices.py).
        clock: monotonic, in seconds.
        orders: orders for images; None if this process makes the images as well.
        irretrievable: models whose images must stay in the host cache."""

    def __init__(
        self,
        build: EngineBuilder,
        stepping: Stepping,
        clock: Callable[[], float],
        orders: ImageOrders | None,
        irretrievable: Callable[[], tuple[ModelKey, ...]],
    ) -> None:
        self._build, self._stepping, self._clock = build, stepping, clock
        self._orders, self._irretrievable = orders, irretrievable
        self._imaged: set[ModelKey] = set()  # models whose images were made for the build under way
        self._slices: dict[ModelKey, Sliced[Engine]] = {}
        self._began: dict[ModelKey, float] = {}
        self._pace = BuildPace()
        self._over_at = float("-inf")  # end of the last build
        self._untidy = False  # a build has ended since the last `tidy`

    def go_on(
        self, spec: EngineSpec, later: Sequence[EngineSpec] | None = None
    ) -> tuple[Built | BuildFailed | Unfinished, Engine | None]:
        """Begin a build or carry out the next slice. Returns the event for the machine, and the engine once built.

        `later`: the model is staged by the history of requests, and only unused images of these models make room."""
        model, now = ModelKey(spec.key), self._clock()
        if later is not None and model not in self._began and (failed := self._not_spare(spec, later)) is not None:
            return failed, None
        began = self._began.setdefault(model, now)
        if model not in self._slices and self._orders is not None and self._orders.order(spec):
            return Unfinished(model, waits=True), None
        self._stepping.begin_build(model, now, around_image=self._orders is not None)
        try:
            read = partial(self._stepping.read, model, began)
            build = self._slices.setdefault(model, Sliced(partial(self._build, spec, read)))
            if not build.go_on(SLICE_S):
                return Unfinished(model), None
            engine, took_s = build.result, self._clock() - began
            pages = engine.weights_pages, engine.kv_pages_least
            source = WeightSource.FILES if model in self._imaged else engine.source
            built = Built(model, took_s, *pages, engine.held(), engine.sequential, source)
        except NoHostRoom as error:
            return self._no_room(model, str(error), error.lacks_bytes), None
        except Exception as error:
            return BuildFailed(model, reason("device.build_failed", model, error)), None
        finally:
            self._stepping.end_build(over=self._slices[model].over)
        log.info("device.built", model=model, took_ms=round(took_s * 1e3), source=source)
        self._pace.note(spec.weight_bytes, self._clock() - max(began, self._over_at))
        self._over_at, self._untidy = self._clock(), True
        return built, engine

    def _not_spare(self, spec: EngineSpec, later: Sequence[EngineSpec]) -> BuildFailed | None:
        """Make room for an image from room that costs nothing. Returns None if the build may begin."""
        model, lacks_bytes = ModelKey(spec.key), self._build.spare_room(spec, later)
        if lacks_bytes is None:
            return BuildFailed(model, "the disk has no image of the model")
        return BuildFailed(model, "no room is spare", lacks_bytes, self._irretrievable()) if lacks_bytes else None

    def tidy(self, waited_for: bool) -> None:
        """Give memory that builds have left back to the machine, unless requests wait (`waited_for`)."""
        if self._untidy and not waited_for:
            self._untidy = False
            heap.trim()

    def queued(self, models: Mapping[ModelKey, Model], states: dict[str, ModelState]) -> dict[str, ModelState]:
        """Write places in the queue of builds, and times until the engines are built, into the states of the models.

        The time of a build under way counts from the order for the build, or from the end of the build before.
        Returns `states`."""
        due = {key: model.spec for key, model in models.items() if model.builds}
        ordered = self._orders.queue if self._orders is not None else []
        begun = [model for model in self._slices if model in due]
        queue = [*dict.fromkeys([*begun, *(model for model in ordered if model in due), *due])]
        now, eta_s = self._clock(), 0.0
        for place, model in enumerate(queue, 1):
            if (expected_s := self._pace.expected_s(due[model].weight_bytes)) is not None:
                passed_s = now - max(self._began.get(model, now), self._over_at) if place == 1 else 0.0
                eta_s += max(1.0, expected_s - passed_s)
            states[model] = structs.replace(states[model], build_place=place, build_eta_s=round(eta_s, 1))
        return states

    def _no_room(self, model: ModelKey, error: str, lacks_bytes: int) -> BuildFailed:
        log.info("device.no_host_room", model=model, lacks_bytes=lacks_bytes)
        return BuildFailed(model, error, lacks_bytes, self._irretrievable())

    def image_made(self, made: ImageMade) -> Event:
        """Take word of the node that an ordered image is made, or the error. Returns the event for the machine."""
        model = ModelKey(made.model)
        if self._orders is not None:
            self._orders.made(model)
        if not made.error:
            self._imaged.add(model)
            return ImageOver(model)
        self.ended(model)
        if made.lacks_bytes:
            return self._no_room(model, made.error, made.lacks_bytes)
        return BuildFailed(model, made.error)

    def withdraw(self, model: ModelKey) -> None:
        """Take back the order for the image of a withdrawn model, if any."""
        if self._orders is not None:
            self._orders.cancel(model)

    def __contains__(self, model: object) -> bool:
        """Whether a build of the model, named by its key, is under way."""
        return model in self._began

    def ended(self, model: ModelKey) -> float:
        """Forget a build that has ended. Returns when the build began."""
        self._slices.pop(model, None)
        self._imaged.discard(model)
        return self._began.pop(model, self._clock())


class Checks:
    """Checks of models under way, each in slices."""

    def __init__(self) -> None:
        self._under_way: dict[ModelKey, Sliced[str | None]] = {}

    def go_on(self, model: ModelKey, engine: Engine) -> Event:
        """Begin a check or carry out the next slice. Returns the event for the machine. Raises errors of the engine."""
        check = self._under_way.setdefault(model, Sliced(engine.check))
        try:
            if not check.go_on(SLICE_S):
                return Unfinished(model)
        finally:
            if check.over:
                del self._under_way[model]
        if check.result is not None:
            log.error("device.check_failed", model=model, wrong=check.result)
        return Checked(model, check.result, engine.held())

    def drop(self, model: ModelKey) -> None:
        """End the check of a model to be closed, if a check is under way."""
        if (check := self._under_way.pop(model, None)) is not None:
            check.drop()


def reason(what: str, model: ModelKey, error: Exception) -> str:
    """Log an error, and return a reason fit for clients: an engine's own sentence, else only the error's type."""
    log.error(what, model=model, error=type(error).__name__, detail=str(error)[:300])
    return str(error) if isinstance(error, EngineError) else type(error).__name__
