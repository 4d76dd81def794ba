"""Limits of the bus under a large fleet: bytes a second, CPU time of each role, time until a gateway knows of a death.

A generator plays the runtimes on a real NATS server, or on a cluster of three servers, with the product's senders of
leases and reports (`bench_reports.py` has the played runtime). Each gateway is a process with the product's view of the
fleet (gateway/streams/runtimes.py) and nothing else. In the middle of the window some runtimes fall silent at once, and
each gateway notes when the last of these runtimes has left the gateway's leases. The answer has the slowest gateway's
seconds, the MB that a gateway gets each second, leases that the servers did not store in time, and the CPU time of a
gateway, of the generator and of a server as shares of a core. Aim: a death is known within 3 s of the last lease and
the second in which the next lease was due.

`python tests/bench/fleet/bench_bus.py [--runtimes 1000] [--gateways 20] [--servers 1] [--models 50] [--seconds 20]`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))

from gateway.streams.runtimes import RuntimesView  # noqa: E402
from store.bus import Bus  # noqa: E402
from tests.bench.fleet.bench_reports import PlayedRuntime  # noqa: E402
from tests.bench.timing import load  # noqa: E402
from tests.conftest import NatsServer  # noqa: E402
from tests.store.clusters import NatsCluster  # noqa: E402

DYING = 10  # runtimes that fall silent at once
FULL_S = 180.0  # longest wait for leases of every runtime


class CountingRuntime(PlayedRuntime):
    """A played runtime that counts leases not stored in time."""

    late = 0

    async def play(self, until: float) -> None:
        forget = self._parts.forget

        def late() -> None:
            CountingRuntime.late += 1
            forget()

        self._parts.forget = late  # type: ignore[method-assign]
        await super().play(until)


async def generate(url: str, replicas: int, runtimes: int, models: int) -> None:
    """Play runtimes until standard input closes. A line on standard input silences DYING runtimes; the answer is the
    monotonic time of the silence, and the number of leases not stored in time until then."""
    names = [f"{number:024x}" for number in range(models)]
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with Bus.connect(url, "generator", replicas=replicas) as bus:
        played = [CountingRuntime(bus, number, names, runtimes) for number in range(runtimes)]
        tasks = [asyncio.create_task(each.play(loop.time() + 3600)) for each in played]
        while await reader.readline():
            for task in tasks[:DYING]:
                task.cancel()
            print(json.dumps([time.monotonic(), CountingRuntime.late]), flush=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def view(url: str, replicas: int, runtimes: int) -> None:
    """Watch the fleet as a gateway does. Prints a line when every runtime is known, and then a line with the monotonic
    time at which the first deaths were known, bytes received until then, and the seconds since the first line."""
    async with Bus.connect(url, "view", replicas=replicas) as bus:
        seen = RuntimesView(bus)
        await seen.start()
        async with asyncio.timeout(FULL_S):
            while len(seen.leases) < runtimes:
                await asyncio.sleep(0.05)
        print("full", flush=True)
        began, got = time.monotonic(), bus._client.stats["in_bytes"]
        dying = {f"runtime-{number:04d}" for number in range(DYING)}
        while dying & seen.leases.keys():
            await asyncio.sleep(0.02)
        known = time.monotonic()
        print(json.dumps([known, bus._client.stats["in_bytes"] - got, known - began, len(seen.leases)]), flush=True)
        await asyncio.sleep(3600)


@contextlib.contextmanager
def servers_of(folder: Path, count: int) -> Iterator[str]:
    """Run `count` servers, 1 or 3. Yields the URL."""
    if count == 3:
        with NatsCluster.running(folder) as cluster:
            yield cluster.url
        return
    server = NatsServer(folder)
    server.start()
    try:
        yield server.url
    finally:
        server.kill()


def started(role: str, url: str, asked: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--role", role, "--url", url]
    for name in ("runtimes", "models", "servers"):
        command += [f"--{name}", str(getattr(asked, name))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(asked: argparse.Namespace, url: str) -> dict[str, object]:
    servers = [each for each in psutil.Process().children() if each.name() == "nats-server"]
    generator = started("generate", url, asked)
    views = [started("view", url, asked) for _ in range(asked.gateways)]
    try:
        began = time.monotonic()
        for each in views:
            assert each.stdout is not None and each.stdout.readline() == "full\n", "not every lease came"
        full_s = time.monotonic() - began
        roles = {"server": servers, "generator": [psutil.Process(generator.pid)]}
        roles["gateway"] = [psutil.Process(each.pid) for each in views]
        before, at = {role: cpu_s(found) for role, found in roles.items()}, time.monotonic()
        time.sleep(asked.seconds)
        passed = time.monotonic() - at
        shares = {f"{role}_cores": (cpu_s(found) - before[role]) / passed / len(found) for role, found in roles.items()}
        assert generator.stdin is not None and generator.stdout is not None
        generator.stdin.write("die\n")
        generator.stdin.flush()
        died, late = json.loads(generator.stdout.readline())
        known = [json.loads(each.stdout.readline()) for each in views if each.stdout is not None]
        return {
            "death_known_s": [round(pick(when for when, *_ in known) - died, 2) for pick in (min, max)],
            "MB_per_s": round(sum(got / over for _, got, over, _ in known) / len(known) / 1e6, 2),
            **{role: round(share, 3) for role, share in shares.items()},
            "leases_late": late,
            "runtimes_known_at_the_end": min(left for *_, left in known),
            "full_after_s": round(full_s, 1),
        }
    finally:
        for each in (generator, *views):
            each.kill()
            each.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtimes", type=int, default=1000)
    parser.add_argument("--gateways", type=int, default=20)
    parser.add_argument("--servers", type=int, choices=(1, 3), default=1)
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--role", choices=("generate", "view"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.role == "generate":
        return asyncio.run(generate(asked.url, asked.servers, asked.runtimes, asked.models))
    if asked.role == "view":
        return asyncio.run(view(asked.url, asked.servers, asked.runtimes))
    with tempfile.TemporaryDirectory() as folder, servers_of(Path(folder), asked.servers) as url:
        answer = measure(asked, url)
    question = f"{asked.runtimes} runtimes, {asked.gateways} gateways, {asked.servers} servers of NATS"
    print(json.dumps({"bench": "bus", "question": question, "answer": answer, "load": load()}))


if __name__ == "__main__":
    main()
