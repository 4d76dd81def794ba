"""How models get from one placement to another, and where one that is asked for comes in first. Pure.

A model serves where it is until all of its parts are where they are to be, so for that time it takes memory at both.
Moves go in rounds: within one, each device has part in at most one move. Where nobody can go first because each waits
for the room of another, one leaves for the host and comes in again later; while it is there it does not serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.policy.kvpr import Candidate, Room, groups, least_pressed, score
from runtime.request import ModelKey


class Move(NamedTuple):
    """Of a model's parts, each to the target that stands at the same place. Without targets: to the host."""

    model: ModelKey
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    part_bytes: int  # of the weights


def changes(models: Sequence[Candidate], placed: dict[ModelKey, tuple[int, ...]]) -> list[Move]:
    """From where the models are to where they are placed. A part stays where it may."""
    moves = []
    for model in models:
        wanted, part_bytes = placed[model.model], model.part.weight_bytes
        targets = tuple(device for device in wanted if device not in model.devices)
        sources = tuple(device for device in model.devices if device not in wanted)
        if targets or sources:
            moves.append(Move(model.model, sources, targets, part_bytes))
    return moves


def rounds(moves: Sequence[Move], free_bytes: Sequence[int]) -> list[list[Move]]:
    """All moves, in an order in which no device ever lacks memory. `free_bytes` of each device before the first; no
    device lacks any then, nor when all have moved."""
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


def _possible(pending: Sequence[Move], free: Sequence[int]) -> list[Move]:
    """Those for which there is room now, each with devices of its own."""
    busy: set[int] = set()
    chosen = []
    for move in pending:
        devices = {*move.sources, *move.targets}
        if not devices & busy and all(free[device] >= move.part_bytes for device in move.targets):
            busy |= devices
            chosen.append(move)
    return chosen


def _in_the_way(pending: Sequence[Move]) -> Move:
    """The smallest that holds memory which another waits for."""
    wanted = {device for move in pending for device in move.targets}
    blocking = [move for move in pending if wanted.intersection(move.sources)]
    assert blocking, f"there is no room for {', '.join(move.model for move in pending)}"
    return min(blocking, key=lambda move: (move.part_bytes, move.model))


def activate(
    model: Candidate, rooms: Sequence[Room], load_s: Sequence[float], ttft_s: float, nodes: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Where a model that is nowhere comes in: where the pressure would be least, and the less the sooner it is there,
    for not every host has it in its cache. `load_s` on each device; none if there is no room for all of its parts."""
    part = model.part
    scores = [score(room, part) * (1 + wait_s / ttft_s) for room, wait_s in zip(rooms, load_s, strict=True)]
    best = least_pressed(scores, groups(len(rooms), nodes), model.parts)
    return () if best is None else best[1]
