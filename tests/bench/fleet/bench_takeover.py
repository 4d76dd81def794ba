"""How long is a fleet without a scheduler when the scheduler is killed in the middle of its work?

Three runtimes with streams, and a scheduler that wants three or four runtimes. The scheduler is killed fifteen times,
always after a healthy time long enough for an immediate restart by the supervisor: the supervisor delays restarts of a
process that dies again and again.

Measured are the time until a new scheduler process leads, and the time until the new leader's reports show that the
leader has heard of the runtimes. At that moment the scheduler's state is complete, because a scheduler keeps no
state over a restart. Streams go on meanwhile; failed rounds of streams are counted.

`python tests/bench/fleet/bench_takeover.py`
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from gateway.ops.supervise import HEALTHY_S  # noqa: E402
from tests.bench.timing import load, spread  # noqa: E402
from tests.e2e.fleet import EACH, RUNTIMES, Fleet  # noqa: E402

BOUNDS = (RUNTIMES, RUNTIMES + 1)  # least and most runtimes; a scheduler without bounds wants no number
KILLS = 15
WAIT_S = 60.0


async def until(fleet: Fleet, done: Callable[[dict[str, object]], bool]) -> float:
    """Wait until the leader's report satisfies `done`; returns the moment in seconds. Fails after WAIT_S."""
    deadline = time.perf_counter() + WAIT_S
    while not done((await asyncio.to_thread(fleet.platform.get, "/api/v1/fleet")).json()):
        assert time.perf_counter() < deadline, "nobody leads"
        await asyncio.sleep(0.05)
    return time.perf_counter()


async def killed(fleet: Fleet) -> tuple[float, float]:
    """Kill the scheduler; returns the seconds until a new scheduler leads, and until the leader knows the fleet."""
    before = await fleet.scheduler()
    fleet.platform.child("runtime.scheduler").kill()
    at = time.perf_counter()
    leads = await until(fleet, lambda said: said["scheduler"] not in (None, before))
    knows = await until(fleet, lambda said: said["wanted"] in BOUNDS)
    return leads - at, knows - at


async def busy(fleet: Fleet, ended: list[bool]) -> None:
    while True:
        try:
            await fleet.streams(EACH)
            ended.append(True)
        except (AssertionError, ExceptionGroup):
            ended.append(False)


async def measure(fleet: Fleet) -> dict[str, object]:
    await fleet.ready()
    await until(fleet, lambda said: said["wanted"] in BOUNDS)
    ended: list[bool] = []
    streams = asyncio.create_task(busy(fleet, ended))
    chance, times = random.Random(1), []
    for _ in range(KILLS):
        times.append(await killed(fleet))
        await asyncio.sleep(HEALTHY_S + chance.uniform(0, 2))
    while not ended:
        await asyncio.sleep(0.1)
    streams.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await streams
    return {
        "leads_s": spread((leads for leads, _ in times), 2),
        "knows_s": spread((knows for _, knows in times), 2),
        "rounds_of_streams": len(ended),
        "of_them_failed": ended.count(False),
        "load": load(),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        with Fleet.running(Path(name), 3, runtimes="{}:{}".format(*BOUNDS)) as fleet:
            print(json.dumps(asyncio.run(measure(fleet))))


if __name__ == "__main__":
    main()
