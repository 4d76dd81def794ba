"""How much does a platform without requests take? Time to ready, memory of every process, CPU when idle.

`python tests/bench/gateway/bench_footprint.py`: three starts on an empty data folder. After the last start, three
models of the demo are deployed, a model is asked once, and the idle process tree is watched, with the threads that woke
up most.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from tests.bench.gateway.footprint import has_torch, processes, ticks  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.e2e.conftest import MODELS, Platform  # noqa: E402

STARTS = 3
SETTLE_S, IDLE_S = 5.0, 30.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def ready_s(platform: Platform) -> float:
    started = time.monotonic()
    platform.start()
    return time.monotonic() - started


def memory(running: dict[str, psutil.Process]) -> dict[str, dict[str, object]]:
    return {
        name: {"rss_mb": round(process.memory_info().rss / 1e6), "torch": has_torch(process)}
        for name, process in running.items()
    }


def idle(running: dict[str, psutil.Process]) -> dict[str, object]:
    """CPU in percent of a core, and the threads that woke up most: process/thread → wake-ups a second."""
    before = {name: ticks(process) for name, process in running.items()}
    started = time.monotonic()
    time.sleep(IDLE_S)
    seconds = time.monotonic() - started
    percent: dict[str, float] = dict.fromkeys(running, 0.0)
    wakes: dict[str, float] = {}
    for name, process in running.items():
        for thread, now in ticks(process).items():
            then = before[name].get(thread)
            percent[name] += (now.cpu_ticks - (then.cpu_ticks if then else 0)) / TICKS_PER_S / seconds * 100
            label = f"{name}/{now.name}"
            wakes[label] = wakes.get(label, 0) + (now.switches - (then.switches if then else 0)) / seconds
    most = sorted(wakes.items(), key=lambda item: -item[1])[:8]
    return {
        "idle_percent_of_a_core": round(sum(percent.values()), 2),
        "by_process": {name: round(value, 2) for name, value in percent.items()},
        "wakes_per_s": {name: round(value, 1) for name, value in most},
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        times = []
        for start in range(STARTS):
            platform = Platform(Path(folder) / f"data{start}", free_port())
            with contextlib.ExitStack() as stack:
                stack.callback(platform.stop)
                times.append(ready_s(platform))
                if start < STARTS - 1:
                    continue
                print(json.dumps({"ready_s": [round(statistics.median(times), 1), *map(_tenth, sorted(times))]}))
                assert platform.process is not None
                running = processes(platform.everyone())
                print(json.dumps({"deployed": 0, "memory": memory(running)}), flush=True)
                time.sleep(SETTLE_S)
                print(json.dumps({"deployed": 0, **idle(running)}), flush=True)
                deploy(platform)
                time.sleep(SETTLE_S)
                running = processes(platform.everyone())  # with the renderers started by now
                print(json.dumps({"deployed": 3, "memory": memory(running)}), flush=True)
                print(json.dumps({"deployed": 3, **idle(running)}), flush=True)


def deploy(platform: Platform) -> None:
    key = platform.tenant("acme")
    for name in ("faq", "poet", "weather"):
        platform.model(name, MODELS / name)
        platform.deploy("acme", name)
        body = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        platform.post("/v1/chat/completions", body, key)


def _tenth(value: float) -> float:
    return round(value, 1)


if __name__ == "__main__":
    main()
