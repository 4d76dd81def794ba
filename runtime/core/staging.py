"""Staging: models whose images come up to the host cache before requests ask for the models. Pure.

A tenant's schedule stages a model by order. Without an order, a model is staged by the history of its requests: the
gaps between requests say when the next request is likely. An image staged by history takes only room that costs
nothing: free room, and the room of images whose next use is expected later. One model comes up at a time, while no
other model does.

A gap stages a model at most once. If the expected time was already near when the image left the host cache, the gap
stages the model not at all: the history that let the image go would only bring the image back.

Models served by an earlier process of the device come up as well, in the order of their placement, as long as the host
cache has free room: a restart of few models then costs no request a read from disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.core.device.events import BuildFailed
from runtime.core.device.eviction import COOL_DOWN_S
from runtime.core.device.model import Model, Phase
from runtime.core.device.request import ModelKey
from runtime.core.host_room import HostRoom, image_bytes

RECENT = 32  # gaps that tell a rhythm
GAPS_LEAST = 4
SPREAD = 0.5  # the middle half of the gaps lies within half of the median: else there is no rhythm
LEAD_S, LEADS = 2.0, 3.0  # a model comes up 2 s, and 3 times the time of its way, before the expected request
TRIES_MOST = 3  # room freed in several pieces may not suffice
RETRY_S = 10.0  # until an ordered model is tried again that found no room
_STILL = (Phase.STAGED, Phase.RESIDENT)
_NEVER = float("inf")


class Rhythm(NamedTuple):
    """Times from the end of a request to the next request, in seconds: quartiles of the gaps."""

    low_s: float
    middle_s: float
    high_s: float


class ImageUse(NamedTuple):
    """An image in the host cache, and the time at which its next use is expected."""

    model: ModelKey
    bytes: int
    at: float


def rhythm(gaps: Sequence[float], idle_s: float) -> Rhythm | None:
    """Rhythm of a model without requests for `idle_s` seconds, by its gaps, oldest first; None: there is no rhythm."""
    longer = sorted(gap_s for gap_s in gaps[-RECENT:] if gap_s > idle_s)
    count = len(longer)
    if count < GAPS_LEAST:
        return None
    found = Rhythm(longer[count // 4], longer[count // 2], longer[3 * count // 4])
    return found if found.high_s - found.low_s <= SPREAD * found.middle_s else None


def expected_in_s(gaps: Sequence[float], idle_s: float) -> float:
    """Seconds until the next request of a model without requests for `idle_s` seconds: the median of the longer gaps.

    Without enough longer gaps, a model is expected to rest for as long again."""
    longer = sorted(gap_s for gap_s in gaps[-RECENT:] if gap_s > idle_s)
    return longer[len(longer) // 2] - idle_s if len(longer) >= GAPS_LEAST else idle_s


def giving_way(short_bytes: int, at: float, images: Iterable[ImageUse]) -> list[ModelKey] | None:
    """Models whose images go, for `short_bytes` bytes together, so that an image expected to be used at `at` comes up.

    Only images used later go, the latest first. None: such images do not suffice."""
    taken: list[ModelKey] = []
    for image in sorted(images, key=lambda image: (-image.at, image.model)):
        if short_bytes <= 0 or image.at <= at:
            break
        taken.append(image.model)
        short_bytes -= image.bytes
    return taken if short_bytes <= 0 else None


@dataclass(slots=True)
class StagePlan:
    """A model to be staged."""

    model: Model
    at: float  # not earlier
    until: float  # if the model was not staged by then, the expected time has passed
    tries: int = 0
    returns: bool = False  # an earlier process of the device served the model: only free room is taken


class StagingPlans:
    """Models of a device to be staged.

    Args:
        room: room in the host cache.
        by_history: whether models are staged by the history of their requests as well."""

    def __init__(self, room: HostRoom, by_history: bool) -> None:
        self._room, self._by_history = room, by_history
        self._plans: dict[ModelKey, StagePlan] = {}
        self._returned: dict[ModelKey, Model] = {}  # models to come up in free room, in order
        self._begun: StagePlan | None = None
        self._read_at = 0.0  # until then, the disk may be reading the image staged last

    # ── what happened ─────────────────────────────────────────────────────────────────────────────────────────────────

    def order(self, model: Model | None, warm: bool, now: float) -> None:
        """Keep the image of a model in the host cache from now on, or (`warm` False) no longer."""
        if model is None:
            return
        model.staging.warm = warm
        self._plans.pop(model.key, None)
        if warm:
            self._plan(StagePlan(model, now, _NEVER))

    def placed(self, model: Model) -> None:
        """Note that the model was placed on the device: the image comes up if an earlier process served the model."""
        if model.loads.noted and self._by_history:
            self._returned[model.key] = model

    def asked(self, model: Model) -> None:
        """Note that a request, or an operator, asks for the model."""
        self._plans.pop(model.key, None)
        self._returned.pop(model.key, None)
        model.staging.unasked = False

    def closed(self, model: Model, now: float) -> None:
        """Note that the model's engine was closed: the image may leave the host cache."""
        staging = model.staging
        staging.unused += staging.unasked
        staging.unasked = False
        if staging.warm:  # a model with requests needed the room
            self._plan(StagePlan(model, now + RETRY_S, _NEVER))
        elif self._by_history and (left_at := model.queues.idle.left_at) is not None:
            found = rhythm(model.queues.idle.gaps(now), now - left_at)
            if found is None or left_at == staging.tried_of:
                return
            opens_at = left_at + found.low_s - _lead_s(model)
            if opens_at > now:
                self._plan(StagePlan(model, opens_at, left_at + found.high_s))

    def built(self, model: Model, now: float) -> None:
        """Note that the model's engine was built. Call before the model's phase changes for the next time."""
        staging, plan = model.staging, self._end(model)
        model.loads.staged = plan is not None and not model.works
        if not model.loads.staged:
            return
        self._read_at = now + max(model.loads.return_s, model.loads.load_s)
        if staging.later is not None and plan is not None and not plan.returns:
            staging.unasked = True
            staging.staged += 1

    def failed(self, model: Model, failed: BuildFailed, models: Iterable[Model], now: float) -> Sequence[Model]:
        """Note that the model could not be staged. Returns the models to close, to make room for the next try."""
        plan = self._end(model)
        if plan is None or model.works or model.withdrawn:
            return ()
        if plan.returns:
            if failed.lacks_bytes:  # no free room is left
                self._returned.clear()
            return ()
        going = self._going(model, failed, models, now) if failed.lacks_bytes else None
        if going and plan.tries < TRIES_MOST:
            plan.at, plan.until, plan.tries = now, _NEVER, plan.tries + 1
            self._plan(plan)
            return going
        if model.staging.warm:
            self._plan(StagePlan(model, now + RETRY_S, _NEVER))
        return ()

    def imaged(self, model: Model, now: float) -> None:
        """Note that the image of a model was made that is staged by order: the build may go on."""
        plan = self._end(model)
        if plan is not None:
            self._plan(plan)

    def _plan(self, plan: StagePlan) -> None:
        if _down(plan.model):
            self._plans[plan.model.key] = plan

    def _end(self, model: Model) -> StagePlan | None:
        """The plan of the staging under way, which ends now; None: the model is not being staged."""
        plan, staged = self._begun, model.staging.under_way
        model.staging.under_way = False
        if not staged:
            return None
        self._begun = None
        return plan

    # ── what comes next ───────────────────────────────────────────────────────────────────────────────────────────────

    def due(self, models: Iterable[Model], free_pages: int, now: float) -> Model | None:
        """The model to be staged now, if nothing else comes up; the caller must let the build begin."""
        if not (self._plans or self._returned) or self._begun is not None or now < self._read_at:
            return None
        self._plans = {key: plan for key, plan in self._plans.items() if plan.until >= now and _down(plan.model)}
        due = [plan for plan in self._plans.values() if plan.at <= now]
        fitting = [plan for plan in due if plan.model.demand.build_pages <= free_pages]
        if not (fitting or self._returned) or any(model.phase is Phase.BUILDING for model in models):
            return None
        if fitting:
            plan = min(fitting, key=lambda plan: (not plan.model.staging.warm, plan.at, plan.model.key))
            del self._plans[plan.model.key]
        elif (back := self._next_returned(free_pages)) is not None:
            plan = StagePlan(back, now, _NEVER, returns=True)
        else:
            return None
        self._begun, model = plan, plan.model
        staging, staging.under_way = model.staging, True
        staging.later = () if plan.returns else None
        if not (plan.returns or staging.warm):
            staging.tried_of, at = model.queues.idle.left_at, _expected_at(model, now)
            cold = [each for each in models if each.phase is Phase.COLD and each is not model and not each.works]
            staging.later = tuple(each.key for each in cold if _expected_at(each, now) > at)
        return model

    def _next_returned(self, free_pages: int) -> Model | None:
        """The next model to come up in free room, taken from the queue of such models."""
        while self._returned:
            model = next(iter(self._returned.values()))
            if _down(model) and model.demand.build_pages > free_pages:
                return None
            del self._returned[model.key]
            if _down(model):
                return model
        return None

    def next_at(self, now: float) -> float:
        """Time of the next look without an event, in seconds on the monotonic clock; inf: an event comes first."""
        coming = [max(plan.at, self._read_at) for plan in self._plans.values()]
        coming += [self._read_at] if self._returned else []
        return min((at for at in coming if at > now), default=_NEVER)

    def _going(self, model: Model, failed: BuildFailed, models: Iterable[Model], now: float) -> Sequence[Model] | None:
        """Models to close for the room that the model lacks; None: too few bytes would go."""
        held = [each for each in models if _may_go(each, failed.kept, now)]
        if model.staging.later is None:
            return self._room.going(failed.lacks_bytes, held, now)
        images = [ImageUse(each.key, image_bytes(each), _expected_at(each, now)) for each in held]
        taken = giving_way(failed.lacks_bytes, _expected_at(model, now), images)
        return None if taken is None else [each for each in held if each.key in taken]


def _down(model: Model) -> bool:
    """Whether the model's image may be below the host cache, and nothing brings the image up."""
    return model.phase is Phase.COLD and not (model.works or model.withdrawn)


def _may_go(model: Model, kept: Collection[ModelKey], now: float) -> bool:
    """Whether the model's image may go for an image without requests."""
    if model.phase not in _STILL or model.works or model.queues.leaving or model.key in kept:
        return False
    return not (model.spec.pinned or model.staging.warm or now - model.loads.came_at < COOL_DOWN_S)


def _expected_at(model: Model, now: float) -> float:
    """When the next request of the model is expected."""
    if model.has_requests:
        return now
    idle = model.queues.idle
    idle_s = now - (model.used_at if idle.left_at is None else idle.left_at)
    return now + expected_in_s(idle.gaps(now), idle_s)


def _lead_s(model: Model) -> float:
    return max(LEAD_S, LEADS * max(model.loads.return_s, model.loads.load_s))
