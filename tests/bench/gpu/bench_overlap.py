"""What do two models gain from running on a GPU at once, and not in turn?

`python tests/bench/gpu/bench_overlap.py [SHAPE ...]`, by default 0.6B and 8B: every pair of the shapes, with batches of
1, 8 and 64. A model is a decode step without attention, of the shape's width and depth: the batch times the weights of
every layer, in 16 bits, as a CUDA graph. J: two graphs of a process, in turn on a stream and at once on two streams,
each the milliseconds for both steps. K: two processes with a graph each, without and with NVIDIA's multi-process
service (MPS), which this bench starts and ends. `worth` is 1 if nothing is gained and 2 if each model is as fast as
alone; `staccato sim --overlap` says how much it could be at most.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch

from tests.bench.gpu.report import emit, emit_conditions, spread
from tests.bench.gpu.shapes import SHAPES

BATCHES = (1, 8, 64)
ROUNDS, REPEATS, WARM = 7, 20, 3
PROCESS_ROUNDS, PROCESS_S = 3, 1.0
MPS = "nvidia-cuda-mps-control"


class StepGraph:
    """The products of a decode step, as a CUDA graph with memory of its own."""

    def __init__(self, shape: str, batch: int) -> None:
        found = SHAPES[shape]
        hidden, q, kv = found.hidden, found.heads * found.head, found.kv_heads * found.head
        self._q, self._intermediate = q, found.intermediate
        sizes = ((hidden, q + 2 * kv), (q, hidden), (hidden, 2 * found.intermediate), (found.intermediate, hidden))
        self._layers = [[_weights(rows, columns) for rows, columns in sizes] for _ in range(found.layers)]
        self._input = torch.ones(batch, hidden, dtype=torch.bfloat16, device="cuda")
        stream = _stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries take their workspaces before the capture
            for _ in range(WARM):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.output = self._step()

    def _step(self) -> torch.Tensor:
        x: torch.Tensor = self._input
        for qkv, out, gate_up, down in self._layers:
            x = torch.nn.functional.rms_norm(x, x.shape[-1:])
            x = (x @ qkv)[:, : self._q] @ out
            both = x @ gate_up
            gate, up = both[:, : self._intermediate], both[:, self._intermediate :]
            x = (torch.nn.functional.silu(gate) * up) @ down
        return x

    def replay(self) -> None:
        self._graph.replay()


def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _weights(rows: int, columns: int) -> torch.Tensor:
    weights: torch.Tensor = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * rows**-0.5
    return weights


# ── J: two streams of a process ───────────────────────────────────────────────────────────────────────────────────────


def two_streams(shapes: tuple[str, str], batch: int) -> dict[str, object]:
    one, other = (StepGraph(shape, batch) for shape in shapes)
    streams = _stream(), _stream()

    def in_turn() -> None:
        with torch.cuda.stream(streams[0]):
            one.replay()
            other.replay()

    def at_once() -> None:
        for stream, graph in zip(streams, (one, other), strict=True):
            with torch.cuda.stream(stream):
                graph.replay()

    rounds = [[_ms(work) for work in (one.replay, other.replay, in_turn, at_once)] for _ in range(ROUNDS)]
    alone, beside, turns, both = (list(column) for column in zip(*rounds, strict=True))
    return {
        "shapes": shapes,
        "batch": batch,
        "alone_ms": [spread(alone), spread(beside)],
        "in_turn_ms": spread(turns),
        "at_once_ms": spread(both),
        "worth": spread([turn / at_once for turn, at_once in zip(turns, both, strict=True)]),
    }


def _ms(work: Callable[[], None]) -> float:
    """Milliseconds of `work` on the device, in the mean of REPEATS."""
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(REPEATS):
        work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / REPEATS


# ── K: two processes ──────────────────────────────────────────────────────────────────────────────────────────────────


class StepProcess:
    """A process with a graph. The process replays the graph for as many seconds as the bench says."""

    def __init__(self, shape: str, batch: int, environment: dict[str, str]) -> None:
        command = [sys.executable, __file__, "--child", shape, str(batch)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if not self._line().startswith("ready"):
            raise RuntimeError("a process of the bench ended before its graph was there: its error stands above")

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{PROCESS_S}\n")
        self._process.stdin.flush()

    def rate(self) -> float:
        """Steps a second of what was begun."""
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def serve(shape: str, batch: int) -> None:
    graph = StepGraph(shape, batch)
    print("ready", flush=True)
    for line in sys.stdin:
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < float(line):
            for _ in range(REPEATS):
                graph.replay()
            torch.cuda.synchronize()
            steps += REPEATS
        print(steps / (time.perf_counter() - began), flush=True)


def two_processes(shapes: tuple[str, str], batch: int, environment: dict[str, str]) -> dict[str, object]:
    processes = [StepProcess(shape, batch, environment) for shape in shapes]
    try:
        worths, alone_ms = [], []
        for _ in range(PROCESS_ROUNDS):
            alone = []
            for process in processes:
                process.begin()
                alone.append(process.rate())
            for process in processes:
                process.begin()
            together = [process.rate() for process in processes]
            alone_ms.append([1e3 / rate for rate in alone])
            worths.append(sum(both / one for both, one in zip(together, alone, strict=True)))
    finally:
        for process in processes:
            process.close()
    times = [spread(list(column)) for column in zip(*alone_ms, strict=True)]
    return {"shapes": shapes, "batch": batch, "alone_ms": times, "worth": spread(worths)}


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """The environment of processes that share the GPU by MPS. Raises OSError or CalledProcessError without MPS."""
    with tempfile.TemporaryDirectory(prefix="staccato-mps-") as folder:
        environment = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([MPS, "-d"], env=environment, check=True, capture_output=True)
        try:
            yield environment
        finally:
            subprocess.run([MPS], env=environment, input="quit\n", text=True, check=True, capture_output=True)


def main(shapes: list[str]) -> int:
    emit_conditions()
    pairs = list(combinations_with_replacement(shapes, 2))
    for pair in pairs:
        for batch in BATCHES:
            emit("two streams", **two_streams(pair, batch))
            torch.cuda.empty_cache()
    for pair in pairs:
        emit("two processes", **two_processes(pair, BATCHES[1], dict(os.environ)))
    try:
        with mps() as environment:
            for pair in pairs:
                for batch in BATCHES:
                    emit("two processes by MPS", **two_processes(pair, batch, environment))
    except (OSError, subprocess.CalledProcessError) as error:
        emit("two processes by MPS", error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main(sys.argv[1:] or ["0.6B", "8B"]))
