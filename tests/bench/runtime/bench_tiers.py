"""Does the simulator say how long first tokens take when most models are on disk?

A device process with `--models` models of equal size, room for a third of the images in the host cache and for a sixth
on the device, is asked at random times for random models. Equal requests go to a simulated device, with the costs
measured in the same run, each a median: steps with and without a prompt, the way from the host cache, the time to make
and to close an engine, and the rate at which an image comes from disk.

The answer has the median time to the first token and the images per minute that came from disk, measured and
simulated, and the ratios. Bound: ratios within a factor of 1.5.

`python tests/bench/runtime/bench_tiers.py [--models 18] [--requests 80] [--gap 1.2]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from deploy.demo.random_weights import write_random  # noqa: E402
from runtime import ipc  # noqa: E402
from runtime.core.device.events import Arrived, BuildFailed, Built, Closed, Event, Fetched, Stepped  # noqa: E402
from runtime.core.device.request import Objective  # noqa: E402
from runtime.core.engine import WeightSource  # noqa: E402
from runtime.core.ledgers.costs import ImageTiers, ModelCosts, ModelSize, Profile  # noqa: E402
from runtime.device import journal  # noqa: E402
from runtime.memory.disk import StoredImage, padded  # noqa: E402
from runtime.sim.fleet import Changes, simulate  # noqa: E402
from runtime.sim.workload import Workload  # noqa: E402
from runtime.sim.world import SimulationResult  # noqa: E402
from store.contract.wire import replace  # noqa: E402
from store.files import artefact  # noqa: E402
from store.files.architectures import Known  # noqa: E402
from tests.bench.timing import load  # noqa: E402
from tests.runtime.engines import spec  # noqa: E402
from tests.runtime.processes import DeviceProcess  # noqa: E402

MIB = 1 << 20
SHAPE: dict[str, Any] = dict(hidden=256, layers=6, heads=4, kv_heads=1)
IMAGE_BYTES, PAGE_BYTES = 22 * MIB, 2 * MIB  # of the shape, in the host cache; of a device
PROMPT, TOKENS = 60, 8
ASKED: dict[str, Any] = dict(prompt=[7, 8, 9] * (PROMPT // 3), temperature=0, max_tokens=TOKENS)
FACTOR_MOST = 1.5


class Arrival(NamedTuple):
    """A request: seconds since the first request could come, and the number of its model."""

    at_s: float
    model: int


class Measured(NamedTuple):
    """Times to the first token and of the whole, in seconds, and the journal's events with their times."""

    ttft_s: list[float]
    took_s: float
    events: list[tuple[float, Event]]

    @property
    def disk_loads(self) -> int:
        return sum(isinstance(event, Built) and event.source is WeightSource.DISK for _, event in self.events)


class Took(NamedTuple):
    """Times of a device with models on disk, in seconds, each a median."""

    build: float  # making an engine around an image
    close: float  # of an engine
    load: float  # bringing a model from the host cache to the device
    prefill: float  # a step with a prompt
    step: float  # any other step

    @classmethod
    def of(cls, measured: Measured) -> Took:
        events = [event for _, event in measured.events]
        built = [event.took_s for event in events if isinstance(event, Built) and event.source is WeightSource.DISK]
        return cls(statistics.median(built or [0.0]), close_s(measured.events), fetch_s(events), *steps_s(events))

    def ms(self) -> dict[str, float]:
        return {name: round(1e3 * seconds, 1) for name, seconds in self._asdict().items()}


class Tiers(NamedTuple):
    """Bytes of the device's pool, of a page and of the host cache, the rate in bytes a second of the disk, and the
    fetches of each model before: None if the checks that follow the first fetches are over."""

    pool_bytes: int
    page_bytes: int
    host_bytes: int
    disk_bytes_per_s: float
    fetched: int | None = None


def arrivals(count: int, models: int, gap_s: float) -> list[Arrival]:
    """Requests at random times: each model once, in the order of the deployments, then random models.

    A device that has just deployed the models begins as a simulated device begins, with every image on disk."""
    rng, at_s, found = random.Random(1), 0.0, []
    for number in range(count):
        at_s += rng.expovariate(1 / gap_s)
        found.append(Arrival(at_s, number if number < models else rng.randrange(models)))
    return found


async def place(device: DeviceProcess, models: dict[str, Path], images: Path) -> None:
    for key, path in models.items():
        found = artefact.inspect(path, Known(frozenset(["LlamaForCausalLM"])))
        told = replace(spec(path, key=key), digest=found.digest, architecture=found.architecture)
        device.end.send(ipc.Place(told))
        await device.until(lambda key=key: key in device.state.models and device.state.models[key].load_ms > 0)
    while len(list(images.glob("*.image"))) < len(models):
        await asyncio.sleep(0.1)


async def first_token_s(device: DeviceProcess, model: str) -> float:
    began = time.perf_counter()
    stream = device.ask(model, ASKED)
    await device.until(lambda: bool(device.said[stream]) or stream in device.ended)
    first_s = time.perf_counter() - began
    await device.answer(stream)
    return first_s


async def run(folder: Path, models: dict[str, Path], asked: list[Arrival]) -> Measured:
    host_bytes, pool_bytes = IMAGE_BYTES * (len(models) // 3) + 8 * MIB, IMAGE_BYTES * (len(models) // 6 + 1)
    images, kept = folder / "disk", folder / "journal"
    device = await DeviceProcess.start(
        *(pool_bytes, host_bytes), policy="slack", disk_folder=str(images), disk_bytes=4096 * MIB, journal=str(kept)
    )
    await place(device, models, images)
    for model in [*models] * 2:  # the checks that follow the first three fetches of a model are over then
        await first_token_s(device, model)
    began, wall = time.perf_counter(), time.monotonic()

    async def one(arrival: Arrival) -> float:
        await asyncio.sleep(max(0.0, arrival.at_s - (time.perf_counter() - began)))
        return await first_token_s(device, f"m{arrival.model}")

    ttft_s = await asyncio.gather(*map(one, asked))
    took_s = time.perf_counter() - began
    await device.stop()
    events = [(at, event) for at, event in journal_events(kept) if at >= wall]
    return Measured(list(ttft_s), took_s, events)


def journal_events(path: Path) -> list[tuple[float, Event]]:
    """The events in a device's journal, and their times on the machine's monotonic clock."""
    with path.open("rb") as file:
        heard = [record for record in journal.read(file) if isinstance(record, journal.EventRecord)]
    return [(record.now, journal.event_of(record)) for record in heard]


def disk_bytes_per_s(images: Path) -> float:
    """Rate of the reading of single images, in the median: as the product reads, but by one thread."""
    rates = []
    for path in sorted(images.glob("*.image"))[:6]:
        stored = StoredImage.open(path, path.stem)
        target = memoryview(bytearray(padded(stored.bytes) + 8 * MIB))
        began = time.perf_counter()
        for extent in range(stored.extents):
            stored.read(extent, aligned(target))
        rates.append(stored.bytes / (time.perf_counter() - began))
        stored.close()
    return statistics.median(rates)


def aligned(target: memoryview) -> memoryview:
    """Part of the memory from the first whole block on: direct reads go to whole blocks."""
    address = np.frombuffer(target, dtype=np.uint8).__array_interface__["data"][0]
    return target[-address % 4096 :]


def simulated(
    took: Took, asked: list[Arrival], prompt_tokens: int, weight_bytes: Sequence[int], tiers: Tiers
) -> SimulationResult:
    """Ask a simulated device with the measured costs. `weight_bytes`: of each model."""
    costs = {
        f"m{number}": ModelCosts(
            weight_bytes=size,
            kv_bytes_per_token=1024,
            step_s=took.step,
            step_s_per_request=0.0,
            step_s_per_token=0.0,
            prefill_s=took.prefill,
            prefill_s_per_token=0.0,
            prefill_s_per_token2=0.0,
            load_s=took.load,
            switch_s=0.0,
            copy_s_per_byte=1e-9,
        )
        for number, size in enumerate(weight_bytes)
    }
    profile = Profile(
        name="bench",
        kind="measured",
        conditions={},
        memory_bytes=tiers.pool_bytes,
        page_bytes=tiers.page_bytes,
        batched_tokens=2048,
        host_bytes_per_s=1e10,
        tiers=ImageTiers(
            host_cache_bytes=tiers.host_bytes,
            disk_bytes_per_s=tiers.disk_bytes_per_s,
            build_s=took.build,
            close_s=took.close,
            by_history=True,
            fetched=tiers.fetched,
        ),
        models=costs,
    )
    mean_gap_s = asked[-1].at_s / len(asked)
    workload = Workload(
        models=[ModelSize(name, each.weight_bytes, 1024, each.weight_bytes / 4) for name, each in costs.items()],
        rates=[1 / mean_gap_s / len(costs)] * len(costs),
        duration_s=asked[-1].at_s + mean_gap_s,
        at_s=np.array([each.at_s for each in asked]),
        model=np.array([each.model for each in asked]),
        prompt_tokens=np.full(len(asked), prompt_tokens),
        output_tokens=np.full(len(asked), TOKENS),
    )
    return simulate(workload, profile, "slack", 1, Objective(), warm_s=0, changes=Changes())


def compared(measured: Measured, told: SimulationResult, around_s: float = 0.0) -> dict[str, Any]:
    """Median time to the first token and images a minute from disk: measured, simulated, and the ratios.

    `around_s`: what the way to the device and back adds to a first token, in the median. A device alone is simulated.
    """
    assert isinstance(told.disk_loads_per_min, float)
    p50_s, per_min = statistics.median(measured.ttft_s), 60 * measured.disk_loads / measured.took_s
    told_s = told.ttft_p50_s + around_s
    ratios = {
        "ttft_p50": told_s / p50_s,
        "disk_loads_per_min": told.disk_loads_per_min / per_min if per_min else 0.0,
    }
    return {
        "measured": {"ttft_p50_s": round(p50_s, 3), "disk_loads_per_min": round(per_min, 1)},
        "simulated": {"ttft_p50_s": round(told_s, 3), "disk_loads_per_min": round(told.disk_loads_per_min, 1)},
        "simulated_by_measured": {name: round(ratio, 2) for name, ratio in ratios.items()},
        "met": all(1 / FACTOR_MOST <= ratio <= FACTOR_MOST for ratio in ratios.values()),
    }


def first_tokens(events: list[tuple[float, Event]]) -> list[tuple[str, float, float]]:
    """The requests that got a token: model, time of the arrival at the device, time of the first token."""
    waiting: dict[str, tuple[str, float]] = {}
    found = []
    for at, event in events:
        if isinstance(event, Arrived):
            waiting[event.request.id] = event.request.model, at
        elif isinstance(event, Stepped):
            for output in event.outputs:
                if output.tokens and (asked := waiting.pop(output.request, None)) is not None:
                    found.append((*asked, at))
    return found


def steps_s(events: list[Event]) -> tuple[float, float]:
    """Medians of the steps with a prompt, and of the remaining steps."""
    seen, prompts, further = set[str](), list[float](), list[float]()
    for event in events:
        if isinstance(event, Stepped):
            fresh = {output.request for output in event.outputs} - seen
            (prompts if fresh else further).append(event.step_s)
            seen |= fresh
    return statistics.median(prompts), statistics.median(further)


def fetch_s(events: list[Event]) -> float:
    """Time to bring a model from the host cache to the device, in the median; the shortest fetch if none is known."""
    reading, found, every = set[str](), list[float](), list[float]()
    for event in events:
        if isinstance(event, Built):
            reading.add(event.model)
        elif isinstance(event, Fetched):
            every.append(event.took_s)
            found += [] if event.model in reading else [event.took_s]
            reading.discard(event.model)
    return statistics.median(found) if found else min(every)


def close_s(events: list[tuple[float, Event]]) -> float:
    """Time to close an engine: from a build without room, or a closing before, to the end of a closing; the median."""
    found, since = [], None
    for at, event in events:
        if isinstance(event, Closed) and since is not None:
            found.append(at - since)
        since = at if isinstance(event, BuildFailed | Closed) else None
    return statistics.median(found) if found else 0.0


def measure(folder: Path, count: int, requests: int, gap_s: float) -> dict[str, object]:
    models = {f"m{at}": write_random(folder / f"m{at}", "llama", seed=at, **SHAPE) for at in range(count)}
    asked = arrivals(requests, count, gap_s)
    measured = asyncio.run(run(folder, models, asked))
    rate = disk_bytes_per_s(folder / "disk")
    tiers = Tiers(IMAGE_BYTES * (count // 6 + 1), PAGE_BYTES, IMAGE_BYTES * (count // 3), rate)
    took = Took.of(measured)
    told = simulated(took, asked, PROMPT, [IMAGE_BYTES - 2 * MIB] * count, tiers)
    return {
        "models": count,
        "requests": requests,
        "gap_s": gap_s,
        **compared(measured, told),
        "took_ms": took.ms(),
        "disk_gb_s": round(rate / 1e9, 2),
        "load": load(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=18)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--gap", type=float, default=1.2, help="seconds between two requests, in the mean")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(measure(Path(made), chosen.models, chosen.requests, chosen.gap)), flush=True)
