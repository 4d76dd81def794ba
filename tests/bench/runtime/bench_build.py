"""How long does the device stand still while an engine is built from an image?

A process builds an engine of a model of the demo again and again from the model's image in the host cache. Between two
of these builds, the process builds an engine as vLLM does by itself, with a search of every module for kernels and of
every installed package for plug-ins. The bench prints the CPU time of both kinds, and the ratios of the pairs.

`python tests/bench/runtime/bench_build.py`
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from runtime.core.engine import Engine  # noqa: E402
from tests.bench.timing import load, milliseconds, one_thread, ratios  # noqa: E402

MODEL = ROOT / "deploy/demo/models/weather"
ROUNDS = 15
CPU_MS_MOST = 40.0  # to reach, in the median
POOL_BYTES, HOST_BYTES = 64 << 20, 256 << 20


def cpu_s(build: Callable[[], Engine]) -> float:
    """CPU time of the building of an engine, without the closing."""
    began = time.process_time()
    engine = build()
    took_s = time.process_time() - began
    engine.close()
    return took_s


def main() -> int:
    one_thread()
    from vllm.platforms import current_platform
    from vllm.utils import cpu_resource_utils
    from vllm.v1.sample import logits_processor

    from runtime.engine.builder import Builder, freeze_heap
    from tests.runtime.engines import spec

    freeze_heap()  # as a device process does
    build, model = Builder(POOL_BYTES, HOST_BYTES), spec(MODEL)
    build(model).close()  # from the files: makes the image
    found_once: list[Any] = [
        current_platform.register_triton_kernel_overrides,
        logits_processor._load_logitsprocs_plugins,
        vars(cpu_resource_utils)["_get_cpu_list"],
    ]

    def as_vllm() -> Engine:
        for found in found_once:
            found.cache_clear()
        return build(model)

    pairs = [(cpu_s(lambda: build(model)), cpu_s(as_vllm)) for _ in range(ROUNDS)]
    ours, theirs = (list(column) for column in zip(*pairs, strict=True))
    found = {"cpu_ms": milliseconds(ours), "cpu_ms_with_search": milliseconds(theirs), "ratio": ratios(theirs, ours)}
    print(json.dumps(found | {"load": load()}), flush=True)
    met = found["cpu_ms"][1] <= CPU_MS_MOST
    sys.stdout.flush()
    os._exit(int(not met))  # vLLM's exit handlers would tear down a process that is ending anyway


if __name__ == "__main__":
    main()
