"""Tiny models with random weights of many architectures: transformers' own default config of a family, made small.

`write_family` writes the folder of a name of `FAMILIES`: an architecture, or an architecture in a further form. Nothing
but sizes is set, unless the family needs more, so a config has the fields, and the tensors have the names, with which
transformers publishes the family.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from deploy.demo.random_weights import SPREAD, _tokenizer
from tests.runtime.forms import CONTEXT, SHAPE, VOCABULARY, _configure
from tests.runtime.hybrids import NOISE, QUIET, _let_layers_speak

LANGUAGE: dict[str, Any] = SHAPE | {
    "num_hidden_layers": 4,
    "sliding_window": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_nextn_predict_layers": 0,
    "query_pre_attn_scalar": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "full_attention_interval": 4,
    "attention_chunk_size": 128,
    "intermediate_size_mlp": 256,
    "interleave_moe_layer_step": 1,
}
TOWER: dict[str, Any] = {
    "hidden_size": 64,
    "embed_dim": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "mlp_ratio": 2,
    "image_size": 64,
    "patch_size": 16,
    "num_channels": 3,
    "num_position_embeddings": 64,
    "out_hidden_size": 128,
    "projection_dim": 64,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "output_dim": 128,
}
MROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "num_kv_shared_layers": 0,
    "num_experts": None,
    "enable_moe_block": False,
}
CONVOLUTIONS = ["conv", "conv", "full_attention", "conv"]
LFM2: dict[str, Any] = {"block_dim": 128, "conv_dim": 128, "layer_types": CONVOLUTIONS}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # by architecture: transformers' name, and values of config.json
    # vLLM makes a group of processes for mixtures if the first model of a process is one: mixtures come first.
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", {}),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", {}),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", {"text_config": {"norm_topk_prob": True}}),
    "Glm4vMoeForConditionalGeneration": ("glm4v_moe", {"text_config": {"head_dim": 32, "use_qk_norm": False}}),
    "Llama4ForConditionalGeneration": (
        "llama4",
        {
            "text_config": {"num_experts_per_tok": 1},
            "vision_config": {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
        },
    ),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", LATENT),
    "AfmoeForCausalLM": (
        "afmoe",
        {
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 2,
        },
    ),
    "ExaoneMoeForCausalLM": ("exaone_moe", {}),
    "ExaoneMoEForCausalLM": ("exaone_moe", {}),
    "FlexOlmoForCausalLM": ("flex_olmo", {}),
    "HYV3ForCausalLM": (
        "hy_v3",
        {
            "first_k_dense_replace": 1,
            "expert_hidden_dim": 128,
            "route_norm": True,
            "qk_norm": True,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "GraniteMoeSWAForCausalLM": ("granitemoe_swa", {}),
    "MellumForCausalLM": ("mellum", {}),
    # Published models route by sigmoid with a bias, which kernels for CPUs lack.
    "MiniMaxM2ForCausalLM": (
        "minimax_m2",
        {"rotary_dim": 16, "scoring_func": "softmax", "use_routing_bias": True},
    ),
    "MiMoV2FlashForCausalLM": (
        "mimo_v2_flash",
        {
            "v_head_dim": 32,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "hybrid_layer_pattern": [0, 1, 1, 0],
            "moe_layer_freq": [0, 1, 1, 1],
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "sliding_window_size": 32,
            "swa_rope_theta": 10000,
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "layernorm_epsilon": 1e-5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "rope_theta": 5000000,
            "partial_rotary_factor": 0.5,
        },
    ),
    "AriaForConditionalGeneration": ("aria", {}),
    "Cohere2MoeForCausalLM": ("cohere2_moe", {}),
    "GraniteMoeSharedForCausalLM": ("granitemoeshared", {}),
    "Qwen3OmniMoeForConditionalGeneration": (
        "qwen3_omni_moe",
        {
            "enable_audio_output": False,
            "thinker_config": {
                "text_config": MROPE | {"tie_word_embeddings": False},
                "vision_config": {"image_size": 64, "apply_vit_abs_pos_embed": True},
            },
        },
    ),
    "Lfm2MoeForCausalLM": ("lfm2_moe", {"layer_types": CONVOLUTIONS}),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", {}),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", {}),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl", {}),
    "LlavaForConditionalGeneration": ("llava", {}),
    "LlavaNextForConditionalGeneration": ("llava_next", {}),
    "LlavaOnevisionForConditionalGeneration": ("llava_onevision", {}),
    "Gemma3ForConditionalGeneration": ("gemma3", {}),
    "PaliGemmaForConditionalGeneration": ("paligemma", {}),
    "InternVLForConditionalGeneration": ("internvl", {}),
    "Mistral3ForConditionalGeneration": ("mistral3", {}),
    "Ministral3ForCausalLM": ("ministral3", {}),
    "Idefics3ForConditionalGeneration": ("idefics3", {}),
    "Glm4vForConditionalGeneration": ("glm4v", {}),
    "GlmOcrForConditionalGeneration": ("glm_ocr", {}),
    "Exaone4_5_ForConditionalGeneration": ("exaone4_5", {}),
    "PaddleOCRVLForConditionalGeneration": ("paddleocr_vl", {}),
    "Qwen2_5OmniForConditionalGeneration": (
        "qwen2_5_omni",
        {"enable_audio_output": False, "thinker_config": {"text_config": MROPE}},
    ),
    "Gemma4ForConditionalGeneration": (
        "gemma4",
        {
            "vision_config": {},
            "text_config": GEMMA4
            | {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 64},
        },
    ),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified", {"vision_config": {}, "text_config": GEMMA4}),
    "Lfm2ForCausalLM": ("lfm2", LFM2),
    "Lfm2VlForConditionalGeneration": ("lfm2_vl", {"text_config": LFM2}),
    "Qwen2_5OmniModel": (
        "qwen2_5_omni",
        {"enable_audio_output": False, "thinker_config": {"text_config": MROPE}},
    ),
    "Qwen2AudioForConditionalGeneration": ("qwen2_audio", {}),
    "AudioFlamingo3ForConditionalGeneration": ("audioflamingo3", {}),
    "GraniteSpeechForConditionalGeneration": ("granite_speech", {}),
    "GraniteSpeechPlusForConditionalGeneration": ("granite_speech_plus", {}),
    "LlavaNextVideoForConditionalGeneration": ("llava_next_video", {}),
    "Blip2ForConditionalGeneration": (
        "blip-2",
        {"text_config": {"ffn_dim": 256, "word_embed_proj_dim": 128, "init_std": SPREAD}},
    ),
    "Cohere2VisionForConditionalGeneration": (
        "cohere2_vision",
        {"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": True},
    ),
    "LightOnOCRForConditionalGeneration": (
        "lighton_ocr",
        {
            "vision_feature_layer": -1,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
        },
    ),
    "MuseGlimmerForConditionalGeneration": ("muse_glimmer", {"vision_config": {"output_dim": 256}}),
    "CwmForCausalLM": ("cwm", {}),
    "LLaMAForCausalLM": ("llama", {}),
    "GraniteSWAForCausalLM": ("granite_swa", {}),
    "HyperCLOVAXForCausalLM": ("hyperclovax", {}),
    "Jais2ForCausalLM": ("jais2", {}),
    "VaultGemmaForCausalLM": ("vaultgemma", {}),
    "ApertusForCausalLM": ("apertus", {}),
    "ArceeForCausalLM": ("arcee", {}),
    "BloomForCausalLM": ("bloom", {"tie_word_embeddings": True}),
    "Cohere2ForCausalLM": ("cohere2", {}),
    "CohereForCausalLM": ("cohere", {}),
    "Ernie4_5ForCausalLM": ("ernie4_5", {}),
    "Exaone4ForCausalLM": ("exaone4", {}),
    "FalconForCausalLM": ("falcon", {}),
    "GPT2LMHeadModel": ("gpt2", {}),
    "GPTBigCodeForCausalLM": ("gpt_bigcode", {"num_key_value_heads": 1}),
    "GPTJForCausalLM": ("gptj", {"rotary_dim": 16}),
    "Gemma2ForCausalLM": ("gemma2", {"tie_word_embeddings": True}),
    "Gemma3nForCausalLM": (
        "gemma3n_text",
        {
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "activation_sparsity_pattern": [0.0] * 4,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 64,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 16,
            "tie_word_embeddings": True,
        },
    ),
    "GemmaForCausalLM": ("gemma", {}),
    "Glm4ForCausalLM": ("glm4", {}),
    "GlmForCausalLM": ("glm", {}),
    "GraniteForCausalLM": ("granite", {}),
    "GraniteMoeForCausalLM": ("granitemoe", {}),
    "HunYuanDenseV1ForCausalLM": ("hunyuan_v1_dense", {}),
    "LlamaForCausalLM": ("llama", {}),
    "MiniCPM3ForCausalLM": ("minicpm3", {}),
    "MistralForCausalLM": ("mistral", {}),
    "NemotronForCausalLM": ("nemotron", {}),
    "OPTForCausalLM": ("opt", {"ffn_dim": 256, "word_embed_proj_dim": 128, "init_std": SPREAD}),
    "Olmo2ForCausalLM": ("olmo2", {}),
    "Olmo3ForCausalLM": ("olmo3", {}),
    "OlmoForCausalLM": ("olmo", {}),
    "OlmoeForCausalLM": ("olmoe", {}),
    "Phi3ForCausalLM": ("phi3", {}),
    "PhiForCausalLM": ("phi", {}),
    "PhiMoEForCausalLM": ("phimoe", {"attention_bias": True, "lm_head_bias": True}),
    "Qwen2ForCausalLM": ("qwen2", {}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", {}),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "SeedOssForCausalLM": ("seed_oss", {}),
    "SmolLM3ForCausalLM": ("smollm3", {}),
    "StableLmForCausalLM": ("stablelm", {}),
    "Starcoder2ForCausalLM": ("starcoder2", {}),
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": CONTEXT // 4}
STRETCHED = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Other ways in which an architecture is published: the name begins with the architecture.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM tied": ("llama", {"tie_word_embeddings": True}),
    "LlamaForCausalLM yarn": ("llama", {"rope_parameters": YARN}),
    "LlamaForCausalLM llama3": ("llama", {"rope_parameters": YARN | STRETCHED}),
    "LlamaForCausalLM in parts": ("llama", {}),
    "LlamaForCausalLM float16": ("llama", {}),
    "LlamaForCausalLM bfloat16": ("llama", {}),
    "FalconForCausalLM 40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "GraniteMoeHybridForCausalLM attention": (
        "granitemoehybrid",
        {"layer_types": ["attention"] * 4, "num_local_experts": 4, "position_embedding_type": "rope"},
    ),
}
FAMILIES |= VARIANTS
PARTS = {"LlamaForCausalLM in parts": "500KB"}  # largest file of weights
# By architecture: the name and weight of a published model's tensor, from the tensor as transformers writes it.
PUBLISHED: dict[str, Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]] = {
    "Qwen3VLMoeForConditionalGeneration": lambda name, weight: (
        name,
        weight.transpose(1, 2).contiguous() if ".experts." in name else weight,
    ),
    **dict.fromkeys(
        (
            "AudioFlamingo3ForConditionalGeneration",
            "GraniteSpeechForConditionalGeneration",
            "GraniteSpeechPlusForConditionalGeneration",
            "Qwen2AudioForConditionalGeneration",
        ),
        lambda name, weight: (name.replace(".model.model.", ".model."), weight),
    ),
}
CLASSES = {  # transformers' classes of other names than the architecture
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "LightOnOCRForConditionalGeneration": "LightOnOcrForConditionalGeneration",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "Qwen2_5OmniModel": "Qwen2_5OmniForConditionalGeneration",
}
# Beginnings of architectures whose kernels for CPUs take 16 bits alone, or answer otherwise in a batch than alone.
ROUNDED = ("Qwen3_5", "Glm4MoeLite", "Lfm2", "LlamaForCausalLM bfloat16")


# With the common seed, two tokens are equally likely in 16 bits, or an answer repeats itself.
SEEDS = {"Glm4MoeLiteForCausalLM": 4, "PhiForCausalLM": 6, "BloomForCausalLM": 5}


def architecture_of(name: str) -> str:
    """The architecture of a name of `FAMILIES`."""
    return name.split()[0]


def write_family(folder: Path, name: str, seed: int = 3) -> Path:
    """Write the model folder of a name of `FAMILIES`, with random weights. Returns the folder."""
    (kind, more), architecture = FAMILIES[name], architecture_of(name)
    config = CONFIG_MAPPING[kind](**_small(CONFIG_MAPPING[kind], LANGUAGE, more))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEEDS.get(architecture, seed))
        model = getattr(transformers, CLASSES.get(architecture, architecture))(config)
        for key, weight in model.named_parameters():  # weights of zeros or ones alone would hide faults
            if weight.ndim > 1 and (weight.std() == 0 or not weight.isfinite().all() or "experts" in key):
                torch.nn.init.normal_(weight.data, std=SPREAD)
            elif weight.ndim <= 1 and weight.numel() > 1 and "A_log" not in key and "dt_bias" not in key:
                weight.data += torch.randn(weight.shape) * NOISE
            if "gemma" in kind:
                _let_layers_speak(key, weight)
                if "gemma3n" in kind and key.endswith("embed_tokens.weight"):  # vLLM divides by the spread of a row
                    weight.data[config.pad_token_id] = weight.data[config.pad_token_id - 1]
            elif "word_embeddings_layernorm" in key:  # else Bloom's answer depends on the last token alone
                weight.data *= QUIET
    model.to(torch.float32).save_pretrained(folder, max_shard_size=PARTS.get(name, "1GB"))
    _configure(folder, architectures=[architecture])
    if architecture in PUBLISHED:
        weights = load_file(folder / "model.safetensors")
        renamed = dict(PUBLISHED[architecture](key, weight) for key, weight in weights.items())
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    _tokenizer(VOCABULARY, CONTEXT).save_pretrained(folder)
    return folder


def dtype(name: str) -> str:
    """vLLM's dtype for a name of `FAMILIES`."""
    if name.endswith(" float16"):
        return "float16"
    return "bfloat16" if name.startswith(ROUNDED) else "float32"


def _small(config: type[Any], sizes: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a class of configs: the sizes that the config has, for parts of the config too, and `more`."""
    default = config()
    default.allow_global_per_layer_attribute_access = True  # sizes of the layers of a Gemma 4 may differ
    given = {name: size for name, size in sizes.items() if hasattr(default, name) and not _computed(config, name)}
    for name, part in config.sub_configs.items():
        if getattr(default, name, None) is not None or name in more:
            part = type(getattr(default, name, None) or part())
            tower = "vision" in name or "audio" in name
            small = _small(part, TOWER if tower else LANGUAGE, more.get(name, {}))
            given[name] = small | {"model_type": part.model_type}
    return given | {name: value for name, value in more.items() if name not in config.sub_configs}


def _computed(config: type[Any], name: str) -> bool:
    """Whether a class of configs computes a size from other sizes."""
    return isinstance(found := getattr(config, name, None), property) and found.fset is None
