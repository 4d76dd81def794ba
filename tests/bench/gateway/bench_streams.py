"""CPU time of a token at a pace, and 1,000 streams of a gateway.

A platform whose steps keep a pace (`pace/sitecustomize.py`): vLLM computes a small model's tokens, and a step lasts 20
ms, or 100 ms. First part: 200 streams with a token every 20 ms, and the CPU time of the gateway for each token. Second
part: 50 and 1,000 streams of a tenant, in turns, with a token every 100 ms; measured are the gaps between tokens of
eight streams of a second tenant, and the gateway's memory for each stream. The texts of all answers equal the texts of
sixteen streams asked before.

`python tests/bench/gateway/bench_streams.py`
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from tests.bench.gateway.bench_gateway import MODEL, cpu_s, spread  # noqa: E402
from tests.bench.gateway.streams import Client, Job, Load  # noqa: E402
from tests.bench.timing import load  # noqa: E402
from tests.conftest import free_port, with_hook  # noqa: E402
from tests.e2e.conftest import AWAKE, Platform  # noqa: E402

SHAPE: dict[str, Any] = dict(hidden=128, layers=2)
MANY, OTHERS = "acme", "globex"  # tenants
QUESTIONS = 16
FEW_STREAMS, MANY_STREAMS, OTHER_STREAMS = 50, 1000, 8
REQUESTS_MOST = 1024  # of a step
TOKENS = 128  # of each of the many answers
OTHERS_AFTER_S = 5.0  # the second tenant asks when the many streams flow
PAIRS, PACED_ROUNDS = 3, 5
FLOWING_AFTER_S, FLOWING_S = 1.5, 3.0  # begin and length of a window in which 200 streams flow
MEMORY_PERIOD_S = 0.25


@dataclass(frozen=True)
class PacedPlatform:
    """A platform whose steps keep a pace. Each tenant has the model."""

    platform: Platform
    gateway: psutil.Process

    def job(self, tenant: str, streams: int, tokens: int, salt: int) -> Job:
        return Job(self.platform.port, self.platform.keys[tenant], [MODEL], streams, 1, salt, QUESTIONS, tokens)


@contextlib.contextmanager
def paced(folder: Path, step_ms: int) -> Iterator[PacedPlatform]:
    from deploy.demo.random_weights import write_random

    folder.mkdir()
    settings = {"STACCATO_THREADS": "1", "STACCATO_DEVICE_MEMORY": "1GiB", "STACCATO_CONNECTIONS_PER_ADDRESS": "4096"}
    path = with_hook(Path(__file__).with_name("pace"))
    hook = ("env", f"PYTHONPATH={path}", f"STEP_MS={step_ms}", f"REQUESTS_MOST={REQUESTS_MOST}")
    started = Platform(folder / "data", free_port(), settings, limited=hook)  # forked processes would not load the hook
    try:
        started.start()
        started.model(MODEL, write_random(folder / "model", "llama", **SHAPE))
        for tenant in (MANY, OTHERS):
            started.tenant(tenant)
            deployment = started.deploy(tenant, MODEL, max_model_len=512, scaling=AWAKE["scaling"])
            assert deployment["status"]["phase"] == "awake", deployment
        yield PacedPlatform(started, started.child("gateway.app"))
    finally:
        started.stop()


def texts_before(client: Client, side: PacedPlatform, tokens: int, salt: int) -> list[list[str]]:
    """The texts of all questions, each asked once."""
    return client.run(side.job(MANY, QUESTIONS, tokens, salt)).texts


# ── CPU time of a token ───────────────────────────────────────────────────────────────────────────────────────────────


def measure_paced(client: Client, side: PacedPlatform) -> dict[str, object]:
    """Measure the gateway's CPU time for each token of 200 streams, over whole requests and in the window."""
    streams, tokens = 200, 256
    expected = texts_before(client, side, tokens, 0)
    costs, flowing, gaps, rates = list[float](), list[float](), list[float](), list[float]()
    for _ in range(PACED_ROUNDS):
        before_s = cpu_s([side.gateway])
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.run, side.job(MANY, streams, tokens, 0))
            time.sleep(FLOWING_AFTER_S)
            since_s, since = cpu_s([side.gateway]), time.monotonic()
            time.sleep(FLOWING_S)
            spent_s, window_s = cpu_s([side.gateway]) - since_s, time.monotonic() - since
            made = running.result()
        flowing.append(spent_s * 1e6 / (streams * window_s / (made.gap_ms.p50 / 1e3)))
        assert made.texts == expected, "a stream has other tokens than before, or tokens in another order"
        costs.append((cpu_s([side.gateway]) - before_s) / made.tokens * 1e6)
        gaps.append(made.gap_ms.p50)
        rates.append(made.tokens / made.seconds)
    return {
        "of": "paced",
        "streams": streams,
        "gap_ms_p50": spread(gaps),
        "tokens_per_s": spread(rates),
        "gateway_us_per_token": spread(costs),
        "gateway_us_per_token_flowing": spread(flowing),
        "load": load(),
    }


# ── many streams ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Beside:
    """Measurements of a round: many streams, and streams of the second tenant beside."""

    many: Load
    others: Load
    memory_bytes: int  # by which the gateway grew, at most


def measure_beside(clients: tuple[Client, Client], side: PacedPlatform, streams: int, salt: int) -> Beside:
    before = side.gateway.memory_info().rss
    most, over = [before], threading.Event()

    def watch() -> None:
        while not over.wait(MEMORY_PERIOD_S):
            most.append(side.gateway.memory_info().rss)

    with ThreadPoolExecutor(2) as pool:
        watching = pool.submit(watch)
        try:
            flowing = pool.submit(clients[0].run, side.job(MANY, streams, TOKENS, salt))
            time.sleep(OTHERS_AFTER_S)
            others = clients[1].run(side.job(OTHERS, OTHER_STREAMS, TOKENS // 2, salt))
            many = flowing.result()
        finally:
            over.set()
        watching.result()
    return Beside(many, others, max(most) - before)


def measure_many(clients: tuple[Client, Client], side: PacedPlatform) -> dict[str, object]:
    expected = texts_before(clients[0], side, TOKENS, 0)
    rounds = []
    for number in range(PAIRS + 1):
        sizes = (FEW_STREAMS, MANY_STREAMS) if number % 2 else (MANY_STREAMS, FEW_STREAMS)
        made = {size: measure_beside(clients, side, size, 0) for size in sizes}
        for size, beside in made.items():
            assert beside.many.texts == expected, (
                f"of {size} streams, some have other tokens than before, or tokens in another order"
            )
        rounds.append((made[FEW_STREAMS], made[MANY_STREAMS]))
    grown = rounds.pop(0)[1].memory_bytes  # memory of the first round stays with the gateway
    return {
        "of": "many",
        "streams": [FEW_STREAMS, MANY_STREAMS],
        "others_gap_ms_p99": [spread([each[i].others.gap_ms.p99 for each in rounds]) for i in (0, 1)],
        "others_gap_ratio": spread([many.others.gap_ms.p99 / few.others.gap_ms.p99 for few, many in rounds]),
        "gap_ms_p99": [spread([each[i].many.gap_ms.p99 for each in rounds]) for i in (0, 1)],
        "first_token_ms_p50": [spread([each[i].many.first_ms.p50 for each in rounds]) for i in (0, 1)],
        "kib_per_stream": round(grown / MANY_STREAMS / 1024, 1),
        "load": load(),
    }


def main() -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients = tuple(stack.enter_context(contextlib.closing(Client())) for _ in range(2))
        with paced(folder / "fast", 20) as side:
            print(json.dumps(measure_paced(clients[0], side)), flush=True)
        with paced(folder / "many", 100) as side:
            print(json.dumps(measure_many((clients[0], clients[1]), side)), flush=True)


if __name__ == "__main__":
    main()
