"""Does a client who behaves badly a thousand times harm another tenant?

`staccato up` with two tenants. The first tenant streams tokens; the second tenant misbehaves from a second address, in
windows between quiet windows. For every kind of abuse: how many connections the gateway answered with which status, how
many connections the gateway cut, how long the longest connection lived, the gateway's growth in memory, and the longest
answer of `/healthz`; and the streaming tenant's p95 between two tokens (and longest pause), in the window over the mean
of the quiet windows before and after the window. Abusers (a process of the lowest priority), reader and platform share
the machine's cores: the bench prints the cores used by abusers, reader, platform, and the rest of the machine.

Attacks are single requests that ask for much (`attacks.py`), sent in turn by a client, a second apart. For every
attack, in paired rounds: the longest gap in a second tenant's stream on a second model, and the longest answer of
`/healthz`, without and with the attack. The medians are held against bounds (GAP_TIMES, GAP_MORE_MS, HEALTH_MS_MOST),
and `--table` makes of the output a table in tests/bench/NOTEBOOK.md.

`python tests/bench/gateway/bench_abuse.py [--connections 1000] [--pairs 3] [--load 2] [--wait 60] [KIND or ATTACK ...]`
`python tests/bench/gateway/bench_abuse.py --attacks [--rounds 5] > OUTPUT`
`python tests/bench/gateway/bench_abuse.py --table OUTPUT`
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

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from deploy.demo.random_weights import write_random  # noqa: E402
from tests.bench.gateway.abuse import attacks  # noqa: E402
from tests.bench.gateway.abuse.abusers import KINDS, WINDOW_S, Abusers, Job, Seen  # noqa: E402
from tests.bench.gateway.abuse.grammar import RAISED  # noqa: E402
from tests.bench.timing import load, spread  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.e2e.conftest import MODELS, Platform  # noqa: E402

MIB = 1 << 20
SHAPE: dict[str, Any] = dict(
    hidden=512, layers=8, heads=8, kv_heads=4
)  # some 7 ms for a token: no GPU is faster by much
STREAMS = 1  # concurrent streams of the abuser: more streams in a batch slow every tenant, even if the abuser reads
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GAP_TIMES, GAP_MORE_MS = 1.5, 50.0  # bound on the longest gap during an attack: quiet gap x GAP_TIMES + GAP_MORE_MS
HEALTH_MS_MOST = 250.0
HEALTH_PERIOD_S = 0.05
EVIL = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}hello"


@dataclass
class Gaps:
    """Records the gaps between two tokens of the well-behaved tenant; streams until told to end."""

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
        """p95 of the gaps and the longest gap during the window, in milliseconds."""
        self.times.clear()
        await window
        return statistics.quantiles(self.times, n=20)[-1] * 1e3, max(self.times) * 1e3


class Cores:
    """Processor use since the object was made, in cores, by process group."""

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
    """CPU seconds of a process and its descendants, with ended descendants."""
    used_s = 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used_s += times.user + times.system + times.children_user + times.children_system
    return used_s


async def settled(most: float, wait_s: float) -> float:
    """Wait until the machine's load is below `most`, at most `wait_s` seconds; returns the load."""
    until = time.monotonic() + wait_s
    while os.getloadavg()[0] >= most and time.monotonic() < until:
        await asyncio.sleep(1)
    return round(os.getloadavg()[0], 2)


async def measure(platform: Platform, abusers: Abusers, job: Job, chosen: argparse.Namespace) -> dict[str, object]:
    gateway = platform.child("gateway.app")
    gaps, healthz = Gaps(platform), HealthProbe(platform)
    grown = 0
    quiet, loud, loads, longest = list[float](), list[float](), list[float](), dict[str, list[float]]()
    health = list[float]()
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
            asking = asyncio.create_task(healthz.longest_ms(window))
            during = await gaps.during(window)
            health.append(await asking)
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
    await healthz.close()
    ratio = spread((a / b for a, b in zip(loud, quiet, strict=True)), 2)
    said = {"ends": dict(ends), "lived_s_most": round(max(lived, default=0), 1), "grown_mib": round(grown / MIB)}
    p95 = {"p95_ms": spread(loud, 1), "quiet_ms": spread(quiet, 1), "ratio": ratio, "longest": longest}
    p95["health_ms"] = spread(health, 0)
    conditions = {"cores": cores, "load_before": loads, "load": load()}
    return {"kind": job.kind, "connections": job.connections, **said, **p95, **conditions}


async def most_rss(process: psutil.Process, window: asyncio.Task[Seen]) -> int:
    most = 0
    while not window.done():
        most = max(most, process.memory_info().rss)
        await asyncio.sleep(0.2)
    return most


# ── attacks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class HealthProbe:
    """Asks for `/healthz`. The client is made beforehand: to make a client takes 40 to 100 ms of the loop that also
    reads the other tenant's stream."""

    def __init__(self, platform: Platform) -> None:
        self._client = httpx.AsyncClient(base_url=platform.url, timeout=60, verify=False)

    async def longest_ms(self, window: asyncio.Future[Any]) -> float:
        """The longest answer until the window is over, in milliseconds."""
        longest_s = 0.0
        while not window.done():
            began = time.perf_counter()
            assert (await self._client.get("/healthz")).status_code == 200
            longest_s = max(longest_s, time.perf_counter() - began)
            await asyncio.sleep(HEALTH_PERIOD_S)
        return longest_s * 1e3

    async def close(self) -> None:
        await self._client.aclose()


async def measure_attack(platform: Platform, attacker: attacks.Attacker, name: str, chosen: argparse.Namespace) -> Any:
    """Run paired rounds of an attack; the answer's `kept` says whether the medians are within the bounds."""
    gaps, healthz, statuses = Gaps(platform), HealthProbe(platform), Counter[str]()
    quiet, attacked, health, cpu = list[float](), list[float](), list[float](), list[float]()
    gateway = platform.child("gateway.app")
    loads = [await settled(chosen.load, chosen.wait)]
    async with gaps.streaming():
        for _ in range(chosen.rounds):
            began_s = _own_s(gateway)
            quiet.append((await gaps.during(asyncio.sleep(chosen.window)))[1])
            quiet_s = _own_s(gateway) - began_s
            job = attacks.Job(platform.port, platform.keys["acme"], name, chosen.window)
            began, began_s = time.monotonic(), _own_s(gateway)
            window = asyncio.create_task(asyncio.to_thread(attacker.run, job))
            asking = asyncio.create_task(healthz.longest_ms(window))
            attacked.append((await gaps.during(window))[1])
            health.append(await asking)
            own_s = quiet_s * (time.monotonic() - began) / chosen.window  # the gateway's CPU time without the attack
            cpu.append(1e3 * (_own_s(gateway) - began_s - own_s) / max(1, window.result().total()))
            statuses += window.result()
            loads.append(round(os.getloadavg()[0], 2))
    await healthz.close()
    gap_ms_most = GAP_TIMES * statistics.median(quiet) + GAP_MORE_MS
    wrong = attacks.ATTACKS[name].refused and set(statuses) != {"400"}
    kept = statistics.median(attacked) <= gap_ms_most and statistics.median(health) <= HEALTH_MS_MOST and not wrong
    return {
        "attack": name,
        "rounds": chosen.rounds,
        "answers": dict(statuses),
        "quiet_gap_ms": spread(quiet, 0),
        "gap_ms": spread(attacked, 0),
        "gap_ms_most": round(gap_ms_most),
        "health_ms": spread(health, 0),
        "gateway_cpu_ms": spread(cpu, 0),  # for each request
        "kept": kept,
        "loads": loads,
    }


def table(lines: list[str]) -> str:
    """The answers of attacks as rows for NOTEBOOK.md."""
    rows = [
        "| request | answers | longest gap of another tenant on another model, ms: without | with | at most "
        "| longest `/healthz`, ms | the gateway's CPU time, ms a request | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for answer in (json.loads(line)["answer"] for line in lines if line.startswith('{"bench": "abuse"')):
        if "attack" in answer:
            answers = ", ".join(f"{count} × {status}" for status, count in sorted(answer["answers"].items()))
            fields = ("quiet_gap_ms", "gap_ms", "health_ms", "gateway_cpu_ms")
            spreads = (answer[name] for name in fields)
            without, gap, health, cpu = (f"{median:.0f} [{low:.0f}, {high:.0f}]" for low, median, high in spreads)
            kept = "kept" if answer["kept"] else "**not kept**"
            rows.append(
                f"| {answer['attack']} | {answers} | {without} | {gap} | {answer['gap_ms_most']} "
                f"| {health} | {cpu} | {kept} |"
            )
    return "\n".join(rows)


# ── the bench ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_evil(folder: Path) -> Path:
    """Write a model whose template loops without end if the message says "loop"."""
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
    parser.add_argument("--attacks", action="store_true", help="all attacks, and no other kind")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of windows for each attack")
    parser.add_argument("--window", type=float, default=6.0, help="seconds of each of these windows")
    parser.add_argument("--table", type=Path, metavar="OUTPUT", help="print the table of attacks of an earlier output")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join([*KINDS, *attacks.ATTACKS]))
    chosen = parser.parse_args()
    if chosen.table:
        print(table(chosen.table.read_text().splitlines()))
        return
    abusers, attacker = Abusers(), attacks.Attacker()
    with tempfile.TemporaryDirectory() as name:
        raised = RAISED if any(kind.startswith("raised_") for kind in chosen.kinds) else {}
        platform = Platform(Path(name) / "data", free_port(), raised)
        try:
            platform.start("--device-memory", "512MiB")
            platform.model("m", write_random(Path(name) / "m", "llama", **SHAPE))
            platform.model("evil", write_evil(Path(name) / "evil"))
            for tenant in ("acme", "globex"):
                platform.tenant(tenant)
                platform.deploy(tenant, "m")
            platform.deploy("acme", "evil")
            platform.model("faq", MODELS / "faq")
            platform.deploy("acme", attacks.MODEL, "faq", scaling={"idle": "never"})
            limited = platform.request("PATCH", "/api/v1/tenants/acme", {"limits": {"concurrent_streams": STREAMS}})
            assert limited.status_code == 200, limited.text
            every = [*attacks.ATTACKS] if chosen.attacks else [*KINDS, *attacks.ATTACKS]
            for kind in chosen.kinds or every:
                if kind in attacks.ATTACKS:
                    answer = await measure_attack(platform, attacker, kind, chosen)
                else:
                    job = Job(platform.port, platform.keys["acme"], kind, chosen.connections)
                    answer = await measure(platform, abusers, job, chosen)
                print(json.dumps({"bench": "abuse", "answer": answer}), flush=True)
        finally:
            platform.stop()
            abusers.close()
            attacker.close()


if __name__ == "__main__":
    asyncio.run(main())
