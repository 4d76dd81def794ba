"""Does one machine serve a thousand models, far more than its memory holds, and does the simulator say how fast?

`staccato up` with a host cache of 2 GiB and a device of 256 MiB gets `--models` models of nine architectures with
random weights, some 25 MiB each. Every model is deployed: the bench orders the next deployment once a few are left to
be built. Meanwhile the list of deployments is asked again and again. Then each model gets a question, in a random
order, `--asked` at a time. Last, `--again` questions come at random times, `--gap` seconds apart in the mean, each to a
random model. The answers must agree, and the time to the first token is held against the objective of the deployment.

The questions at random times go to a simulated device as well, with costs measured in the same run (bench_tiers.py).
Both devices check a model after each of the model's first three fetches, and the simulated models were fetched as often
before as the measured models in the median. The way through the gateway is not simulated: the median of the measured
ways there and back is added to the simulated time. The simulated host cache begins empty, the measured one with the
images asked for last, less than a tenth of all.

The answer has the seconds of the deployments, the tiers in which the models were then, the times to the first token;
how long the API answered, in the median, the 99th percentile and at most; the memory of all processes together, every
page counted once; the time of `staccato ps`; for pages of the dashboard in a browser (none without Chromium), the time
until the page shows the models, the longest task of the browser while the page is looked at, and the time until a typed
filter has taken effect; and the median time to the first token and the images per minute that came
from disk, measured and simulated. Bounds: no model fails, every answer agrees, no first token comes later than the
objective, memory stays below the host cache and 2 GiB more, the API's 99th percentile below 200 ms; and simulated
figures within a factor of 1.5.

Then the whole platform is restarted. A second line of the answer has the seconds from the command until every
deployment can be asked, and the times to the first token of a hundred models asked right after, `--asked` at a time.

`python tests/bench/runtime/bench_thousand.py [--models 1000] [--asked 2] [--again 350] [--gap 1.2]`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from deploy.demo.random_weights import ARCHITECTURES, write_random  # noqa: E402
from runtime.core.device.events import Built, Fetched, Placed  # noqa: E402
from runtime.device import journal  # noqa: E402
from tests.bench.runtime.bench_tiers import (  # noqa: E402
    Arrival,
    Measured,
    Tiers,
    Took,
    compared,
    disk_bytes_per_s,
    first_tokens,
    journal_events,
    simulated,
)
from tests.bench.timing import load  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.e2e.conftest import Platform  # noqa: E402
from tests.runtime.hybrids import write_hybrid  # noqa: E402

GIB = 1 << 30
HYBRIDS: dict[str, dict[str, Any]] = {"gemma3_text": {"intermediate_size": 1024}, "nemotron_h": {}}
SHAPE: dict[str, Any] = dict(hidden=512, layers=2)
SETTINGS = {"STACCATO_HOST_CACHE": "2GiB", "STACCATO_DEVICE_MEMORY": "256MiB", "STACCATO_DISK_CACHE": "24GiB"}
QUEUED = 20  # deployments ordered and not built yet
PROMPT = [5, 6, 7, 8, 9]
QUESTION = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
OBJECTIVE_S = 10.0  # of a deployment without an objective of its own
API_MS_MOST, MORE_BYTES_MOST = 200.0, 2 * GIB
RESTART_ASKED = 100  # models asked after the restart
JOURNALS = "journals"


def write_models(folder: Path, count: int) -> dict[str, Path]:
    kinds = (*ARCHITECTURES, *HYBRIDS)
    models: dict[str, Path] = {}
    for number in range(count):
        name, kind = f"m{number}", kinds[number % len(kinds)]
        path = folder / name
        if kind in HYBRIDS:
            write_hybrid(path, kind, seed=number, **HYBRIDS[kind])
        else:
            write_random(path, kind, seed=number, **SHAPE)
        models[name] = path
    return models


LOOK_S = 10.0  # at a page of the dashboard
SHOWN_MS_MOST = 120_000
WATCH_TASKS = """
window.longest = 0;
new PerformanceObserver((list) => {
  for (const task of list.getEntries()) window.longest = Math.max(window.longest, task.duration);
}).observe({ type: 'longtask', buffered: true });
"""
SHOWN = {  # what each page shows once the page has heard of `count` models
    "now": "(count) => document.querySelector('#totals').textContent.replaceAll(',', '').includes(`${count} models`)",
    "deployments": "(count) => document.querySelectorAll('tbody tr').length === count",
    "cold-starts": "(count) => document.querySelectorAll('tbody tr').length > 0",
}


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


class Memory(NamedTuple):
    """Bytes in the memory of all processes of a platform. A page of several processes counts once."""

    own: int  # anonymous memory: heaps and stacks
    libraries: int  # mapped files, of which nearly all are programs and libraries
    shared: int  # files in memory: the host cache and the pool of the device

    @classmethod
    def of(cls, platform: Platform) -> Memory:
        own, libraries, files = 0, 0, dict[tuple[int, int], int]()
        for process in platform.everyone():
            with contextlib.suppress(OSError):  # the process has ended
                kib = shares_kib(process)
                own, libraries = own + 1024 * kib["Pss_Anon"], libraries + 1024 * kib["Pss_File"]
            with contextlib.suppress(OSError):
                for file in Path(f"/proc/{process.pid}/fd").iterdir():
                    if os.readlink(file).startswith("/memfd:"):
                        found = file.stat()
                        files[found.st_dev, found.st_ino] = 512 * found.st_blocks
        return cls(own, libraries, sum(files.values()))

    def mib(self) -> dict[str, int]:
        return {name: size >> 20 for name, size in self._asdict().items()}


def shares_kib(process: psutil.Process) -> dict[str, int]:
    """Memory of a process in KiB by the kernel's names. `Pss`: a page of n processes counts as an n-th of a page.

    Raises OSError if the process has ended."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


def by_kind(platform: Platform) -> dict[str, tuple[int, int]]:
    """Number and anonymous MiB of the platform's processes, by the program."""
    found = defaultdict[str, list[int]](list)
    for process in platform.everyone():
        with contextlib.suppress(psutil.Error, OSError):
            words = " ".join(process.cmdline()).split()  # a forked process has its command in one word
            name = words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name
            found[name].append(shares_kib(process)["Pss_Anon"])
    return {name: (len(each), sum(each) >> 10) for name, each in sorted(found.items())}


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


class Answer(NamedTuple):
    model: str
    asked_s: float  # when the question was sent, on the machine's monotonic clock
    first_s: float  # time to the first token
    text: str


class Asker:
    """Asks models of a platform the question."""

    def __init__(self, platform: Platform) -> None:
        self._url = f"{platform.url}/v1/completions"
        self._headers = {"authorization": f"Bearer {platform.keys['acme']}"}
        self._client = httpx.AsyncClient(timeout=120)

    async def ask(self, model: str) -> Answer:
        began, first_s, text = time.monotonic(), 0.0, ""
        body = QUESTION | {"model": model, "stream": True}
        async with self._client.stream("POST", self._url, json=body, headers=self._headers) as answer:
            assert answer.status_code == 200, (model, await answer.aread())
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    first_s = first_s or time.monotonic() - began
                    text += json.loads(line[6:])["choices"][0]["text"]
        return Answer(model, began, first_s, text)

    async def each(self, models: list[str], at_once: int) -> list[Answer]:
        """Ask every model, `at_once` at a time."""
        gate = asyncio.Semaphore(at_once)

        async def one(model: str) -> Answer:
            async with gate:
                return await self.ask(model)

        async with self._client:
            return await asyncio.gather(*map(one, models))

    async def at_times(self, arrivals: list[Arrival]) -> list[Answer]:
        """Ask models at the times of the arrivals, whether earlier questions are answered or not."""
        began = time.perf_counter()

        async def one(arrival: Arrival) -> Answer:
            await asyncio.sleep(max(0.0, arrival.at_s - (time.perf_counter() - began)))
            return await self.ask(f"m{arrival.model}")

        async with self._client:
            return await asyncio.gather(*map(one, arrivals))


def arrivals(count: int, models: int, gap_s: float) -> list[Arrival]:
    """Requests at random times for random models."""
    rng, at_s, found = random.Random(2), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(1 / gap_s)
        found.append(Arrival(at_s, rng.randrange(models)))
    return found


def ttfts(answers: list[Answer]) -> list[float]:
    """Smallest, median, 99th percentile and largest time to the first token, in milliseconds."""
    ordered = sorted(answer.first_s * 1e3 for answer in answers)
    return [round(ordered[int((len(ordered) - 1) * part)]) for part in (0, 0.5, 0.99, 1)]


def beside_simulated(
    kept: Path, images: Path, asked: list[Arrival], again: list[Answer], since: float, until: float
) -> dict[str, Any]:
    """Compare the questions at random times with a simulated device. `kept`: journal of the device; `since`, `until`:
    when the questions began and when all were answered, on the machine's monotonic clock."""
    with kept.open("rb") as file:
        began = next(journal.read(file))
    assert isinstance(began, journal.BeginRecord)
    events = journal_events(kept)
    numbers, pages = dict[str, int](), dict[int, int]()
    for _, event in events:
        if isinstance(event, Placed):
            numbers[event.spec.key] = int(Path(event.spec.path).name.removeprefix("m"))
        elif isinstance(event, Built):
            pages[numbers[event.model]] = event.weights_pages
    fetched = Counter(event.model for at, event in events if at < since and isinstance(event, Fetched))
    heard = [(at, event) for at, event in events if since <= at <= until]
    measured = Measured([answer.first_s for answer in again], until - since, heard)
    host_bytes = int(SETTINGS["STACCATO_HOST_CACHE"].removesuffix("GiB")) * GIB
    rate, before = disk_bytes_per_s(images), round(statistics.median(fetched.values()))
    tiers = Tiers(began.pages_total * began.page_bytes, began.page_bytes, host_bytes, rate, before)
    weights = [pages[number] * began.page_bytes for number in range(len(pages))]
    took = Took.of(measured)
    ways = ways_s(again, {key: f"m{number}" for key, number in numbers.items()}, first_tokens(heard))
    there_s, at_device_s, back_s, around_s = (statistics.median(part) for part in zip(*ways, strict=True))
    told = compared(measured, simulated(took, asked, len(PROMPT), weights, tiers), around_s)
    way = {"there": there_s, "device": at_device_s, "back": back_s, "around": around_s}
    return told | {
        "took_ms": took.ms(),
        "way_ms": {name: round(1e3 * seconds, 1) for name, seconds in way.items()},
        "fetched_before": before,
        "disk_gb_s": round(rate / 1e9, 2),
    }


def ways_s(
    again: list[Answer], names: dict[str, str], tokens: list[tuple[str, float, float]]
) -> list[tuple[float, float, float, float]]:
    """For each question, the seconds to the device, at the device until the first token, and back; and there and back
    together. `names`: of the models, by key; `tokens`: see `first_tokens`."""
    heard = defaultdict[str, list[tuple[float, float]]](list)
    for key, arrived_s, first_s in sorted(tokens, key=lambda token: token[1]):
        heard[names[key]].append((arrived_s, first_s))
    ways = []
    for answer in sorted(again, key=lambda answer: answer.asked_s):
        arrived_s, first_s = heard[answer.model].pop(0)
        there_s, back_s = arrived_s - answer.asked_s, answer.asked_s + answer.first_s - first_s
        ways.append((there_s, first_s - arrived_s, back_s, there_s + back_s))
    return ways


def ps_s(platform: Platform) -> float:
    """Seconds of `staccato ps`."""
    command = [str(Path(sys.executable).with_name("staccato")), "ps"]
    began = time.perf_counter()
    subprocess.run([*command, "--url", platform.url, "--key", platform.admin_key], check=True, capture_output=True)
    return time.perf_counter() - began


def dashboard(platform: Platform, count: int) -> dict[str, float]:
    """Milliseconds of the dashboard with `count` models: see the bench's answer."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        return {}
    from playwright.sync_api import sync_playwright

    found: dict[str, float] = {}
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.add_init_script(WATCH_TASKS)
        tab.goto(f"{platform.url}/dashboard")
        tab.fill("#key", platform.admin_key)
        tab.keyboard.press("Enter")
        tab.wait_for_selector("#page")
        for page, shown in SHOWN.items():
            began = time.perf_counter()
            tab.click(f"#to-{page}")
            tab.wait_for_function(shown, arg=count, polling=10, timeout=SHOWN_MS_MOST)
            found[f"{page}_shown"] = 1e3 * (time.perf_counter() - began)
            tab.wait_for_timeout(1e3 * LOOK_S)
            found[f"{page}_longest_task"] = tab.evaluate("() => { const most = longest; longest = 0; return most; }")
        tab.click("#to-deployments")
        tab.wait_for_function(SHOWN["deployments"], arg=count, polling=10, timeout=SHOWN_MS_MOST)
        began = time.perf_counter()
        tab.locator("input[type=search]").press_sequentially(f"m{count - 1}")
        tab.wait_for_function(SHOWN["deployments"], arg=1, polling=10)
        found["filtered"] = 1e3 * (time.perf_counter() - began)
        browser.close()
    return {name: round(ms) for name, ms in found.items()}


def restart(platform: Platform, texts: dict[str, str], at_once: int) -> dict[str, object]:
    """Start a stopped platform again, and ask some of the models as soon as every deployment can be asked."""
    began = time.monotonic()
    platform.start()
    try:
        api = Api(platform)
        while not ready(found := api.deployments(), len(texts)):
            time.sleep(0.5)
        ready_s = time.monotonic() - began
        names = random.Random(3).sample(sorted(texts), min(RESTART_ASKED, len(texts)))
        answers = asyncio.run(Asker(platform).each(names, at_once))
        return {
            "ready_s": round(ready_s, 1),
            "tiers": dict(Counter(status["residency"] for status in found.values())),
            "asked": len(answers),
            "ttft_ms": ttfts(answers),
            "differ": [answer.model for answer in answers if answer.text != texts[answer.model]],
            "api_ms": api.times_ms(),
        }
    finally:
        platform.stop()


def ready(deployments: dict[str, Any], count: int) -> bool:
    """Whether each of `count` deployments can be asked."""
    phases = Counter(status["phase"] for status in deployments.values())
    return phases["awake"] + phases["asleep"] + phases["waking"] == count


def measure(
    platform: Platform, folder: Path, count: int, at_once: int, again_count: int, gap_s: float
) -> tuple[dict[str, object], dict[str, str]]:
    """Returns the figures, and the answer of each model."""
    models = write_models(folder / "models", count)
    weights = sum(file.stat().st_size for path in models.values() for file in path.glob("*.safetensors"))
    platform.start()
    try:
        platform.tenant("acme")
        api = Api(platform)
        deployed_s = deploy(platform, api, models)
        tiers = Counter(status["residency"] for status in api.deployments().values())
        names = [*models]
        random.Random(1).shuffle(names)
        first = asyncio.run(Asker(platform).each(names, at_once))
        memory = [Memory.of(platform)]
        asked, since = arrivals(again_count, count, gap_s), time.monotonic()
        again = asyncio.run(Asker(platform).at_times(asked))
        until = time.monotonic()
        memory.append(Memory.of(platform))
        kinds = by_kind(platform)
        for _ in range(20):
            api.deployments()
        ps_took_s = ps_s(platform)
        dashboard_ms = dashboard(platform, count)
        failed = [name for name, status in api.deployments().items() if status["phase"] == "failed"]
    finally:
        platform.stop()
    (kept,) = (path for path in (folder / JOURNALS).glob("*.journal") if "-" not in path.stem)
    texts = {answer.model: answer.text for answer in first}
    differ = [answer.model for answer in again if answer.text != texts[answer.model]]
    late = sum(answer.first_s > OBJECTIVE_S for answer in (*first, *again))
    most = max(map(sum, memory))
    bounds = (most <= 2 * GIB + MORE_BYTES_MOST, api.times_ms()[1] <= API_MS_MOST)
    figures = {
        "models": count,
        "weights_gib": round(weights / GIB, 2),
        "deployed_s": round(deployed_s, 1),
        "tiers": dict(tiers),
        "ttft_ms": [ttfts(first), ttfts(again)],
        "late": late,
        "asked_at_once": at_once,
        "asked_again": again_count,
        "gap_s": gap_s,
        "differ": differ[:10],
        "different_texts": len({*texts.values()}),
        "failed": failed[:10],
        "api_ms": api.times_ms(),
        "api_calls": len(api.took_ms),
        "ps_s": round(ps_took_s, 2),
        "dashboard_ms": dashboard_ms,
        "memory_gib": [round(sum(each) / GIB, 2) for each in memory],
        "memory_mib": [each.mib() for each in memory],
        "processes": kinds,
        "kept": not (differ or failed or late) and all(bounds),
        "tiers_simulated": beside_simulated(kept, platform.data / "images", asked, again, since, until),
        "load": load(),
    }
    return figures, texts


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--asked", type=int, default=2, help="requests under way at a time when each model is asked")
    parser.add_argument("--again", type=int, default=350, help="questions at random times")
    parser.add_argument("--gap", type=float, default=1.2, help="seconds between two of these, in the mean")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / JOURNALS).mkdir()
        platform = Platform(folder / "data", free_port(), SETTINGS | {"STACCATO_JOURNAL": str(folder / JOURNALS)})
        result, texts = measure(platform, folder, chosen.models, chosen.asked, chosen.again, chosen.gap)
        print(json.dumps(result), flush=True)
        print(json.dumps({"restart": restart(platform, texts, chosen.asked)}), flush=True)
