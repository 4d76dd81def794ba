"""Inputs for measuring an engine: models and requests made up for the measurement, vLLM's limits, the device's name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import cast

from runtime.engine.settings import engine_args  # isort: skip  (sets vLLM's environment, so: first)

import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from store.contract.wire import EngineSpec

HEAD, WIDER, VOCABULARY = 64, 3, 512


def write_llama(folder: Path, hidden: int, layers: int, context: int) -> EngineSpec:
    """Write a Llama with random weights of 16 bits, as most models have, into the new folder `folder`.

    The Llama has half as many heads for keys and values as for queries. Returns the model's spec."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": WIDER * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": hidden // HEAD // 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    }
    noise = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=noise).div_(hidden**0.5).bfloat16()
        for name, shape in _shapes(hidden, layers).items()
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return EngineSpec(
        key=folder.name,
        path=str(folder),
        digest="",
        architecture="LlamaForCausalLM",
        dtype="auto",
        max_model_len=context,
        weight_bytes=llama_bytes(hidden, layers),
        kv_bytes_per_token=2 * 2 * layers * hidden // 2,  # two bytes an element of K and V
    )


def llama_bytes(hidden: int, layers: int) -> int:
    """Bytes of the weights that `write_llama` writes."""
    return 2 * sum(map(prod, _shapes(hidden, layers).values()))


def _shapes(hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
    square, kv = (hidden, hidden), (hidden // 2, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": square,
        "self_attn.k_proj": kv,
        "self_attn.v_proj": kv,
        "self_attn.o_proj": square,
        "mlp.gate_proj": (WIDER * hidden, hidden),
        "mlp.up_proj": (WIDER * hidden, hidden),
        "mlp.down_proj": (hidden, WIDER * hidden),
    }
    return {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        "lm_head.weight": (VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
        **{f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in layer.items()},
    }


def request(prompt: Sequence[int], max_tokens: int, salt: str) -> bytes:
    """A request as the engine's front half writes requests; shares prefixes only with requests of equal `salt`."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    message = EngineCoreRequest(
        request_id="",
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
    )
    return bytes(cast(bytes, MsgpackEncoder(size_threshold=1 << 62).encode(message)[0]))


def batched_tokens(spec: EngineSpec) -> int:
    """The most prompt tokens that a step computes."""
    config = engine_args(spec, skip_tokenizer_init=True).create_engine_config(UsageContext.ENGINE_CONTEXT)
    return int(config.scheduler_config.max_num_batched_tokens)


def accelerator() -> str | None:
    """The GPU's name; None if vLLM computes on the processor."""
    return None if current_platform.is_cpu() else str(torch.cuda.get_device_name())
