"""Draws how attainment falls as models are added, with a line for every policy; takes minutes."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import fmean

from runtime.core.device.request import Objective
from runtime.core.ledgers.costs import load_profile
from runtime.core.turns.registry import POLICIES
from runtime.sim.capacity import CapacityRun, Scenario, processes
from runtime.sim.report import attainment_svg
from runtime.sim.workload import base

ROOT = Path(__file__).parents[3]
OBJECTIVE = Objective(ttft_s=10.0, tbt_s=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, metavar="FILE.svg")
    parser.add_argument("--gpu", default="h100", help="a profile of deploy/profiles [%(default)s]")
    parser.add_argument("--gpus", type=int, default=8, help="[%(default)s]")
    parser.add_argument("--models-per-gpu", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 13])
    parser.add_argument("--duration", type=float, default=240.0, metavar="SECONDS", help="[%(default)g]")
    parser.add_argument("--seeds", type=int, default=1, help="of which the mean is drawn [%(default)s]")
    chosen = parser.parse_args()
    file = ROOT / f"deploy/profiles/{chosen.gpu}.json"
    profile, workload = load_profile(file.read_bytes(), str(file)), partial(base, duration_s=chosen.duration)
    curves: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    with processes() as each:
        for policy, curve in curves.items():
            scenario = Scenario(workload, profile, policy, chosen.gpus, OBJECTIVE)
            runs = [CapacityRun(n * chosen.gpus, seed) for n in chosen.models_per_gpu for seed in range(chosen.seeds)]
            attained = [result.token_attainment for result in each(scenario.simulate, runs)]
            for place, models in enumerate(chosen.models_per_gpu):
                own = attained[place * chosen.seeds : (place + 1) * chosen.seeds]
                curve.append((float(models), fmean(own)))
            print(policy, *(f"{models:g}:{share:.3f}" for models, share in curve), flush=True)
    chosen.picture.write_text(attainment_svg(curves))


if __name__ == "__main__":
    main()
