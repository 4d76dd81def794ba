"""How long a model without requests is worth its pages, learnt from past gaps between the model's requests. Pure.

A gap lasts from the end of a model's last request to the arrival of the next request. Under a threshold of T seconds, a
gap of I seconds costs `hold` * min(I, T), and a `reactivation` as well if the gap outlasts T. Over the observed gaps,
the cheapest T is the length of a gap or the smallest allowed T: between two gap lengths only the cost of holding grows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

PRIOR_S = 45.0  # the best threshold for all models alike, as Prism measured it (OSDI'26)
LEAST_S, MOST_S = 15.0, 900.0
ACTIVATIONS_LEAST = 3  # the threshold is at least 3 times the model's activation time: slow models stay longer
GAPS_MOST, GAPS_LEAST = 512, 20  # gaps in a sample; with fewer than 20 the prior holds
MEMORY_S = 24 * 3600.0
RECOMPUTE_S = 60.0
HYSTERESIS = 0.2


class IdlePrice(NamedTuple):
    """Costs of holding a model and of waiting for a model, both in the caller's unit."""

    hold: float  # cost of the model's pages per second; 0: no other model wants the pages
    reactivation: float  # cost of loading the model again


class IdleGaps:
    """Latest gaps of a model; gaps older than a day are forgotten.

    Gaps shorter than the least threshold are not kept: short gaps cost the same under every threshold and would crowd
    out the longer gaps, on which the choice depends."""

    __slots__ = ("_ended",)

    def __init__(self) -> None:
        self._ended: deque[tuple[float, float]] = deque(maxlen=GAPS_MOST)  # end and length of each gap, in seconds

    def add(self, gap_s: float, now: float) -> None:
        if gap_s > LEAST_S:
            self._ended.append((now, gap_s))

    def recent(self, now: float) -> list[float]:
        """Lengths of the gaps in seconds, the oldest gap first."""
        while self._ended and self._ended[0][0] < now - MEMORY_S:
            self._ended.popleft()
        return [gap_s for _, gap_s in self._ended]


def threshold_s(gaps: Sequence[float], activation_s: float, price: IdlePrice | None) -> float:
    """Cheapest idle threshold in seconds for the gaps of a model that takes `activation_s` seconds to load.

    With fewer than GAPS_LEAST gaps, returns the prior. If the price is unknown (None), holding a model for PRIOR_S is
    taken to cost as much as a reactivation: under such a price (ski rental) the prior costs at most twice the optimum.
    The threshold is at least LEAST_S and ACTIVATIONS_LEAST activations, and at most MOST_S."""
    least_s = min(MOST_S, max(LEAST_S, ACTIVATIONS_LEAST * activation_s))
    if len(gaps) < GAPS_LEAST:
        return max(least_s, PRIOR_S)
    return _cheapest_s(sorted(gaps), least_s, price or IdlePrice(hold=1.0, reactivation=PRIOR_S))


def _cheapest_s(gaps: list[float], least_s: float, price: IdlePrice) -> float:
    """Cheapest threshold among `least_s` and the gaps, or the shortest of equally cheap thresholds.

    `gaps` are sorted, shortest first. A single pass keeps the running cost over the gaps."""
    shorter = bisect_right(gaps, least_s)
    shorter_s, longer = sum(gaps[:shorter]), len(gaps) - shorter
    best_s, best = least_s, price.hold * (shorter_s + least_s * longer) + price.reactivation * longer
    for gap_s in gaps[shorter : bisect_right(gaps, MOST_S)]:
        shorter_s, longer = shorter_s + gap_s, longer - 1
        cost = price.hold * (shorter_s + gap_s * longer) + price.reactivation * longer
        if cost < best:
            best_s, best = gap_s, cost
    return best_s


class IdleThreshold:
    """Idle threshold of a model, computed anew every RECOMPUTE_S; changes below HYSTERESIS are ignored."""

    __slots__ = ("_due_at", "_gaps", "_left_at", "_value_s")

    def __init__(self) -> None:
        self._gaps = IdleGaps()
        self._left_at: float | None = None  # end of the last request; None: the model has requests, or never had any
        self._value_s = PRIOR_S
        self._due_at = float("-inf")

    def left(self, now: float) -> None:
        """Note the end of the model's last request."""
        if self._left_at is None:
            self._left_at = now

    def arrived(self, now: float) -> None:
        """Note the arrival of a request, whether or not the model has requests already."""
        if self._left_at is not None:
            self._gaps.add(now - self._left_at, now)
            self._left_at = None

    @property
    def left_at(self) -> float | None:
        """When the last request ended, in seconds; None: the model has requests, or never had any."""
        return self._left_at

    def gaps(self, now: float) -> list[float]:
        """Lengths of the gaps in seconds that the threshold is learnt from."""
        return self._gaps.recent(now)

    def value(self, now: float, activation_s: float, price: IdlePrice | None = None) -> float:
        """Threshold in seconds: a model idle for longer is no longer worth its pages."""
        if now < self._due_at:
            return self._value_s
        self._due_at = now + RECOMPUTE_S
        fresh_s = threshold_s(self._gaps.recent(now), activation_s, price)
        if abs(fresh_s - self._value_s) > HYSTERESIS * self._value_s:
            self._value_s = fresh_s
        return self._value_s
