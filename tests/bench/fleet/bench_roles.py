"""When is a fleet better with devices for prompts only? Simulated: long prompts for few models, with `slack`.

`python tests/bench/fleet/bench_roles.py` prints the share of tokens, and of first tokens, on time for fleets of four
H100. Either every device has both roles, or the first device or two compute prompts and the further devices decode, or
the fleet gives roles and takes roles back (`runtime/core/fleet/roles.py`); then the number of changes follows.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from runtime.core.device.request import Objective  # noqa: E402
from runtime.core.fleet.cluster import Rules  # noqa: E402
from runtime.core.fleet.roles import RoleRule  # noqa: E402
from runtime.core.ledgers.costs import load_profile  # noqa: E402
from runtime.core.turns.slack import Slack  # noqa: E402
from runtime.sim.dispatch.gateways import GatewayDispatch  # noqa: E402
from runtime.sim.dispatch.sight import Sight  # noqa: E402
from runtime.sim.workload import Workload, base  # noqa: E402
from runtime.sim.world import World  # noqa: E402
from store.contract.wire import Role  # noqa: E402

PROMPTS, ANSWERS = (2000, 6000), (100, 300)  # tokens, least and most
TTFT_S, PATIENCE_S = 2.0, 1.0
DEVICES = 4
POOLS = [(), (Role.PREFILL, *[Role.DECODE] * 3), (*[Role.PREFILL] * 2, *[Role.DECODE] * 2)]
CASES = [(2, 6.0), (2, 8.0), (3, 8.0), (12, 4.0)]  # number of models, requests per second for the fleet


def with_long_prompts(models: int, per_s: float, seed: int, duration_s: float = 180.0) -> Workload:
    work, rng = base(models, seed, rate=per_s / models, duration_s=duration_s), np.random.default_rng(seed)
    prompts, outputs = (rng.integers(*tokens, len(work.at_s)).astype(np.int32) for tokens in (PROMPTS, ANSWERS))
    return replace(work, prompt_tokens=prompts, output_tokens=outputs)


def served(work: Workload, roles: tuple[Role, ...], tbt_s: float, seed: int, auto: bool = False) -> str:
    """Simulate the fleet. Returns the shares of tokens and of first tokens on time, and changes of roles if `auto`."""
    path = ROOT / "deploy/profiles/h100.json"
    dispatch = GatewayDispatch(Sight(2, seed=seed), roles)
    objective = Objective(TTFT_S, tbt_s, PATIENCE_S)
    rules = Rules(migrate=True, roles=RoleRule() if auto else None)
    world = World(work, load_profile(path.read_bytes(), str(path)), Slack, dispatch, DEVICES, objective, rules=rules)
    world.run(60.0)
    result = world.result(40.0)
    changes = f" {world.role_changes:2}" if auto else ""
    return f"{result.token_attainment:.3f}/{result.first_token_attainment:.3f}{changes}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    print("models  requests/s  TBT s   both roles       1 for prompts    2 for prompts    automatic", flush=True)
    for tbt_s in (0.1, 0.03):
        for models, per_s in CASES:
            work = with_long_prompts(models, per_s, seed)
            shown = [served(work, roles, tbt_s, seed) for roles in POOLS] + [served(work, (), tbt_s, seed, auto=True)]
            print(f"{models:6} {per_s:11.1f} {tbt_s:6.2f}   " + "      ".join(shown), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
