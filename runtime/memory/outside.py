"""Memory of a GPU outside the pool: vLLM's tables, bounded by settings, and blocks of torch's allocator."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

# When vLLM's worker starts, this share of a GPU's memory must be free, whatever kv_cache_memory_bytes says. The pool
# has nearly all of a GPU's memory already.
MEMORY_SHARE = 0.001
# vLLM's sizes for a server on a GPU, by the GPU's memory: requests of a batch and tokens of a step.
LARGE_BYTES, LARGE, SMALL = 70 << 30, (1024, 8192), (256, 2048)
# vLLM's runner keeps a count for each request of a batch and each token of the vocabulary, 4 bytes each, and every
# engine has such a table outside the pool: 128 requests and 151,936 tokens are 74 MiB. The table of an engine may take
# this part of the GPU's memory: a hundred engines take a tenth.
COUNTS_PART, COUNT_BYTES, REQUESTS_LEAST = 1024, 4, 64
WORKSPACE_BYTES = 1 << 30  # for products of matrices, activations and graphs, of all engines together
NO_POOL = (0, 0)  # the allocator's name for memory that belongs to no private pool
STRAY_LEAST = 1 << 20  # bytes: smaller blocks are parts of torch's own and of kernels


def pool_bytes(percent: int, free_bytes: int, total_bytes: int) -> int:
    """Size of a pool that is to take `percent` percent of a device's memory, and leaves WORKSPACE_BYTES free.

    `free_bytes`: memory without this process's context, and without what other processes have."""
    return max(0, min(total_bytes * percent // 100, free_bytes - WORKSPACE_BYTES))


def too_little(weight_bytes: int, free_bytes: int) -> str | None:
    """A sentence if a model can't be built: vLLM makes the weights in torch's memory, beside the pool, before the
    weights move into the pool. None: there is enough memory.

    `free_bytes`: memory of the device that neither the pool nor a process has."""
    if weight_bytes <= free_bytes:
        return None
    weights, free = (f"{size / (1 << 20):.0f} MiB" for size in (weight_bytes, free_bytes))
    return (
        f"the weights take {weights} beside the pool while the model is built, and {free} are free there: lower "
        "STACCATO_DEVICE_MEMORY"
    )


def settings(folder: Path, memory_bytes: int) -> dict[str, Any]:
    """Settings of vLLM for a model in `folder` on a GPU with `memory_bytes` bytes of memory."""
    requests, tokens = LARGE if memory_bytes >= LARGE_BYTES else SMALL
    if vocabulary := _vocabulary(folder):
        fitting = memory_bytes // COUNTS_PART // (COUNT_BYTES * vocabulary)
        requests = min(requests, max(REQUESTS_LEAST, fitting // 8 * 8))
    return {"gpu_memory_utilization": MEMORY_SHARE, "max_num_seqs": requests, "max_num_batched_tokens": tokens}


def _vocabulary(folder: Path) -> int:
    """Tokens of the model's vocabulary by its config.json; 0 if the file does not say a number."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return 0
    found = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return found if isinstance(found, int) else 0


def live_blocks(snapshot: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Blocks in use of torch's allocator: bytes by address. The pool of CUDA graphs is left out: graphs own its blocks.

    `snapshot`: answer of torch.cuda.memory_snapshot."""
    return {
        int(block["address"]): int(block["size"])
        for segment in snapshot
        if tuple(segment.get("segment_pool_id", NO_POOL)) == NO_POOL
        for block in segment["blocks"]
        if str(block["state"]).startswith("active")
    }


def strays(before: Collection[int], now: Mapping[int, int], known: Iterable[int]) -> dict[int, int]:
    """Blocks that a model left behind when its tensors moved: bytes by address, the largest block first.

    Args:
        before: addresses of the blocks that were in use before the model was made.
        now: blocks in use now, as by `live_blocks`.
        known: addresses of tensors of the runner, which stay where the tensors are."""
    scratch = sorted(known)
    left = {
        address: size
        for address, size in now.items()
        if address not in before
        and size >= STRAY_LEAST
        and not any(address <= tensor < address + size for tensor in scratch)
    }
    return dict(sorted(left.items(), key=lambda block: -block[1]))
