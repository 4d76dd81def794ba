"""How many steps each decode batch makes in one round of weighted round robin (Aegaeon, §4.3). Pure.

In a round each batch makes enough tokens for its readers to read for a time equal for every batch: the cover. A batch
makes cover / tbt steps, and a slower batch holds the device longer. The paper writes this as
q = c / (n * (alpha - S)) seconds: n is tbt / step, S the sum of 1/n over the batches, c the time of a round's switches.
A round takes alpha times its cover, and min(1, 1/alpha) of its tokens are on time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import msgspec

STEPS_MOST = 1 << 16  # as good as no quota: a round is planned again when a batch comes or goes
STEPS_LEAST = 8  # steps of the batch read fastest; fewer steps are not worth a switch
ALPHA_LEAST = 0.5  # tokens are made at most twice as fast as the batches together read
SPARE_LEAST = 0.05  # part of the device left for switches; with less, rounds would grow without end
HIDDEN = 0.9  # part of a load hidden behind the steps of loaded models
TURN_PER_LOAD = 1.1  # a turn of this length, in load times, hides the load of the next model
ROUND_PER_TTFT = 0.8  # a round of this length, in TTFTs, gives a new request its first turn in time
ALPHA_OVERLOADED = 1.05


class Batch(NamedTuple):
    step_s: float  # a decode step of the whole batch
    tbt_s: float  # time between two tokens that readers expect


class Round(msgspec.Struct, frozen=True):
    steps: list[int]  # by batch, at least 1
    alpha: float  # duration of the round over the time that its tokens last
    overloaded: bool  # no quota keeps pace: batches must go elsewhere


def plan_round(
    batches: Sequence[Batch], loads_s: Sequence[float], switch_s: float, prefetch: bool, ttft_s: float
) -> Round:
    """Plans a round with equal covers, as in the paper, also where the paper's formula has no answer: S above alpha, no
    overhead, a single model.

    The round is long enough to hide a load, unless `ttft_s` is too short; keeping pace goes before both.

    Args:
        loads_s: time to bring in each distinct model, 0 for a model that stays on the device.
        switch_s: time of a switch between two models.
        prefetch: whether the next model comes in while the present model steps.
        ttft_s: objective by which a new request needs its first turn."""
    share = sum(_shares(batches))
    if len(loads_s) <= 1:
        return Round([STEPS_MOST] * len(batches), alpha=share, overloaded=share > ALPHA_OVERLOADED)
    loads = [min(max(load, 0.0), _LONGEST_S) for load in loads_s]
    overhead = len(loads) * _seconds(switch_s) + sum(loads) * (1.0 - HIDDEN if prefetch else 1.0)
    if prefetch:
        hiding = TURN_PER_LOAD * max(loads) * len(batches) / share
    else:
        hiding = overhead / max(ALPHA_LEAST - share, SPARE_LEAST)
    least = STEPS_LEAST * min(_seconds(batch.tbt_s) for batch in batches)
    in_time = max(least, (ROUND_PER_TTFT * _seconds(ttft_s) - overhead) / share)
    keeping_pace = overhead / max(1.0 - share, SPARE_LEAST)
    cover = max(least, keeping_pace, min(hiding, in_time))
    alpha = share + overhead / cover
    overloaded = share >= 1.0 - SPARE_LEAST or alpha > ALPHA_OVERLOADED
    return Round(_steps(batches, cover), alpha, overloaded)


def paper_round(batches: Sequence[Batch], overhead_s: float, quota_s_most: float = 4.0) -> Round:
    """Plans a round as published, for comparison: alpha = max(c * max(1/n) / quota_s_most + S, 0.5).

    No quota exceeds `quota_s_most` seconds."""
    shares, overhead = _shares(batches), _seconds(overhead_s)
    # `spare` is alpha - S, computed without the subtraction, which would lose every digit where S is large.
    spare = max(overhead * max(shares) / _seconds(quota_s_most), ALPHA_LEAST - sum(shares))
    alpha = sum(shares) + spare
    return Round(_steps(batches, overhead / spare), alpha, overloaded=alpha > 1.0)


def once_around(models: Sequence[Hashable], current: Hashable | None) -> list[int]:
    """Positions in `models` in the order of turns, going around from the current model, which spares a switch.

    Positions of equal models stand side by side (§4.3)."""
    distinct = list(dict.fromkeys(models))
    start = distinct.index(current) if current in distinct else 0
    turn = {model: (place - start) % len(distinct) for place, model in enumerate(distinct)}
    return sorted(range(len(models)), key=lambda place: turn[models[place]])


# ── so that any number gives a round ──────────────────────────────────────────────────────────────────────────────────

_SHORTEST_S, _LONGEST_S = 1e-6, 1e6


def _seconds(value: float) -> float:
    return min(max(value, _SHORTEST_S), _LONGEST_S)


def _shares(batches: Sequence[Batch]) -> list[float]:
    """Share 1/n of the device that each batch needs to keep pace."""
    return [_seconds(batch.step_s) / _seconds(batch.tbt_s) for batch in batches]


def _steps(batches: Sequence[Batch], cover_s: float) -> list[int]:
    return [max(1, round(min(cover_s / _seconds(batch.tbt_s), STEPS_MOST))) for batch in batches]
