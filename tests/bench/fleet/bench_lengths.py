"""How much do models with windows or states serve on a GPU, counted by their curves and by a line? In simulation.

Prompts are `LONGER` times as long as ShareGPT's, on one GPU under `slack`. Two capacities are asked for: the most
models at `RATE` requests per second each, and the most requests per second of one model. The capacity is the largest
number, of the numbers tried, up to which every smaller number keeps `min`, the attainment of tokens and of first
tokens, at 90 % in the mean over seeds. "line" counts every token in every layer and no states, as versions before
`KvCurve` did. An engine holds what the curve says, so the figures by line are what such a count promised.

`python tests/bench/fleet/bench_lengths.py [--seeds 3] [--out FILE]`
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))

from runtime.core.device.request import Objective  # noqa: E402
from runtime.core.ledgers.costs import ModelSize, load_profile  # noqa: E402
from runtime.sim.fleet import simulate  # noqa: E402
from runtime.sim.workload import base  # noqa: E402
from store.contract.kv_curve import KeptLayers, LayerKind, written_bytes  # noqa: E402

FULL, WINDOW, _, STATE = LayerKind
RATE, LONGER, DURATION_S = 0.1, 16, 200.0
MODELS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24)
RATES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
ENOUGH = 0.9
# Weights in bytes, parameters that a token uses, layers at two bytes an element; from the models' published configs.
SHAPES = {
    "gpt-oss-20b": (13_800_000_000, 3.6e9, (KeptLayers(WINDOW, 12, 2048, 128), KeptLayers(FULL, 12, 2048))),
    "gemma-3-27b": (54_900_000_000, 27.4e9, (KeptLayers(WINDOW, 52, 8192, 1024), KeptLayers(FULL, 10, 8192))),
    "qwen3-next-80b-fp8": (82_000_000_000, 3.9e9, (KeptLayers(STATE, 36, 1_097_728), KeptLayers(FULL, 12, 2048))),
}


def attained(size: ModelSize, models: int, rate: float, seeds: int) -> float:
    """Mean of `min` over the seeds."""
    path = ROOT / "deploy" / "profiles" / "h200.json"
    profile = load_profile(path.read_bytes(), str(path))
    found = []
    for seed in range(seeds):
        work = base(models, seed, rate, DURATION_S)
        sizes = [msgspec.structs.replace(size, name=f"m{number}") for number in range(models)]
        work = replace(work, models=sizes, prompt_tokens=work.prompt_tokens * LONGER)
        found.append(simulate(work, profile, "slack", 1, Objective()).min)
    return sum(found) / seeds


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    for name, (weight_bytes, parameters, kept) in SHAPES.items():
        for count in ("line", "curve"):
            size = ModelSize(name, weight_bytes, written_bytes(kept), parameters, kept if count == "curve" else ())
            answer = {"bench": "lengths", "gpu": "H200, simulated", "model": name, "kv": count, "seeds": given.seeds}
            for what, tried in (("models", [(each, RATE) for each in MODELS]), ("rate", [(1, each) for each in RATES])):
                points = {}
                for models, rate in tried:
                    points[models if what == "models" else rate] = found = attained(size, models, rate, given.seeds)
                    if found < ENOUGH:
                        break
                answer[what] = max((point for point, found in points.items() if found >= ENOUGH), default=0)
                answer[f"min_by_{what}"] = {point: round(found, 4) for point, found in points.items()}
            print(json.dumps(answer), flush=True)
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
