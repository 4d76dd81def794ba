"""How much does an engine leave in the process while the model is scaled to zero?

A process builds engines in turn, with different weights, and puts every engine to sleep. A sleeping engine has no page
on the device, and its image lies in the host's cache (shared memory, not counted). The growth of private memory,
threads and open files stays for as long as the deployment is placed. Does the first engine step slower beside fifteen
sleeping engines? To find out, a process with one engine and a process with sixteen engines take the same batch in
turns.

`python tests/bench/runtime/bench_residue.py`
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from runtime.core.device.request import RequestId  # noqa: E402
from tests.bench.timing import awaited, load, milliseconds, one_thread, ratios, seconds  # noqa: E402

MIB = 1 << 20
SHAPES: dict[str, dict[str, Any]] = {
    "demo (2.5 MiB)": dict(hidden=128, layers=2),
    "14 MB": dict(hidden=256, layers=4, heads=4, kv_heads=2),
}
COUNTS = (1, 4, 8, 16)
BATCH, OUTPUT_TOKENS, ROUNDS = 8, 64, 9
POOL_BYTES, HOST_BYTES = 512 * MIB, 2048 * MIB  # the pool as `staccato up` has it


class Child:
    """A process with sleeping engines. A line on stdin is answered with the seconds of a batch on the first engine."""

    def __init__(self, shape: str, engines: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", shape, str(engines)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.memory: list[dict[str, int]] = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("[", "{")):  # vLLM's own threads print as well
                return json.loads(line)
        raise RuntimeError("the child with the engines ended: run it alone with --child SHAPE ENGINES to see why")

    def batch_s(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer()["batch_s"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(shape: str, engines: int) -> None:
    """The child: prints the process's resources with 1, 4, ... sleeping engines, then the seconds of a batch
    per line."""
    from deploy.demo.random_weights import write_random
    from runtime.engine.builder import Builder
    from tests.runtime.engines import asleep, awake, spec

    build = Builder(POOL_BYTES, HOST_BYTES)
    built, seen = [], []
    with tempfile.TemporaryDirectory() as folder:
        for n in range(engines):
            path = write_random(Path(folder) / f"m{n}", "llama", seed=n, **SHAPES[shape])
            engine = build(spec(path))
            awake(engine)
            assert engine.check() is None
            built.append(asleep(engine))
            shutil.rmtree(path)
            if len(built) in COUNTS:
                seen.append({"engines": len(built), **taken()})
    assert build.pages_used() == 0
    print(json.dumps(seen), flush=True)
    for salt, _ in enumerate(sys.stdin):
        print(json.dumps({"batch_s": batch_s(built[0], str(salt))}), flush=True)
    os._exit(0)  # vLLM's exit handlers would tear down a process that is ending anyway


def taken() -> dict[str, int]:
    """Memory, threads and files of this process, once the heap is trimmed, as a device at rest does after builds."""
    from runtime.memory import heap

    heap.trim()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kinds = {f"{kind}_kib": int(status[kind].split()[0]) for kind in ("RssAnon", "RssShmem")}
    return kinds | {"threads": int(status["Threads"]), "fds": len(os.listdir("/proc/self/fd"))}


def batch_s(engine: Any, salt: str) -> float:
    """Seconds of the decode steps of a batch; the engine is asleep before and after."""
    from tests.runtime.engines import asleep, payload

    engine.fetch(engine.kv.pages_for(1 + 2 * BATCH))
    awaited(engine, engine.arrived)
    for n in range(BATCH):
        asked = payload([7 * n + 3] * 32, f"{salt}-{n}", temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        engine.add(RequestId(f"{n}"), asked)
    engine.step()

    def decode() -> None:
        while engine.busy():
            engine.step()

    took_s = seconds(decode)
    asleep(engine)
    return took_s


def measure(shape: str) -> dict[str, object]:
    one, many = Child(shape, COUNTS[0]), Child(shape, COUNTS[-1])
    pairs = []
    for n in range(ROUNDS + 1):
        pair = (one.batch_s(), many.batch_s()) if n % 2 else (many.batch_s(), one.batch_s())[::-1]
        if n > 0:
            pairs.append(pair)
    one_s, many_s = (list(column) for column in zip(*pairs, strict=True))
    seen = many.memory
    one.close()
    many.close()
    return {
        "model": shape,
        "mib_for_each_engine": {
            f"{before['engines']} to {after['engines']}": growth_mib(before, after)
            for before, after in zip(seen, seen[1:], strict=False)
        },
        "threads": {str(step["engines"]): step["threads"] for step in seen},
        "fds": {str(step["engines"]): step["fds"] for step in seen},
        "step_ms": milliseconds((s / (OUTPUT_TOKENS - 1) for s in one_s), 3),
        "step_beside_15_sleepers": ratios(many_s, one_s),
        "load": load(),
    }


def growth_mib(before: dict[str, int], after: dict[str, int]) -> float:
    return round((after["RssAnon_kib"] - before["RssAnon_kib"]) / 1024 / (after["engines"] - before["engines"]), 2)


if __name__ == "__main__":
    one_thread()
    if sys.argv[1:2] == ["--child"]:
        serve(sys.argv[2], int(sys.argv[3]))
    for shape in SHAPES:
        print(json.dumps(measure(shape)), flush=True)
