"""How much do choices of runtimes cost a gateway, and how much do the reports of a large fleet?

256 runtimes serve 2,800 models. Each runtime has requests of 30 models and weights of 10; 600 models have no requests.
Every runtime sends a report four times a second: 1,024 reports a second. From a report to the next, numbers of requests
change, one model of the 30 goes, and a further model comes. The gateway has an open request for 8 of the 30 models,
which stay. Choices are measured for models with requests, for models without requests, and for models asked for the
first time, when the order of runtimes has to be computed. Reports are measured with decoding. Aims: at most 20 µs for a
choice, at most 1 % of a core for the reports.

`python tests/bench/fleet/bench_dispatch.py`
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))

from runtime.core.device.request import ModelKey, Objective  # noqa: E402
from runtime.core.fleet.dispatch import Coldness, SeenFleet  # noqa: E402
from runtime.core.ledgers.costs import load_profile  # noqa: E402
from runtime.sim.workload import BASE_SIZES  # noqa: E402
from store.contract import wire  # noqa: E402
from store.contract.reports import PERIOD_S, Report, Seat  # noqa: E402
from tests.bench.timing import load, spread  # noqa: E402

PROFILE = load_profile((ROOT / "deploy" / "profiles" / "h100.json").read_bytes(), "h100.json")
RUNTIMES, MODELS, BUSY, SEATS, HERE, OWN = 256, 2800, 2200, 30, 10, 8
REPEATS = 5


def main() -> None:
    rng = random.Random(7)
    names = [f"{rng.getrandbits(64):016x}-{rng.getrandbits(32):08x}" for _ in range(MODELS)]  # as in store/db
    states = [Busy(rng, names[number % 64 : BUSY : 64], f"runtime-{number:04d}") for number in range(RUNTIMES)]
    reports = [[state.encoded(seq) for state in states] for seq in range(1, REPEATS + 2)]
    fleet = _fleet(names)
    for state in states:
        for model in state.seated[:OWN]:
            fleet.took(state.runtime, ModelKey(model), 0.1)
    hear_us = [_hear_us(fleet, sent) for sent in reports][1:]
    held, idle = names[:BUSY], names[BUSY:]
    share = RUNTIMES / PERIOD_S * sum(hear_us) / len(hear_us) / 1e6
    answer = {
        "choose_held_us": _choose_us(fleet, lambda: rng.sample(held, 400)),
        "choose_idle_us": _choose_us(fleet, lambda: rng.sample(idle[:100], 100)),
        "choose_first_us": _choose_us(fleet, lambda: [idle.pop() for _ in range(100)]),
        "hear_us": spread(hear_us, 1),
        "share_of_a_core": round(share, 4),
        "bytes": len(reports[0][0]),
        "to_reach": "a choice at most 20 us, reports at most 0.01 of a core",
    }
    question = f"{RUNTIMES} runtimes, {MODELS} models, {SEATS} of them with requests on each"
    print(json.dumps({"bench": "dispatch", "question": question, "answer": answer, "load": load()}))


class Busy:
    """A runtime with requests of SEATS of its models."""

    def __init__(self, rng: random.Random, models: list[str], runtime: str) -> None:
        self._rng, self.runtime = rng, runtime
        rng.shuffle(models)
        self.seated, self._others = models[:SEATS], models[SEATS:]

    def encoded(self, seq: int) -> bytes:
        """Return the encoded next report, after a model went and another model came."""
        rng = self._rng
        self._others.append(self.seated.pop(rng.randrange(OWN, SEATS)))
        self.seated.append(self._others.pop(0))
        seats = {model: Seat(rng.randint(1, 4), rng.random() / SEATS, rng.random() / SEATS) for model in self.seated}
        here = frozenset(self.seated[:HERE])
        report = Report(runtime=self.runtime, epoch=1, seq=seq, load=0.8, reload=0.3, full=0.4, seats=seats, here=here)
        return wire.encode(report)


def _fleet(names: list[str]) -> SeenFleet:
    fleet = SeenFleet()
    costs = {ModelKey(name): PROFILE.costs(BASE_SIZES[index % len(BASE_SIZES)]) for index, name in enumerate(names)}
    for number in range(RUNTIMES):
        fleet.hosts(f"runtime-{number:04d}", dict.fromkeys(costs, Coldness.HOST), costs)
    return fleet


def _hear_us(fleet: SeenFleet, sent: list[bytes]) -> float:
    began = time.thread_time()
    for data in sent:
        fleet.hear(wire.decode(Report, data), 0.0)
    return (time.thread_time() - began) / len(sent) * 1e6


def _choose_us(fleet: SeenFleet, models: Callable[[], list[str]]) -> list[float]:
    """Median, least and most over the repeats of the microseconds that a choice takes."""
    found = []
    for _ in range(REPEATS):
        asked, objective = models(), Objective()
        began = time.thread_time()
        for model in asked:
            assert fleet.choose(ModelKey(model), objective, 1.0) is not None
        found.append((time.thread_time() - began) / len(asked) * 1e6)
    return spread(found, 1)


if __name__ == "__main__":
    main()
