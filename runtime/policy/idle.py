"""How long a model without requests is worth its pages, learnt from how long its requests stay away. Pure.

A gap lasts from the end of a model's last request to the arrival of its next. Under a threshold of T seconds a gap of I
costs `hold` * min(I, T), and one `reactivation` if it outlasts T. Over gaps like those that were seen, the T that costs
least is one of them, or the least T there may be: between two gaps only what holding costs grows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

PRIOR_S = 45.0  # the best threshold for all models alike, as Prism measured it (OSDI'26)
LEAST_S, MOST_S = 15.0, 900.0
ACTIVATIONS_LEAST = 3  # a model that comes slowly is not sent away for less than so many times what that takes
GAPS_MOST, GAPS_LEAST = 512, 20  # in a sample; with fewer the prior holds
MEMORY_S = 24 * 3600.0
RECOMPUTE_S = 60.0
HYSTERESIS = 0.2


class Price(NamedTuple):
    """What waiting for a model and holding it cost, both in the same unit, whichever that is."""

    hold: float  # its pages, for a second; 0: nobody else wants them
    reactivation: float


class Gaps:
    """The latest of one model, those older than a day forgotten. Gaps that end before the least threshold are not kept:
    they cost the same under every threshold, and would crowd out those that decide."""

    __slots__ = ("_ended",)

    def __init__(self) -> None:
        self._ended: deque[tuple[float, float]] = deque(maxlen=GAPS_MOST)  # when, and how long it was

    def add(self, gap_s: float, now: float) -> None:
        if gap_s > LEAST_S:
            self._ended.append((now, gap_s))

    def recent(self, now: float) -> list[float]:
        """Seconds, the oldest first."""
        while self._ended and self._ended[0][0] < now - MEMORY_S:
            self._ended.popleft()
        return [gap_s for _, gap_s in self._ended]


def threshold_s(gaps: Sequence[float], activation_s: float, price: Price | None) -> float:
    """`price` None: not known. The prior then says what the best guess is, and holding a model for so long is taken to
    cost as much as to bring it back: under that price (ski rental) the prior is at most twice as dear as the best."""
    least_s = min(MOST_S, max(LEAST_S, ACTIVATIONS_LEAST * activation_s))
    if len(gaps) < GAPS_LEAST:
        return max(least_s, PRIOR_S)
    return _cheapest_s(sorted(gaps), least_s, price or Price(hold=1.0, reactivation=PRIOR_S))


def _cheapest_s(gaps: list[float], least_s: float, price: Price) -> float:
    """Of `gaps`, shortest first, and `least_s`; the shortest of equals. In one pass, for costs over all gaps."""
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
    """One model's threshold, kept up to date; it moves only when it would move far."""

    __slots__ = ("_due_at", "_gaps", "_left_at", "_value_s")

    def __init__(self) -> None:
        self._gaps = Gaps()
        self._left_at: float | None = None  # None: it has requests, or never had any
        self._value_s = PRIOR_S
        self._due_at = float("-inf")

    def left(self, now: float) -> None:
        """No request is left."""
        if self._left_at is None:
            self._left_at = now

    def arrived(self, now: float) -> None:
        """A request came, the first of a while or another one."""
        if self._left_at is not None:
            self._gaps.add(now - self._left_at, now)
            self._left_at = None

    def value(self, now: float, activation_s: float, price: Price | None = None) -> float:
        """Seconds."""
        if now < self._due_at:
            return self._value_s
        self._due_at = now + RECOMPUTE_S
        fresh_s = threshold_s(self._gaps.recent(now), activation_s, price)
        if abs(fresh_s - self._value_s) > HYSTERESIS * self._value_s:
            self._value_s = fresh_s
        return self._value_s
