"""What do migration and scaling bring a fleet? In simulation, beside a fleet without them, seed by seed.

`moves`: a model on 16 devices under memory pressure, with lengths of a power law (the Llumnix paper's table 1, M-M) on
devices like the paper's A10; requests go to the freest device, with migration and without, and in turns.
`bursts`: the model of `moves` as the Llumnix paper scales it (6.5: lengths L-L, 2 requests/s in bursts, 1 to 16
devices). A line is a band of freeness, to compare GPU-hours at equal P99 of the first token. Further variants: devices
that join at once, a bound for any forecast; at most one device leaving at a time, as in the paper; requests sent to
devices in turns. Two lower bounds of the hours are printed as well: the hours of devices always completely filled by
the running requests' memory, and the hours of the fewest whole devices with enough memory in every second, where no
device joins, leaves or is in reserve.
`scale`: as `bursts`, under a load that rises and falls, M-M, 2 to 24 devices.
`documents`: as `bursts`, where a tenth of the requests brings a document as large as most of a device's memory. For
documents, a fleet without moves must keep a device nearly empty.
`conversation`: as `bursts`, with the requests of a public trace of long conversations, Mooncake's, at three speeds for
three seeds, and the model on devices like an H100.
`fleet`: many models asked like ServeGen's clients, 11 per H100: on their devices, moving between devices, scaling, in
turns, and moving between half as many devices.
`decisions`: the price of a decision with 256 devices, in a core's time.

Requests go where the variant says. `in turns`: to devices in turns. `freest` and `moving`: to the freest device, known
exactly, as in the Llumnix paper. `gateways, moving`: by production's rule, at four gateways with reports of 0.25 s; so
do all variants of `fleet` but `in turns`.

Ratios compare runs of equal seeds, in the median [least, most]. Every simulation is kept in build/ for as long as the
simulated code stays unchanged: an interrupted bench goes on where the bench ended.

`python tests/bench/fleet/bench_fleet.py [--parts moves,bursts,scale,documents,conversation,fleet,decisions] [--seeds 3]
[--gpus 32]`;
STACCATO_TRACES names the folder of traces, and 256 GPUs take an hour.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from math import log
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))  # after the compiled machines named by PYTHONPATH

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from runtime.core.device.request import ModelKey, Objective, Request, request_id  # noqa: E402
from runtime.core.fleet.cluster import Cluster, Rules  # noqa: E402
from runtime.core.fleet.rebalance import Load  # noqa: E402
from runtime.core.fleet.scaling import Band  # noqa: E402
from runtime.core.ledgers.costs import Law, ModelSize, Profile, load_profile  # noqa: E402
from runtime.core.turns.fixed import Resident  # noqa: E402
from runtime.sim.capacity import processes  # noqa: E402
from runtime.sim.dispatch.base import Dispatch  # noqa: E402
from runtime.sim.dispatch.baselines import Freest, InTurns  # noqa: E402
from runtime.sim.dispatch.gateways import GatewayDispatch  # noqa: E402
from runtime.sim.fleet import Changes, simulate  # noqa: E402
from runtime.sim.trace import Floats, read_lengths, read_trace, read_windows  # noqa: E402
from runtime.sim.workload import Distribution, Workload, log_quantiles, quantiles, servegen  # noqa: E402
from runtime.sim.world import JOIN_S, SimulationResult, World  # noqa: E402
from tests.bench.fleet.bench_capacity import TRACES, simulated_code  # noqa: E402

RUNS = ROOT / "build" / "fleet-runs.jsonl"
PARTS = ("moves", "bursts", "scale", "documents", "conversation", "fleet", "decisions")
TRACE_OF = {"conversation": "mooncake_conversation.csv.zst", "fleet": "servegen_clients_windows.parquet"}
OBJECTIVE = Objective()


class Run(msgspec.Struct, frozen=True):
    part: str
    variant: str
    point: float  # requests per second; the low end of a band; devices
    seed: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=32, help="of the part `fleet`")
    chosen = parser.parse_args()
    parts, seeds = chosen.parts.split(","), range(chosen.seeds)
    points: dict[str, tuple[float, ...]] = {"moves": RATES, "fleet": (chosen.gpus,)} | BANDS
    tables: dict[str, Callable[[Mapping[Run, SimulationResult], Sequence[float], Sequence[int]], None]] = {
        "moves": show_moves,
        "fleet": show_fleet,
    }
    tables |= {part: partial(show_scale, part) for part in BANDS}
    for part in parts:
        if part == "decisions":
            show_decisions()
            continue
        if part in TRACE_OF and not (TRACES / TRACE_OF[part]).exists():
            print(f"{part}: left out, there is no {TRACE_OF[part]} in {TRACES}: set STACCATO_TRACES", file=sys.stderr)
            continue
        runs = [
            Run(part, variant, point, seed) for seed in seeds for point in points[part] for variant in VARIANTS[part]
        ]
        tables[part](answered(runs), points[part], seeds)


def answered(runs: Sequence[Run]) -> dict[Run, SimulationResult]:
    code = simulated_code()
    known = {run: result for made_by, run, result in _kept() if made_by == code}
    missing = [run for run in runs if run not in known]
    RUNS.parent.mkdir(exist_ok=True)
    with processes() as each, RUNS.open("ab") as file:
        for run, result in zip(missing, each(simulated, missing), strict=True):
            known[run] = result
            file.write(msgspec.json.encode((code, run, result)) + b"\n")
            file.flush()
            print(f"\r{run.part} {run.variant} {run.point:g} {run.seed}".ljust(60), end="\r", file=sys.stderr)
    return known


def _kept() -> list[tuple[str, Run, SimulationResult]]:
    lines = RUNS.read_bytes().splitlines(keepends=True) if RUNS.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    # A missing first token is at infinity, and JSON writes infinity as null.
    return [
        msgspec.json.decode(line.replace(b":null", b":1e99"), type=tuple[str, Run, SimulationResult]) for line in whole
    ]


def simulated(run: Run) -> SimulationResult:
    return SIMULATED[run.part](run)


# ── one model on many devices ─────────────────────────────────────────────────────────────────────────────────────────

LLAMA_7B = ModelSize("llama-7b", 13_480_000_000, 524_288, 6.74e9)
KV_TOKENS = 13_616  # an A10's room for KV cache beside the model's weights, as the paper says
# An A10's 600 GB/s at 0.7 for weights and 0.6 for KV cache, half of 125 TFLOPS, 64 Gb/s of network.
A10 = Profile(
    name="a10",
    kind="analytic",
    conditions={},
    memory_bytes=LLAMA_7B.weight_bytes + KV_TOKENS * 524_288 + (8 << 20),
    page_bytes=8 << 20,  # vLLM's blocks of 16 tokens
    batched_tokens=6144,
    host_bytes_per_s=1e11,
    law=Law(
        step_s=0.002,
        step_s_per_weight_byte=1 / 420e9,
        step_s_per_request=3e-5,
        step_s_per_parameter=0.0,
        step_s_per_kv_byte=1 / 360e9,
        prefill_s=0.01,
        prefill_s_per_parameter=2 / 62e12,
        prefill_s_per_parameter2=7.1e-20,
        load_s=0.1,
        load_s_per_byte=1 / 20e9,
        switch_s=0.0,
        copy_s_per_byte=1 / 8e9,
    ),
)
SHARES = np.array((0.0, 0.5, 0.8, 0.95, 0.99, 1.0))
MEDIUM = np.array((8.0, 32, 173, 1288, 4208, 6000))  # tokens
REQUESTS, DEVICES = 4000, 16
RATES = (8.5, 9.0, 9.5)  # requests per second: from nine in ten first tokens on time to rates where fewer are
ONE_BY_ONE = Rules(whole=False)
MOVING = Rules(migrate=True, whole=False)


def _one_model(at_s: Floats, rng: np.random.Generator, tokens: Distribution) -> Workload:
    prompts, outputs = (np.clip(tokens(rng, len(at_s)), 2, 6144) for _ in range(2))
    return _asked(at_s, prompts, outputs)


def _asked(at_s: Floats, prompts: Floats, outputs: Floats) -> Workload:
    rate, models = len(at_s) / float(at_s[-1]), np.zeros(len(at_s), np.int32)
    prompt_tokens, output_tokens = prompts.astype(np.int32), outputs.astype(np.int32)
    return Workload([LLAMA_7B], [rate], float(at_s[-1]) + 1, at_s, models, prompt_tokens, output_tokens)


def _moves(run: Run) -> SimulationResult:
    rng = np.random.default_rng(run.seed)
    workload = _one_model(np.cumsum(rng.exponential(1 / run.point, REQUESTS)), rng, quantiles(SHARES, MEDIUM))
    rules = {"in turns": None, "freest": ONE_BY_ONE, "moving": MOVING, "gateways, moving": MOVING}[run.variant]
    return _ended(World(workload, A10, Resident, _dispatch(run.variant), DEVICES, OBJECTIVE, rules=rules))


def _dispatch(variant: str) -> Dispatch:
    if variant.startswith("gateways"):
        return GatewayDispatch()
    return InTurns() if variant == "in turns" else Freest()


def _ended(world: World, warm_s: float = 60.0) -> SimulationResult:
    world.run(900.0)
    return world.result(warm_s)


# ── as many devices as the load needs ─────────────────────────────────────────────────────────────────────────────────

LOWS, WIDTH = (1.0, 40.0, 120.0, 240.0, 320.0), 200.0  # decode steps: low ends of bands, width of a band
# rules, seconds a device takes to join, most devices leaving at a time
SCALES: dict[str, tuple[Rules, float, int | None]] = {
    "freest": (ONE_BY_ONE, JOIN_S, None),
    "moving": (MOVING, JOIN_S, None),
    "moving, at once": (MOVING, 0.0, None),
    "freest, one leaves": (ONE_BY_ONE, JOIN_S, 1),
    "moving, one leaves": (MOVING, JOIN_S, 1),
    "in turns": (ONE_BY_ONE, JOIN_S, None),
    "gateways, moving": (MOVING, JOIN_S, None),
}
COMPARED = (
    ("moving", "freest"),
    ("moving, at once", "freest"),
    ("moving, one leaves", "freest, one leaves"),
    ("moving", "freest, one leaves"),
    ("moving", "in turns"),
    ("gateways, moving", "freest"),
    ("gateways, moving", "in turns"),
)
LONG = np.array((8.0, 55, 582, 3113, 5166, 6144))  # tokens
BURSTS, BURST_RATE, BURST_CV = 5000, 2.0, 2.0
FILLED_S = 300.0  # seconds until the empty fleet has as much to do as later: the longest requests last for minutes
SCALED_S, PERIOD_S = 1600.0, 800.0
SHORT = np.array((8.0, 38, 109, 240, 400, 1000))  # tokens of answers, with and without a document
DOCUMENT, DOCUMENTS = (8000.0, 11_500.0), 0.1  # tokens of a document; part of the requests with a document
ASKED, ASKED_RATE, ASKED_CV = 8000, 8.0, 2.0
SPEEDS = (0.7, 1.0, 1.5)  # speed of the asked conversations beside the recorded speed
CONVERSED_S = 1200.0
BANDS = {  # low ends: waiting for much room pays for itself where devices are mostly free
    "bursts": LOWS,
    "scale": LOWS,
    "documents": (120.0, 240.0, 320.0, 400.0, 480.0, 560.0, 640.0, 750.0),
    "conversation": (1.0, 240.0, 500.0, 600.0, 650.0, 700.0, 750.0, 800.0, 850.0),
}


def _bursts(run: Run) -> SimulationResult:
    rng, shape = np.random.default_rng(run.seed), BURST_CV**-2
    at_s = np.cumsum(rng.gamma(shape, 1 / (BURST_RATE * shape), BURSTS))
    workload = _one_model(at_s, rng, log_quantiles(SHARES, LONG))
    return _ended(_scaled(run, workload, Band(1, 16, run.point, run.point + WIDTH), 8), FILLED_S)


def _scale(run: Run) -> SimulationResult:
    rng = np.random.default_rng(run.seed)
    even = np.cumsum(rng.exponential(1 / 10.0, 40_000))
    kept = rng.random(len(even)) < 0.5 - 0.35 * np.cos(2 * np.pi * even / PERIOD_S)
    workload = _one_model(even[kept & (even < SCALED_S)], rng, quantiles(SHARES, MEDIUM))
    return _ended(_scaled(run, workload, Band(2, 24, run.point, run.point + WIDTH), 4))


def _documents(run: Run) -> SimulationResult:
    rng, shape = np.random.default_rng(run.seed), ASKED_CV**-2
    at_s = np.cumsum(rng.gamma(shape, 1 / (ASKED_RATE * shape), ASKED))
    prompts, outputs = quantiles(SHARES, MEDIUM)(rng, ASKED), quantiles(SHARES, SHORT)(rng, ASKED)
    brings = rng.random(ASKED) < DOCUMENTS
    prompts[brings] = np.exp(rng.uniform(log(DOCUMENT[0]), log(DOCUMENT[1]), int(brings.sum())))
    workload = _asked(at_s, np.clip(prompts, 2, DOCUMENT[1]), np.clip(outputs, 2, SHORT[-1]))
    return _ended(_scaled(run, workload, Band(1, 32, run.point, run.point + WIDTH), 8), FILLED_S)


def _conversation(run: Run) -> SimulationResult:
    trace, h100 = read_trace(TRACES / TRACE_OF["conversation"]), _h100()
    at_s = trace.at_s / SPEEDS[run.seed % len(SPEEDS)]
    asked, room = at_s < CONVERSED_S, (h100.memory_bytes - LLAMA_7B.weight_bytes) // LLAMA_7B.kv_bytes_per_token
    prompts = np.clip(trace.prompt_tokens[asked].astype(float), 2, 0.9 * room)
    outputs = np.clip(trace.output_tokens[asked].astype(float), 2, 0.95 * room - prompts)
    workload = _asked(at_s[asked], prompts, outputs)
    return _ended(_scaled(run, workload, Band(1, 32, run.point, run.point + WIDTH), 8, h100), 120.0)


def _scaled(run: Run, workload: Workload, band: Band, devices: int, profile: Profile = A10) -> World:
    rules, join_s, leaving_most = SCALES[run.variant]
    rules = msgspec.structs.replace(rules, band=msgspec.structs.replace(band, leaving_most=leaving_most))
    return World(workload, profile, Resident, _dispatch(run.variant), devices, OBJECTIVE, rules=rules, join_s=join_s)


# ── many models ───────────────────────────────────────────────────────────────────────────────────────────────────────

PER_GPU = 2800 / 256
FLEETS: dict[str, Callable[[int], Changes]] = {
    "placed": lambda gpus: Changes(),
    "moving": lambda gpus: Changes(migrate=True),
    "scaling": lambda gpus: Changes(scale=(gpus // 8, gpus)),
    "scaling, moving": lambda gpus: Changes(migrate=True, scale=(gpus // 8, gpus)),
    "in turns": lambda gpus: Changes(dispatch="in-turns"),
    "moving, fewer": lambda gpus: Changes(migrate=True),
}
FEWER = {"moving, fewer": 0.5}  # part of the GPUs in the variant


@cache
def _h100() -> Profile:
    return load_profile((ROOT / "deploy" / "profiles" / "h100.json").read_bytes(), "h100.json")


@cache
def _clients() -> Callable[[int, int], Workload]:
    windows = read_windows(TRACES / "servegen_clients_windows.parquet")
    lengths = read_lengths(TRACES / "servegen_clients_lengths.csv.zst")
    return lambda models, seed: servegen(windows, lengths, models, seed, duration_s=300.0)


def _fleet(run: Run) -> SimulationResult:
    gpus = int(run.point)
    workload = _clients()(round(gpus * PER_GPU), run.seed)
    there = round(gpus * FEWER.get(run.variant, 1.0))
    return simulate(workload, _h100(), "slack", there, OBJECTIVE, changes=FLEETS[run.variant](there))


VARIANTS: dict[str, Sequence[str]] = {
    "moves": ("in turns", "freest", "moving", "gateways, moving"),
    "bursts": tuple(SCALES),
    "scale": tuple(SCALES),
    "documents": ("freest", "moving", "in turns", "gateways, moving"),
    "conversation": ("freest", "moving", "in turns", "gateways, moving"),
    "fleet": tuple(FLEETS),
}
SIMULATED: dict[str, Callable[[Run], SimulationResult]] = {
    "moves": _moves,
    "bursts": _bursts,
    "scale": _scale,
    "documents": _documents,
    "conversation": _conversation,
    "fleet": _fleet,
}

# ── what is printed ───────────────────────────────────────────────────────────────────────────────────────────────────


def show_moves(results: Mapping[Run, SimulationResult], points: Sequence[float], seeds: Sequence[int]) -> None:
    for rate in points:
        for variant in VARIANTS["moves"]:
            _line(f"moves, {rate:g}/s", variant, [results[Run("moves", variant, rate, seed)] for seed in seeds])
        for other, variant in product(("freest", "in turns"), ("moving", "gateways, moving")):
            ratios = [
                results[Run("moves", other, rate, seed)].ttft_p99_s
                / results[Run("moves", variant, rate, seed)].ttft_p99_s
                for seed in seeds
            ]
            print(f"  P99 of the first token, {other} over {variant}: {_range(ratios)}")


def show_scale(
    part: str, results: Mapping[Run, SimulationResult], points: Sequence[float], seeds: Sequence[int]
) -> None:
    variants = VARIANTS[part]
    for low in points:
        for variant in variants:
            _line(f"{part}, from {low:g}", variant, [results[Run(part, variant, low, seed)] for seed in seeds])
    least: dict[str, list[float]] = {
        name: [
            min(getattr(results[Run(part, variant, low, seed)], name) for low in points for variant in variants)
            for seed in seeds
        ]
        for name in ("held_hours", "whole_hours")
    }
    for name, measure, limits in EQUAL:
        for limit in limits:
            hours = {
                variant: [
                    _hours([results[Run(part, variant, low, seed)] for low in points], measure, limit) for seed in seeds
                ]
                for variant in variants
            }
            for variant, other in COMPARED:
                if variant in hours and other in hours:
                    saved = _saved(hours, variant, other)
                    print(f"  {part}: GPU-hours saved at {name} of {limit:g}, {variant} over {other}: {saved}")
            for bound in least:
                most = _saved(hours | least, bound, "freest")
                print(f"  {part}: no fleet can save more over freest at {name} of {limit:g}, {bound}: {most}")


def _saved(hours: Mapping[str, Sequence[float]], variant: str, other: str) -> str:
    saved = [1 - less / more for less, more in zip(hours[variant], hours[other], strict=True)]
    known = [share for share in saved if np.isfinite(share)]
    return f"{_range(known)}, known of {len(known)} seeds" if known else "not known"


def _hours(results: Sequence[SimulationResult], measure: Callable[[SimulationResult], float], limit: float) -> float:
    """The fewest GPU-hours at which the measure is at most `limit`, interpolated between the best bands (no further
    band is better in both); NaN if no band is as good."""
    best: list[tuple[float, float]] = []
    for measured, hours in sorted((np.log(measure(result)), result.gpu_hours) for result in results):
        if not best or hours < best[-1][1]:
            best.append((measured, hours))
    logs, fewest = zip(*best, strict=True)
    return float(np.interp(np.log(limit), logs, fewest, left=np.nan))


EQUAL: Sequence[tuple[str, Callable[[SimulationResult], float], Sequence[float]]] = (
    ("a P99 in seconds", lambda result: result.ttft_p99_s, (2.5, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 40.0)),
    ("a share of late tokens", lambda result: max(1e-6, 1 - result.token_attainment), (0.03, 0.02, 0.01)),
)


def show_fleet(results: Mapping[Run, SimulationResult], points: Sequence[float], seeds: Sequence[int]) -> None:
    for gpus in points:
        for variant in VARIANTS["fleet"]:
            _line(f"fleet, {gpus:g} GPUs", variant, [results[Run("fleet", variant, gpus, seed)] for seed in seeds])


def _line(name: str, variant: str, results: Sequence[SimulationResult]) -> None:
    columns = {
        "TTFT p50": [result.ttft_p50_s for result in results],
        "p99": [result.ttft_p99_s for result in results],
        "tokens": [result.token_attainment for result in results],
        "first": [result.first_token_attainment for result in results],
        "GPU-h": [result.gpu_hours for result in results],
        "held": [result.held_hours for result in results],
        "moves": [float(result.moves) for result in results],
    }
    print(f"{name}, {variant}: " + ", ".join(f"{column} {_range(values)}" for column, values in columns.items()))


def _range(values: Sequence[float]) -> str:
    return f"{median(values):.3g} [{min(values):.3g}, {max(values):.3g}]"


def show_decisions() -> None:
    """Print the time of decisions for 256 devices with 2,800 models, with 256 reports and 50 arrivals between two
    ticks. Choices of gateways are measured by `bench_dispatch.py`."""
    h100 = _h100()
    costs = {ModelKey(f"m{index}"): h100.costs(ModelSize("m", 16 * 10**9, 131_072, 8e9)) for index in range(2800)}
    for whole in (True, False):
        cluster = Cluster(256, costs, Rules(migrate=True, whole=whole, band=Band(32, 512)))
        ticks, choices = _decided(cluster, Freest(), [*costs])
        print(f"decisions, whole models {whole}: tick {_tail(ticks)}, choice of the freest {_tail(choices)}")


def _decided(cluster: Cluster, dispatch: Dispatch, models: Sequence[ModelKey]) -> tuple[list[float], list[float]]:
    """Milliseconds of the ticks and of the choices of a device, where a tenth of the devices has too much to do."""
    rng, ticks, choices = np.random.default_rng(1), [], []
    for second in range(200):
        now = float(second)
        for device in cluster.devices:
            cluster.hear(_drawn_load(rng, device.number, now, models))
        ticks.append(_timed_ms(partial(cluster.tick, now)))
        for stream in range(50):
            model = models[int(rng.integers(len(models)))]
            request = Request(request_id("g", stream), "g", stream, model, b"", now, 200)
            choices.append(_timed_ms(partial(dispatch.arrived, request, cluster, now)))
    return ticks, choices


def _drawn_load(rng: np.random.Generator, number: int, at: float, models: Sequence[ModelKey]) -> Load:
    each = 0.3 if rng.random() < 0.1 else 0.12
    shares = {models[int(index)]: each for index in rng.integers(len(models), size=5)}
    running = int(rng.integers(1, 30))
    used = rng.random() * 5.5e10
    return Load(number, at, 5e10, used, running * 131_072.0, running, 0, sum(shares.values()), shares)


def _timed_ms(act: Callable[[], object]) -> float:
    began = time.thread_time()
    act()
    return (time.thread_time() - began) * 1e3


def _tail(times_ms: Sequence[float]) -> str:
    return f"p50 {np.quantile(times_ms, 0.5):.3f} ms, p99 {np.quantile(times_ms, 0.99):.3f} ms"


if __name__ == "__main__":
    # the other processes end with the main process
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main()
