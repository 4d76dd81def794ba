"""The one command for a GPU machine: `python tests/bench/gpu/all.py OUT_DIR [PART ...]`.

Without a part every part runs.

The machine needs a GPU with its driver, Python 3.11, a C++ compiler, nvcc, and a checkout of the repository. `build`,
`tests`, `driver_calls` and `scale_up` need pytest, hypothesis, torch and cupy besides, the other parts everything that
Staccato needs on a machine with a GPU. A part is a process with a time limit; the part's output goes to the terminal
and to OUT_DIR. A failed part stops no further part, but makes the exit status 1. On an H100 expect:

  build          10 s   the memory library, and its view of the driver beside NVIDIA's headers
  tests          60 s   tests/gpu but for the part kinds
  kinds         400 s   models with every kind of KV cache beside bare vLLM, by pytest-xdist (time guessed)
  driver_calls   90 s   A the price of the driver's calls, B behind a running kernel, C beside launches
  scale_up       60 s   D pinned memory and the link, E an image of 15 GiB back from the cache
  shapes         60 s   F engines of two models of 0.6 B: build, cold start, parking, turns
  shapes_8b      90 s   the same of a model of 8 B
  hot           210 s   G a hot model beside vLLM as shipped and eager
  sleep          90 s   H vLLM's own sleep mode
  served         80 s   I the whole platform: `staccato up`, streams over HTTP
  overlap       120 s   J, K two models at once: two streams, two processes (time guessed)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
GRAPHS = "64"  # most requests of a step with a CUDA graph


class Part(NamedTuple):
    command: list[str]
    limit_s: int
    output: str


def bench(name: str, limit_s: int, *arguments: str) -> Part:
    return Part([sys.executable, f"tests/bench/gpu/bench_{name}.py", *arguments], limit_s, f"{name}.jsonl")


# The repository's pytest settings name plugins missing on the machine.
TESTS = [
    sys.executable,
    "-m",
    "pytest",
    "-c",
    os.devnull,
    "--rootdir",
    str(ROOT),
    "-p",
    "no:cacheprovider",
    "-o",
    "asyncio_mode=auto",
    "-rs",
    "-v",
]
PARTS = {
    "build": Part(["make", "-j4", "-C", "csrc", "all", "cuda"], 70, "build.txt"),
    "tests": Part([*TESTS, "tests/gpu", "--ignore=tests/gpu/test_kinds.py"], 110, "tests.txt"),
    "kinds": Part([*TESTS, "-n", "6", "tests/gpu/test_kinds.py"], 480, "kinds.txt"),
    "driver_calls": bench("driver_calls", 120),
    "scale_up": bench("scale_up", 220),
    "shapes": bench("shapes", 240, "--graphs", GRAPHS, "0.6B", "0.6B"),
    "shapes_8b": Part(bench("shapes", 300, "--graphs", GRAPHS, "8B").command, 300, "shapes_8b.jsonl"),
    "hot": bench("hot", 420),
    "sleep": bench("sleep", 240),
    "served": bench("served", 240),
    "overlap": bench("overlap", 300),
}


def main(out: Path, names: list[str]) -> int:
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"there is no part {', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    out.mkdir(parents=True, exist_ok=True)
    lines = [carry_out(name, out) for name in names or PARTS]
    summary = "".join(f"{line}\n" for line in lines)
    (out / "summary.txt").write_text(summary)
    print(summary, end="")
    return int(any(" failed " in line for line in lines))


def carry_out(name: str, out: Path) -> str:
    """Run a part with its time limit; returns a line on the part's end."""
    part = PARTS[name]
    started = time.monotonic()
    with (
        subprocess.Popen(part.command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process,
        (out / part.output).open("w") as file,
    ):
        timer = threading.Timer(part.limit_s, os.killpg, (process.pid, signal.SIGKILL))  # with the part's children
        timer.start()
        for line in process.stdout or ():
            print(line, end="", flush=True)
            file.write(line)
        status = process.wait()
    timer.cancel()
    took = f"{time.monotonic() - started:.0f} s of {part.limit_s} s"
    return f"{name:14}ok      {took}" if status == 0 else f"{name:14}failed  {took}, exit status {status}"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(str(__doc__))
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
