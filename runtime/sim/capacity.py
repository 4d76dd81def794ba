"""How many models one GPU can serve: the most at which attainment, in the mean over seeds, is still as asked."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from runtime.costs import Profile
from runtime.request import Objective
from runtime.sim.fleet import simulate
from runtime.sim.workload import Workload
from runtime.sim.world import Result

Measure = Literal["token_attainment", "first_token_attainment", "min"]
Tuning = tuple[tuple[str, float], ...]  # names and values

STEP = 0.5  # models per GPU
SCANNED = 3  # steps that fail in a row: attainment is not monotone where models differ
MOST = 256.0  # models per GPU: what carries more is asked for nothing
FIRST = 8.0  # models per GPU, where the search begins
FINALISTS = 3  # of the tunings, the best with the first seed, are tried with the others
PROCESSES = 2


class Run(NamedTuple):
    """One simulation of a scenario."""

    models: int
    seed: int
    tuning: Tuning = ()


@dataclass(frozen=True)
class Scenario:
    """All but what a search varies. `workload` makes one of a number of models and a seed; it must pickle."""

    workload: Callable[[int, int], Workload]
    profile: Profile
    policy: str
    gpus: int
    objective: Objective

    def simulate(self, run: Run) -> Result:
        workload = self.workload(run.models, run.seed)
        tuning: dict[str, Any] = dict(run.tuning)
        return simulate(workload, self.profile, self.policy, self.gpus, self.objective, **tuning)


class Point(NamedTuple):
    """What a policy, at its best tuning, attains with so many models."""

    models_per_gpu: float
    attained: float  # mean over seeds
    by_seed: list[float]
    tuning: Tuning


A = TypeVar("A")
B = TypeVar("B")


class Each(Protocol):
    """`map`, or one in other processes."""

    def __call__(self, act: Callable[[A], B], items: Iterable[A], /) -> Iterable[B]: ...


@contextmanager
def processes(most: int = PROCESSES) -> Iterator[Each]:
    """A `map` over as many processes as there are cores, at most `most`."""
    count = min(most, len(os.sched_getaffinity(0)))
    if count < 2:
        yield map
        return
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        try:
            yield pool.map
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@dataclass
class Search:
    """A scenario's simulations, each made once, in the order in which a search asks for them."""

    scenario: Scenario
    seeds: Sequence[int]
    each: Each = map
    known: MutableMapping[Run, Result] = field(default_factory=dict)  # a mapping that keeps its items goes on later

    def capacity(self, measure: Measure, bar: float) -> float:
        """Models per GPU."""
        step = self._step
        count = largest(
            lambda steps: self._best(steps * step, measure).attained >= bar,
            first=max(1, round(FIRST * self.scenario.gpus / step)),
            most=round(MOST * self.scenario.gpus / step),
        )
        return count * step / self.scenario.gpus

    def curve(self, measure: Measure) -> list[Point]:
        """All that was looked at so far."""
        looked_at = {run.models for run in self.known if run.seed == self.seeds[-1]}
        return [self._best(models, measure) for models in sorted(looked_at)]

    @property
    def _step(self) -> int:
        return max(1, round(STEP * self.scenario.gpus))

    def _best(self, models: int, measure: Measure) -> Point:
        """Tunings race with the first seed; the best of them then run with the others too."""
        tunings = tunings_of(self.scenario.policy, self.scenario.gpus)
        finalists = tunings if len(tunings) <= FINALISTS else self._race(models, measure, tunings)
        self._results(Run(models, seed, tuning) for tuning in finalists for seed in self.seeds)
        points = [self._point(models, measure, tuning) for tuning in finalists]
        return max(points, key=lambda point: point.attained)

    def _race(self, models: int, measure: Measure, tunings: list[Tuning]) -> list[Tuning]:
        results = self._results(Run(models, self.seeds[0], tuning) for tuning in tunings)
        attained = {tuning: getattr(result, measure) for tuning, result in zip(tunings, results, strict=True)}
        return sorted(tunings, key=lambda tuning: -attained[tuning])[:FINALISTS]

    def _point(self, models: int, measure: Measure, tuning: Tuning) -> Point:
        by_seed = [getattr(self.known[Run(models, seed, tuning)], measure) for seed in self.seeds]
        return Point(models / self.scenario.gpus, fmean(by_seed), by_seed, tuning)

    def _results(self, runs: Iterable[Run]) -> list[Result]:
        wanted = list(runs)
        missing = [run for run in wanted if run not in self.known]
        for run, result in zip(missing, self.each(self.scenario.simulate, missing), strict=True):
            self.known[run] = result
        return [self.known[run] for run in wanted]


def largest(holds: Callable[[int], bool], first: int, most: int) -> int:
    """The largest number, 0 to `most`, that holds, after which SCANNED in a row do not. 0 is taken to hold.

    Found by doubling from `first`, then by bisection, then by looking on from there."""
    low, high, looked_at = 0, most + 1, min(first, most)
    while high - low > 1:
        low, high = (looked_at, high) if holds(looked_at) else (low, looked_at)
        looked_at = min(2 * low, most) if high > most else (low + high) // 2
    ahead = low + 1
    while ahead <= min(low + SCANNED, most):
        low = ahead if holds(ahead) else low
        ahead += 1
    return low


# ── tunings ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def tunings_of(policy: str, gpus: int) -> list[Tuning]:
    """What is searched: of Aegaeon how many devices prefill, and the longest quota. Others have no knobs."""
    if policy != "aegaeon":
        return [()]
    prefill = sorted({max(1, round(of_eight * gpus / 8)) for of_eight in (1, 2, 3, 4)} & set(range(1, gpus)))
    quotas: list[Tuning] = [(), *((("quota", longest_s),) for longest_s in (0.5, 1.0, 2.0, 4.0))]
    return [(("prefill", devices), *quota) for devices in prefill for quota in quotas] or quotas
