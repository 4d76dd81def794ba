"""A plan counts as many blocks as an engine holds for a request, for each kind of KV cache and at each length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from runtime.core.device.request import RequestId
from runtime.engine.builder import Builder
from runtime.engine.vllm import VllmEngine
from store.contract.kv_curve import KvBlocks, curve_of
from store.files.architectures import TABLE, Known
from store.files.artefact import inspect
from tests.runtime.engines import asleep, awake, payload, spec
from tests.runtime.hybrids import HYBRIDS, STATES, dtype, settings, write_hybrid

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
POOL_BYTES, HOST_BYTES = 96 << 20, 256 << 20
CPU_TOKENS, SMALL_TOKENS = 128, 16  # vLLM's blocks on CPUs: for attention, and for latent vectors or states
PIECE = 128  # most tokens of a prompt that a step computes: see tests/runtime/hybrids.py
CONTEXT = 512  # tokens, as in tests/runtime/engines.py
LENGTHS = (5, 32, 33, 200, 300)
QUICK = ("gpt_oss", "llama4_text", "gemma4_text", "qwen3_next", "nemotron_h", "mamba2", "deepseek_v2")


@pytest.fixture(scope="module")
def build() -> Iterator[Builder]:
    build = Builder(POOL_BYTES, HOST_BYTES)
    yield build
    build.close()


def block_tokens(name: str) -> int:
    """vLLM's kernel for latent vectors takes small blocks alone, but for processors with AMX it has another kernel."""
    small = name.startswith("mamba2") or (name.startswith("deepseek") and not torch.cpu._is_amx_tile_supported())
    return settings(name).get("block_size", SMALL_TOKENS if small else CPU_TOKENS)


def held_by(engine: VllmEngine, tokens: int) -> tuple[int, int]:
    """Blocks that a request holds after the step for its last token, and the most blocks at any step before."""
    blocks = engine._scheduler.blocks
    engine._scheduler.reset_prefix_cache()
    id, most = RequestId(f"of {tokens}"), 0
    engine.add(id, payload([3 + number % 400 for number in range(tokens - 1)], temperature=0, max_tokens=9))
    made = 0
    while made < 2:  # the second token's step computes the last of `tokens` tokens
        made += sum(len(output.tokens) for output in engine.step())
        most = max(most, blocks.used_blocks)
        engine.grow(max(0, engine.held().kv_wanted - engine.held().kv))
    held = blocks.used_blocks
    engine.abort([id])
    return held, most


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in HYBRIDS]
)
def test_a_plan_counts_the_blocks_that_a_request_holds(build: Builder, tmp_path: Path, name: str) -> None:
    folder = write_hybrid(tmp_path / name, name)
    found = inspect(folder, Known(frozenset(TABLE)))
    kept = found.kv_layers_as(dtype(name))
    told = msgspec.structs.replace(spec(folder), dtype=dtype(name))
    # vLLM's kernels for processors with AVX-512 BF16 would keep states in 32 bits; a plan counts the model's dtype.
    states = {"mamba_ssm_cache_dtype": dtype(name)} if dtype(name) == "bfloat16" and name in STATES else {}
    engine = build.build(told, **settings(name), **states)
    try:
        planned, groups = KvBlocks.of(kept, block_tokens(name)), engine._scheduler.groups.groups
        assert planned.block_bytes == engine.kv.block_bytes
        assert sorted((t.kind, t.size, t.reach) for t in planned.tables) == sorted(
            (group.kind, group.size, group.reach) for group in groups
        )
        assert planned.peak(CONTEXT, PIECE) == engine._scheduler.groups.most
        curve = curve_of(kept)
        awake(engine, 8)
        for tokens in LENGTHS:
            held, most = held_by(engine, tokens)
            assert held == planned.held(tokens)
            assert most <= planned.peak(tokens, PIECE)
            off = curve.bytes(tokens) - held * planned.block_bytes
            chunks = planned.block_bytes * sum(
                -(-table.reach // table.size) for table in planned.tables if table.kind == "chunk"
            )
            assert -len(groups) * planned.block_bytes <= off <= chunks, "more than a block of each group, or a chunk"
        asleep(engine)
    finally:
        engine.close()
