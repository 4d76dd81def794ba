"""Which devices give requests to which others, and which requests those are (Llumnix, §4.4). Pure.

A device says of itself only sums: what there is for keys and values, what its requests use of that, and how fast they
take more. A request may use more than it holds: the one at the head of a queue what it waits for, one of high priority
some space around it; then its device looks fuller than it is, and is relieved like one that is full. Freeness is the
number of steps that a device's batch can still make; the time of a device that several models share counts as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

import msgspec

from runtime.request import ModelKey, Objective, RequestId

FULL_STEPS = 1000.0  # freeness that a device is given for its time while nobody needs any of it
LOW_STEPS, HIGH_STEPS = 10.0, 60.0  # of freeness: below, a device gives requests away; above, it takes some
HIGH_PATIENCE_S = 6.0  # of a request of high priority, as the gateway has it for a tenant of weight 1
GAP_LEAST = 0.2  # of two devices' time: less is not worth a model's way in
_NEVER = float("inf")


class Priority(IntEnum):
    BATCH = 0
    NORMAL = 1
    HIGH = 2


def priority(objective: Objective) -> Priority:
    """What matters more has more patience, and what is done in batches has none."""
    if objective.patience_s >= HIGH_PATIENCE_S:
        return Priority.HIGH
    return Priority.NORMAL if objective.patience_s > 0 else Priority.BATCH


class Usage(msgspec.Struct, frozen=True):
    """What one request means for the memory of its device."""

    request: RequestId
    model: ModelKey
    priority: Priority
    kv_bytes: float  # that it holds; while it waits, that it waits for
    token_bytes: float  # that it takes with each step
    waits: bool = False  # nothing of it is on the device yet
    moves: bool = False  # it is on its way to another


class Load(msgspec.Struct, frozen=True):
    """What a device says of itself."""

    device: int
    at: float
    kv_bytes: float  # that there are for keys and values
    used_bytes: float = 0.0  # virtual usage of all its requests
    step_bytes: float = 0.0  # that a step of them all takes
    running: int = 0
    waiting: int = 0
    busy: float = 0.0  # share of its time that its requests need to keep their pace
    shares: dict[ModelKey, float] = {}  # of that, by model, where several share the device

    @property
    def requests(self) -> int:
        return self.running + self.waiting


def load_of(
    device: int,
    at: float,
    kv_bytes: float,
    usages: Sequence[Usage],
    shares: dict[ModelKey, float],
    headroom: Mapping[Priority, float],
) -> Load:
    """`usages` in the order in which they wait. `headroom`: bytes that stay free around the requests of a priority, all
    of them together, so that nothing slows them."""
    head = next((usage for usage in usages if usage.waits), None)
    runs = [usage for usage in usages if not usage.waits]
    counted = runs if head is None else [*runs, head]
    there = {usage.priority for usage in runs}
    return Load(
        device,
        at,
        kv_bytes,
        sum(usage.kv_bytes for usage in counted) + sum(headroom.get(each, 0.0) for each in sorted(there)),
        sum(usage.token_bytes for usage in counted),
        len(runs),
        len(usages) - len(runs),
        sum(shares.values()),
        shares,
    )


def freeness(load: Load) -> float:
    """Steps that it can go on; below 0 where somebody waits for memory or time that is not there."""
    return _steps(load.kv_bytes - load.used_bytes, load.step_bytes, load.busy)


def _steps(free_bytes: float, step_bytes: float, busy: float) -> float:
    steps = free_bytes / step_bytes if step_bytes > 0 else _NEVER
    return min(steps, FULL_STEPS * (1 - busy)) if busy > 0 else steps


def pooled(loads: Sequence[Load], idle: int = 0) -> float:
    """Of all together, as if they were one device: one that is idle is not infinitely free for the others. `idle`: so
    many more, each like the mean of them and without work."""
    free, step, kv, busy = _sums(loads)
    return _steps(free + idle * kv / max(1, len(loads)), step, busy / max(1, len(loads) + idle))


def without(loads: Sequence[Load], leaving: Load) -> float:
    """Of all together, when that device has left and its requests stay."""
    free, step, _, busy = _sums(loads)
    if len(loads) == 1:
        return -_NEVER if leaving.requests else _NEVER
    return _steps(free - leaving.kv_bytes, step, busy / (len(loads) - 1))


def _sums(loads: Sequence[Load]) -> tuple[float, float, float, float]:
    """Bytes that are free, that a step takes, that there are, and time."""
    free = step = kv = busy = 0.0
    for load in loads:
        free += load.kv_bytes - load.used_bytes
        step += load.step_bytes
        kv += load.kv_bytes
        busy += load.busy
    return free, step, kv, busy


# ── who to whom ───────────────────────────────────────────────────────────────────────────────────────────────────────


def pairs(
    loads: Iterable[Load], draining: frozenset[int], low: float = LOW_STEPS, high: float = HIGH_STEPS
) -> list[tuple[int, int]]:
    """Sources, the fullest first, each with a target, the freest first.

    A device that drains is the fullest, whatever it says, and no target. No device is both source and target."""
    assert low < high, f"a device with a freeness between {high} and {low} would give and take"
    sources, targets = [], []
    for load in loads:
        free = -_NEVER if load.device in draining else freeness(load)
        if free < low and load.requests:
            sources.append((free, load.device, load))
        elif free > high:
            targets.append((-free, load.device, load))
    sources.sort(key=_standing)
    targets.sort(key=_standing)
    return [
        (source.device, target.device)
        for (free, _, source), (_, _, target) in zip(sources, targets, strict=False)
        if helps(source, target, free == -_NEVER, low)
    ]


def _standing(place: tuple[float, int, Load]) -> tuple[float, int]:
    return place[0], place[1]


def helps(source: Load, target: Load, drains: bool, low: float = LOW_STEPS) -> bool:
    """Whether it brings the two nearer to each other that one mean request goes, and does not fill the target."""
    part = 1 / max(1, source.running + (source.waiting > 0))
    used, step, busy = source.used_bytes * part, source.step_bytes * part, source.busy * part
    taken = _steps(target.kv_bytes - target.used_bytes - used, target.step_bytes + step, target.busy + busy)
    if taken <= low:
        return False
    left = 1 - part  # of what the source has
    given = _steps(source.kv_bytes - source.used_bytes * left, source.step_bytes * left, source.busy * left)
    return drains or abs(taken - given) < freeness(target) - freeness(source)


# ── what ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pick(usages: Sequence[Usage], room_bytes: float) -> Usage | None:
    """One that the target has room for. Who waits goes first, for nothing of it has to be copied; of the others the
    one of the lowest priority, of these the shortest."""
    fits = [usage for usage in usages if not usage.moves and usage.kv_bytes <= room_bytes]
    head = next((usage for usage in fits if usage.waits), None)
    if head is not None:
        return head
    return min(fits, key=lambda usage: (usage.priority, usage.kv_bytes, usage.request), default=None)


def pick_model(source: Load, target: Load, drains: bool) -> ModelKey | None:
    """Where each model has one place it goes as a whole: the one with the largest share of the source's time that makes
    the two more alike, and leaves the target time of its own."""
    gap = source.busy - target.busy
    most = _NEVER if drains else gap / 2 if gap >= GAP_LEAST else 0.0
    fits = [(-share, model) for model, share in source.shares.items() if share <= most and target.busy + share < 1]
    return min(fits)[1] if fits else None
