"""Folders that look like models: real safetensors files with headers made by a test."""

from __future__ import annotations

import json
from pathlib import Path

from store.files.architectures import Known

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "max_position_embeddings": 2048,
}
KNOWN = Known(
    frozenset({"LlamaForCausalLM", "OPTForCausalLM", "Gemma3ForConditionalGeneration"}),
    frozenset({"llama", "opt", "gemma3"}),
)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """Write a file of tensors. `tensors`: dtype, shape and bytes by name; the data is zeros."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_model(folder: Path, config: dict[str, object] | None = None, seed: str = "") -> Path:
    """Write an acceptable model folder; a different `seed` makes a different digest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or LLAMA))
    (folder / "tokenizer.json").write_text(json.dumps({"seed": seed}))
    (folder / "tokenizer_config.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", {"a": ("F32", [8, 4], 128), "b": ("F32", [2], 8)})
    return folder


def sentence_transformers(folder: Path, **parts: object) -> Path:
    """Add the files of sentence-transformers to a model's folder. `parts`: further parts, name → path."""
    said = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"} | parts
    listed = [{"idx": n, "name": str(n), "path": said[name], "type": f"a.b.{name}"} for n, name in enumerate(said)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 128}))
    return folder
