"""How many steps each decode batch makes in one round of weighted round robin (Aegaeon, §4.3). Pure.

In a round every batch makes tokens that last its readers equally long, its cover: it makes cover / tbt steps, and holds
the device for longer if it is slower. The paper writes this as q = c / (n * (alpha - S)) seconds: n is tbt / step, S
the sum of all 1/n, c what the switches of a round take. Such a round takes alpha times its cover, so that of its tokens
min(1, 1/alpha) are on time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import msgspec

STEPS_MOST = 1 << 16  # as good as no quota: a round is planned again when a batch comes or goes
STEPS_LEAST = 8  # of the batch that is read fastest; fewer are not worth a switch
ALPHA_LEAST = 0.5  # run at most twice as fast as all read together
SPARE_LEAST = 0.05  # of the device, for switches; with less, rounds would grow without end
HIDDEN = 0.9  # of a load, while others step
TURN_PER_LOAD = 1.1  # a turn so long hides the load of the next model
ROUND_PER_TTFT = 0.8  # a round so long gives a new request its first turn in time
ALPHA_OVERLOADED = 1.05


class Batch(NamedTuple):
    step_s: float  # one decode step of the whole batch
    tbt_s: float  # its readers' time between two tokens


class Round(msgspec.Struct, frozen=True):
    steps: list[int]  # of each batch, at least 1
    alpha: float  # how long the round takes, over how long its tokens last
    overloaded: bool  # no quota keeps pace: batches must go elsewhere


def plan_round(
    batches: Sequence[Batch], loads_s: Sequence[float], switch_s: float, prefetch: bool, ttft_s: float
) -> Round:
    """Equal covers, as in the paper, also where its formula has no answer: S above alpha, no overhead, one model.

    `loads_s`: to bring in each distinct model, 0 if it stays; `prefetch`: the next one comes in while one steps. A
    round is as long as hides a load, unless `ttft_s` is too short for that; to keep pace goes before both."""
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
    """As published, for comparison: alpha = max(c * max(1/n) / quota_s_most + S, 0.5), so no quota exceeds its most."""
    shares, overhead = _shares(batches), _seconds(overhead_s)
    # This is alpha - S; to subtract would lose all digits where S is large.
    spare = max(overhead * max(shares) / _seconds(quota_s_most), ALPHA_LEAST - sum(shares))
    alpha = sum(shares) + spare
    return Round(_steps(batches, overhead / spare), alpha, overloaded=alpha > 1.0)


def once_around(models: Sequence[Hashable], current: Hashable | None) -> list[int]:
    """The places of `models` in the order of their turns: the current model's first, which spares a switch, and those
    of one model side by side (§4.3); else as they are, going around."""
    distinct = list(dict.fromkeys(models))
    start = distinct.index(current) if current in distinct else 0
    turn = {model: (place - start) % len(distinct) for place, model in enumerate(distinct)}
    return sorted(range(len(models)), key=lambda place: turn[models[place]])


# ── so that any number gives a round ──────────────────────────────────────────────────────────────────────────────────

_SHORTEST_S, _LONGEST_S = 1e-6, 1e6


def _seconds(value: float) -> float:
    return min(max(value, _SHORTEST_S), _LONGEST_S)


def _shares(batches: Sequence[Batch]) -> list[float]:
    """1/n of each: what it needs of the device to keep pace."""
    return [_seconds(batch.step_s) / _seconds(batch.tbt_s) for batch in batches]


def _steps(batches: Sequence[Batch], cover_s: float) -> list[int]:
    return [max(1, round(min(cover_s / _seconds(batch.tbt_s), STEPS_MOST))) for batch in batches]
