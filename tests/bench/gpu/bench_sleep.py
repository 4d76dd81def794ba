"""vLLM's own sleep mode (level 1) on this GPU: the times to put a model to sleep and to wake the model up.

`python tests/bench/gpu/bench_sleep.py [SHAPE ...]`, by default 0.6B and 8B; the models of `bench_shapes.py`.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from tests.bench.gpu.bench_shapes import GIB, MIB, MODELS  # noqa: E402
from tests.bench.gpu.report import emit, emit_conditions, seconds, spread  # noqa: E402
from tests.bench.gpu.shapes import CONTEXT, SHAPES, write  # noqa: E402

ROUNDS, KV_BYTES = 5, 6 * GIB


def main(names: list[str]) -> None:
    emit_conditions()
    import torch
    from vllm import LLM, SamplingParams

    for name in names:
        spec = write(MODELS / f"{name}-0", SHAPES[name])
        llm = LLM(
            model=spec.path,
            dtype="bfloat16",
            max_model_len=CONTEXT,
            kv_cache_memory_bytes=KV_BYTES,
            gpu_memory_utilization=0.01,
            enable_sleep_mode=True,
            enforce_eager=True,
            attention_backend="FLASH_ATTN",
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)

        prompt: Any = {"prompt_token_ids": list(range(3, 35))}
        llm.generate([prompt], sampling, use_tqdm=False)
        times: list[tuple[float, float]] = []
        left = 0
        for _ in range(ROUNDS):
            sleep_s = seconds(partial(llm.sleep, level=1))
            free, total = torch.cuda.mem_get_info()
            left = total - free
            times.append((sleep_s, seconds(llm.wake_up)))
            llm.generate([prompt], sampling, use_tqdm=False)
        sleeps, wakes = (list(column) for column in zip(*times, strict=True))
        emit(
            "vLLM sleep mode",
            model=spec.key,
            weights_mib=spec.weight_bytes // MIB,
            first_sleep_ms=round(sleeps[0] * 1e3, 1),
            sleep_ms=spread([s * 1e3 for s in sleeps[1:]], 1),
            wake_ms=spread([s * 1e3 for s in wakes[1:]], 1),
            left_on_device_mib=left // MIB,
        )
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:] or ["0.6B", "8B"])
