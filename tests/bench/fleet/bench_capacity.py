"""How many models does a GPU serve within their objectives, by policy? In simulation, beside a study's figures.

A row is a workload, a GPU and objectives; every fleet has 8 GPUs. For each policy: the most models per GPU with an
attainment of 90 % and of 99 %, of tokens (`att`) and of both tokens and first tokens (`min`), in the mean over seeds;
in brackets the capacities of the worst and of the best seed. The parameters of `aegaeon` are searched at every point.
`was` is the study's figure; the policies come from the study's prototype. The study gives `att99` only for row `base`.

Devices are chosen by --gateways gateways, each by reports that devices send every --report-period seconds, as in
production, or, with --exact, by a single gateway that sees every device as the device is. `request`, `prism`,
`resident` and `dedicated` have a central dispatch with exact knowledge in any case.

Every simulation is kept in build/ for as long as the simulated code stays unchanged: an interrupted bench goes on where
the bench ended.

`python tests/bench/fleet/bench_capacity.py [--rows base,H200] [--policies slack,aegaeon] [--seeds 3] [--again] [--show]
[--gateways 4] [--report-period 0.25] [--exact] [--picture DIR]`; STACCATO_TRACES names the folder of traces.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))  # after the compiled machines named by PYTHONPATH: see bench_simulator.py

import msgspec  # noqa: E402

from runtime.core.device.request import Objective  # noqa: E402
from runtime.core.ledgers.costs import load_profile  # noqa: E402
from runtime.sim.capacity import CapacityRun, Each, Measure, Point, Scenario, Search, processes  # noqa: E402
from runtime.sim.dispatch.sight import Sight  # noqa: E402
from runtime.sim.fleet import FLEETS  # noqa: E402
from runtime.sim.report import attainment_svg  # noqa: E402
from runtime.sim.trace import read_lengths, read_trace, read_windows  # noqa: E402
from runtime.sim.workload import Workload, base, replicated, servegen  # noqa: E402
from runtime.sim.world import SimulationResult  # noqa: E402

TRACES = Path(os.environ.get("STACCATO_TRACES", ROOT.parent / "shared" / "traces"))
ANSWERS = ROOT / "tests" / "bench" / "results" / "capacity.jsonl"
RUNS = ROOT / "build" / "capacity-runs.jsonl"
GPUS = 8
EXACT = Sight(1, 0.0, exact=True)
CENTRAL = ("request", "prism", "resident", "dedicated")  # policies with exact knowledge whatever the sight
POLICIES = ("slack", "aegaeon", "aegaeon-paper", "request", "prism", "resident", "dedicated")
BARS: dict[str, tuple[Measure, float]] = {
    "att90": ("token_attainment", 0.9),
    "att99": ("token_attainment", 0.99),
    "min90": ("min", 0.9),
    "min99": ("min", 0.99),
}


@dataclass(frozen=True)
class Row:
    workload: Callable[[], Callable[[int, int], Workload]]  # raises TraceError where the trace is missing
    gpu: str = "h100"
    ttft_s: float = 10.0
    tbt_s: float = 0.1


def _arena() -> Callable[[int, int], Workload]:
    return partial(replicated, read_trace(TRACES / "arena27.csv.zst"))


def _servegen() -> Callable[[int, int], Workload]:
    windows = read_windows(TRACES / "servegen_clients_windows.parquet")
    return partial(servegen, windows, read_lengths(TRACES / "servegen_clients_lengths.csv.zst"), duration_s=300.0)


BASE_400_S = partial(base, duration_s=400.0)
BASE_300_S = partial(base, duration_s=300.0)
ROWS = {
    "base": Row(lambda: BASE_400_S),
    "arena27": Row(_arena),
    "H200": Row(lambda: BASE_300_S, gpu="h200"),
    "TTFT2": Row(lambda: BASE_300_S, ttft_s=2.0),
    "TTFT1": Row(lambda: BASE_300_S, ttft_s=1.0),
    "TTFT.5": Row(lambda: BASE_300_S, ttft_s=0.5),
    "code": Row(lambda: partial(base, duration_s=300.0, lengths="code")),
    "servegen": Row(_servegen),
}

# The study's figures by row and policy: att90, att99 (None: not given), min90, min99.
Figures = tuple[float | None, ...]
STUDY: dict[str, dict[str, Figures]] = {
    "base": {
        "slack": (12.0, 11.0, 12.0, 11.0),
        "aegaeon": (6.0, 5.5, 6.0, 5.5),
        "aegaeon-paper": (5.0, 3.5, 5.0, 3.5),
        "request": (5.5, 4.5, 4.5, 4.0),
        "prism": (7.0, 5.5, 6.0, 5.0),
        "resident": (3.0, 3.0, 3.0, 3.0),
        "dedicated": (1.0, 1.0, 1.0, 1.0),
    },
    "arena27": {
        "slack": (20.5, None, 20.5, 17.0),
        "aegaeon": (9.5, None, 9.5, 8.0),
        "request": (8.5, None, 6.5, 5.5),
        "prism": (11.0, None, 9.5, 7.5),
    },
    "H200": {
        "slack": (16.0, None, 16.0, 14.5),
        "aegaeon": (7.5, None, 7.5, 6.5),
        "request": (7.0, None, 6.0, 5.5),
        "prism": (10.5, None, 10.0, 8.5),
    },
    "TTFT2": {
        "slack": (10.0, None, 8.5, 6.5),
        "aegaeon": (4.5, None, 4.5, 3.0),
        "request": (4.5, None, 3.0, 2.0),
        "prism": (6.5, None, 5.5, 4.5),
    },
    "TTFT1": {
        "slack": (9.5, None, 4.5, 3.0),
        "aegaeon": (4.0, None, 1.5, 0.5),
        "request": (4.0, None, 2.5, 0.5),
        "prism": (6.0, None, 5.0, 3.0),
    },
    "TTFT.5": {
        "slack": (8.5, None, 3.0, 3.0),
        "aegaeon": (3.5, None, 0.5, 0.5),
        "request": (4.0, None, 0.0, 0.0),
        "prism": (6.0, None, 3.5, 3.0),
    },
    "code": {
        "slack": (26.0, None, 24.5, 23.0),
        "aegaeon": (10.0, None, 10.0, 9.0),
        "request": (17.0, None, 16.0, 15.5),
        "prism": (26.5, None, 25.5, 23.0),
    },
    "servegen": {
        "slack": (20.0, None, 19.5, 15.0),
        "aegaeon": (7.0, None, 7.0, 6.0),
        "request": (9.0, None, 6.0, 5.5),
        "prism": (11.5, None, 9.5, 7.5),
    },
}


Question = tuple[str, str, int, float]  # row, policy, gateways, seconds between two reports


class Found(msgspec.Struct, frozen=True):
    capacity: float  # models per GPU, in the mean over seeds
    worst: float  # capacity of the worst seed
    best: float
    tuning: dict[str, float]  # at the capacity


class Answer(msgspec.Struct, frozen=True):
    """Capacities of a policy in a row."""

    row: str
    policy: str
    seeds: int
    found: dict[str, Found]
    curve: list[tuple[float, float]]  # models per GPU, `min`
    code: str  # digest of the simulated code
    commit: str
    bench: str = "capacity"
    gateways: int = 1
    report_period_s: float = 0.0  # 0: exact knowledge

    @property
    def question(self) -> Question:
        return self.row, self.policy, self.gateways, self.report_period_s


def question(row: str, policy: str, sight: Sight) -> Question:
    sight = EXACT if policy in CENTRAL else sight
    return row, policy, sight.gateways, sight.period_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=_names(ROWS), default=list(ROWS))
    parser.add_argument("--policies", type=_names(POLICIES), default=list(POLICIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--report-period", type=float, default=0.25, metavar="SECONDS")
    parser.add_argument("--exact", action="store_true", help="gateways see every device as the device is")
    parser.add_argument("--again", action="store_true", help="forget what was simulated")
    parser.add_argument("--show", action="store_true", help="print what is known, simulate nothing")
    parser.add_argument("--picture", type=Path, metavar="DIR", help="attainment of a row's policies, ROW.svg")
    chosen = parser.parse_args()
    sight = EXACT if chosen.exact else Sight(chosen.gateways, chosen.report_period)
    if not chosen.show:
        answer_all(chosen.rows, chosen.policies, range(chosen.seeds), sight, chosen.again)
    answers = {known.question: known for known in known_answers()}
    for row in chosen.rows:
        asked = [question(row, policy, sight) for policy in chosen.policies]
        own = [answers[each] for each in asked if each in answers]
        show(row, own)
        if chosen.picture and own:
            (chosen.picture / f"{row}.svg").write_text(attainment_svg({known.policy: known.curve for known in own}))


def _names(known: Sequence[str] | dict[str, Row]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        if strange := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{strange[0]!r} is none of {', '.join(known)}")
        return text.split(",")

    return names


def answer_all(rows: Sequence[str], policies: Sequence[str], seeds: Sequence[int], sight: Sight, again: bool) -> None:
    code = simulated_code()
    known = {(*one.question, one.seeds) for one in known_answers() if one.code == code and not again}
    with processes() as each:
        for row in rows:
            for policy in policies:
                if policy not in FLEETS:
                    print(f"{row}, {policy}: left out, the simulator has no such policy", file=sys.stderr)
                elif (*question(row, policy, sight), len(seeds)) not in known:
                    _answer(row, policy, seeds, EXACT if policy in CENTRAL else sight, code, again, each)


def _answer(row: str, policy: str, seeds: Sequence[int], sight: Sight, code: str, again: bool, each: Each) -> None:
    of = ROWS[row]
    try:
        workload = of.workload()
    except ValueError as error:
        print(f"{row}, {policy}: left out, {error}", file=sys.stderr)
        return
    profile = ROOT / "deploy" / "profiles" / f"{of.gpu}.json"
    gpu = load_profile(profile.read_bytes(), str(profile))
    scenario = Scenario(workload, gpu, policy, GPUS, Objective(of.ttft_s, of.tbt_s), sight)
    search = Search(scenario, seeds, each, Kept(f"{code} {row} {policy} {sight.gateways} {sight.period_s}", again))
    found = {name: _found(search, measure, bar) for name, (measure, bar) in BARS.items()}
    curve = [(point.models_per_gpu, point.attained) for point in search.curve("min")]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    answer = Answer(
        row,
        policy,
        len(seeds),
        found,
        curve,
        code,
        commit.strip(),
        gateways=sight.gateways,
        report_period_s=sight.period_s,
    )
    with ANSWERS.open("ab") as file:
        file.write(msgspec.json.encode(answer) + b"\n")
    show(row, [answer])


def _found(search: Search, measure: Measure, bar: float) -> Found:
    capacity = search.capacity(measure, bar)
    curve = search.curve(measure)
    by_seed = [_reach(curve, seed, bar) for seed in range(len(search.seeds))]
    tuning = next((dict(point.tuning) for point in curve if point.models_per_gpu == capacity), {})
    return Found(capacity, min(by_seed), max(by_seed), tuning)


def _reach(curve: Sequence[Point], seed: int, bar: float) -> float:
    """Most models per GPU at which the seed still attains `bar`, among the points of the search; 0 if no point does."""
    return max((point.models_per_gpu for point in curve if point.by_seed[seed] >= bar), default=0.0)


# ── what is kept ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Kept(dict[CapacityRun, SimulationResult]):
    """The simulations of a search; a file common to the searches keeps the simulations."""

    def __init__(self, scenario: str, again: bool) -> None:
        self._scenario = scenario
        if not again:
            self.update(_kept(scenario))

    def __setitem__(self, run: CapacityRun, result: SimulationResult) -> None:
        super().__setitem__(run, result)
        RUNS.parent.mkdir(exist_ok=True)
        with RUNS.open("ab") as file:
            file.write(msgspec.json.encode((self._scenario, run, result)) + b"\n")


def _kept(scenario: str) -> Iterator[tuple[CapacityRun, SimulationResult]]:
    start = b"[" + msgspec.json.encode(scenario) + b","
    for line in RUNS.read_bytes().splitlines(keepends=True) if RUNS.exists() else ():
        if line.startswith(start) and line.endswith(b"\n"):
            _, run, result = msgspec.json.decode(line, type=tuple[str, CapacityRun, SimulationResult])
            yield run, result


def known_answers() -> list[Answer]:
    """The last answer for every row, policy, number of gateways and period of reports."""
    lines = ANSWERS.read_bytes().splitlines() if ANSWERS.exists() else []
    answers = [msgspec.json.decode(line, type=Answer) for line in lines]
    return list({answer.question: answer for answer in answers}.values())


def simulated_code() -> str:
    """A digest of the profiles and of the modules run by a simulation. Changes of further modules keep the digest."""
    files = {_source(module.__file__) for name, module in sys.modules.items() if _simulates(name) and module.__file__}
    content = hashlib.sha256()
    for path in sorted([*files, *(ROOT / "deploy" / "profiles").glob("h*.json")]):
        content.update(path.read_bytes())
    return content.hexdigest()[:12]


def _source(file: str) -> Path:
    """The source file of a module: a compiled module names a library of many modules; the source lies beside the
    library."""
    path = Path(file)
    return path if path.suffix == ".py" else path.with_name(path.name.split(".")[0] + ".py")


def _simulates(name: str) -> bool:
    return name.startswith("runtime.") and name not in ("runtime.sim.capacity", "runtime.sim.report")


# ── what is printed ───────────────────────────────────────────────────────────────────────────────────────────────────


def show(row: str, answers: Sequence[Answer]) -> None:
    if not answers:
        print(f"{row}: nothing is known")
        return
    print(f"\n{row.ljust(15)}" + "".join(f"{name:>28}" for name in BARS))
    for answer in answers:
        was = STUDY.get(row, {}).get(answer.policy, (None,) * len(BARS))
        cells = [_cell(answer.found[name], figure) for name, figure in zip(BARS, was, strict=True)]
        tuning = json.dumps(answer.found["min90"].tuning) if answer.found["min90"].tuning else ""
        print(f"{answer.policy.ljust(15)}" + "".join(f"{cell:>28}" for cell in cells), tuning)
    by_policy = {answer.policy: answer.found for answer in answers}
    if {"slack", "aegaeon"} <= by_policy.keys():
        cells = [_ratio(by_policy["slack"][name].capacity, by_policy["aegaeon"][name].capacity) for name in BARS]
        print("slack/aegaeon".ljust(15) + "".join(f"{cell:>28}" for cell in cells))


def _cell(found: Found, was: float | None) -> str:
    beside = "" if was is None else f" was {was:g} ({found.capacity - was:+g})"
    return f"{found.capacity:g} [{found.worst:g}, {found.best:g}]{beside}"


def _ratio(over: float, under: float) -> str:
    return f"{over / under:.2f}" if under else "-"


if __name__ == "__main__":
    # the other processes end with the main process
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main()
