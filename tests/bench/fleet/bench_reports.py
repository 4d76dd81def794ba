"""Costs of the leases and reports of a large fleet, for the bus and for a gateway.

A generator plays the runtimes on a real NATS server: reports as often as in a fleet of that size, and a lease each
second, split as nodes split leases (store/contract/leases.py). A runtime serves all models and has requests of 30
models; from a report to the next, a model of the 30 gives way to a further model. A second process is a gateway's view
of the fleet (gateway/streams/runtimes.py) and nothing else. The answer has, for a window after all bases came: the
bytes that the view got each second, CPU time of the view and of the server as shares of a core, and the sizes of a
lease, of a lease with the states of all models, and of a report. Aims: 2 MB/s of reports, and 1 % of a core
(bench_dispatch.py).

`python tests/bench/fleet/bench_reports.py [--runtimes 256] [--models 2800] [--seconds 20]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))

from gateway.streams.runtimes import RuntimesView  # noqa: E402
from store.bus import Bus, BusError  # noqa: E402
from store.contract import wire  # noqa: E402
from store.contract.leases import LeaseParts  # noqa: E402
from store.contract.reports import period_s, report_subject  # noqa: E402
from tests.bench.fleet.bench_dispatch import Busy  # noqa: E402
from tests.bench.timing import load  # noqa: E402
from tests.conftest import NatsServer  # noqa: E402

LEASED_S = 0.9  # a report less than a second after the last lease comes without a lease
IDLE = wire.ModelState(
    residency=wire.Residency.STAGED,
    load_ms=812.5,
    turns=40,
    tokens=5120,
    fetches=9,
    fetch_ms=210.5,
    step_ms=11.25,
    prefill_ms=160.5,
    ever_resident=True,
)


class PlayedRuntime:
    """A runtime as the bus hears the runtime."""

    def __init__(self, bus: Bus, number: int, names: list[str], runtimes: int) -> None:
        """`runtimes`: number of runtimes of the fleet."""
        self._period_s, self._leased_at = period_s(runtimes), 0.0
        self._bus, self.id = bus, f"runtime-{number:04d}"
        rng = random.Random(number)
        self._busy = Busy(rng, rng.sample(names, min(len(names), 64)), self.id)
        self._states = dict.fromkeys(names, IDLE)
        self._parts, self._seq = LeaseParts(), 0

    async def play(self, until: float) -> None:
        """Publish reports and leases until the event loop's time is `until`."""
        loop = asyncio.get_running_loop()
        due = loop.time() + random.random() * self._period_s
        while due < until:
            await asyncio.sleep(due - loop.time())
            due += self._period_s
            self._seq += 1
            await self._bus.publish(report_subject(self.id), self._busy.encoded(self._seq))
            if loop.time() > self._leased_at + LEASED_S:
                self._leased_at = loop.time()
                base, lease = self._parts.split(self.lease(), loop.time())
                try:
                    if base is not None:
                        await self._bus.put(wire.LEASE_BASES, self.id, base)
                    await self._bus.put(wire.LEASES, self.id, lease)
                except BusError:  # the server can't store the first bases of every runtime in time
                    self._parts.forget()

    def lease(self) -> wire.Lease:
        """Return the whole lease: models with requests step, so their states change."""
        for model in self._busy.seated:
            self._states[model] = wire.ModelState(
                residency=wire.Residency.RESIDENT, running=2, turns=self._seq, tokens=9 * self._seq, ever_resident=True
            )
        return wire.Lease(
            runtime=self.id, epoch=1, engine="e", page_bytes=2 << 20, pages_total=40_000, models=dict(self._states)
        )


async def generate(url: str, runtimes: int, models: int, seconds: float) -> None:
    names = [f"{random.Random(number).getrandbits(96):024x}" for number in range(models)]
    async with Bus.connect(url, "generator") as bus:
        played = [PlayedRuntime(bus, number, names, runtimes) for number in range(runtimes)]
        whole, report = played[0].lease(), played[0]._busy.encoded(1)
        parts = LeaseParts()
        parts.split(whole, 0.0)
        amending = parts.split(played[0].lease(), 1.0)[1]
        print(json.dumps([len(wire.encode(whole)), len(wire.encode(amending)), len(report)]), flush=True)
        until = asyncio.get_running_loop().time() + seconds
        await asyncio.gather(*(each.play(until) for each in played))


async def view(url: str, runtimes: int, models: int, seconds: float, server: psutil.Process) -> dict[str, object]:
    async with Bus.connect(url, "view") as bus:
        seen = RuntimesView(bus)
        await seen.start()
        async with asyncio.timeout(120):
            while sum(len(lease.models) == models for lease in seen.leases.values()) < runtimes:
                await asyncio.sleep(0.2)
        await asyncio.sleep(2)
        got, began, spent, served = bus._client.stats["in_bytes"], time.monotonic(), time.process_time(), _cpu_s(server)
        await asyncio.sleep(seconds)
        passed = time.monotonic() - began
        assert len(seen.leases) == runtimes
        return {
            "MB_per_s": round((bus._client.stats["in_bytes"] - got) / passed / 1e6, 2),
            "view_share_of_a_core": round((time.process_time() - spent) / passed, 3),
            "server_share_of_a_core": round((_cpu_s(server) - served) / passed, 3),
        }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtimes", type=int, default=256)
    parser.add_argument("--models", type=int, default=2800)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--generate", metavar="URL", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.generate:
        return asyncio.run(generate(asked.generate, asked.runtimes, asked.models, asked.seconds))
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder))
        server.start()
        command = [sys.executable, __file__, "--generate", server.url, "--seconds", str(asked.seconds + 60)]
        command += ["--runtimes", str(asked.runtimes), "--models", str(asked.models)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as generator:
            try:
                assert generator.stdout is not None
                sizes = json.loads(generator.stdout.readline())
                (process,) = [each for each in psutil.Process().children() if each.name() == "nats-server"]
                answer = asyncio.run(view(server.url, asked.runtimes, asked.models, asked.seconds, process))
            finally:
                generator.kill()
                server.kill()
    answer |= dict(zip(("whole_lease_bytes", "lease_bytes", "report_bytes"), sizes, strict=True))
    answer["to_reach"] = "at most 2 MB/s"
    question = f"{asked.runtimes} runtimes that each serve {asked.models} models"
    print(json.dumps({"bench": "reports", "question": question, "answer": answer, "load": load()}))


if __name__ == "__main__":
    main()
