"""Which device each model lives on, by the pressure on the memory left for KV cache (Prism, §6.1, Algorithm 1). Pure.

The pressure (KVPR) of a device is the demand of its models over its memory without their weights. Here it is always the
one that a placement would bring about, with the model counted in, and a device without room has none to offer.
"""

from __future__ import annotations

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
    """A model to be placed."""

    model: ModelKey
    demand: float
    weight_bytes: int
    kv_bytes_least: int  # one request of its longest length
    move_s: float  # to load it elsewhere
    device: int | None = None  # where it is
    moved_at: float = -_NEVER


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
    models: Sequence[Candidate], device_bytes: Sequence[int], now: float, gain_least: float = 0.0
) -> dict[ModelKey, int | None]:
    """A device for each model, by its place in `device_bytes`; None where there is no room for it.

    A model moves if that lowers the pressure by GAIN_LEAST of what it is and by `gain_least` (the paper's tau), and if
    it pays for its load. So moves are few, and the bound of the paper's appendix does not hold."""
    rooms = [Room(size) for size in device_bytes]
    placed: dict[ModelKey, int | None] = {}
    for model in sorted(models, key=lambda model: (-model.demand, -model.weight_bytes, model.model)):
        device = _device(model, [score(room, model) for room in rooms], now, gain_least)
        placed[model.model] = device
        if device is not None:
            rooms[device].add(model)
    return placed


def _device(model: Candidate, scores: Sequence[float], now: float, gain_least: float) -> int | None:
    best = min(range(len(scores)), key=lambda device: (scores[device], device), default=None)
    if best is None or scores[best] == _NEVER:
        return None
    if model.device is None or scores[model.device] == _NEVER:
        return best
    return best if _pays(model, scores[model.device], scores[best], now, gain_least) else model.device


def _pays(model: Candidate, here: float, there: float, now: float, gain_least: float) -> bool:
    gain = here - there
    saved_s = MOVED_AGAIN_S * gain / here
    rested = now - model.moved_at > MOVED_AGAIN_S
    return gain > max(gain_least, GAIN_LEAST * here) and saved_s > model.move_s and rested
