"""The whole platform on a GPU, as users start it: `staccato up`, two models, streams of both over HTTP.

`python tests/bench/gpu/bench_served.py [--cpu]`. Two random Qwen3 with 16-bit weights and tokenizers are deployed.
Eight streams of each run at the same time, and each stream's text must be the text of the same request run alone. Then
a model is put to sleep, and a request wakes the model. A line of JSON tells tokens per second, first tokens warm and
cold, and the bill.
`--cpu` rehearses the bench without a GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402

from tests.bench.gpu.report import emit, emit_conditions, spread  # noqa: E402

STREAMS, TOKENS, PROMPT = 8, 128, "count the pages "
COLD_ROUNDS = 5
GPU_SHAPE: dict[str, Any] = dict(hidden=1024, layers=16, heads=16, kv_heads=8, vocab=8192, context=2048)
CPU_SHAPE: dict[str, Any] = dict(hidden=128, layers=2, heads=4, kv_heads=2, context=1024)
SETTINGS = ("STACCATO_CUDA_GRAPHS", "STACCATO_ASYNC_SCHEDULING")  # the product's, unless the environment has others


class Said:
    def __init__(self) -> None:
        self.text, self.first_s, self.times = "", 0.0, list[float]()


async def stream(client: httpx.AsyncClient, key: str, model: str, prompt: str) -> Said:
    said, began = Said(), time.perf_counter()
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"authorization": f"Bearer {key}"}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                said.times.append(time.perf_counter() - began)
                said.text += chunk["choices"][0]["text"] if chunk["choices"] else ""
    said.first_s = said.times[0]
    return said


async def questions(url: str, key: str, models: list[str]) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for model in models:
            await stream(client, key, model, "warm up")
        alone = {
            (model, n): await stream(client, key, model, f"{PROMPT}{n}") for model in models for n in range(STREAMS)
        }
        began = time.perf_counter()
        together = await asyncio.gather(*(stream(client, key, model, f"{PROMPT}{n}") for model, n in alone))
        took_s = time.perf_counter() - began
        equal = sum(one.text == other.text for one, other in zip(alone.values(), together, strict=True))
        gaps = [b - a for one in alone.values() for a, b in zip(one.times, one.times[1:], strict=False)]
        return {
            "streams_at_once": len(alone),
            "texts_equal_to_alone": f"{equal} of {len(alone)}",
            "different_texts": len({one.text for one in alone.values()}),
            "tokens_per_s_together": round(len(alone) * TOKENS / took_s),
            "first_token_ms_alone": spread([one.first_s * 1e3 for one in alone.values()], 1),
            "first_token_ms_together": spread([one.first_s * 1e3 for one in together], 1),
            "between_tokens_ms_alone": spread([gap * 1e3 for gap in gaps], 2),
        }


def main(cpu: bool) -> None:
    if not cpu:
        emit_conditions()
    import torch

    from deploy.demo.random_weights import write_random
    from tests.conftest import free_port
    from tests.e2e.conftest import Platform

    kind, shape = (torch.float32, CPU_SHAPE) if cpu else (torch.bfloat16, GPU_SHAPE)
    settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    if not cpu:
        settings |= {"STACCATO_DEVICE_MEMORY": "60%", "STACCATO_HOST_CACHE": "16GiB"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        platform = Platform(folder / "data", free_port(), settings)
        try:
            began = time.perf_counter()
            platform.start()
            ready_s = time.perf_counter() - began
            key, models, ids, deploy_s = platform.tenant("acme"), ["one", "two"], [], []
            for seed, model in enumerate(models):
                path = write_random(folder / model, "qwen3", seed=seed, dtype=kind, **shape)
                platform.model(model, path)
                began = time.perf_counter()
                deployed = platform.deploy("acme", model, dtype=str(kind).removeprefix("torch."))
                ids.append(deployed["id"])
                deploy_s.append(time.perf_counter() - began)
                assert deployed["status"]["phase"] in ("awake", "asleep"), deployed
            answers = asyncio.run(questions(platform.url, key, models))
            cold = asyncio.run(woken(platform, key, models[0], f"/api/v1/deployments/{ids[0]}"))
            emit(
                "served",
                ready_s=round(ready_s, 1),
                deploy_s=[round(s, 2) for s in deploy_s],
                settings=settings,
                **answers,
                first_token_ms_from_zero=spread([s * 1e3 for s in cold], 1),
                usage=platform.usage("acme"),
            )
        finally:
            status = platform.stop() if platform.process is not None else None
            for log in sorted((folder / "data" / "logs").glob("*")):
                lines = [line for line in log.read_text(errors="replace").splitlines() if "error" in line.lower()]
                if lines or status is None:
                    print(f"-- {log.name}", *lines[-6:], sep="\n", file=sys.stderr)


async def woken(platform: Any, key: str, model: str, path: str) -> list[float]:
    """Seconds to the first token of requests that wake a sleeping model."""
    first: list[float] = []
    async with httpx.AsyncClient(base_url=platform.url, timeout=120) as client:
        for n in range(COLD_ROUNDS):
            platform.post(f"{path}:sleep", {})
            platform.until(lambda: platform.get(path).json()["status"]["phase"] == "asleep")
            first.append((await stream(client, key, model, f"wake up {n}")).first_s)
    return first


if __name__ == "__main__":
    main("--cpu" in sys.argv[1:])
