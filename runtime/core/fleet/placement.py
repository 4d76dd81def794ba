"""Moves of models from a placement to the next placement, and the first place of a newly wanted model. Pure.

A model serves at its old place until every part has reached the new place, so during a move the model takes memory at
both places. Moves go in rounds; within a round, a device takes part in at most one move. If no move can go first
because moves wait for each other's room, a model leaves for the host and comes in again in a later round. A model does
not serve while it is on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.core.device.request import ModelKey
from runtime.core.fleet.kvpr import Candidate, DeviceRoom, groups, least_pressed, score


class ModelMove(NamedTuple):
    """Move of a model's parts: the part of each source goes to the target with the same index.

    Without targets, the parts go to the host. Without sources, the parts come from the host."""

    model: ModelKey
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    part_bytes: int  # weights of a part


def changes(models: Sequence[Candidate], placed: dict[ModelKey, tuple[int, ...]]) -> list[ModelMove]:
    """Moves from the models' present devices to their devices in `placed`. A part on a wanted device stays."""
    moves = []
    for model in models:
        wanted, part_bytes = placed[model.model], model.part.weight_bytes
        targets = tuple(device for device in wanted if device not in model.devices)
        sources = tuple(device for device in model.devices if device not in wanted)
        if targets or sources:
            moves.append(ModelMove(model.model, sources, targets, part_bytes))
    return moves


def rounds(moves: Sequence[ModelMove], free_bytes: Sequence[int]) -> list[list[ModelMove]]:
    """Rounds of moves in an order in which no device ever lacks memory.

    `free_bytes` is the free memory of each device before the first move. The caller guarantees that no device lacks
    memory before the first move or after the last. A model in the way may take two moves, over the host."""
    free, found = list(free_bytes), []
    pending = sorted(moves, key=lambda move: (len(move.targets) > 0, move.part_bytes, move.model))
    while pending:
        chosen = _possible(pending, free)
        if chosen:
            pending = [move for move in pending if move not in chosen]
        else:
            parked = _in_the_way(pending)
            pending[pending.index(parked)] = parked._replace(sources=())
            chosen = [parked._replace(targets=())]
        for move in chosen:
            for device in move.targets:
                free[device] -= move.part_bytes
                assert free[device] >= 0, f"device {device} has no room for {move.model}"
        for move in chosen:
            for device in move.sources:
                free[device] += move.part_bytes
        found.append(chosen)
    return found


def _possible(pending: Sequence[ModelMove], free: Sequence[int]) -> list[ModelMove]:
    """Moves with room now; no two of the moves share a device."""
    busy: set[int] = set()
    chosen = []
    for move in pending:
        devices = {*move.sources, *move.targets}
        if not devices & busy and all(free[device] >= move.part_bytes for device in move.targets):
            busy |= devices
            chosen.append(move)
    return chosen


def _in_the_way(pending: Sequence[ModelMove]) -> ModelMove:
    """Move of the smallest part among the moves whose sources hold memory wanted by a pending move."""
    wanted = {device for move in pending for device in move.targets}
    blocking = [move for move in pending if wanted.intersection(move.sources)]
    assert blocking, f"there is no room for {', '.join(move.model for move in pending)}"
    return min(blocking, key=lambda move: (move.part_bytes, move.model))


def activate(
    model: Candidate,
    rooms: Sequence[DeviceRoom],
    load_s: Sequence[float],
    ttft_s: float,
    nodes: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Devices for a model without a place: the devices with the least pressure, weighted by the load time.

    Not every host has the model in its cache, so load times differ: `load_s` is the load time on each device, and a
    load time of `ttft_s` doubles the pressure. Returns () if no node has room for every part."""
    part = model.part
    scores = [score(room, part) * (1 + wait_s / ttft_s) for room, wait_s in zip(rooms, load_s, strict=True)]
    best = least_pressed(scores, groups(len(rooms), nodes), model.parts)
    return () if best is None else best[1]
