"""What does changing models between two tokens serve, beside vLLM servers that a front starts and stops?

Ten models are asked in bursts through HTTP, with the same trace for both sides. *Ours* is `staccato up` with one
runtime and a pool for two or three of the models. *Theirs* is the way of a model-swapping proxy: `vllm serve` for one
model at a time (or for more with `--at-once`), with the memory of the whole pool per server. The longest-waiting
request chooses the next model, and every waiting request for the chosen model comes along. The leaving server takes no
new requests and ends after its last request.

Goodput is requests per second with a first token and at least 95 % of all tokens on time. Both sides have the files in
the page cache, and vLLM has warm caches.

`python tests/bench/runtime/bench_swapped.py [--minutes 5] [--rate 0.8] [--at-once 1,3]`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402
import numpy as np  # noqa: E402

from runtime.core.device.request import Objective  # noqa: E402
from runtime.core.ledgers.attainment import ObjectiveProgress  # noqa: E402
from runtime.sim.workload import base  # noqa: E402
from tests.bench.gateway.servers import VllmServer  # noqa: E402
from tests.bench.timing import load  # noqa: E402

MIB = 1 << 20
MODELS, SHAPES = 10, ((256, 8), (384, 8), (512, 8))  # hidden width and layers, in turn
POOL_MIB, CONTEXT = 192, 1024
PROMPT_TOKENS, OUTPUT_TOKENS = (16, 256), (64, 640)  # tokens, least and most
CV, SEED = 4.0, 1
OBJECTIVE = Objective(ttft_s=2.0, tbt_s=0.1)
ON_TIME, DRAIN_S = 0.95, 20.0
GAIN = 5.0  # goodput of the platform over the vLLM servers' goodput, at least


@dataclass(frozen=True)
class Request:
    at_s: float
    model: str
    prompt: list[int]
    output_tokens: int


@dataclass
class Asked:
    """A request and its progress."""

    tokens: int
    progress: ObjectiveProgress

    @property
    def good(self) -> bool:
        kept = self.progress.sent - self.progress.late
        return self.progress.sent > 0 and not self.progress.first_late and kept >= ON_TIME * self.tokens


class Side(Protocol):
    """A serving side of the comparison."""

    key: str

    def serving(self, model: str) -> contextlib.AbstractAsyncContextManager[str]:
        """Yields the URL of the server for a request of the model. Within the context the server stays."""


def trace(rate: float, duration_s: float) -> list[Request]:
    """The requests of the trace. `rate` is requests per second over the ten models together."""
    drawn = base(MODELS, SEED, rate / MODELS, duration_s, cv=CV)
    prompts, outputs = np.clip(drawn.prompt_tokens, *PROMPT_TOKENS), np.clip(drawn.output_tokens, *OUTPUT_TOKENS)
    rows = zip(drawn.at_s, drawn.model, prompts, outputs, strict=True)
    return [
        Request(float(at_s), f"m{model}", [(7919 * n) % 256 + 2 for n in range(prompt)], int(output))
        for at_s, model, prompt, output in rows
    ]


async def ask(client: httpx.AsyncClient, side: Side, request: Request, asked: Asked) -> None:
    async with side.serving(request.model) as url:
        body = {"model": request.model, "prompt": request.prompt, "max_tokens": request.output_tokens, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        headers = {"authorization": f"Bearer {side.key}"}
        async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith('data: {"'):
                    tokens = json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"] or ()
                    asked.progress.deliver(time.monotonic(), len(tokens), 0.0)


async def serve(side: Side, requests: Sequence[Request], duration_s: float) -> dict[str, Any]:
    """Send the whole trace; returns the figures of the tokens until DRAIN_S after the trace's end."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:
        began, all_asked, tasks = time.monotonic(), [], []
        for request in requests:
            await asyncio.sleep(began + request.at_s - time.monotonic())
            progress = ObjectiveProgress(began + request.at_s, OBJECTIVE.ttft_s, OBJECTIVE.tbt_s)
            all_asked.append(Asked(request.output_tokens, progress))
            tasks.append(asyncio.create_task(ask(client, side, request, all_asked[-1])))
        done, late = await asyncio.wait(tasks, timeout=began + duration_s + DRAIN_S - time.monotonic())
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for task in done:
            task.result()
    ttfts = sorted(asked.progress.first_at - asked.progress.arrived_at for asked in all_asked)
    tokens = sum(asked.tokens for asked in all_asked)
    return {
        "goodput": round(sum(asked.good for asked in all_asked) / duration_s, 4),
        "good": round(sum(asked.good for asked in all_asked) / len(all_asked), 4),
        "token_attainment": round(sum(a.progress.sent - a.progress.late for a in all_asked) / tokens, 4),
        "ttft_p50_s": round(p50, 3) if (p50 := statistics.median_low(ttfts)) < float("inf") else None,
        "unfinished": len(late),
        "load": load(),
    }


# ── ours ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Ours:
    url: str
    key: str

    @contextlib.asynccontextmanager
    async def serving(self, model: str) -> AsyncIterator[str]:
        yield self.url


@contextlib.contextmanager
def ours(models: dict[str, Path], folder: Path) -> Any:
    from tests.conftest import free_port
    from tests.e2e.conftest import Platform

    settings = {"STACCATO_THREADS": "1", "STACCATO_DEVICE_MEMORY": f"{POOL_MIB}MiB"}
    platform = Platform(folder / "data", free_port(), settings)
    slo = {"ttft_ms": round(1e3 * OBJECTIVE.ttft_s), "tbt_ms": round(1e3 * OBJECTIVE.tbt_s)}
    try:
        platform.start()
        key = platform.tenant("acme")
        for name, model in models.items():
            platform.model(name, model)
            deployed = platform.deploy("acme", name, max_model_len=CONTEXT, slo=slo)
            assert deployed["status"]["phase"] in ("awake", "asleep"), deployed
        yield Ours(platform.url, key)
    finally:
        platform.stop()


# ── theirs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Swapping:
    """A front that starts and stops servers, `at_once` servers at most."""

    start: Callable[[str], VllmServer]  # returns when the server is ready
    at_once: int
    key: str = "none"
    servers: dict[str, VllmServer] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=dict)  # open requests by server
    waiting: list[str] = field(default_factory=list)  # models of the waiting requests, the oldest first
    took_s: list[float] = field(default_factory=list)  # from a server's end to the next server's start
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @contextlib.asynccontextmanager
    async def serving(self, model: str) -> AsyncIterator[str]:
        async with self.changed:
            self.waiting.append(model)
            self.changed.notify_all()
            try:
                while not self._may_go(model):
                    await self.changed.wait()
            finally:
                self.waiting.remove(model)
            self.open[model] += 1
        try:
            yield f"http://127.0.0.1:{self.servers[model].port}"
        finally:
            async with self.changed:
                self.open[model] -= 1
                self.changed.notify_all()

    def _may_go(self, model: str) -> bool:
        """Whether the model's server runs and is not about to leave for a request with a longer wait."""
        if model not in self.servers:
            return False
        first = self._next()
        return first is None or model != self._leaving() or self.waiting.index(model) < self.waiting.index(first)

    def _next(self) -> str | None:
        """The model without a server and with the longest wait; None if no model waits for a server."""
        return next((model for model in self.waiting if model not in self.servers), None)

    def _leaving(self) -> str | None:
        """The server to stop for the next model: the server with the fewest requests; None if there is room."""
        if len(self.servers) < self.at_once:
            return None
        return min(self.servers, key=lambda model: self.open[model])

    def _used(self, model: str | None) -> bool:
        """Whether the model's server has requests, or gets a request next."""
        return model is not None and (self.open[model] > 0 or (model in self.waiting and self._may_go(model)))

    async def swap(self) -> None:
        """Start and stop servers for ever: the next model gets a server when there is room, or when the leaving server
        has no requests left."""
        while True:
            async with self.changed:
                while (coming := self._next()) is None or self._used(leaving := self._leaving()):
                    await self.changed.wait()
                server = self.servers.pop(leaving) if leaving else None
            began = time.monotonic()
            if server:
                await asyncio.to_thread(server.stop)
            started = await asyncio.to_thread(self.start, coming)
            async with self.changed:
                self.took_s.append(time.monotonic() - began)
                self.servers[coming], self.open[coming] = started, 0
                self.changed.notify_all()


@contextlib.asynccontextmanager
async def theirs(models: dict[str, Path], folder: Path, at_once: int) -> AsyncIterator[Swapping]:
    def start(name: str) -> VllmServer:
        server = VllmServer(models[name], name, folder / f"server-{name}", CONTEXT, POOL_MIB * MIB)
        server.start()
        return server

    for name in models:
        (folder / f"server-{name}").mkdir(exist_ok=True)
    for name in list(models)[: len(SHAPES)]:  # vLLM's caches are warm afterwards
        (await asyncio.to_thread(start, name)).stop()
    swapping = Swapping(start, at_once)
    task = asyncio.create_task(swapping.swap())
    try:
        yield swapping
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for server in swapping.servers.values():
            await asyncio.to_thread(server.stop)


# ── the bench ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def written(folder: Path) -> dict[str, Path]:
    from deploy.demo.random_weights import write_random

    shapes = [SHAPES[n % len(SHAPES)] for n in range(MODELS)]
    return {
        f"m{n}": write_random(folder / f"m{n}", "llama", seed=n, hidden=hidden, layers=layers, context=CONTEXT)
        for n, (hidden, layers) in enumerate(shapes)
    }


async def bench(requests: Sequence[Request], duration_s: float, at_once: Sequence[int]) -> dict[int, float]:
    """Goodput by number of vLLM servers at once; the platform's own goodput has key 0."""
    with tempfile.TemporaryDirectory(prefix="staccato-bench-") as scratch:
        models = written(Path(scratch))
        with ours(models, Path(scratch)) as side:
            made = await serve(side, requests, duration_s)
        show({"side": "staccato", **made})
        goodput = {0: made["goodput"]}
        for most in at_once:
            async with theirs(models, Path(scratch), most) as swapping:
                made = await serve(swapping, requests, duration_s)
            show({"side": f"vllm servers, {most} at once", **made, "starts": len(swapping.took_s)} | took(swapping))
            goodput[most] = made["goodput"]
    return goodput


def took(swapping: Swapping) -> dict[str, float]:
    return {"start_s": round(statistics.median(swapping.took_s), 1)} if swapping.took_s else {}


def show(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=0.8, help="requests a second")
    parser.add_argument("--at-once", default="1,3", help="servers that may be up")
    asked = parser.parse_args()
    requests = trace(asked.rate, 60 * asked.minutes)
    show({"requests": len(requests), "s": 60 * asked.minutes, "rate": asked.rate})
    at_once = [int(most) for most in asked.at_once.split(",")]
    goodput = asyncio.run(bench(requests, 60 * asked.minutes, at_once))
    for most in at_once:
        assert goodput[0] >= GAIN * goodput[most], f"{goodput}: {GAIN} times theirs is to reach"


if __name__ == "__main__":
    main()
