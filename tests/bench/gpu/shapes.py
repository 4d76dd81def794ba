"""Shapes of real models, written to a folder with random weights of 16 bits, and the specs for the builder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from store.contract.wire import EngineSpec

CONTEXT = 4096
SHARD_BYTES = 2 << 30


class Shape(NamedTuple):
    """Shape of a dense Qwen3."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool  # the output reads the embeddings
    head: int = 128

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.layers * self.kv_heads * self.head

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors by name."""
        hidden, q, kv = self.hidden, self.heads * self.head, self.kv_heads * self.head
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "self_attn.q_norm": (self.head,),
            "self_attn.k_norm": (self.head,),
            "mlp.gate_proj": (self.intermediate, hidden),
            "mlp.up_proj": (self.intermediate, hidden),
            "mlp.down_proj": (hidden, self.intermediate),
        }
        return {
            "model.embed_tokens.weight": (self.vocabulary, hidden),
            **({} if self.tied else {"lm_head.weight": (self.vocabulary, hidden)}),
            "model.norm.weight": (hidden,),
            **{f"model.layers.{n}.{name}.weight": shape for n in range(self.layers) for name, shape in layer.items()},
        }


SHAPES = {
    "tiny": Shape(128, 2, 4, 2, 384, 512, False, head=32),  # for a rehearsal on a CPU
    "0.6B": Shape(1024, 28, 16, 8, 3072, 151936, True),
    "8B": Shape(4096, 36, 32, 8, 12288, 151936, False),
}


def write(folder: Path, shape: Shape, seed: int = 0) -> EngineSpec:
    """Write a model of the shape into the new folder `folder`; a folder that exists is taken as written before.

    Returns the model's spec, whose key is the folder's name."""
    import torch
    from safetensors.torch import save_file

    size = 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    noise = torch.Generator(device).manual_seed(seed)
    shards: list[dict[str, torch.Tensor]] = [{}]
    new = not folder.exists()
    for name, of in shape.tensors().items():
        count = 1
        for length in of:
            count *= length
        size += 2 * count
        if not new:
            continue
        tensor = torch.ones(of, dtype=torch.bfloat16)
        if len(of) > 1:
            tensor = torch.randn(of, generator=noise, device=device, dtype=torch.bfloat16).div_(of[1] ** 0.5).cpu()
        if sum(other.nbytes for other in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    if new:
        part = folder.with_name(f"{folder.name}.part")  # a run that is cut off leaves no folder that looks whole
        part.mkdir(parents=True, exist_ok=True)
        (part / "config.json").write_text(json.dumps(_config(shape)))
        for n, shard in enumerate(shards, 1):
            name = "model" if len(shards) == 1 else f"model-{n:05}-of-{len(shards):05}"
            save_file(shard, part / f"{name}.safetensors", metadata={"format": "pt"})
        part.rename(folder)
    return EngineSpec(
        key=folder.name,
        path=str(folder),
        digest="",
        architecture="Qwen3ForCausalLM",
        dtype="bfloat16",
        max_model_len=CONTEXT,
        weight_bytes=size,
        kv_bytes_per_token=shape.kv_bytes_per_token,
    )


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
