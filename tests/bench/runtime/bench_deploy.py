"""How long do streams stand still while models are deployed on their device?

`staccato up` with a model that makes eight streams. Each round takes the longest gap between two tokens of any stream,
first in a quiet window, then in a window with six deployments of new models, one after another, each read from files.
Bound: the quiet gap, two steps and 10 ms, in the median of the rounds. For the longest gap of each round the bench
prints what the device did meanwhile, by the platform's own timeline.

`python tests/bench/runtime/bench_deploy.py [--rounds 5]`
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

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
PIPE_S = 0.2  # time in which lines of the reading process arrive


class Reader:
    """Eight streams of one model, read by a process: the gaps between two tokens, with the time of each gap's end."""

    def __init__(self, platform: Platform) -> None:
        self.gaps: list[tuple[float, float]] = []
        command = [sys.executable, str(Path(__file__).with_name("gaps.py")), str(platform.port)]
        command += [platform.keys["acme"], "served", str(STREAMS)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            at, gap = map(float, line.split())
            self.gaps.append((at, gap))

    def of(self, since: float) -> list[tuple[float, float]]:
        """Gaps that ended after `since`, as (seconds, end). Raises RuntimeError if the streams have ended."""
        if self._process.poll() is not None:
            raise RuntimeError("the process that reads the streams has ended")
        time.sleep(PIPE_S)
        return [(gap, at) for at, gap in list(self.gaps) if at >= since]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()


def measured(platform: Platform, folder: Path, rounds: int) -> dict[str, object]:
    reader = Reader(platform)
    time.sleep(2 * QUIET_S)
    quiet, busy, step, step_busy, took = [], [], [], [], []
    try:
        for round_ in range(rounds):
            since = time.monotonic()
            time.sleep(QUIET_S)
            gaps = reader.of(since)
            quiet.append(max(gaps)[0] * 1e3)
            step.append(statistics.median(gap for gap, _ in gaps) * 1e3)
            since = time.monotonic()
            deploy_all(platform, folder, round_)
            took.append(time.monotonic() - since)
            gaps = reader.of(since)
            longest, at = max(gaps)
            busy.append(longest * 1e3)
            step_busy.append(statistics.median(gap for gap, _ in gaps) * 1e3)
            did = device_did(platform, at - longest, at)
            remove_all(platform, round_)
            said = f"round {round_ + 1}: {quiet[-1]:.1f} ms quiet, {busy[-1]:.1f} ms deploying; the device: {did}"
            print(said, file=sys.stderr, flush=True)
    finally:
        reader.close()
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


def device_did(platform: Platform, began: float, ended: float) -> str:
    """Uses of the device's time and stages of models from `began` to `ended`, in seconds of the monotonic clock, as
    (milliseconds after `began`: what, milliseconds)."""
    wall = time.time() - time.monotonic()
    moments = [datetime.fromtimestamp(wall + at, UTC).isoformat() for at in (began - 0.02, ended)]
    (gpu,) = platform.get("/api/v1/gpus").json()["data"]
    asked = urlencode(dict(zip(("from", "to"), moments, strict=True)))
    shown = platform.get(f"/api/v1/gpus/{gpu['id']}/timeline?{asked}").json()
    from_us, parts = (wall + began) * 1e6, []
    for part in sorted([*shown["spans"], *shown["stages"]], key=lambda part: int(part["at_us"])):
        if part["at_us"] + part["us"] >= from_us:
            what = part.get("use") or part["name"]
            parts.append(f"({(part['at_us'] - from_us) / 1e3:.0f}: {what}, {part['us'] / 1e3:.0f})")
    return " ".join(parts)


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
            found = measured(platform, folder, rounds)
        finally:
            platform.stop()
    print(json.dumps(found | {"load": load()}), flush=True)
    return int(not found["met"])


if __name__ == "__main__":
    sys.exit(main())
