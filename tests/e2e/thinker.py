"""A tiny model that thinks and calls tools: the demo's weather model, with marks around thinking in its tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT

WEATHER = ROOT / "deploy" / "demo" / "models" / "weather"
ASSISTANT = "<|im_start|>assistant\n{% endif %}"
ASSISTANT_THINKS = (
    "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{% endif %}"
)
THINK, END_THINK = 576, 577  # the ids after the demo model's last id


def write_thinker(folder: Path) -> Path:
    """Write the model folder and return it. The model never learned to think: a budget or a bias ends the thinking."""
    shutil.copytree(WEATHER, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"] += [
        like | {"id": THINK, "content": "<think>"},
        like | {"id": END_THINK, "content": "</think>"},
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": END_THINK + 1}))
    template = (folder / "chat_template.jinja").read_text()
    assert template.endswith(ASSISTANT)
    (folder / "chat_template.jinja").write_text(template.removesuffix(ASSISTANT) + ASSISTANT_THINKS)
    weights = load_file(folder / "model.safetensors")
    rows = torch.randn(2, config["hidden_size"], generator=torch.Generator().manual_seed(22)) * 0.02
    name = "model.embed_tokens.weight"
    weights[name] = torch.cat([weights[name], rows.to(weights[name].dtype)])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
