"""The first minutes on a GPU machine, rehearsed on a machine without a GPU: `make gpu-rehearsal`.

vLLM's build for CUDA, a torch for CUDA and stand-ins for NVIDIA's driver and for NVML must come first on the paths;
the Makefile arranges the paths. The rehearsal loads the libraries, looks for their operators, imports engine and
self-check, and builds the self-check's toy over the stand-in driver until the first golden answer is scheduled. The
next call would be the first kernel. Each line is a step, the last line is PASS or FAIL.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

# FlashInfer is not installed for the rehearsal: a GB of kernels, compiled at first use.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_USE_FLASHINFER_SAMPLER="0")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

with contextlib.suppress(ImportError):  # without Triton `versions` says what is missing
    from triton.backends.nvidia.driver import CudaDriver

    CudaDriver.is_active = staticmethod(lambda: True)  # vLLM defines its kernels only where a GPU is

LIBRARIES = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn._vllm_fa3_C", "cumem_allocator")
OPERATORS = {
    "_C": ("rms_norm", "fused_add_rms_norm", "rotary_embedding", "silu_and_mul", "marlin_gemm", "cutlass_scaled_mm"),
    "_C_cache_ops": ("reshape_and_cache_flash",),
    "_moe_C": ("topk_softmax", "moe_align_block_size", "moe_wna16_marlin_gemm"),
    "_vllm_fa3_C": ("fwd", "get_scheduler_metadata"),
}
OURS = ("builder", "selfcheck", "probe", "worker", "runner", "moving")
PAGE_BYTES = 32 << 20
POOL_PAGES, HOST_BYTES = 24, 64 << 20  # nearly the 1 GiB that the stand-in driver has

failed: list[str] = []


def step(what: str, work: Callable[[], object]) -> None:
    try:
        said = work()
    except Exception as error:
        failed.append(what)
        traceback.print_exc()
        print(f"FAIL  {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    else:
        print(f"ok    {what}{f': {said}' if said else ''}", flush=True)


def versions() -> str:
    import torch
    import vllm

    assert torch.version.cuda, f"torch {torch.__version__} is no build for CUDA"
    return f"torch {torch.__version__}, vLLM {vllm.__version__}"


def platform() -> str:
    from vllm.platforms import current_platform

    assert current_platform.is_cuda(), f"vLLM takes the machine for {type(current_platform).__name__}"
    return str(current_platform.get_device_name())


def operators() -> str:
    import torch

    for name in LIBRARIES:
        importlib.import_module(f"vllm.{name}")
    missing = [
        f"{space}.{name}"
        for space, names in OPERATORS.items()
        for name in names
        if not hasattr(getattr(torch.ops, space), name)
    ]
    assert not missing, f"not registered: {', '.join(missing)}"
    return f"{sum(map(len, OPERATORS.values()))} operators of {len(LIBRARIES)} libraries"


class ReachedFirstKernel(Exception):
    """The engine scheduled a step; `scheduled` is vLLM's output of the scheduler."""

    def __init__(self, scheduled: Any) -> None:
        super().__init__("the first step is scheduled")
        self.scheduled = scheduled


def first_golden_answer(graphs: int) -> str:
    """Build the toy of the self-check over the stand-in driver, until vLLM would run the first kernel.

    `graphs`: most requests of a decode step with a CUDA graph; 0: every step is eager."""
    from vllm.platforms import current_platform

    from runtime.core.engine import EngineError
    from runtime.engine import worker
    from runtime.engine.builder import Builder
    from runtime.engine.selfcheck import toy
    from tests.gpu import fake_cuda

    def execute(self: worker.PooledWorker, scheduled: Any) -> None:
        raise ReachedFirstKernel(scheduled)

    with (
        fake_cuda.installed(),
        mock.patch.object(type(current_platform), "dist_backend", "gloo"),  # NCCL wants a GPU
        mock.patch.object(worker.PooledWorker, "execute_model", execute, create=True),
    ):
        build = Builder(POOL_PAGES * PAGE_BYTES, HOST_BYTES, graphs=graphs)
        try:
            with tempfile.TemporaryDirectory() as folder:
                build.build(toy(Path(folder), "cuda"), skip_tokenizer_init=True)
        except EngineError as error:
            if not isinstance(error.__cause__, ReachedFirstKernel):
                raise
            scheduled = error.__cause__.scheduled
        build.device.settle(10)
        assert (stats := build.device.stats()).pages_free == stats.pages_total, f"pages are lost: {stats}"
        build.close()
    (request,) = scheduled.scheduled_new_reqs
    assert len(request.prompt_token_ids) == scheduled.total_num_scheduled_tokens == 16, scheduled
    return f"{request.req_id}, blocks {request.block_ids}"


def main() -> int:
    step("versions", versions)
    step("platform", platform)
    step("libraries", operators)
    for name in OURS:
        step(
            f"import runtime.engine.{name}", lambda name=name: importlib.import_module(f"runtime.engine.{name}") and ""
        )
    step("the first golden answer is scheduled", lambda: first_golden_answer(graphs=0))
    step("the same with settings for CUDA graphs", lambda: first_golden_answer(graphs=8))
    print("FAIL: " + ", ".join(failed) if failed else "PASS")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
