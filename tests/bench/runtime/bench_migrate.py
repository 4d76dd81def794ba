"""How long does a client wait for a token when its request moves to a second runtime? Beside a new prefill.

Two runtimes of one platform, a stream with a context of 512, 2,048 and 8,000 tokens at the beginning. The stream is
ordered to move, back and forth, fifteen times. For every move: the longest time between two tokens from the order until
the target's tenth token, beside the median of the times between the tokens before the order. The median is the time of
a decode step with every part of the way between engine and client. The first move from each runtime stands apart: in a
first move, the engine's thread gets memory on the host for the request. Then the same prompt is computed anew: the
price of a move without keys and values.

`python tests/bench/runtime/bench_migrate.py`
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from deploy.demo.random_weights import write_random  # noqa: E402
from store.bus import Bus  # noqa: E402
from store.contract import grants, wire  # noqa: E402
from tests.bench.timing import load, milliseconds, spread  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.e2e.conftest import Platform  # noqa: E402

CONTEXTS = (512, 2048, 8000)  # tokens
MOVES, BEFORE, AFTER = 15, 20, 10  # moves; tokens before an order, and after a move
FIRST = 2  # moves, one from either runtime
SHAPE: dict[str, Any] = dict(hidden=256, layers=8, heads=8, kv_heads=8, context=9216)
MOVE_S_MOST = 20.0


@dataclass
class Stream:
    """A request, and the arrival times of its tokens."""

    platform: Platform
    times: list[float] = field(default_factory=list)

    async def read(self, prompt: list[int], tokens: int) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0, "return_token_ids": True}
        headers = {"authorization": f"Bearer {self.platform.keys['acme']}"}
        self.asked_at = time.perf_counter()
        async with (
            httpx.AsyncClient(timeout=120) as client,
            client.stream("POST", f"{self.platform.url}/v1/completions", json=body, headers=headers) as response,
        ):
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    made = json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"] or ()
                    self.times += [time.perf_counter()] * len(made)

    @property
    def first_s(self) -> float:
        return self.times[0] - self.asked_at

    def gaps_s(self, first: int, last: int) -> list[float]:
        times = self.times[first:last]
        return [after - before for before, after in zip(times, times[1:], strict=False)]

    async def until(self, tokens: int) -> None:
        while len(self.times) < tokens:
            await asyncio.sleep(0.001)


def moved(platform: Platform) -> tuple[int, str]:
    """How many moves the platform has done so far, and the runtime with a running request ("" without a request)."""
    gpus = platform.get("/api/v1/gpus").json()["data"]
    runs = [gpu["id"] for gpu in gpus if any(model["running"] for model in gpu["models"].values())]
    return sum(gpu["moved"] for gpu in gpus), runs[0] if runs else ""


async def measure(platform: Platform, bus: Bus, context: int) -> dict[str, object]:
    stream, pauses_s, steps_s = Stream(platform), [], []
    prompt = [(7 * n + context) % 500 + 3 for n in range(context)]
    reading = asyncio.create_task(stream.read(prompt, SHAPE["context"] - context - 1))
    await stream.until(1)
    await asyncio.sleep(1.5)  # by then the lease names the stream's runtime
    _, where = await asyncio.to_thread(moved, platform)
    for _ in range(FIRST + MOVES):
        before = len(stream.times)
        await stream.until(before + BEFORE)
        steps_s.append(statistics.median(stream.gaps_s(before, before + BEFORE)))
        target = "r2" if where == "r1" else "r1"
        ordered = len(stream.times)
        count, _ = await asyncio.to_thread(moved, platform)
        await bus.request(wire.migrate_subject(where), wire.Migrate(target=target, term=1 << 62))
        deadline = time.monotonic() + MOVE_S_MOST
        while (await asyncio.to_thread(moved, platform))[0] == count:
            assert time.monotonic() < deadline, "it did not move"
            await asyncio.sleep(0.1)
        await stream.until(len(stream.times) + AFTER)
        pauses_s.append(max(stream.gaps_s(ordered - 1, len(stream.times))))
        where = target
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return {
        "context": context,
        "step_ms": milliseconds(steps_s),
        "first_pauses_ms": [round(1e3 * pause, 1) for pause in pauses_s[:FIRST]],
        "pause_ms": milliseconds(pauses_s[FIRST:]),
        "of_2_steps_and_10_ms": spread(
            (pause / (2 * step + 0.010) for pause, step in zip(pauses_s[FIRST:], steps_s[FIRST:], strict=True)), 2
        ),
        "again_ms": round(1e3 * await again_s(platform, [prompt[0] + 1, *prompt[1:]]), 1),
        "load": load(),
    }


async def again_s(platform: Platform, prompt: list[int]) -> float:
    """Seconds to the first token of a prompt of the same length, not computed before."""
    stream = Stream(platform)
    await stream.read(prompt, 1)
    return stream.first_s


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        platform = Platform(Path(name) / "data", free_port())
        try:
            platform.start("--runtimes", "2", "--device-memory", "512MiB")
            platform.tenant("acme")
            platform.model("m", write_random(Path(name) / "m", "llama", **SHAPE))
            platform.deploy("acme", "m")
            port = (platform.data / "nats.port").read_text().strip()
            seed = platform.data / "nats-users" / "scheduler.nk"
            async with Bus.connect(f"nats://127.0.0.1:{port}", "bench", grants.SCHEDULER, seed) as bus:
                for context in CONTEXTS:
                    print(json.dumps(await measure(platform, bus, context)), flush=True)
        finally:
            platform.stop()


if __name__ == "__main__":
    asyncio.run(main())
