"""Small models with random weights that make vectors: encoders, cross-encoders and decoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from deploy.demo.random_weights import _tokenizer
from store.contract.tasks import Task
from store.files.architectures import ENCODERS

VOCABULARY, CONTEXT, WIDTH = 512, 256, 128
SPREAD = 0.2  # of random weights: a smaller spread makes vectors of all texts alike
LABELS = 3


class VectorModel(NamedTuple):
    """A kind of model.

    `pooling`: the pooling named by files of sentence-transformers; empty for a model without these files."""

    config: str
    task: Task
    pooling: str = ""


# By architecture, and a word that tells models of an architecture apart.
VECTOR_MODELS = {
    "BertModel": VectorModel("Bert", Task.EMBED),
    "BertModel mean": VectorModel("Bert", Task.EMBED, "mean_tokens"),
    "ModernBertModel": VectorModel("ModernBert", Task.EMBED),
    "RobertaModel": VectorModel("Roberta", Task.EMBED),
    "XLMRobertaModel": VectorModel("XLMRoberta", Task.EMBED),
    "BertForSequenceClassification": VectorModel("Bert", Task.CLASSIFY),
    "ModernBertForSequenceClassification": VectorModel("ModernBert", Task.CLASSIFY),
    "RobertaForSequenceClassification": VectorModel("Roberta", Task.CLASSIFY),
    "XLMRobertaForSequenceClassification": VectorModel("XLMRoberta", Task.CLASSIFY),
    "LlamaModel": VectorModel("Llama", Task.EMBED),
    "MistralModel": VectorModel("Mistral", Task.EMBED),
    "Qwen2Model": VectorModel("Qwen2", Task.EMBED),
    "LlamaForCausalLM": VectorModel("Llama", Task.EMBED, "lasttoken"),
    "MistralForCausalLM": VectorModel("Mistral", Task.EMBED, "lasttoken"),
    "Qwen2ForCausalLM": VectorModel("Qwen2", Task.EMBED, "lasttoken"),
    "Qwen3ForCausalLM": VectorModel("Qwen3", Task.EMBED, "lasttoken"),
}


def write_vector_model(folder: Path, name: str, seed: int = 5, labels: int = LABELS) -> Path:
    """Write the model folder of a name of `VECTOR_MODELS`, with random weights. Returns the folder.

    `labels`: scores of a cross-encoder for each pair."""
    kind, architecture = VECTOR_MODELS[name], name.split()[0]
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH}
    room = 2 if "Roberta" in kind.config else 0  # positions before the first token's
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT + room, "initializer_range": SPREAD}
    more: dict[str, object] = {"pad_token_id": 1} if room else {"pad_token_id": 0}
    more |= {"position_embedding_type": "absolute"} if kind.config == "XLMRoberta" else {}  # as published
    more |= {"num_labels": labels} if kind.task is Task.CLASSIFY else {}
    if name.split()[0] not in ENCODERS:
        more |= {"num_key_value_heads": 2} | ({} if kind.config == "Qwen2" else {"head_dim": WIDTH // 4})
    if kind.config == "ModernBert":
        marks = {f"{mark}_token_id": 1 for mark in ("bos", "eos", "cls", "sep")}
        more |= {"global_attn_every_n_layers": 2, "local_attention": 32} | marks
    config = getattr(transformers, f"{kind.config}Config")(**sizes, **shape, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, architecture)(config).float()
    model.save_pretrained(folder)
    _tokenizer(VOCABULARY, CONTEXT).save_pretrained(folder)
    if kind.pooling:
        _write_sentence_transformers(folder, kind.pooling)
    return folder


def _write_sentence_transformers(folder: Path, pooling: str) -> None:
    parts = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{part}"}
        for number, (part, path) in enumerate(parts.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    said = {"word_embedding_dimension": WIDTH, f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
