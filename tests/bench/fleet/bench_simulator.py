"""How fast is the simulator? Events per second at 8 GPUs; a large fleet beside real time; the time of an event by size.

The workload is `base` at 11 models per GPU, the policy `slack`; interpreted, and compiled (`make fast`) where compiling
is possible. Times are one core's work, so other load on the machine counts only as far as it takes the caches. The
large fleets are simulated for as long as the workload lasts.

`python tests/bench/fleet/bench_simulator.py`
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))  # after the compiled machines named by PYTHONPATH

from runtime.core.device.request import Objective  # noqa: E402
from runtime.core.ledgers.costs import load_profile  # noqa: E402
from runtime.sim import compiled, world  # noqa: E402
from runtime.sim.fleet import simulate  # noqa: E402
from runtime.sim.workload import base  # noqa: E402
from tests.bench.timing import load, spread  # noqa: E402

PROFILE = load_profile((ROOT / "deploy" / "profiles" / "h100.json").read_bytes(), "h100.json")
REPEATS = 5
PER_GPU = 11
SIZES = (8, 16, 32, 64, 128, 256)  # GPUs
MODE = "interpreted" if world.__file__.endswith(".py") else "compiled"


def main() -> None:
    _measure()
    if MODE == "compiled":
        return
    try:
        made = compiled.build()
    except ValueError as error:
        print(f"compiled: not measured: {error}", file=sys.stderr)
        return
    subprocess.run([sys.executable, __file__], env=compiled.environment(made), check=True)


def _measure() -> None:
    speeds = [_speed(8, 8 * PER_GPU, 400.0)[0] for _ in range(REPEATS)]
    _print("8 GPUs x 11", events_per_s=spread(speeds, 0), to_reach="at least 100000")
    for gpus, models in ((64, 704), (256, 2800)):
        events_per_s, times_real = _speed(gpus, models, 120.0)
        _print(f"{gpus} GPUs x {models} models", events_per_s=round(events_per_s), times_real_time=round(times_real, 1))
    _print("to reach with 256 GPUs x 2800 models", times_real_time="at least 10")
    rounds = [{gpus: 1e6 / _speed(gpus, gpus * PER_GPU, 60.0)[0] for gpus in SIZES} for _ in range(REPEATS)]
    _print(
        "by GPUs",
        event_us={str(gpus): spread([costs[gpus] for costs in rounds], 1) for gpus in SIZES},
        ratio_256_to_8=spread([costs[256] / costs[8] for costs in rounds], 2),
        to_reach=f"at most {math.log2(256) / math.log2(8):.2f}, as the logarithm",
        load=load(),
    )


def _speed(gpus: int, models: int, duration_s: float) -> tuple[float, float]:
    """Events per second, and simulated seconds per second."""
    workload = base(models, 7, duration_s=duration_s)
    began = time.thread_time()  # without the threads of a BLAS, busy for a while after the workload was made
    result = simulate(workload, PROFILE, "slack", gpus, Objective(), drain_s=0.0)
    took_s = time.thread_time() - began
    return result.events / took_s, duration_s / took_s


def _print(question: str, **answer: object) -> None:
    print(json.dumps({"bench": "simulator", "mode": MODE, "question": question, "answer": answer}), flush=True)


if __name__ == "__main__":
    main()
