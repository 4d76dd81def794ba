"""How fast are embeddings, beside vLLM's own API server? The servers get equal calls, in turns, on one machine.

The servers have a small BERT with random weights, under equal settings. Bulk: four clients, each with calls of 256
texts. Single: sixteen clients, each with calls of one text. The bench measures texts a second, the time of a call, and
CPU per text of the client-facing process. `python tests/bench/gateway/bench_vectors.py`
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from tests.bench.gateway.bench_gateway import KV_BYTES, MODEL, cpu_s, spread  # noqa: E402
from tests.bench.gateway.servers import VllmServer  # noqa: E402
from tests.bench.timing import load  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.e2e.conftest import Platform  # noqa: E402
from tests.runtime.pooling.models import CONTEXT, write_vector_model  # noqa: E402

LOADS = {"bulk": (4, 3, 256), "single": (16, 40, 1)}  # clients, calls of each, texts of a call
PAIRS = 5
TEXT = "the quick brown fox jumps over the lazy dog, number %d"
CALL_S = 300.0


@dataclass(frozen=True)
class Embedder:
    """A server of embeddings: the client-facing process is `front`."""

    url: str
    key: str
    front: psutil.Process


@dataclass(frozen=True)
class Calls:
    """Measurements of a load's calls."""

    texts_per_s: float
    call_ms: float  # median
    front_us: float  # CPU per text


@contextlib.contextmanager
def platform_side(model: Path, folder: Path) -> Iterator[Embedder]:
    folder.mkdir()
    settings = {"STACCATO_THREADS": "1", "STACCATO_DEVICE_MEMORY": str(KV_BYTES)}
    platform = Platform(folder / "data", free_port(), settings)
    try:
        platform.start()
        key = platform.tenant("acme")
        platform.model(MODEL, model)
        deployment = platform.deploy("acme", MODEL)
        assert deployment["status"]["phase"] == "awake", deployment
        yield Embedder(f"http://127.0.0.1:{platform.port}", key, platform.child("gateway.app"))
    finally:
        platform.stop()


@contextlib.contextmanager
def vllm_side(model: Path, folder: Path) -> Iterator[Embedder]:
    more = ("--runner", "pooling", "--no-enable-prefix-caching")
    server = VllmServer(model, MODEL, folder, CONTEXT, KV_BYTES, *more)
    try:
        server.start()
        yield Embedder(f"http://127.0.0.1:{server.port}", "none", server.front)
    finally:
        server.stop()


def measure(side: Embedder, clients: int, calls: int, texts: int) -> Calls:
    """Put a load on a side. Every call must be answered with as many vectors as texts."""
    took_s: list[float] = []
    body = {"model": MODEL, "input": [TEXT % number for number in range(texts)], "encoding_format": "base64"}

    def one_client() -> None:
        with httpx.Client(headers={"authorization": f"Bearer {side.key}"}, timeout=CALL_S) as client:
            for _ in range(calls):
                began = time.perf_counter()
                answer = client.post(f"{side.url}/v1/embeddings", json=body)
                took_s.append(time.perf_counter() - began)
                assert answer.status_code == 200 and len(answer.json()["data"]) == texts, answer.text[:500]

    before_s, began = cpu_s([side.front]), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        for client in [pool.submit(one_client) for _ in range(clients)]:
            client.result()
    all_s, made = time.perf_counter() - began, clients * calls * texts
    front_us = (cpu_s([side.front]) - before_s) / made * 1e6
    return Calls(made / all_s, statistics.median(took_s) * 1e3, front_us)


def main() -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_vector_model(folder / "model", "BertModel mean")
        ours = stack.enter_context(platform_side(model, folder / "ours"))
        theirs = stack.enter_context(vllm_side(model, folder))
        for name, (clients, calls, texts) in LOADS.items():
            pairs: list[tuple[Calls, Calls]] = []
            for number in range(PAIRS + 1):
                sides = (ours, theirs) if number % 2 else (theirs, ours)
                made = {side: measure(side, clients, calls, texts) for side in sides}
                if number:  # the servers are warm
                    pairs.append((made[ours], made[theirs]))
            answer = {
                "texts_per_s": spread([own.texts_per_s for own, _ in pairs]),
                "call_ms": spread([own.call_ms for own, _ in pairs]),
                "front_us_per_text": spread([own.front_us for own, _ in pairs]),
                "vllm_texts_per_s": spread([other.texts_per_s for _, other in pairs]),
                "texts_per_s_ratio": spread([own.texts_per_s / other.texts_per_s for own, other in pairs]),
                "call_ms_ratio": spread([own.call_ms / other.call_ms for own, other in pairs]),
                "front_cpu_ratio": spread([own.front_us / other.front_us for own, other in pairs]),
            }
            print(json.dumps({"bench": "vectors", "load": name, "answer": answer, "machine": load()}), flush=True)


if __name__ == "__main__":
    main()
