"""Times for the benches that drive engines: how long, how spread out, and with what else on the machine."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from runtime.device import TRANSFER_WAIT_S

WAIT_S = 60.0


def one_thread() -> None:
    """Before torch is imported: the benches compare processes and engines of one compute thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("STACCATO_LOG_LEVEL", "error")


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Moving(Protocol):
    def wait(self, timeout_s: float) -> None: ...


def awaited(engine: Moving, done: Callable[[], bool]) -> None:
    """As the device's loop does when it has nothing else to do."""
    deadline = time.perf_counter() + WAIT_S
    while not done():
        assert time.perf_counter() < deadline, f"{done} is not true after {WAIT_S:.0f} s"
        engine.wait(TRANSFER_WAIT_S)


def spread(values: Iterable[float], digits: int) -> list[float]:
    """Smallest, median, largest."""
    ordered = sorted(values)
    return [round(value, digits) for value in (ordered[0], statistics.median(ordered), ordered[-1])]


def ratios(over: Sequence[float], under: Sequence[float], digits: int = 3) -> list[float]:
    """Of the pairs."""
    return spread((a / b for a, b in zip(over, under, strict=True)), digits)


def milliseconds(times: Iterable[float], digits: int = 3) -> list[float]:
    return spread((s * 1e3 for s in times), digits)


def gb_s(size: int, times: Iterable[float]) -> list[float]:
    return spread((size / s / 1e9 for s in times), 2)


def load() -> list[float]:
    """Of the machine, over 1 and 5 minutes, the bench itself included."""
    return [round(value, 2) for value in os.getloadavg()[:2]]
