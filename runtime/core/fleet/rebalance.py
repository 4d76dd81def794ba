"""Choice of devices that give requests to freer devices, and choice of the requests (Llumnix, §4.4). Pure.

A device reports only sums: its memory for keys and values, the memory used by its requests, and the memory taken by
each step. The *virtual usage* of a request may exceed the memory held. The request at the head of a queue uses the
memory it waits for, and a request of high priority uses some space around it. The device then looks fuller than it is
and is relieved like a full device. *Freeness* is the number of steps that a device's batch can still make. If several
models share a device, the time of the device counts as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from runtime.core.device.request import ModelKey, RequestId
from runtime.core.fleet.headroom import headroom
from runtime.core.fleet.roles import RoleView
from store.contract.priorities import Priority

FULL_STEPS = 1000.0  # freeness by time of a device whose time no request needs
LOW_STEPS, HIGH_STEPS = 10.0, 60.0  # freeness: below 10, a device gives requests away; above 60, a device takes some
GAP_LEAST = 0.2  # difference of two devices' shares of time: a smaller gap is not worth loading a model
PART, PART_MOST = 0.25, 8  # share and largest number of a model's requests that move at a time
_NEVER = float("inf")


class RequestMemory(msgspec.Struct, frozen=True):
    """Memory of a device used by a single request."""

    request: RequestId
    model: ModelKey
    priority: Priority
    kv_bytes: float  # held by the request; while the request waits, the memory waited for
    token_bytes: float  # taken with each step
    waits: bool = False  # the device has no keys and values of the request yet
    moves: bool = False  # the request is on its way to another device


class LackingModel(msgspec.Struct, frozen=True):
    """Requests of a model that together need more memory than a device has beside the weights of the model.

    No other model of the device causes such a lack: a larger or a second device is needed."""

    requests: int
    kv_bytes: float  # held and waited for
    weight_bytes: float


class Load(msgspec.Struct, frozen=True):
    """Report of a device about its load."""

    device: int
    at: float  # seconds
    kv_bytes: float  # memory for keys and values
    used_bytes: float = 0.0  # virtual usage of the device's requests
    step_bytes: float = 0.0  # memory taken by a step of every request
    running: int = 0
    waiting: int = 0
    busy: float = 0.0  # share of the device's time that its requests need to keep their pace
    shares: dict[ModelKey, float] = {}  # `busy` by model, if several models share the device
    queued_bytes: float = 0.0  # memory that requests behind the head of the queue wait for
    least_bytes: float | None = None  # usage of the smallest request that may move; None: single requests are unknown
    lacking: dict[ModelKey, LackingModel] = {}
    roles: RoleView | None = None  # for the choice of roles, if roles are chosen
    node: int | None = None  # number of the device's node, if whole nodes come and go; None: the device stays

    @property
    def requests(self) -> int:
        return self.running + self.waiting


def load_of(
    device: int,
    at: float,
    kv_bytes: float,
    usages: Sequence[RequestMemory],
    shares: dict[ModelKey, float],
) -> Load:
    """Load of a device at the time `at`, in seconds, summed up from the usages of its requests.

    Args:
        device: number of the device.
        at: time of the report.
        kv_bytes: memory of the device for keys and values.
        usages: running and waiting requests; waiting requests in the order of the queue.
        shares: share of the device's time that each model needs."""
    used = queued = step = busy = 0.0
    running, high, head = 0, 0, True
    for usage in usages:
        if not usage.waits:
            running += 1
            high += usage.priority is Priority.HIGH
        if not usage.waits or head:
            used += usage.kv_bytes
            step += usage.token_bytes
        else:
            queued += usage.kv_bytes
        head = head and not usage.waits
    free = headroom(high)
    used += free * kv_bytes
    for share in shares.values():
        busy += share
    busy += free
    least = min([usage.kv_bytes for usage in usages if not usage.moves], default=None)
    return Load(device, at, kv_bytes, used, step, running, len(usages) - running, busy, shares, queued, least)


def freeness(load: Load) -> float:
    """Number of steps that the device's batch can still make; below 0 if requests wait for memory or time."""
    return steps(load.kv_bytes - load.used_bytes, load.step_bytes, load.busy)


def steps(free_bytes: float, step_bytes: float, busy: float) -> float:
    """Freeness from free memory, the memory taken by a step, and the share of the device's time that is needed.

    Returns the smaller of freeness by memory and freeness by time."""
    of_memory = free_bytes / step_bytes if step_bytes > 0 else _NEVER
    if busy > 0:
        of_time = FULL_STEPS * (1 - busy)
        return of_time if of_time < of_memory else of_memory
    return of_memory


class DevicesTotal(NamedTuple):
    """Sums over the loads of several devices."""

    devices: int
    free_bytes: float
    step_bytes: float
    kv_bytes: float
    busy: float


def total(loads: Sequence[Load]) -> DevicesTotal:
    free = step = kv = busy = 0.0
    for load in loads:
        free += load.kv_bytes - load.used_bytes - load.queued_bytes
        step += load.step_bytes
        kv += load.kv_bytes
        busy += load.busy
    return DevicesTotal(len(loads), free, step, kv, busy)


def pooled(fleet: DevicesTotal, idle: int = 0) -> float:
    """Freeness of the fleet as a single large device: an idle device is not infinitely free for the remaining devices.

    `idle` adds that many devices without work, each with the mean memory of the fleet's devices."""
    count = max(1, fleet.devices)
    return steps(fleet.free_bytes + idle * fleet.kv_bytes / count, fleet.step_bytes, fleet.busy / (count + idle))


def without(fleet: DevicesTotal, leaving: Sequence[Load]) -> float:
    """Freeness of the fleet after the devices have left and their requests have moved to the remaining devices."""
    remaining = fleet.devices - len(leaving)
    if remaining == 0:
        return -_NEVER if any([load.requests for load in leaving]) else _NEVER
    freed = sum([load.kv_bytes for load in leaving])
    return steps(fleet.free_bytes - freed, fleet.step_bytes, fleet.busy / remaining)


# ── who to whom ───────────────────────────────────────────────────────────────────────────────────────────────────────


def pairs(
    loads: Iterable[Load], draining: frozenset[int], low: float = LOW_STEPS, high: float = HIGH_STEPS
) -> list[tuple[int, int]]:
    """Pairs of source and target devices: the fullest source with the freest target, and so on down.

    A source without a request that may move to its target is left out. A draining device counts as the fullest,
    whatever its report, and is no target. No device is both source and target."""
    assert low < high, f"a device with a freeness between {high} and {low} would give and take"
    sources, targets = [], []  # numbers of devices differ, so sorting never compares the loads themselves
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
    """Whether moving a request brings the two devices' freeness nearer together without filling the target.

    From a source that `drains`, a request may move to any target that the request does not fill. `low` is the freeness
    below which a target counts as full. `request_bytes` is the usage of the request; None: the mean of the source."""
    part = 1 / max(1, source.running + (source.waiting > 0))
    step, busy = source.step_bytes * part, source.busy * part
    used = source.used_bytes * part if request_bytes is None else request_bytes
    taken = steps(target.kv_bytes - target.used_bytes - used, target.step_bytes + step, target.busy + busy)
    if taken <= low:
        return False
    if drains:
        return True
    left = source.kv_bytes - source.used_bytes + used
    if left < 0:  # the source lacks memory: divided by a smaller step, the lack would look larger
        step = 0.0
    given = steps(left, source.step_bytes - step, source.busy - busy)
    return abs(taken - given) < freeness(target) - freeness(source)


# ── what ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pick(usages: Sequence[RequestMemory], room_bytes: float) -> RequestMemory | None:
    """Request to move to a target with `room_bytes` of memory; None if no request fits.

    The first waiting request is preferred: nothing of a waiting request has to be copied. Next come running requests of
    the lowest priority, the shortest first."""
    fits = [usage for usage in usages if not usage.moves and usage.kv_bytes <= room_bytes]
    head = next((usage for usage in fits if usage.waits), None)
    if head is not None:
        return head
    return min(fits, key=lambda usage: (usage.priority, usage.kv_bytes, usage.request), default=None)


def pick_model(source: Load, target: Load, drains: bool) -> ModelKey | None:
    """Model to move as a whole, in a fleet with a single place for each model; None if no model fits.

    The model has the largest share of the source's time that still makes the two devices more alike, and leaves the
    target some time. If the source drains, any share may move."""
    gap = source.busy - target.busy
    most = _NEVER if drains else gap / 2 if gap >= GAP_LEAST else 0.0
    fits = [(-share, model) for model, share in source.shares.items() if share <= most and target.busy + share < 1]
    return min(fits)[1] if fits else None


def pick_part(source: Load, target: Load) -> tuple[ModelKey, int] | None:
    """Model and number of its requests to move; None if no model lacks memory by itself, or the target has no room.

    At most a quarter of the requests moves at a time: the next report says whether more requests should follow. If the
    target does not have the model, the weights of the model need room as well."""
    found: tuple[float, ModelKey, int] | None = None
    for model, lack in source.lacking.items():
        weight_bytes = 0.0 if model in target.shares else lack.weight_bytes
        room_bytes = target.kv_bytes - target.used_bytes - target.queued_bytes - weight_bytes
        fits = int(max(0.0, room_bytes) / lack.kv_bytes * lack.requests)
        count = min(fits, PART_MOST, max(1, int(lack.requests * PART)))
        if lack.requests > 1 and count and (found is None or (-lack.kv_bytes, model) < found[:2]):
            found = -lack.kv_bytes, model, count
    return found and found[1:]
