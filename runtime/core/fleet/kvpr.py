"""Placement of models on devices by the pressure on memory left for KV cache (Prism, §6.1, Algorithm 1). Pure.

The pressure (KVPR) of a device is the demand of its models over its memory without their weights. Pressure is always
computed as after a placement, with the placed model counted in. A device without room for the model has infinite
pressure.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from runtime.core.device.request import ModelKey

DEMAND_LEAST = 1e-9  # so that models without demand still spread by the memory left
MARGIN = 1.1  # memory for KV cache over the need of one request of the longest length for each model
GAIN_LEAST = 0.25  # part of the pressure at the model's place: a smaller gain is not worth a move
MOVED_AGAIN_S = 60.0  # least time between moves of a model; demand is a mean over 60 s, and a move must pay within 60 s
_NEVER = float("inf")


class Candidate(msgspec.Struct, frozen=True):
    """A complete model to be placed. Each of its `parts` gets a device of its own; the devices belong to a single
    node."""

    model: ModelKey
    demand: float
    weight_bytes: int
    kv_bytes_least: int  # KV cache of a request of the model's longest length
    move_s: float  # time to load the model at a new place
    devices: tuple[int, ...] = ()  # devices of the parts now
    moved_at: float = -_NEVER  # time of the last move
    parts: int = 1

    @property
    def part(self) -> Candidate:
        """Part of the model on a single device."""
        if self.parts == 1:
            return self
        weight_bytes, kv_bytes_least = -(-self.weight_bytes // self.parts), -(-self.kv_bytes_least // self.parts)
        return Candidate(self.model, self.demand / self.parts, weight_bytes, kv_bytes_least, self.move_s)


@dataclass(slots=True)
class DeviceRoom:
    """Room of a device, less the models placed so far."""

    kv_bytes: int  # memory of the device without the placed weights
    kv_bytes_least: int = 0  # sum over the placed models
    demand: float = 0.0  # sum over the placed models

    def add(self, model: Candidate) -> None:
        self.kv_bytes -= model.weight_bytes
        self.kv_bytes_least += model.kv_bytes_least
        self.demand += max(model.demand, DEMAND_LEAST)


def demand(tokens_per_s: float, token_bytes: float, tbt_s: float) -> float:
    """Demand of a model in bytes/s²: the rate at which it takes KV cache, over its TBT objective.

    The shorter the objective, the more urgent the demand."""
    return tokens_per_s * token_bytes / tbt_s


def fits(room: DeviceRoom, model: Candidate) -> bool:
    """Whether the device has room for the model: beside the weights, for the longest request of each model and a
    margin."""
    kv_bytes = room.kv_bytes - model.weight_bytes
    return kv_bytes > 0 and kv_bytes >= MARGIN * (room.kv_bytes_least + model.kv_bytes_least)


def score(room: DeviceRoom, model: Candidate) -> float:
    """Pressure of the device with the model placed on the device; infinite if the model does not fit."""
    if not fits(room, model):
        return _NEVER
    return (room.demand + max(model.demand, DEMAND_LEAST)) / (room.kv_bytes - model.weight_bytes)


def place(
    models: Sequence[Candidate],
    device_bytes: Sequence[int],
    now: float,
    gain_least: float = 0.0,
    nodes: Sequence[int] | None = None,
) -> dict[ModelKey, tuple[int, ...]]:
    """Devices of each model, as indices of `device_bytes`; () if no node has room for every part of the model.

    A placed model moves only if its last move is more than MOVED_AGAIN_S ago, and if the move lowers its pressure by
    more than GAIN_LEAST of the present pressure and by more than `gain_least` (the paper's tau), and pays for the time
    of loading. Moves are therefore few, and the bound in the paper's appendix does not hold.

    Args:
        models: models to place, with their present devices.
        device_bytes: memory of each device.
        now: seconds.
        gain_least: least gain of a move, in units of pressure.
        nodes: the node of each device; None: the devices belong to a single node."""
    rooms = [DeviceRoom(size) for size in device_bytes]
    by_node = groups(len(rooms), nodes)
    placed: dict[ModelKey, tuple[int, ...]] = {}
    for model in sorted(models, key=lambda model: (-model.demand, -model.weight_bytes, model.model)):
        part = model.part
        devices = _devices(model, [score(room, part) for room in rooms], by_node, now, gain_least)
        placed[model.model] = devices
        for device in devices:
            rooms[device].add(part)
    return placed


def groups(count: int, nodes: Sequence[int] | None) -> list[list[int]]:
    """Lists of devices, a list for each node."""
    found: dict[int, list[int]] = {}
    for device in range(count):
        found.setdefault(0 if nodes is None else nodes[device], []).append(device)
    return list(found.values())


def _devices(
    model: Candidate, scores: Sequence[float], by_node: Sequence[Sequence[int]], now: float, gain_least: float
) -> tuple[int, ...]:
    best = least_pressed(scores, by_node, model.parts)
    if best is None:
        return ()
    there, devices = best
    here = max((scores[device] for device in model.devices), default=_NEVER)
    if len(model.devices) != model.parts or here == _NEVER:
        return devices
    return devices if _pays(model, here, there, now, gain_least) else model.devices


def least_pressed(
    scores: Sequence[float], by_node: Sequence[Sequence[int]], parts: int
) -> tuple[float, tuple[int, ...]] | None:
    """Choose `parts` devices of a single node with the least pressure.

    Returns the highest pressure among the devices, and the devices; None if no node has room."""
    found: list[tuple[float, tuple[int, ...]]] = []
    for devices in by_node:
        least = heapq.nsmallest(parts, [(scores[device], device) for device in devices])
        if len(least) == parts and least[-1][0] < _NEVER:
            found.append((least[-1][0], tuple(sorted(device for _, device in least))))
    return min(found, default=None)


def _pays(model: Candidate, here: float, there: float, now: float, gain_least: float) -> bool:
    gain = here - there
    saved_s = MOVED_AGAIN_S * gain / here
    rested = now - model.moved_at > MOVED_AGAIN_S
    return gain > max(gain_least, GAIN_LEAST * here) and saved_s > model.move_s and rested
