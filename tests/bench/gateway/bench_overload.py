"""Does a machine with far too much to do make the platform take living processes for dead?

`staccato up` with one runtime and one model serves `--streams` streams, each followed by the next, beside `--loops`
processes that compute without end. The answer counts losses of gateways and of runtimes, the losses that proved false,
and the streams that ended well; and has the longest gap between two pieces of a stream and the highest attempt at a
request. Gateway and runtime live all the time, so every loss is false; no loss is the aim.

`python tests/bench/gateway/bench_overload.py [--seconds 300] [--loops 3] [--streams 16]`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from tests.bench.timing import load  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.e2e.conftest import MODELS, Platform  # noqa: E402

TOKENS = 200  # tokens of a stream
LOSSES = ("node.gateway_lost", "node.gateway_lives", "relay.streams_lost", "relay.runtime_lives", "dispatch.resumed")
LOOP = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"


@dataclass
class Overload:
    """Counts of a run."""

    streams: int = 0  # with a good end
    failed: Counter[str] = field(default_factory=Counter)  # by status or error
    longest_gap_s: float = 0.0
    events: Counter[str] = field(default_factory=Counter)  # counts of LOSSES in the logs
    attempt_max: int = 1

    @property
    def false_losses(self) -> int:
        """Losses of gateways and runtimes: both lived."""
        return self.events["node.gateway_lost"] + self.events["relay.streams_lost"]


@contextlib.contextmanager
def busy(loops: int, seconds: float) -> Iterator[None]:
    """Run `loops` processes that compute. The processes end after `seconds`, even if the bench was killed."""
    command = [sys.executable, "-c", LOOP, str(seconds)]
    running = [subprocess.Popen(command) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


class Logs:
    """Lines that the platform's processes have logged since the construction."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes = {path: path.stat().st_size for path in folder.glob("*.log")}

    def count(self, into: Overload) -> None:
        for path in sorted(self._folder.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._sizes.get(path, 0))
                for line in file:
                    with contextlib.suppress(ValueError):
                        self._count(json.loads(line), into)

    def _count(self, line: object, into: Overload) -> None:
        if isinstance(line, dict) and line.get("event") in LOSSES:
            into.events[line["event"]] += 1
            into.attempt_max = max(into.attempt_max, int(line.get("attempt", 1)))


async def overloaded(platform: Platform, tenant: str, model: str, streams: int, loops: int, seconds: float) -> Overload:
    """Keep `streams` streams of the tenant's deployment `model` running beside `loops` busy loops for `seconds`."""
    seen, logs, end = Overload(), Logs(platform.data / "logs"), time.monotonic() + seconds
    with busy(loops, seconds + 60):
        headers = {"authorization": f"Bearer {platform.keys[tenant]}"}
        async with httpx.AsyncClient(base_url=platform.url, headers=headers, timeout=120) as client:
            await asyncio.gather(*(_streaming(client, model, end, seen) for _ in range(streams)))
    logs.count(seen)
    return seen


async def _streaming(client: httpx.AsyncClient, model: str, end: float, seen: Overload) -> None:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    while time.monotonic() < end:
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                last, pieces, done = time.monotonic(), 0, False
                async for line in response.aiter_lines():
                    now = time.monotonic()
                    if line.startswith("data: {"):
                        if pieces:
                            seen.longest_gap_s = max(seen.longest_gap_s, now - last)
                        last, pieces = now, pieces + 1
                    done = done or line == "data: [DONE]"
        except httpx.HTTPError as error:
            seen.failed[type(error).__name__] += 1
            await asyncio.sleep(0.5)
            continue
        if response.status_code == 200 and done:
            seen.streams += 1
        else:
            seen.failed[str(response.status_code)] += 1
            await asyncio.sleep(0.5)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--loops", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        platform = Platform(Path(name) / "data", free_port())
        try:
            platform.start("--device-memory", "256MiB")
            platform.tenant("acme")
            platform.model("faq", MODELS / "faq")
            platform.deploy("acme", "faq", scaling={"idle": "never"})
            before = load()
            seen = await overloaded(platform, "acme", "faq", chosen.streams, chosen.loops, chosen.seconds)
        finally:
            platform.stop()
    answer = {**vars(chosen), **asdict(seen), "false_losses": seen.false_losses}
    answer["longest_gap_s"] = round(seen.longest_gap_s, 2)
    print(json.dumps({"bench": "overload", "answer": answer | {"load_before": before, "load": load()}}))


if __name__ == "__main__":
    asyncio.run(main())
