"""Models with every kind of KV cache, and weights in several forms, make on a real GPU the tokens of bare vLLM.

Requests are parked in mid-answer while every free page of the GPU is overwritten, follow requests that left bytes which
are no number, and move to a second pool. Every model is in 16 bits: where bare vLLM finds two tokens about equally
likely, the answer may go on with either token. Without a GPU the module is skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from runtime.engine import golden
from runtime.engine.runner import graph_settings
from runtime.engine.vllm import VllmEngine
from tests.gpu.conftest import why_no_gpu
from tests.runtime.bare import Likeliest, ask_for_likeliest
from tests.runtime.engine.test_hybrids import MOST, PARKED_EVERY, PROMPTS, answers, question
from tests.runtime.engines import TwoRuntimes, asleep, awake, moved, spec, spoil
from tests.runtime.forms import write_form
from tests.runtime.hybrids import HYBRIDS, write_hybrid

POOL_BYTES, HOST_BYTES = 1 << 30, 1 << 30
GRAPHS = 8
DTYPE = "bfloat16"
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 128, "max_num_seqs": 8}
OWN: dict[str, dict[str, Any]] = {  # kernels that need no further packages than vLLM's own libraries
    "qwen3_next": {"gdn_prefill_backend": "triton"},
    "gemma4_text": {"attention_backend": "TRITON_ATTN"},
    "gpt_oss_mxfp4": {"moe_backend": "marlin"},
}
NAMES = (*HYBRIDS, "gpt_oss_mxfp4", "awq", "gptq", "w4a16", "w8a8_symmetric", "qwen3_moe", "mixtral")


class Kinds(TwoRuntimes):
    """Two pools on the GPU, and the folders of the models."""

    def __init__(self, folder: Path) -> None:
        super().__init__(POOL_BYTES, HOST_BYTES, GRAPHS)
        self._folder = folder

    def said(self, name: str) -> tuple[list[list[int]], Likeliest]:
        """Write a model, and ask bare vLLM each of PROMPTS in a new process, with graphs as the engine has."""
        folder = (write_hybrid if name in HYBRIDS else write_form)(self._folder / name, name)
        more = {"gpu_memory_utilization": 0.01, "enable_prefix_caching": True} | graph_settings(GRAPHS, False)
        return ask_for_likeliest(folder, DTYPE, PROMPTS, MOST, SETTINGS | OWN.get(name, {}) | more)

    def of(self, name: str, runtime: int = 0) -> VllmEngine:
        asked = msgspec.structs.replace(spec(self._folder / name), dtype=DTYPE)
        return self.engine(asked, runtime, **SETTINGS | OWN.get(name, {}))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kinds]:
    if reason := why_no_gpu():
        pytest.skip(reason)
    kinds = Kinds(tmp_path_factory.mktemp("kinds"))
    yield kinds
    kinds.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_model_on_a_gpu_says_what_bare_vllm_says(kinds: Kinds, name: str) -> None:
    said, likeliest = kinds.said(name)
    engine = awake(kinds.of(name), 8)
    assert engine.check() is None
    wrong: list[str] = []
    ties = 0

    def as_bare(what: str, number: int, made: list[int]) -> None:
        nonlocal ties
        for place, (token, expected) in enumerate(zip(made, said[number], strict=True)):
            if token != expected:
                known = likeliest[number][place]
                lead = known[expected] - known.get(token, float("-inf"))
                if lead <= golden.tie(torch.bfloat16):
                    ties += 1
                else:
                    wrong.append(f"prompt {number} {what}: token {place}, {lead:.2f} nats")
                return

    for number in range(len(PROMPTS)):
        alone = answers(engine, [number])[0]
        as_bare("alone", number, alone)
        if answers(engine, [number], PARKED_EVERY)[0] != alone:
            wrong.append(f"prompt {number} parked")
        spoil(engine)
        if answers(engine, [number])[0] != alone:
            wrong.append(f"prompt {number} spoilt")
    target = awake(kinds.of(name, runtime=1), 8)
    engine._scheduler.reset_prefix_cache()  # else the pieces of the prompt are others, and round otherwise
    as_bare("moved", number, moved(engine, target, question(number), MOST, len(PROMPTS[number]) + MOST))
    asleep(engine)
    asleep(target)
    captured = "captured" if engine._graphs.captured else "not captured"
    print(f"{name}: graphs {captured}, {ties} ties in {len(PROMPTS)} prompts and a move, wrong: {wrong}")
    kinds.forget(name)
    assert not wrong
    assert [build.pages_used() for build in kinds.builds] == [0, 0]
