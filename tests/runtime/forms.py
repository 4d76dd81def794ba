"""Tiny models with random weights, in forms in which models are published: mixtures, int8 and 4-bit weights.

A form is an architecture with a way to store the weights, as declared by a model's folder. `write_form` writes the
folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from deploy.demo.random_weights import SPREAD, _tokenizer, write_random
from tests import forks

VOCABULARY, CONTEXT = 512, 1024
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
    "initializer_range": SPREAD,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64, "intermediate_size": 128},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
}
INT8: dict[str, dict[str, Any]] = {  # compressed-tensors' ways to make activations int8
    "w8a8_symmetric": {"symmetric": True, "dynamic": True},
    "w8a8_asymmetric": {"symmetric": False, "dynamic": True},
    "w8a8_static": {"symmetric": True, "dynamic": False, "strategy": "tensor"},
}
INT8_INPUTS = 8.0  # largest activation
INT4: dict[str, dict[str, Any]] = {  # ways to store 4-bit weights, as config.json declares each
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
    "w4a16": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            }
        },
        "ignore": ["lm_head"],
    },
}
INT4_GROUP, INT4_SPREAD = 32, 4.6  # weights that share a scale; spread of random numbers from 0 to 15
FP4_EXPONENT = 123  # exponent of a block's scale, biased by 127: random 4-bit values then spread by about SPREAD
FP4_BLOCK = 32  # weights that share a scale


def write_form(folder: Path, form: str, seed: int = 0) -> Path:
    """Write a model folder of a form.

    Args:
        folder: where to write; made if missing.
        form: a name of `FORMS`.
        seed: seed of the random weights.

    Returns: the folder.
    """
    FORMS[form](folder, form, seed)
    return folder


def _write_mixture(folder: Path, form: str, seed: int) -> None:
    _write_config(folder, AutoConfig.for_model(form, **SHAPE | MIXTURES[form]), seed)


def _write_config(folder: Path, config: Any, seed: int) -> None:
    """The model that transformers makes of a config, with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "norm" not in name:  # experts that transformers makes without a spread, or empty
                torch.nn.init.normal_(weight.data, std=SPREAD)
            elif name.endswith(("bias", "sinks")):
                torch.nn.init.normal_(weight.data, std=SPREAD)
    model.to(torch.float32).save_pretrained(folder)
    _tokenizer(VOCABULARY, CONTEXT).save_pretrained(folder)


def _write_mxfp4(folder: Path, form: str, seed: int) -> None:
    """gpt-oss as published: the experts' weights are 4-bit floats, and 32 weights share an 8-bit exponent."""
    _write_mixture(folder, "gpt_oss", seed)
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(seed)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        blocks = (experts, outputs, inputs // FP4_BLOCK)
        weights[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, FP4_BLOCK // 2), generator=noise, dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.full(blocks, FP4_EXPONENT, dtype=torch.uint8)
    save_file({name: _half(weight) for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _configure(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": left}, dtype="bfloat16")


def dtype(form: str) -> str:
    """vLLM's dtype for a form: some kernels take activations of 16 bits alone."""
    return "bfloat16" if form.endswith("mxfp4") or rounds(form) else "float32"


def rounds(form: str) -> bool:
    """Say whether rounding makes a form's answers depend on the batch.

    Kernels of 4-bit weights take 16 bits alone, and so does the kernel of AMX for int8 weights whose activations have
    symmetric scales."""
    return form in INT4 or (form in INT8 and INT8[form]["symmetric"] and torch.cpu._is_amx_tile_supported())


def _half(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.bfloat16) if weight.is_floating_point() else weight


def _write_int8(folder: Path, form: str, seed: int) -> None:
    """A Llama whose linear layers have int8 weights and a scale for each channel, as compressed-tensors stores both."""
    write_random(folder, "llama", seed=seed, hidden=256)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scales = weights[name].abs().amax(dim=1, keepdim=True) / 127
        weights[name] = (weights[name] / scales).round().to(torch.int8)
        weights[f"{name}_scale"] = scales
        if not INT8[form]["dynamic"]:  # the scale of activations, which the maker of the model has measured
            weights[f"{name.removesuffix('weight')}input_scale"] = torch.tensor([INT8_INPUTS / 127])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    kept = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    given = {"num_bits": 8, "type": "int", "strategy": "token", **INT8[form]}
    group = {"targets": ["Linear"], "weights": kept, "input_activations": given}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    _configure(folder, quantization_config=quantization)


def _write_int4(folder: Path, form: str, seed: int) -> None:
    """A Llama whose linear layers have random 4-bit weights, eight in an integer, and a scale for each group."""
    write_random(folder, "llama", seed=seed, hidden=256)
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(seed)

    def packed(rows: int, columns: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, (rows, columns), generator=noise).to(torch.int32)

    for name in [name for name in weights if name.endswith("_proj.weight")]:
        outputs, inputs = weights.pop(name).shape
        groups, layer = inputs // INT4_GROUP, name.removesuffix(".weight")
        spread = 0.5 + torch.rand(groups, outputs, generator=noise)
        scales = (spread * SPREAD / INT4_SPREAD).to(torch.bfloat16)
        if form == "w4a16":
            weights[f"{layer}.weight_packed"] = packed(outputs, inputs // 8)
            weights[f"{layer}.weight_scale"] = scales.t().contiguous()
            weights[f"{layer}.weight_shape"] = torch.tensor([outputs, inputs])
            continue
        weights[f"{layer}.scales"] = scales
        if form == "awq":
            weights[f"{layer}.qweight"] = packed(inputs, outputs // 8)
            weights[f"{layer}.qzeros"] = packed(groups, outputs // 8)
        else:
            weights[f"{layer}.qweight"] = packed(inputs // 8, outputs)
            weights[f"{layer}.qzeros"] = torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32)
            weights[f"{layer}.g_idx"] = torch.arange(inputs, dtype=torch.int32) // INT4_GROUP
    save_file({name: _half(weight) for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    _configure(folder, quantization_config=INT4[form], dtype="bfloat16")


def _write_neox_elsewhere(folder: Path, form: str, seed: int) -> None:
    """Write a GPT-NeoX in a process of its own: a vLLM that served a GPT-NeoX has changed the class that writes it."""
    forks.ran("tests.runtime.forms", [str(folder), str(seed)])


def _write_neox(folder: Path, form: str, seed: int) -> None:
    """A model that vLLM serves through transformers' code, with as many heads for keys as for queries."""
    shape = {name: value for name, value in SHAPE.items() if name not in ("num_key_value_heads", "head_dim")}
    _write_config(folder, AutoConfig.for_model(form, **shape, rotary_pct=0.25), seed)


def _configure(folder: Path, **more: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


FORMS: dict[str, Callable[[Path, str, int], None]] = {
    **dict.fromkeys(MIXTURES, _write_mixture),
    "gpt_oss_mxfp4": _write_mxfp4,
    **dict.fromkeys(INT8, _write_int8),
    **dict.fromkeys(INT4, _write_int4),
    "gpt_neox": _write_neox_elsewhere,
}

if __name__ == "__main__":
    _write_neox(Path(sys.argv[1]), "gpt_neox", int(sys.argv[2]))
