"""Does one machine serve a thousand models, far more than its memory holds?

`staccato up` with a host cache of 2 GiB and a device of 256 MiB gets `--models` models of nine architectures with
random weights, some 20 MiB each. Every model is deployed: the bench orders the next deployment once a few are left to
be built. Meanwhile the list of deployments is asked again and again. Then each model gets a question, in a random
order, and the same question again, in a different order: the answers must agree, and the time to the first token is
held against the objective of the deployment.

The answer has the seconds of the deployments, the tiers in which the models were then, the times to the first token;
how long the API answered, in the median, the 99th percentile and at most; the shared and the private memory of all
processes; and the time of `staccato ps`. Bounds: no model fails, every answer agrees, memory stays below the host cache
and 2 GiB more, and the API's 99th percentile below 200 ms.

`python tests/bench/runtime/bench_thousand.py [--models 1000] [--asked 4]`
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
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from deploy.demo.random_weights import ARCHITECTURES, write_random  # noqa: E402
from tests.bench.timing import load, spread  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.e2e.conftest import Platform  # noqa: E402
from tests.runtime.hybrids import write_hybrid  # noqa: E402

GIB = 1 << 30
HYBRIDS = ("gemma3_text", "nemotron_h")
SHAPE: dict[str, Any] = dict(hidden=448, layers=2)
SETTINGS = {"STACCATO_HOST_CACHE": "2GiB", "STACCATO_DEVICE_MEMORY": "256MiB", "STACCATO_DISK_CACHE": "24GiB"}
QUEUED = 20  # deployments ordered and not built yet
QUESTION = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 8, "temperature": 0}
API_MS_MOST, MORE_BYTES_MOST = 200.0, 2 * GIB


def write_models(folder: Path, count: int) -> dict[str, Path]:
    kinds = (*ARCHITECTURES, *HYBRIDS)
    models: dict[str, Path] = {}
    for number in range(count):
        name, kind = f"m{number}", kinds[number % len(kinds)]
        path = folder / name
        write_hybrid(path, kind) if kind in HYBRIDS else write_random(path, kind, seed=number, **SHAPE)
        models[name] = path
    return models


class Api:
    """Answers of the control plane, and how long each took, in milliseconds."""

    def __init__(self, platform: Platform) -> None:
        headers = {"authorization": f"Bearer {platform.admin_key}"}
        self._client = httpx.Client(base_url=platform.url, headers=headers, timeout=60)
        self.took_ms: list[float] = []

    def get(self, path: str) -> Any:
        began = time.perf_counter()
        answer = self._client.get(path).raise_for_status().json()
        self.took_ms.append(1e3 * (time.perf_counter() - began))
        return answer

    def deployments(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        after = ""
        while True:
            page = self.get(f"/api/v1/deployments?limit=200{after}")
            found |= {deployment["name"]: deployment["status"] for deployment in page["data"]}
            if page["next_cursor"] is None:
                return found
            after = f"&cursor={page['next_cursor']}"

    def times_ms(self) -> list[float]:
        """Median, 99th percentile and longest."""
        ordered = sorted(self.took_ms)
        return [round(ordered[min(len(ordered) - 1, int(len(ordered) * part))], 1) for part in (0.5, 0.99, 1.0)]


def memory_bytes(platform: Platform) -> tuple[int, int]:
    """Memory that the processes share in files of memory, counted once, and memory of single processes."""
    shared, private = 0, 0
    for process in platform.everyone():
        try:
            full = process.memory_full_info()
        except psutil.Error:
            continue
        shared, private = max(shared, full.shared), private + full.uss
    return shared, private


def deploy(platform: Platform, api: Api, models: dict[str, Path]) -> float:
    """Deploy every model. Returns the seconds for all."""
    began, open_names = time.monotonic(), set[str]()
    for name, path in models.items():
        platform.model(name, path)
        platform.post("/api/v1/deployments", {"name": name, "model": name, "tenant": "acme", "dtype": "float32"})
        open_names.add(name)
        while len(open_names) >= QUEUED:
            settle(api, open_names)
    while open_names:
        settle(api, open_names)
    return time.monotonic() - began


def settle(api: Api, open_names: set[str]) -> None:
    """Take deployments that are built out of the open names. A deployment that failed ends the bench."""
    time.sleep(1)
    for name, status in api.deployments().items():
        assert status["phase"] != "failed", (name, status["conditions"])
        if status["phase"] in ("awake", "asleep"):
            open_names.discard(name)


async def ask(platform: Platform, names: list[str], at_once: int) -> dict[str, tuple[float, str]]:
    """Ask every model. Returns the seconds to the first token and the text by name."""
    gate, answers = asyncio.Semaphore(at_once), dict[str, tuple[float, str]]()
    headers = {"authorization": f"Bearer {platform.keys['acme']}"}

    async def one(client: httpx.AsyncClient, name: str) -> None:
        body = QUESTION | {"model": name, "stream": True}
        async with gate:
            began, first_s, text = time.perf_counter(), 0.0, ""
            async with client.stream("POST", f"{platform.url}/v1/completions", json=body, headers=headers) as answer:
                assert answer.status_code == 200, (name, await answer.aread())
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        first_s = first_s or time.perf_counter() - began
                        text += json.loads(line[6:])["choices"][0]["text"]
            answers[name] = first_s, text

    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=at_once)) as client:
        await asyncio.gather(*(one(client, name) for name in names))
    return answers


def ttfts(answers: dict[str, tuple[float, str]]) -> list[float]:
    """Smallest, median, 99th percentile and largest time to the first token, in milliseconds."""
    ordered = sorted(first_s * 1e3 for first_s, _ in answers.values())
    return [round(ordered[int((len(ordered) - 1) * part)]) for part in (0, 0.5, 0.99, 1)]


def measure(folder: Path, count: int, at_once: int) -> dict[str, object]:
    models = write_models(folder / "models", count)
    weights = sum(file.stat().st_size for path in models.values() for file in path.glob("*.safetensors"))
    platform = Platform(folder / "data", free_port(), SETTINGS)
    platform.start()
    try:
        platform.tenant("acme")
        api = Api(platform)
        deployed_s = deploy(platform, api, models)
        tiers = Counter(status["residency"] for status in api.deployments().values())
        names = [*models]
        random.Random(1).shuffle(names)
        first = asyncio.run(ask(platform, names, at_once))
        memory = [memory_bytes(platform)]
        random.Random(2).shuffle(names)
        second = asyncio.run(ask(platform, names, at_once))
        memory.append(memory_bytes(platform))
        for _ in range(20):
            api.deployments()
        began = time.perf_counter()
        command = [
            str(Path(sys.executable).with_name("staccato")),
            "ps",
            "--url",
            platform.url,
            "--key",
            platform.admin_key,
        ]
        subprocess.run(command, check=True, capture_output=True)
        ps_s = time.perf_counter() - began
        failed = [name for name, status in api.deployments().items() if status["phase"] == "failed"]
    finally:
        platform.stop()
    objective_ms = 10_000  # of a deployment without an objective of its own
    differ = [name for name in models if first[name][1] != second[name][1]]
    most = max(shared + private for shared, private in memory)
    return {
        "models": count,
        "weights_gib": round(weights / GIB, 2),
        "deployed_s": round(deployed_s, 1),
        "tiers": dict(tiers),
        "ttft_ms": [ttfts(first), ttfts(second)],
        "late": sum(first_s * 1e3 > objective_ms for answers in (first, second) for first_s, _ in answers.values()),
        "asked_at_once": at_once,
        "differ": differ[:10],
        "different_texts": len({text for _, text in first.values()}),
        "failed": failed[:10],
        "api_ms": api.times_ms(),
        "api_calls": len(api.took_ms),
        "ps_s": round(ps_s, 2),
        "memory_gib": spread((sum(pair) / GIB for pair in memory), 2),
        "shared_gib": spread((shared / GIB for shared, _ in memory), 2),
        "kept": not differ and not failed and most <= 2 * GIB + MORE_BYTES_MOST and api.times_ms()[1] <= API_MS_MOST,
        "load": load(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--asked", type=int, default=4, help="requests under way at a time")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(measure(Path(made), asked.models, asked.asked)), flush=True)
