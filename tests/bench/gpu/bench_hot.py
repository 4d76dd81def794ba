"""A hot model in the device process, beside vLLM's `LLM` as shipped and eager, on a GPU.

`python tests/bench/gpu/bench_hot.py [SHAPE [GATE]]`, by default 0.6B. With a GATE, the rounds begin when a file of the
name exists: other work may use the device while vLLM compiles. The candidates are processes, live at the same time, and
serve the same batches in turns. The bench writes a line of JSON for each size of a batch: milliseconds for a token of
every request, prefill included, and the candidates' times over the time of vLLM as shipped, pair by pair. Further
lines compare the tokens. The device process replays CUDA graphs, as by default, and once more of a model that torch
has compiled (STACCATO_COMPILED). The shape `tiny` rehearses the bench without a GPU.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from tests.bench.gpu.bench_shapes import GIB, MODELS  # noqa: E402
from tests.bench.gpu.report import emit, emit_conditions, spread  # noqa: E402
from tests.bench.gpu.shapes import CONTEXT, SHAPES, write  # noqa: E402
from tests.bench.runtime.bench_hot_model import Bare, Batch, Ours  # noqa: E402

BATCHES, TOKENS, ROUNDS = (1, 8, 64), 128, 5
GRAPHS = 64
READY_S = 240.0
WITH_EAGER = 8 * GIB  # bytes of weights from which a fourth process would not fit
COMPARED, COMPARED_TOKENS = 8, 64  # requests and tokens of each whose tokens are compared
KV_BYTES, POOL_ROOM, HOST_ROOM = 6 * GIB, 8 * GIB, 3 * GIB
SHIPPED, EAGER = "vLLM as shipped", "vLLM eager"
OURS, COMPILED = "ours", "ours, compiled"


async def main(name: str, gate: Path | None) -> None:
    tiny = name == "tiny"
    if not tiny:
        emit_conditions()
    spec = write(MODELS / f"{name}-0", SHAPES[name], 0)
    settings: dict[str, Any] = dict(
        dtype="bfloat16", max_model_len=CONTEXT, kv_cache_memory_bytes=KV_BYTES // 16 if tiny else KV_BYTES
    )
    if not tiny:
        settings |= dict(gpu_memory_utilization=0.01, attention_backend="FLASH_ATTN")
    settings["skip_tokenizer_init"] = True
    memory = (1 << 28, 1 << 29) if tiny else (spec.weight_bytes + POOL_ROOM, spec.weight_bytes + HOST_ROOM)
    began = time.perf_counter()
    bare: dict[str, Bare] = {}
    if spec.weight_bytes < WITH_EAGER:
        bare[EAGER] = Bare(Path(spec.path), settings | dict(enforce_eager=True), log=None)
    if not tiny:
        bare[SHIPPED] = Bare(Path(spec.path), settings, log=None)
    ours = {
        OURS: await Ours.start(spec, memory=memory, cuda_graphs=GRAPHS),
        COMPILED: await Ours.start(spec, memory=memory, cuda_graphs=GRAPHS, compiled=True),
    }
    failed: list[str] = []

    async def served(who: str, tokens: int, requests: int) -> Batch:
        return bare[who].batch(tokens, requests) if who in bare else await ours[who].batch(tokens, requests)

    for who in [*ours, *bare]:
        try:
            if who in bare:
                bare[who].wait()
            for requests in BATCHES:
                await asyncio.wait_for(served(who, 8, requests), READY_S)  # kernels are compiled at first use
            emit("ready", who=who, shape=name, s=round(time.perf_counter() - began, 1))
        except (RuntimeError, AssertionError, TimeoutError) as error:
            failed.append(who)
            emit("failed", who=who, error=f"{type(error).__name__}: {str(error)[:500]}")
    names = [who for who in ((*bare, *ours) if EAGER in bare else (*ours, *bare)) if who not in failed]
    while gate is not None and not gate.exists():
        await asyncio.sleep(0.1)
    said = {who: (await served(who, COMPARED_TOKENS, COMPARED)).tokens for who in names}
    for beside in dict.fromkeys((names[0], SHIPPED if SHIPPED in said else names[0])):
        equal = {
            who: [_equal(one, other) for one, other in zip(said[beside], tokens, strict=True)]
            for who, tokens in said.items()
        }
        emit("equal tokens", shape=name, tokens=COMPARED_TOKENS, beside=beside, first_equal_tokens=equal)
    for requests in BATCHES:
        rounds: dict[str, list[float]] = {who: [] for who in names}
        for n in range(ROUNDS):
            for who in names if n % 2 else reversed(names):
                rounds[who].append((await served(who, TOKENS, requests)).seconds / TOKENS)
        base = rounds[SHIPPED if SHIPPED in rounds else EAGER]
        emit(
            "hot",
            shape=name,
            requests=requests,
            tokens=TOKENS,
            step_ms={who: spread([s * 1e3 for s in times]) for who, times in rounds.items()},
            over_shipped={
                who: spread([a / b for a, b in zip(times, base, strict=True)]) for who, times in rounds.items()
            },
        )
    os._exit(int(bool(failed)))  # children end with their pipes


def _equal(one: list[int], other: list[int]) -> int:
    """The number of first tokens that are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "0.6B", Path(sys.argv[2]) if len(sys.argv) > 2 else None))
