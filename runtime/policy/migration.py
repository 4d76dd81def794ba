"""Which devices give requests to which others, and which requests those are (Llumnix, §4.4). Pure.

A device says of itself only sums: what there is for keys and values, what its requests use of that, and how fast they
take more. A request may use more than it holds: the one at the head of a queue what it waits for, one of high priority
some space around it; then its device looks fuller than it is, and is relieved like one that is full. Freeness is the
number of steps that a device's batch can still make; the time of a device that several models share counts as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

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
    queued_bytes: float = 0.0  # that the others wait for, behind the head of the queue
    least_bytes: float | None = None  # of the smallest request that may go; None: they are not known one by one

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
    used = queued = step = busy = 0.0
    running, head, there = 0, True, set()
    for usage in usages:
        if not usage.waits:
            running += 1
            there.add(usage.priority)
        if not usage.waits or head:
            used += usage.kv_bytes
            step += usage.token_bytes
        else:
            queued += usage.kv_bytes
        head = head and not usage.waits
    for each in sorted(there):
        used += headroom.get(each, 0.0)
    for share in shares.values():
        busy += share
    least = min([usage.kv_bytes for usage in usages if not usage.moves], default=None)
    return Load(device, at, kv_bytes, used, step, running, len(usages) - running, busy, shares, queued, least)


def freeness(load: Load) -> float:
    """Steps that it can go on; below 0 where somebody waits for memory or time that is not there."""
    return steps(load.kv_bytes - load.used_bytes, load.step_bytes, load.busy)


def steps(free_bytes: float, step_bytes: float, busy: float) -> float:
    """Freeness by its parts: memory, what a step takes of it, and the share of time that is needed."""
    of_memory = free_bytes / step_bytes if step_bytes > 0 else _NEVER
    if busy > 0:
        of_time = FULL_STEPS * (1 - busy)
        return of_time if of_time < of_memory else of_memory
    return of_memory


class Total(NamedTuple):
    """Of several devices."""

    devices: int
    free_bytes: float
    step_bytes: float
    kv_bytes: float
    busy: float


def total(loads: Sequence[Load]) -> Total:
    free = step = kv = busy = 0.0
    for load in loads:
        free += load.kv_bytes - load.used_bytes - load.queued_bytes
        step += load.step_bytes
        kv += load.kv_bytes
        busy += load.busy
    return Total(len(loads), free, step, kv, busy)


def pooled(fleet: Total, idle: int = 0) -> float:
    """Freeness of all together, as if they were one device: one that is idle is not infinitely free for the others.
    `idle`: so many more, each like the mean of them and without work."""
    count = max(1, fleet.devices)
    return steps(fleet.free_bytes + idle * fleet.kv_bytes / count, fleet.step_bytes, fleet.busy / (count + idle))


def without(fleet: Total, leaving: Load) -> float:
    """Freeness of all together, when that device has left and its requests stay."""
    if fleet.devices == 1:
        return -_NEVER if leaving.requests else _NEVER
    return steps(fleet.free_bytes - leaving.kv_bytes, fleet.step_bytes, fleet.busy / (fleet.devices - 1))


# ── who to whom ───────────────────────────────────────────────────────────────────────────────────────────────────────


def pairs(
    loads: Iterable[Load], draining: frozenset[int], low: float = LOW_STEPS, high: float = HIGH_STEPS
) -> list[tuple[int, int]]:
    """Sources, the fullest first, each with the freest target that is left, if one of its requests may go there.

    A device that drains is the fullest, whatever it says, and no target. No device is both source and target."""
    assert low < high, f"a device with a freeness between {high} and {low} would give and take"
    sources, targets = [], []  # no two have the same number, so the loads themselves are never compared
    for load in loads:
        if load.device in draining:
            if load.requests:
                sources.append((-_NEVER, load.device, load))
            continue
        free = freeness(load)
        if free > high:
            targets.append((-free, load.device, load))
        elif free < low and load.requests:
            sources.append((free, load.device, load))
    found: list[tuple[int, int]] = []
    if not sources:
        return found
    sources.sort()
    targets.sort()
    for free, _, source in sources:
        if len(found) == len(targets):
            break
        target = targets[len(found)][2]
        if helps(source, target, free == -_NEVER, low, source.least_bytes):
            found.append((source.device, target.device))
    return found


def helps(source: Load, target: Load, drains: bool, low: float = LOW_STEPS, request_bytes: float | None = None) -> bool:
    """Whether it brings the two nearer to each other that a request of so many bytes goes, and does not fill the
    target. `request_bytes`: None for a mean one."""
    part = 1 / max(1, source.running + (source.waiting > 0))
    step, busy = source.step_bytes * part, source.busy * part
    used = source.used_bytes * part if request_bytes is None else request_bytes
    taken = steps(target.kv_bytes - target.used_bytes - used, target.step_bytes + step, target.busy + busy)
    if taken <= low:
        return False
    if drains:
        return True
    left = source.kv_bytes - source.used_bytes + used
    if left < 0:  # it is short of memory, and by fewer steps the fewer share in that
        step = 0.0
    given = steps(left, source.step_bytes - step, source.busy - busy)
    return abs(taken - given) < freeness(target) - freeness(source)


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
