"""How much does the gateway add, beside vLLM's own API server? The same chats through each, in turns, on one machine.

A model with equal settings on all sides; 50 streams at once, then a single stream. Measured: time to first token, gaps
between tokens, tokens a second, and CPU per token of the client-facing process. The gateway answers the fast way, and
with --handlers a second gateway answers by vLLM's handlers. With --litellm, LiteLLM's proxy stands in front of vLLM's
server as a further side. With --profile, the bench prints where the processes spend time, and no figures.

`python tests/bench/gateway/bench_gateway.py [--small] [--handlers] [--litellm] [--profile]`
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from tests.bench.gateway.servers import LiteLLMProxy, VllmServer  # noqa: E402
from tests.bench.gateway.streams import Client, Job, Load  # noqa: E402
from tests.e2e.conftest import Platform  # noqa: E402

MODEL, MAX_MODEL_LEN, KV_BYTES = "m", 512, 256 << 20
LOADS = {50: 3, 1: 8}  # streams at once → requests per stream
PAIRS = 4
SHAPES: dict[str, dict[str, Any]] = {
    "small (0.6 M)": dict(hidden=128, layers=2),
    "medium (27 M)": dict(hidden=512, layers=8, heads=8, kv_heads=4),
}
TOP = 15
FAST, HANDLERS, VLLM, LITELLM = "fast", "handlers", "vllm", "litellm"


@dataclass(frozen=True)
class Side:
    """A server to load: the client-facing process, and the processes behind the client-facing process."""

    port: int
    key: str
    front: psutil.Process
    behind: list[psutil.Process]


@dataclass(frozen=True)
class Sample:
    load: Load
    front_s: float  # CPU
    behind_s: float  # CPU

    @property
    def front_us_per_token(self) -> float:
        return self.front_s / self.load.tokens * 1e6

    @property
    def front_us_per_event(self) -> float:
        return self.front_s / self.load.events * 1e6

    @property
    def behind_us_per_token(self) -> float:
        return self.behind_s / self.load.tokens * 1e6


@contextlib.contextmanager
def ours(model: Path, folder: Path, environment: dict[str, str]) -> Iterator[Side]:
    from tests.conftest import free_port

    settings = {"STACCATO_THREADS": "1", "STACCATO_DEVICE_MEMORY": str(8 * KV_BYTES), **environment}
    folder.mkdir()
    platform = Platform(folder / "data", free_port(), settings)
    if "SAMPLES" in environment:
        platform.limited = ("env",)  # a forked process has no timer of the sampler: no process is forked
    try:
        platform.start()
        key = platform.tenant("acme")
        platform.model(MODEL, model)
        deployment = platform.deploy("acme", MODEL, max_model_len=MAX_MODEL_LEN)
        assert deployment["status"]["phase"] == "awake", deployment
        assert platform.process is not None
        gateway = platform.child("gateway.app")
        yield Side(platform.port, key, gateway, [process for process in platform.everyone() if process != gateway])
    finally:
        platform.stop()


@contextlib.contextmanager
def theirs(model: Path, folder: Path, environment: dict[str, str]) -> Iterator[Side]:
    server = VllmServer(model, MODEL, folder, MAX_MODEL_LEN, KV_BYTES)
    try:
        server.start(**environment)
        yield Side(server.port, "none", server.front, server.core)
    finally:
        server.stop()


@contextlib.contextmanager
def through_litellm(server: Side, folder: Path) -> Iterator[Side]:
    """LiteLLM's proxy in front of vLLM's server, which is `server`."""
    proxy = LiteLLMProxy(MODEL, server.port, folder)
    try:
        proxy.start()
        yield Side(proxy.port, "none", proxy.front, [server.front, *server.behind])
    finally:
        proxy.stop()


def cpu_s(processes: list[psutil.Process]) -> float:
    """Return the processor time of processes. A process that ended, as makers of images do, counts as nothing."""
    alive = (process.cpu_times() for process in processes if process.is_running())
    return sum((times.user + times.system for times in alive), 0.0)


def measure(client: Client, side: Side, streams: int, requests: int, salt: int) -> Sample:
    front_s, behind_s = cpu_s([side.front]), cpu_s(side.behind)
    load = client.run(Job(side.port, side.key, [MODEL], streams, requests, salt))
    return Sample(load, cpu_s([side.front]) - front_s, cpu_s(side.behind) - behind_s)


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def compare(client: Client, sides: dict[str, Side], streams: int, requests: int) -> list[dict[str, object]]:
    """Measure the sides in turns. Returns a row for each side but vLLM's, beside vLLM's."""
    rounds = []
    for n in range(PAIRS + 1):
        order = list(sides) if n % 2 else list(reversed(sides))
        samples = {name: measure(client, sides[name], streams, requests, n) for name in order}
        if n:  # the servers are warm
            rounds.append(samples)
    rows: list[dict[str, object]] = [
        {"side": name, **beside([(samples[name], samples[VLLM]) for samples in rounds])}
        for name in sides
        if name != VLLM
    ]
    if LITELLM in sides:
        shares = [samples[FAST].front_us_per_token / samples[LITELLM].front_us_per_token for samples in rounds]
        rows.append({"side": f"{FAST} beside {LITELLM}", "front_cpu_per_token_ratio": spread(shares)})
    return rows


def beside(pairs: list[tuple[Sample, Sample]]) -> dict[str, object]:
    return {
        "ours": summary([ours for ours, _ in pairs]),
        "vllm": summary([theirs for _, theirs in pairs]),
        "added_first_token_ms_p50": spread([ours.load.first_ms.p50 - t.load.first_ms.p50 for ours, t in pairs]),
        "front_cpu_per_token_ratio": spread([ours.front_us_per_token / t.front_us_per_token for ours, t in pairs]),
        "front_cpu_per_event_ratio": spread([ours.front_us_per_event / t.front_us_per_event for ours, t in pairs]),
        "tokens_per_s_ratio": spread([t.load.seconds / ours.load.seconds for ours, t in pairs]),
    }


def summary(samples: list[Sample]) -> dict[str, object]:
    return {
        "first_token_ms_p50": spread([sample.load.first_ms.p50 for sample in samples]),
        "first_token_ms_p99": spread([sample.load.first_ms.p99 for sample in samples]),
        "gap_ms_p50": spread([sample.load.gap_ms.p50 for sample in samples]),
        "gap_ms_p99": spread([sample.load.gap_ms.p99 for sample in samples]),
        "tokens_per_s": spread([sample.load.tokens / sample.load.seconds for sample in samples]),
        "events_per_token": spread([sample.load.events / sample.load.tokens for sample in samples]),
        "front_cpu_us_per_token": spread([sample.front_us_per_token for sample in samples]),
        "front_cpu_us_per_event": spread([sample.front_us_per_event for sample in samples]),
        "behind_cpu_us_per_token": spread([sample.behind_us_per_token for sample in samples]),
    }


def spread(values: list[float]) -> list[float]:
    """Median, least and most."""
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


# ── profile ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def profile(client: Client, side: Side, samples: Path) -> dict[str, object]:
    """Shares of the front process's CPU, in percent, while 50 streams run."""
    streams, requests = 50, 4 * LOADS[50]
    measure(client, side, streams, requests, 0)
    take(side.front, samples)
    measured = measure(client, side, streams, requests, 1)
    taken = take(side.front, samples)
    shares = {
        kind: [f"{count / taken['samples'] * 100:5.1f} {name}" for name, count in taken[kind]][: TOP * more]
        for kind, more in (("own", 1), ("within", 3))
    }
    return {"us_per_event": round(measured.front_us_per_event, 1), "samples": taken["samples"], **shares}


def take(process: psutil.Process, samples: Path) -> dict[str, Any]:
    path = samples / f"{process.pid}.json"
    path.unlink(missing_ok=True)
    process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 10
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {process.pid} did not write {path}: its log says why")
        time.sleep(0.02)
    taken: dict[str, Any] = json.loads(path.read_text())
    return taken


def main() -> None:
    from transformers.utils.logging import disable_progress_bar

    from deploy.demo.random_weights import write_random

    disable_progress_bar()  # type: ignore[no-untyped-call]
    profiling = "--profile" in sys.argv
    for name, shape in list(SHAPES.items())[: 1 if profiling or "--small" in sys.argv else None]:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = write_random(folder / "model", "llama", **shape)
            paths = f"{Path(__file__).with_name('sampler')}{os.pathsep}{ROOT}"
            sampler = {"SAMPLES": str(folder), "PYTHONPATH": paths, "STACCATO_FORK_SERVER": "false"}
            client = stack.enter_context(contextlib.closing(Client()))
            sides = {FAST: stack.enter_context(ours(model, folder / FAST, sampler if profiling else {}))}
            if "--handlers" in sys.argv:
                slow = sampler if profiling else {}
                sides[HANDLERS] = stack.enter_context(
                    ours(model, folder / HANDLERS, slow | {"STACCATO_FAST_WAY": "false"})
                )
            if profiling:
                sampler["PYTHONPATH"] += os.pathsep + str(folder / "dist")
            sides[VLLM] = stack.enter_context(theirs(model, folder, sampler if profiling else {}))
            if "--litellm" in sys.argv:
                sides[LITELLM] = stack.enter_context(through_litellm(sides[VLLM], folder))
            if profiling:
                for title, side in sides.items():
                    print(json.dumps({title: profile(client, side, folder)}, indent=1), flush=True)
                continue
            for streams, requests in LOADS.items():
                for answer in compare(client, sides, streams, requests):
                    print(json.dumps({"model": name, "streams": streams, **answer}), flush=True)


if __name__ == "__main__":
    main()
