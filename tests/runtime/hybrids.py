"""Tiny models with random weights whose layers keep several kinds of KV cache: windows, chunks, states, latent vectors.

`write_hybrid` writes a model's folder, and `settings` gives the engine's settings for which the model's contexts cross
several blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from deploy.demo.random_weights import SPREAD, _tokenizer
from tests.runtime.forms import CONTEXT, SHAPE, VOCABULARY

NOISE, QUIET = 0.05, 0.15  # spread of norms and biases; factor of embeddings that would drown the layers
ATTENTION: dict[str, Any] = SHAPE | {"hidden_size": 256, "num_hidden_layers": 4, "head_dim": 64}
WINDOW = 32
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": CONTEXT // 4,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "rope_theta": 150000.0,
}
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "full_attention_interval": 4,
}
LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
}
WINDOWS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "intermediate_size": 256,
        "rope_parameters": YARN,
    },
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 64, "num_hidden_layers": 6},
    "cohere2": {"sliding_window": WINDOW},
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 256,
        "attention_chunk_size": 128,
    },
    "gemma4_text": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 64,
        "num_kv_shared_layers": 0,
        "global_head_dim": 128,
    },
}
STATES: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        **DELTA,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 128,
        "shared_intermediate_size": 128,
        "attention_multiplier": 0.125,
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_d_head": 64,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*",
        "layers_block_type": ["mamba", "mlp", "mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 32,
    },
    "falcon_h1": {
        "num_hidden_layers": 3,
        "mamba_d_ssm": 256,
        "mamba_d_head": 32,
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_chunk_size": 64,
    },
    "zamba2": {
        "hybrid_layer_ids": [1, 3],
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 1,
        "n_mamba_heads": 8,
        "mamba_d_state": 32,
        "mamba_ngroups": 1,
        "mamba_expand": 2,
        "num_key_value_heads": 4,
        "attention_hidden_size": 512,
        "attention_head_dim": 128,
        "use_mem_rope": True,
        "adapter_rank": 16,
    },
    "mamba2": {
        "num_hidden_layers": 3,
        "state_size": 32,
        "num_heads": 8,
        "head_dim": 64,
        "n_groups": 1,
        "expand": 2,
        "chunk_size": 64,
    },
}
LATENTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"q_lora_rank": None, "n_group": 1, "topk_group": 1, **LATENT},
    "deepseek_v3": {
        "q_lora_rank": 64,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        **LATENT,
    },
}
HYBRIDS = WINDOWS | STATES | LATENTS
WITHOUT = {  # values of ATTENTION that a config.json does not have
    "zamba2": ("head_dim",),
    "mamba2": ("num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"),
}
CLASSES = {"llama4_text": "Llama4ForCausalLM", "gemma4_text": "Gemma4ForCausalLM"}  # architectures known to vLLM
ROUNDED = ("qwen3_next", "deepseek_v2", "deepseek_v3")  # kernels for CPUs take 16 bits alone


def dtype(name: str) -> str:
    return "bfloat16" if name in ROUNDED else "float32"


def settings(name: str) -> dict[str, Any]:
    """Settings of vLLM's for the model: a step computes part of a long prompt, and windows cover few blocks."""
    blocks = {} if name in STATES or name in LATENTS else {"block_size": WINDOW}
    return {"max_num_batched_tokens": 128, "max_num_seqs": 8, **blocks}


def write_hybrid(folder: Path, name: str, seed: int = 3, context: int = CONTEXT, **more: Any) -> Path:
    """Write the folder of the model `name` of HYBRIDS, with random weights. Returns the folder.

    `more`: values of config.json, in place of the values of HYBRIDS."""
    shape = ATTENTION | {"max_position_embeddings": context} | HYBRIDS[name] | more
    if "rope_parameters" in shape:
        shape["rope_parameters"] = YARN | {"original_max_position_embeddings": context // 4}
    config = AutoConfig.for_model(
        name, **{key: value for key, value in shape.items() if key not in WITHOUT.get(name, ())}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(config, name)
        for key, weight in model.named_parameters():  # weights of zeros or ones alone would hide faults
            if weight.ndim > 1 and weight.std() == 0 or "experts" in key or key.endswith("sinks"):
                torch.nn.init.normal_(weight.data, std=SPREAD)
            elif weight.ndim <= 1 and weight.numel() > 1 and "A_log" not in key and "dt_bias" not in key:
                weight.data += torch.randn(weight.shape) * NOISE
            if name.startswith("gemma"):
                _let_layers_speak(key, weight)
    if name in CLASSES:
        model.config.architectures = [CLASSES[name]]
    model.to(torch.float32).save_pretrained(folder)
    _tokenizer(VOCABULARY, context).save_pretrained(folder)
    return folder


def _model(config: Any, name: str) -> torch.nn.Module:
    import transformers

    return getattr(transformers, CLASSES[name])(config) if name in CLASSES else AutoModelForCausalLM.from_config(config)


def _let_layers_speak(key: str, weight: torch.nn.Parameter) -> None:
    """A random Gemma's answer depends on the last token alone, unless embeddings are weak and layers strong."""
    if key.endswith("embed_tokens.weight"):
        weight.data *= QUIET
    if "post_attention" in key or "post_feedforward" in key:
        weight.data += 2
