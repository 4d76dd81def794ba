"""Settings of vLLM by a GPU's memory, and blocks of torch's allocator that a model left behind; without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.memory.outside import (
    COUNT_BYTES,
    COUNTS_PART,
    WORKSPACE_BYTES,
    live_blocks,
    pool_bytes,
    settings,
    strays,
    too_little,
)

GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    ("memory_gib", "vocabulary", "requests", "tokens"),
    [
        (141, 151_936, 240, 8192),  # H200 and Qwen3
        (80, 128_256, 160, 8192),  # H100 and Llama 3
        (141, 1_000, 1024, 8192),  # no more than vLLM's own number
        (24, 151_936, 64, 2048),  # small GPU: the least number, though its tables take more than their part
    ],
)
def test_a_batch_is_as_large_as_the_gpus_memory_bears(
    tmp_path: Path, memory_gib: int, vocabulary: int, requests: int, tokens: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": vocabulary}}))
    told = settings(tmp_path, memory_gib * GIB)
    assert (told["max_num_seqs"], told["max_num_batched_tokens"]) == (requests, tokens)
    table = requests * vocabulary * COUNT_BYTES
    assert requests == 64 or table <= memory_gib * GIB // COUNTS_PART


def test_vllm_asks_for_no_free_memory_beside_the_pool(tmp_path: Path) -> None:
    assert 0 < settings(tmp_path, 80 * GIB)["gpu_memory_utilization"] <= 0.01, "nearly all memory is the pool's already"


def test_a_model_that_does_not_fit_beside_the_pool_is_refused_with_both_numbers() -> None:
    assert too_little(2 * GIB, 2 * GIB) is None
    said = too_little(16 * GIB, 7 * GIB)
    assert said is not None and "16384 MiB beside the pool" in said and "7168 MiB are free" in said


def test_blocks_of_cuda_graphs_are_no_strays() -> None:
    segments = [
        {"segment_pool_id": (0, 0), "blocks": [block(0, 4 * MIB)]},
        {"segment_pool_id": (1, 0), "blocks": [block(8 * MIB, 4 * MIB)]},
    ]
    assert live_blocks(segments) == {0: 4 * MIB}


def block(address: int, size: int, state: str = "active_allocated") -> dict[str, object]:
    return {"address": address, "size": size, "state": state}


def test_a_large_block_that_no_tensor_of_the_runner_explains_is_a_stray() -> None:
    snapshot = [
        {"blocks": [block(0, 4 * MIB), block(4 * MIB, 8 * MIB), block(12 * MIB, 64 * MIB, "inactive")]},
        {"blocks": [block(100 * MIB, 2 * MIB), block(200 * MIB, MIB // 2), block(300 * MIB, 3 * MIB)]},
    ]
    now = live_blocks(snapshot)
    assert 12 * MIB not in now
    assert strays({0}, now, [300 * MIB + 256]) == {4 * MIB: 8 * MIB, 100 * MIB: 2 * MIB}


def test_a_pool_takes_its_part_and_leaves_room_for_workspaces() -> None:
    assert pool_bytes(90, 140 * GIB, 141 * GIB) == 141 * GIB * 90 // 100
    assert pool_bytes(90, 20 * GIB, 141 * GIB) == 20 * GIB - WORKSPACE_BYTES, "another process has most of the device"
    assert pool_bytes(90, GIB // 2, 141 * GIB) == 0
