"""Which device each model lives on, by the pressure on the memory left for KV cache (Prism, §6.1, Algorithm 1). Pure.

The pressure (KVPR) of a device is the demand of its models over its memory without their weights. Here it is always the
one that a placement would bring about, with the model counted in, and a device without room has none to offer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from runtime.request import ModelKey

DEMAND_LEAST = 1e-9  # so models that nobody asks for still spread by the memory that is left
MARGIN = 1.1  # over one request of the longest length for each model
GAIN_LEAST = 0.25  # of the pressure where it is: less is not worth a move
MOVED_AGAIN_S = 60.0  # at the earliest; demand is a mean over so long, and a move has to pay within it
_NEVER = float("inf")


class Candidate(msgspec.Struct, frozen=True):
    """A model to be placed, all of it; each of its `parts` on a device of its own, all of one node."""

    model: ModelKey
    demand: float
    weight_bytes: int
    kv_bytes_least: int  # one request of its longest length
    move_s: float  # to load it elsewhere
    devices: tuple[int, ...] = ()  # where its parts are
    moved_at: float = -_NEVER
    parts: int = 1

    @property
    def part(self) -> Candidate:
        """What one of its devices has of it."""
        if self.parts == 1:
            return self
        weight_bytes, kv_bytes_least = -(-self.weight_bytes // self.parts), -(-self.kv_bytes_least // self.parts)
        return Candidate(self.model, self.demand / self.parts, weight_bytes, kv_bytes_least, self.move_s)


@dataclass(slots=True)
class Room:
    """What is placed on one device, by the time."""

    kv_bytes: int  # its memory without the weights
    kv_bytes_least: int = 0
    demand: float = 0.0

    def add(self, model: Candidate) -> None:
        self.kv_bytes -= model.weight_bytes
        self.kv_bytes_least += model.kv_bytes_least
        self.demand += max(model.demand, DEMAND_LEAST)


def demand(tokens_per_s: float, kv_bytes_per_token: float, tbt_s: float) -> float:
    """How fast a model takes KV cache, and the more urgently the shorter its objective: bytes/s, per second of it."""
    return tokens_per_s * kv_bytes_per_token / tbt_s


def fits(room: Room, model: Candidate) -> bool:
    """Beside all weights, one longest request of each model, and a margin."""
    kv_bytes = room.kv_bytes - model.weight_bytes
    return kv_bytes > 0 and kv_bytes >= MARGIN * (room.kv_bytes_least + model.kv_bytes_least)


def score(room: Room, model: Candidate) -> float:
    """The pressure with the model on this device; infinite if it does not fit."""
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
    """The devices of each model, by their places in `device_bytes`; none where there is no room for all of its parts.

    A model moves if that lowers the pressure by GAIN_LEAST of what it is and by `gain_least` (the paper's tau), and if
    it pays for its load. So moves are few, and the bound of the paper's appendix does not hold. `nodes`: that of each
    device, if there are several."""
    rooms = [Room(size) for size in device_bytes]
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
    """Devices by their node."""
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
    """So many devices of one node, and the pressure on the one of them that has the most; None: nowhere is room."""
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
