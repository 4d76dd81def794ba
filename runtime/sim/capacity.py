"""Capacity of a GPU: the most models per GPU whose attainment, in the mean over seeds, holds a bar."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from runtime.core.device.request import Objective
from runtime.core.ledgers.costs import Profile
from runtime.sim.dispatch.sight import AS_GATEWAYS_SEE, Sight
from runtime.sim.fleet import Changes, simulate
from runtime.sim.workload import Workload
from runtime.sim.world import SimulationResult

Measure = Literal["token_attainment", "first_token_attainment", "min"]
Tuning = tuple[tuple[str, float], ...]  # names and values

STEP = 0.5  # models per GPU
SCANNED = 3  # failing steps in a row that end the search: attainment is not monotone if models differ
MOST = 256.0  # models per GPU: more fit only if models get no requests
FIRST = 8.0  # models per GPU at which the search begins
FINALISTS = 3  # tunings, the best with the first seed, tried with the remaining seeds
PROCESSES = 2


class CapacityRun(NamedTuple):
    """Parameters of one simulation of a scenario."""

    models: int
    seed: int
    tuning: Tuning = ()


@dataclass(frozen=True)
class Scenario:
    """Everything that a search keeps fixed.

    `workload` makes a workload from a number of models and a seed; the function must pickle. The seed of a run is the
    seed of the times of reports as well, instead of the seed of `sight`."""

    workload: Callable[[int, int], Workload]
    profile: Profile
    policy: str
    gpus: int
    objective: Objective
    sight: Sight = AS_GATEWAYS_SEE

    def simulate(self, run: CapacityRun) -> SimulationResult:
        workload = self.workload(run.models, run.seed)
        tuning: dict[str, Any] = dict(run.tuning)
        changes = Changes(sight=msgspec.structs.replace(self.sight, seed=run.seed))
        return simulate(workload, self.profile, self.policy, self.gpus, self.objective, changes=changes, **tuning)


class Point(NamedTuple):
    """Attainment of a policy, at its best tuning, for a number of models per GPU."""

    models_per_gpu: float
    attained: float  # mean over seeds
    by_seed: list[float]
    tuning: Tuning


A = TypeVar("A")
B = TypeVar("B")


class Each(Protocol):
    """Function like `map`, in this process or over several processes."""

    def __call__(self, act: Callable[[A], B], items: Iterable[A], /) -> Iterable[B]: ...


@contextmanager
def processes(most: int = PROCESSES) -> Iterator[Each]:
    """Context with a `map` over a process for each core, at most `most`; the plain `map` on a single core."""
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
    """Simulations of a scenario, each run once, in the order in which a search needs the results."""

    scenario: Scenario
    seeds: Sequence[int]
    each: Each = map
    known: MutableMapping[CapacityRun, SimulationResult] = field(
        default_factory=dict
    )  # a persistent mapping resumes a search later

    def capacity(self, measure: Measure, bar: float) -> float:
        """Largest number of models per GPU at which `measure` is at least `bar`."""
        step = self._step
        count = largest(
            lambda steps: self._best(steps * step, measure).attained >= bar,
            first=max(1, round(FIRST * self.scenario.gpus / step)),
            most=round(MOST * self.scenario.gpus / step),
        )
        return count * step / self.scenario.gpus

    def curve(self, measure: Measure) -> list[Point]:
        """Points of every number of models simulated so far, by number of models."""
        looked_at = {run.models for run in self.known if run.seed == self.seeds[-1]}
        return [self._best(models, measure) for models in sorted(looked_at)]

    @property
    def _step(self) -> int:
        return max(1, round(STEP * self.scenario.gpus))

    def _best(self, models: int, measure: Measure) -> Point:
        """Best point for a number of models: tunings race with the first seed, the best then run with every seed."""
        tunings = tunings_of(self.scenario.policy, self.scenario.gpus)
        finalists = tunings if len(tunings) <= FINALISTS else self._race(models, measure, tunings)
        self._results(CapacityRun(models, seed, tuning) for tuning in finalists for seed in self.seeds)
        points = [self._point(models, measure, tuning) for tuning in finalists]
        return max(points, key=lambda point: point.attained)

    def _race(self, models: int, measure: Measure, tunings: list[Tuning]) -> list[Tuning]:
        results = self._results(CapacityRun(models, self.seeds[0], tuning) for tuning in tunings)
        attained = {tuning: getattr(result, measure) for tuning, result in zip(tunings, results, strict=True)}
        return sorted(tunings, key=lambda tuning: -attained[tuning])[:FINALISTS]

    def _point(self, models: int, measure: Measure, tuning: Tuning) -> Point:
        by_seed = [getattr(self.known[CapacityRun(models, seed, tuning)], measure) for seed in self.seeds]
        return Point(models / self.scenario.gpus, fmean(by_seed), by_seed, tuning)

    def _results(self, runs: Iterable[CapacityRun]) -> list[SimulationResult]:
        wanted = list(runs)
        missing = [run for run in wanted if run not in self.known]
        for run, result in zip(missing, self.each(self.scenario.simulate, missing), strict=True):
            self.known[run] = result
        return [self.known[run] for run in wanted]


def largest(holds: Callable[[int], bool], first: int, most: int) -> int:
    """Largest number, 0 to `most`, that holds and is followed by SCANNED numbers that do not. 0 is taken to hold.

    The search doubles from `first`, then bisects, then scans on from the number found."""
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
    """Tunings to search: for Aegaeon the number of prefill devices and the longest quota; else the empty tuning."""
    if policy != "aegaeon":
        return [()]
    prefill = sorted({max(1, round(of_eight * gpus / 8)) for of_eight in (1, 2, 3, 4)} & set(range(1, gpus)))
    quotas: list[Tuning] = [(), *((("quota", longest_s),) for longest_s in (0.5, 1.0, 2.0, 4.0))]
    return [(("prefill", devices), *quota) for devices in prefill for quota in quotas] or quotas
