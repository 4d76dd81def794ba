"""Times for the benches that drive engines: how long, how spread out, and under which load of the machine."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from runtime.device.loop import TRANSFER_WAIT_S

WAIT_S = 60.0


def one_thread() -> None:
    """Give the process a single compute thread, to compare processes and engines. Call it before torch is imported."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("STACCATO_LOG_LEVEL", "error")


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Moving(Protocol):
    def wait(self, timeout_s: float) -> None: ...


def awaited(engine: Moving, done: Callable[[], bool]) -> None:
    """Wait until `done()`, as an idle device's loop waits. Fails after WAIT_S."""
    deadline = time.perf_counter() + WAIT_S
    while not done():
        assert time.perf_counter() < deadline, f"{done} is not true after {WAIT_S:.0f} s"
        engine.wait(TRANSFER_WAIT_S)


def spread(values: Iterable[float], digits: int) -> list[float]:
    """Smallest, median and largest."""
    ordered = sorted(values)
    return [round(value, digits) for value in (ordered[0], statistics.median(ordered), ordered[-1])]


def ratios(over: Sequence[float], under: Sequence[float], digits: int = 3) -> list[float]:
    """Spread of the ratios of the pairs."""
    return spread((a / b for a, b in zip(over, under, strict=True)), digits)


def milliseconds(times: Iterable[float], digits: int = 3) -> list[float]:
    return spread((s * 1e3 for s in times), digits)


def gb_s(size: int, times: Iterable[float]) -> list[float]:
    return spread((size / s / 1e9 for s in times), 2)


def load() -> list[float]:
    """The machine's load over 1 and 5 minutes, the bench included."""
    return [round(value, 2) for value in os.getloadavg()[:2]]
