"""Checks before a runtime serves that the installed vLLM behaves on this machine as the adapter expects.

The check builds a toy model and takes a second. The check tries faults that would otherwise be silent: weights that did
not move, and requests that answer otherwise after parking. Building the toy also proves that vLLM still has the names
used by the adapter.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from runtime.core.device.request import RequestId
from runtime.core.engine import EngineError
from runtime.engine import ranks
from runtime.engine.builder import Builder, freeze_heap
from runtime.engine.vllm import VllmEngine
from store.contract.wire import EngineSpec

HEADS_LEAST, VOCABULARY, CONTEXT, TOKENS = 2, 97, 64, 12
# Attention for CPUs takes heads of width 32 and float32; FlashAttention takes 16 bits and heads from width 64 on.
HEAD_WIDTHS, DTYPES = {"cpu": 32, "cuda": 64}, {"cpu": "float32", "cuda": "bfloat16"}
PARKED_EVERY = 3  # steps
MOVE_S = 10.0


def prepare(build: Builder) -> None:
    """Make a new device process ready for its first model: threads, the self-check, a heap of modules that is frozen.

    Raises EngineError."""
    use_threads()
    freeze_heap()
    self_check(build)
    freeze_heap()  # the toy's build has imported further modules


def use_threads() -> None:
    """Let torch compute with OMP_NUM_THREADS threads: a forked process has found torch loaded with another number."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads.split(",")[0]))


def self_check(build: Builder) -> None:
    """Check vLLM with a toy, and note the length of the toy's blocks: models have blocks of the same length.

    Raises EngineError with the difference between vLLM's behaviour and the expected one."""
    with tempfile.TemporaryDirectory() as folder:
        spec = toy(Path(folder), "cpu" if current_platform.is_cpu() else "cuda")
        engine = build.build(spec, skip_tokenizer_init=True)
    try:
        if (stray := engine.stray_bytes()) or engine.home.used < spec.weight_bytes // ranks.size():
            raise EngineError(
                f"{build.version}: of {spec.weight_bytes} bytes of a toy's weights {engine.home.used} moved into the "
                f"reservation, {stray} bytes are known to lie elsewhere"
            )
        _bring_in(engine)
        alone = _say(engine, "alone", parked_every=0)
        parked = _say(engine, "parked", parked_every=PARKED_EVERY)
        if alone != parked:
            raise EngineError(f"{build.version}: a request that was parked says {parked}, alone it says {alone}")
        if (wrong := engine.check()) is not None:
            raise EngineError(f"{build.version}: a toy that was moved fails its check: {wrong}")
        build.block_tokens = engine.kv_form.tokens
    finally:
        engine.close()
        build.images.discard(engine.key)


def _say(engine: VllmEngine, id: str, parked_every: int) -> list[int]:
    sampling = SamplingParams(temperature=1, seed=1, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    request = EngineCoreRequest(id, list(range(9)), None, sampling, None, 0.0, None, id, None)
    (encoded,) = MsgpackEncoder(size_threshold=1 << 62).encode(request)
    engine.add(RequestId(id), cast(bytes, encoded))
    said: list[int] = []
    steps = 0
    while engine.busy():
        said += [token for output in engine.step() for token in output.tokens]
        steps += 1
        if parked_every and steps % parked_every == 0:
            engine.park()
            _until(engine.parked)
            engine.evict(engine.weights_pages)
            _bring_in(engine)
    return said


def _bring_in(engine: VllmEngine) -> None:
    engine.fetch(engine.kv_pages_least)
    _until(engine.arrived)


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MOVE_S
    while not done():
        if time.monotonic() > deadline:
            raise EngineError(f"a toy could not be moved within {MOVE_S} s")
        time.sleep(1e-4)


def toy(folder: Path, device: str) -> EngineSpec:
    """Write a Llama of one layer with random weights into the folder, in a form that attention on the device takes.

    Args:
        folder: an empty folder.
        device: "cpu" or "cuda".

    Returns: the model's spec, for the builder."""
    heads = max(HEADS_LEAST, ranks.size())
    width, dtype = heads * HEAD_WIDTHS[device], DTYPES[device]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    noise = torch.Generator().manual_seed(0)
    layer, square = "model.layers.0.", (width, width)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, width),
        "lm_head.weight": (VOCABULARY, width),
        "model.norm.weight": (width,),
        layer + "input_layernorm.weight": (width,),
        layer + "post_attention_layernorm.weight": (width,),
        **{f"{layer}self_attn.{name}_proj.weight": square for name in "qkvo"},
        **{f"{layer}mlp.{name}_proj.weight": square for name in ("gate", "up", "down")},
    }
    spread, kind = 2 / width**0.5, getattr(torch, dtype)
    weights = {name: (torch.randn(shape, generator=noise) * spread).to(kind) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return EngineSpec(
        key="toy",
        path=str(folder),
        digest="",
        architecture="LlamaForCausalLM",
        dtype=dtype,
        max_model_len=CONTEXT,
        weight_bytes=sum(weight.nbytes for weight in weights.values()),
        kv_bytes_per_token=0,
    )
