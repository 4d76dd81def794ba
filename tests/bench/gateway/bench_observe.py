"""How much time does the accounting of time cost per token? `python tests/bench/gateway/bench_observe.py`"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

sys.path.insert(0, ".")

from prometheus_client import CollectorRegistry

from gateway.inference.metrics import DeclaredMetrics, Tally
from gateway.inference.timing import Timing
from runtime.core.device.request import ModelKey, Request, RequestId
from runtime.core.ledgers.latency import Clocks
from runtime.node.spans import Spans
from store.contract.wire import Delta
from store.telemetry.tracing import traceparent
from tests.store.telemetry.test_tracing import made

TIMES, ROUNDS = 20_000, 9


def ns(act: Callable[[], object]) -> list[float]:
    """Nanoseconds of a call, round by round."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        for _ in range(TIMES):
            act()
        rounds.append((time.perf_counter_ns() - began) / TIMES)
    return rounds


def main() -> None:
    clocks, asked = Clocks(0.0), Request(RequestId("g/1"), "g", 1, ModelKey("m"), b"", 0.0)
    clocks.arrived(asked, 0.0)
    clocks.turn(asked.model, 0.0)
    clocks.made(asked.id, time.monotonic)
    timing = Timing(time.monotonic(), Tally(DeclaredMetrics(CollectorRegistry()), ("t", "d")))
    delta = Delta(1, [7], 1)
    traces, _ = made()
    spans = Spans(traces, "r1")
    acts: dict[str, Callable[[], object]] = {
        "device: whose turn it is, for each step": lambda: clocks.turn(asked.model, 1.0),
        "device: was it told, for each token": lambda: clocks.made(asked.id, time.monotonic),
        "gateway: a gap between tokens, for each token": lambda: timing.came(delta, time.monotonic()),
        "node, traces on and not of this request, for each frame": lambda: spans.heard("g", [delta]),
        "gateway, traces off, for each request": lambda: traceparent(None),
        "the loop and the call that all of these contain": lambda: None,
    }
    for what, act in acts.items():
        rounds = ns(act)
        print(f"{what:58} {min(rounds):7.0f} ns at best, {statistics.median(rounds):.0f} median")


if __name__ == "__main__":
    main()
