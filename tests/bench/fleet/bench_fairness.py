"""How much does a flooding tenant take from a tenant within its share? In simulation, and of a real runtime.

Tenant t0 asks as often as its share allows, then 20 times as often; tenant t1 sends the same requests in both runs. The
answer is by how many points t1's tokens and first tokens on time fall.

*Simulated*: an H100, several mixes and seeds. *Real*: a process as a runtime's device process with ten small models on
the machine's processor; models and clients come from bench_policies.py.

`python tests/bench/fleet/bench_fairness.py [--seeds 5] [--mixes apart,long] [--real MINUTES]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from runtime.core.device.request import Objective  # noqa: E402
from runtime.core.ledgers.costs import Profile, load_profile, model_size  # noqa: E402
from runtime.sim.fleet import simulate  # noqa: E402
from runtime.sim.workload import Workload, base, divided, flooded  # noqa: E402
from runtime.sim.world import Kept  # noqa: E402
from tests.bench.fleet.bench_policies import SEED, Asked, asking, objective_of, runtime  # noqa: E402
from tests.bench.timing import load, one_thread  # noqa: E402

TIMES = 20
POINTS = 2.0  # points: t1's largest permitted loss
DURATION_S = 150.0
RUNS = 2  # runs of the real trace, without the flood and with the flood
TBT_STEPS = 5
OUTPUT_TOKENS = (12, 96)  # few: a single late request must not cost two points
WITHIN = 0.7  # load of both tenants on the device if every request is served alone: 0.35 per tenant, of a share of 0.5


@dataclass(frozen=True)
class Mix:
    """`weights` of the tenants; a tenant has `models` in turns, or `same_models`; `prompts`: how much longer the
    flood's are."""

    models: int
    rate: float = 0.1
    weights: tuple[float, ...] = (1.0, 1.0)
    same_models: bool = False
    prompts: float = 1.0
    ttft_s: float = 10.0

    def workload(self, seed: int, times: int) -> Workload:
        asked = base(self.models, seed, rate=self.rate, duration_s=DURATION_S)
        return flooded(divided(asked, self.weights, seed, self.same_models), times, seed, self.prompts)


MIXES = {
    "apart": Mix(10),  # models per GPU
    "soon": Mix(6, rate=0.15, ttft_s=2.0),
    "same": Mix(8, same_models=True),
    "hot": Mix(2, rate=0.7, same_models=True, ttft_s=2.0),
    "long": Mix(8, prompts=8.0),
    "long-same": Mix(6, same_models=True, prompts=8.0),
    "light": Mix(9, weights=(1.0, 3.0)),
    "heavy": Mix(9, weights=(3.0, 1.0)),
    "three": Mix(9, rate=0.15, weights=(1.0, 1.0, 1.0)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--real", type=float, default=0.0, metavar="MINUTES", help="that the real trace lasts [none]")
    asked = parser.parse_args()
    profile = load_profile((ROOT / "deploy" / "profiles" / "h100.json").read_bytes(), "h100.json")
    lost = [lost_by(name, profile, range(asked.seeds)) for name in asked.mixes.split(",") if name]
    if asked.real:
        lost.append(asyncio.run(really(60 * asked.real)))
    assert max(lost, default=0.0) <= POINTS, f"a tenant within its share lost {max(lost):.1f} points to the flood"


# ── simulated ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def lost_by(name: str, profile: Profile, seeds: Sequence[int]) -> float:
    """Points lost, in the mean over seeds, by the tenant and for the definition (tokens, first tokens) with
    most loss."""
    mix, lost = MIXES[name], list[dict[str, list[float]]]()
    for seed in seeds:
        calm, flood = (
            simulate(mix.workload(seed, times), profile, "slack", 1, Objective(ttft_s=mix.ttft_s)).tenants
            for times in (1, TIMES)
        )
        lost.append({tenant: points(calm[tenant], flood[tenant]) for tenant in calm})
    tenants = sorted(lost[0])
    means = {tenant: [round(float(np.mean([of[tenant][n] for of in lost])), 2) for n in (0, 1)] for tenant in tenants}
    most = {tenant: [max(of[tenant][n] for of in lost) for n in (0, 1)] for tenant in tenants}
    show("simulated", name, {"seeds": len(seeds), "lost": means, "lost_most": most, "of": ["tokens", "first tokens"]})
    return max(points for tenant in tenants[1:] for points in means[tenant])


def points(calm: Kept, flood: Kept) -> list[float]:
    return [
        round(100 * (calm.token_attainment - flood.token_attainment), 2),
        round(100 * (calm.first_token_attainment - flood.first_token_attainment), 2),
    ]


def show(part: str, question: str, answer: dict[str, object]) -> None:
    print(json.dumps({"bench": "fairness", "part": part, "question": question, "answer": answer}), flush=True)


# ── real ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def really(duration_s: float) -> float:
    """Measure on a real runtime how many points tenant t1 loses.

    Half of the models belong to either tenant. Together the tenants ask for less than the device can serve, at random
    times instead of in bursts: within a burst, a tenant is beyond its share. Runs without and with the flood take
    turns, to meet the same load of the machine."""
    async with runtime() as (node, profile):
        sizes = [model_size(spec) for spec in node.specs]
        objective = objective_of(sizes, profile, TBT_STEPS)
        asked = asking(WITHIN, sizes, profile, duration_s, cv=1.0, output_tokens=OUTPUT_TOKENS)
        calm = divided(asked, (1.0, 1.0), SEED)
        show("real", "predicted", {"lost": predicted(calm, profile, objective), "of": ["tokens", "first tokens"]})
        kept: dict[int, list[Kept]] = {1: [], TIMES: []}
        for times in (1, TIMES) * RUNS:
            work = flooded(calm, times, SEED)
            _, seen = await node.run("slack", work, objective)
            kept[times].append(kept_of(node.asked, work, 1))
            both = {"t1": msgspec.to_builtins(kept[times][-1]), "t0": msgspec.to_builtins(kept_of(node.asked, work, 0))}
            show("real", f"x{times}", both | {"slower_than_profiled": round(seen.slower, 2), "load": load()})
    lost = [points(*pair) for pair in zip(kept[1], kept[TIMES], strict=True)]
    show("real", "lost by t1", {"points": lost, "of": ["tokens", "first tokens"]})
    return float(np.mean(lost, axis=0).max())


def predicted(calm: Workload, profile: Profile, objective: Objective) -> dict[str, list[float]]:
    before, flood = (
        simulate(flooded(calm, times, SEED), profile, "slack", 1, objective).tenants for times in (1, TIMES)
    )
    return {tenant: points(before[tenant], flood[tenant]) for tenant in before}


def kept_of(all_asked: Sequence[Asked], work: Workload, tenant: int) -> Kept:
    assert work.tenant is not None
    own = [asked for asked, whose in zip(all_asked, work.tenant, strict=True) if whose == tenant]
    tokens = sum(asked.kept for asked in own) / sum(asked.tokens for asked in own)
    on_time = [asked.progress.sent > 0 and not asked.progress.first_late for asked in own]
    return Kept(tokens, sum(on_time) / len(own), len(own))


if __name__ == "__main__":
    one_thread()
    main()
