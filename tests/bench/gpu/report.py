"""Parts shared by the GPU benches: the conditions of a run, the form of a number, one line of JSON an answer."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

MIB, GIB = 1 << 20, 1 << 30
FOREVER = -1  # a timeout of the memory library: waits for the device itself instead of polling the device

GPU_FIELDS = (
    "name",
    "driver_version",
    "memory.total",
    "compute_mode",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
)


def emit(measure: str, **answer: object) -> None:
    print(json.dumps({"measure": measure, **answer}), flush=True)


def emit_conditions() -> None:
    """Emit the GPU as found: no bench changes the GPU's clocks or settings."""
    emit(
        "conditions",
        command=" ".join(sys.argv),
        gpu=dict(zip(GPU_FIELDS, gpu_state(), strict=True)),
        kernel=platform.release(),
        cpus=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1),
        load_1_min=os.getloadavg()[0],
        shmem_huge_pages=setting(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
    )


def gpu_state() -> list[str]:
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"no GPU answers ({error}): this bench needs an NVIDIA GPU, its driver and nvidia-smi")
    return [value.strip() for value in line.split(",")]


def setting(path: Path) -> str:
    """The choice put in brackets by the kernel."""
    text = path.read_text() if path.exists() else "[absent]"
    return text[text.index("[") + 1 : text.index("]")]


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def spread(values: list[float], digits: int = 3) -> list[float]:
    """Least, median and most."""
    return [round(value, digits) for value in (min(values), statistics.median(values), max(values))]


def gb_s(size: int, times_s: list[float]) -> list[float]:
    return spread([size / s / 1e9 for s in times_s], 2)
