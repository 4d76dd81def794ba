"""How long do streams stand still while models are deployed on their device?

`staccato up` with a model that makes eight streams. Each round takes the longest gap between two tokens of any stream,
first in a quiet window, then in a window with six deployments of new models, one after another, each read from files.
Bound: the quiet gap, two steps and 10 ms, in the median of the rounds.

`python tests/bench/runtime/bench_deploy.py [--rounds 5]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from deploy.demo.random_weights import write_random  # noqa: E402
from tests.bench.timing import load, spread  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.e2e.conftest import Platform  # noqa: E402

STREAMS, DEPLOYED, STEPS_ALLOWED, MORE_MS = 8, 6, 2, 10.0
SERVED: dict[str, Any] = dict(hidden=256, layers=4, heads=4, kv_heads=4)
# About 100 and 150 MiB of float32.
NEW: list[dict[str, Any]] = [
    dict(hidden=512, layers=8, heads=8, kv_heads=4),
    dict(hidden=640, layers=8, heads=10, kv_heads=5),
]
KINDS = ("llama", "qwen3", "mistral")
QUIET_S = 4.0


@dataclass
class Reader:
    """Eight streams of one model; the gaps between two tokens of a stream, with the time of each gap's end."""

    platform: Platform
    gaps: list[tuple[float, float]] = field(default_factory=list)

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            await asyncio.gather(*(self._stream(client, number) for number in range(STREAMS)))

    async def _stream(self, client: httpx.AsyncClient, number: int) -> None:
        body = {"model": "served", "prompt": [5, 6, 7 + number], "max_tokens": 1000, "ignore_eos": True, "stream": True}
        headers = {"authorization": f"Bearer {self.platform.keys['acme']}"}
        while True:
            post = client.stream("POST", f"{self.platform.url}/v1/completions", json=body, headers=headers)
            async with post as response:
                assert response.status_code == 200, await response.aread()
                last = None
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        if last is not None:
                            self.gaps.append((now, now - last))
                        last = now

    def of(self, since: float) -> list[float]:
        return [gap for at, gap in self.gaps if at >= since]


async def measured(platform: Platform, folder: Path, rounds: int) -> dict[str, object]:
    reader = Reader(platform)
    reading = asyncio.create_task(reader.run())
    await asyncio.sleep(2 * QUIET_S)
    quiet, busy, step, step_busy, took = [], [], [], [], []
    for round_ in range(rounds):
        since = time.monotonic()
        await asyncio.sleep(QUIET_S)
        gaps = reader.of(since)
        quiet.append(max(gaps) * 1e3)
        step.append(statistics.median(gaps) * 1e3)
        since = time.monotonic()
        await asyncio.to_thread(deploy_all, platform, folder, round_)
        took.append(time.monotonic() - since)
        busy.append(max(reader.of(since)) * 1e3)
        step_busy.append(statistics.median(reader.of(since)) * 1e3)
        await asyncio.to_thread(remove_all, platform, round_)
        print(f"round {round_ + 1}: {quiet[-1]:.1f} ms quiet, {busy[-1]:.1f} ms deploying", file=sys.stderr, flush=True)
        if reading.done():
            reading.result()
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading
    most = [gap + STEPS_ALLOWED * one + MORE_MS for gap, one in zip(quiet, step, strict=True)]
    return {
        "streams": STREAMS,
        "deployed_each_round": DEPLOYED,
        "deploys_s": spread(took, 1),
        "step_ms": spread(step, 1),
        "step_deploying_ms": spread(step_busy, 1),
        "longest_gap_quiet_ms": spread(quiet, 1),
        "longest_gap_deploying_ms": spread(busy, 1),
        "bound_ms": round(statistics.median(most), 1),
        "met": statistics.median(busy) <= statistics.median(most),
    }


def deploy_all(platform: Platform, folder: Path, round_: int) -> None:
    for number in range(DEPLOYED):
        name = f"new-{round_}-{number}"
        platform.model(name, folder / name)
        deployed = platform.deploy("acme", name)
        assert deployed["status"]["phase"] in ("awake", "asleep"), deployed["status"]


def remove_all(platform: Platform, round_: int) -> None:
    for deployment in platform.get("/api/v1/deployments").json()["data"]:
        if deployment["name"].startswith(f"new-{round_}-"):
            platform.request("DELETE", f"/api/v1/deployments/{deployment['id']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as data:
        folder = Path(data) / "models"
        write_random(folder / "served", "llama", **SERVED)
        for round_ in range(rounds):
            for number in range(DEPLOYED):
                write_random(
                    folder / f"new-{round_}-{number}",
                    KINDS[number % len(KINDS)],
                    seed=rounds * round_ + number,
                    **NEW[number % len(NEW)],
                )
        settings = {"STACCATO_DEVICE_MEMORY": "2GiB", "STACCATO_HOST_CACHE": "8GiB"}
        platform = Platform(Path(data) / "platform", free_port(), settings)
        platform.start()
        try:
            platform.tenant("acme")
            platform.model("served", folder / "served")
            platform.deploy("acme", "served", scaling={"idle": "never"})
            found = asyncio.run(measured(platform, folder, rounds))
        finally:
            platform.stop()
    print(json.dumps(found | {"load": load()}), flush=True)
    return int(not found["met"])


if __name__ == "__main__":
    sys.exit(main())
