"""Does a client who behaves badly a thousand times harm another tenant?

`staccato up` with two tenants. One streams tokens; the other misbehaves from another address, in windows between quiet
ones. For each kind of abuse: how many connections the gateway answered with which status, how many it cut, how long the
longest lived, what the gateway grew by; and the other tenant's p95 between two tokens (its longest pause, too), in the
window over the mean of the quiet ones before and after it. Abusers (a process of the lowest priority), reader and
platform share the machine's cores: how many each used is said, and how many everybody else on the machine.

`python tests/bench/bench_abuse.py [--connections 1000] [--pairs 3] [--load 2] [--wait 60] [KIND ...]`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from deploy.demo.random_weights import write_random  # noqa: E402
from tests.bench.abusers import KINDS, WINDOW_S, Abusers, Job, Seen  # noqa: E402
from tests.bench.timing import load, spread  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.e2e.conftest import Platform  # noqa: E402

MIB = 1 << 20
SHAPE: dict[str, Any] = dict(
    hidden=512, layers=8, heads=8, kv_heads=4
)  # some 7 ms for a token: no GPU is faster by much
STREAMS = 1  # that the abuser may have at once: more in a batch slow it for everybody, also of those who read
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
EVIL = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}hello"


@dataclass
class Gaps:
    """Between two tokens of the tenant who does nothing wrong; ends when it is told to."""

    platform: Platform
    times: list[float] = field(default_factory=list)

    async def run(self) -> None:
        body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
        headers = {"authorization": f"Bearer {self.platform.keys['globex']}"}
        async with httpx.AsyncClient(timeout=120) as client:
            while True:
                post = client.stream("POST", f"{self.platform.url}/v1/completions", json=body, headers=headers)
                async with post as response:
                    assert response.status_code == 200, await response.aread()
                    last = None
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            now = time.perf_counter()
                            if last is not None:
                                self.times.append(now - last)
                            last = now

    @contextlib.asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.run())
        await asyncio.sleep(2)
        yield
        assert not task.done(), "the other tenant's stream ended"
        task.cancel()
        await asyncio.wait([task])

    async def during(self, window: Awaitable[object]) -> tuple[float, float]:
        """p95 and the longest, in milliseconds."""
        self.times.clear()
        await window
        return statistics.quantiles(self.times, n=20)[-1] * 1e3, max(self.times) * 1e3


class Cores:
    """Who used how much of the processor since it was made, in cores."""

    def __init__(self, platform: Platform, abusers: Abusers) -> None:
        assert platform.process is not None
        self._platform, self._gateway = psutil.Process(platform.process.pid), platform.child("gateway.app")
        self._device, self._abusers = platform.child("runtime.device"), abusers.process
        self._at, self._before = time.monotonic(), self._used_s()

    def _used_s(self) -> dict[str, float]:
        machine, gateway = psutil.cpu_times(), _own_s(self._gateway)
        used = {
            "gateway": gateway,
            "rendering": _tree_s(self._gateway) - gateway,
            "device": _own_s(self._device),
            "abusers": _own_s(self._abusers),
        }
        ours = _tree_s(self._platform) + used["abusers"] + _own_s(psutil.Process())
        return used | {"others": sum(machine) - machine.idle - machine.iowait - machine.guest - ours}

    def used(self) -> dict[str, float]:
        used_s, took_s = self._used_s(), time.monotonic() - self._at
        return {name: round((used_s[name] - self._before[name]) / took_s, 2) for name in used_s}


def _own_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _tree_s(root: psutil.Process) -> float:
    """With all that lie below it, and those of them that are gone."""
    used_s = 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used_s += times.user + times.system + times.children_user + times.children_system
    return used_s


async def settled(most: float, wait_s: float) -> float:
    """The machine's load when it is low enough, or after the wait."""
    until = time.monotonic() + wait_s
    while os.getloadavg()[0] >= most and time.monotonic() < until:
        await asyncio.sleep(1)
    return round(os.getloadavg()[0], 2)


async def measure(platform: Platform, abusers: Abusers, job: Job, chosen: argparse.Namespace) -> dict[str, object]:
    gateway = platform.child("gateway.app")
    gaps = Gaps(platform)
    grown = 0
    quiet, loud, loads, longest = list[float](), list[float](), list[float](), dict[str, list[float]]()
    cores = list[dict[str, dict[str, float]]]()
    ends: Counter[str] = Counter()
    lived: list[float] = []
    for _ in range(chosen.pairs):
        loads.append(await settled(chosen.load, chosen.wait))
        async with gaps.streaming():
            used = Cores(platform, abusers)
            before = await gaps.during(asyncio.sleep(WINDOW_S))
            cores.append({"quiet": used.used()})
            rss, used = gateway.memory_info().rss, Cores(platform, abusers)
            window = asyncio.create_task(asyncio.to_thread(abusers.run, job))
            watching = asyncio.create_task(most_rss(gateway, window))
            during = await gaps.during(window)
            cores[-1]["loud"] = used.used()
            grown = max(grown, await watching - rss)
            after = await gaps.during(asyncio.sleep(WINDOW_S))
        quiet.append((before[0] + after[0]) / 2)
        loud.append(during[0])
        for name, longest_ms in (("quiet_ms", max(before[1], after[1])), ("ms", during[1])):
            longest.setdefault(name, []).append(round(longest_ms))
        seen = window.result()
        ends += seen.ends
        lived += seen.lived_s
    ratio = spread((a / b for a, b in zip(loud, quiet, strict=True)), 2)
    said = {"ends": dict(ends), "lived_s_most": round(max(lived, default=0), 1), "grown_mib": round(grown / MIB)}
    p95 = {"p95_ms": spread(loud, 1), "quiet_ms": spread(quiet, 1), "ratio": ratio, "longest": longest}
    conditions = {"cores": cores, "load_before": loads, "load": load()}
    return {"kind": job.kind, "connections": job.connections, **said, **p95, **conditions}


async def most_rss(process: psutil.Process, window: asyncio.Task[Seen]) -> int:
    most = 0
    while not window.done():
        most = max(most, process.memory_info().rss)
        await asyncio.sleep(0.2)
    return most


def write_evil(folder: Path) -> Path:
    """A model whose template loops without an end when it is told to."""
    write_random(folder, "llama", hidden=128, layers=2)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": EVIL}))
    return folder


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--load", type=float, default=2.0, help="of the machine, before a pair begins")
    parser.add_argument("--wait", type=float, default=60.0, help="longest wait for that, in seconds")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    chosen = parser.parse_args()
    abusers = Abusers()
    with tempfile.TemporaryDirectory() as name:
        platform = Platform(Path(name) / "data", free_port())
        try:
            platform.start("--device-memory", "512MiB")
            platform.model("m", write_random(Path(name) / "m", "llama", **SHAPE))
            platform.model("evil", write_evil(Path(name) / "evil"))
            for tenant in ("acme", "globex"):
                platform.tenant(tenant)
                platform.deploy(tenant, "m")
            platform.deploy("acme", "evil")
            limited = platform.request("PATCH", "/api/v1/tenants/acme", {"limits": {"concurrent_streams": STREAMS}})
            assert limited.status_code == 200, limited.text
            for kind in chosen.kinds or KINDS:
                job = Job(platform.port, platform.keys["acme"], kind, chosen.connections)
                answer = await measure(platform, abusers, job, chosen)
                print(json.dumps({"bench": "abuse", "answer": answer}), flush=True)
        finally:
            platform.stop()
            abusers.close()


if __name__ == "__main__":
    asyncio.run(main())
