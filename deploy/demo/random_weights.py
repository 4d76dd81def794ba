"""Random-weight models of a named architecture, for tests and benches: the right shapes, the right speed, no sense."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "phi", "opt", "gemma")
BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Wide enough for a varied greedy output; at transformers' usual 0.02 a random model repeats one token for ever.
SPREAD = 0.12
# Where SPREAD is not enough: weights that pull every position to the same token are made weaker (Gemma's scaled-up
# embeddings, a plain ReLU or GELU block's mean), weights that tell positions apart are made stronger.
SCALED = {
    "gemma": {"embed_tokens.weight": 0.1},
    "opt": {"fc2.weight": 0.3, "embed_positions.weight": 8.0},
    "phi": {"fc2.weight": 0.3},
}


def write_random(
    path: str | Path,
    architecture: str,
    *,
    seed: int = 0,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
    context: int = 1024,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a loadable model folder and return its path. OPT and Phi have a KV head for each head: they ignore
    `kv_heads`.

    vLLM's CPU attention takes head sizes (hidden / heads) of 32, 64, 80, 96, 112, 128, 160, 192, 224 and 256."""
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is unknown: one of {', '.join(ARCHITECTURES)}")
    if hidden % heads or heads % kv_heads:
        raise ValueError(f"heads={heads} must divide hidden={hidden} and be a multiple of kv_heads={kv_heads}")
    config = _config(architecture, hidden, layers, heads, kv_heads, vocab, context)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        for ending, factor in SCALED.get(architecture, {}).items():
            if name.endswith(ending):
                weight.data.mul_(factor)
    folder = Path(path)
    model.to(dtype).save_pretrained(folder)
    _tokenizer(vocab, context).save_pretrained(folder)
    parameters = sum(weight.numel() for weight in model.parameters())
    (folder / "README.md").write_text(
        f"# {folder.name}: random weights\n\nA {architecture} model of {parameters:,} random parameters (seed {seed}), "
        "made for tests and benches. It was never trained: its output means nothing.\n"
    )
    return folder


def _config(
    architecture: str, hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int
) -> PreTrainedConfig:
    shape = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "tie_word_embeddings": False,  # tied, a random model prefers to repeat the input
    }
    if architecture == "opt":
        own = {"ffn_dim": 3 * hidden, "word_embed_proj_dim": hidden, "init_std": SPREAD, "dropout": 0.0}
    else:
        own = {"intermediate_size": 3 * hidden, "num_key_value_heads": kv_heads, "initializer_range": SPREAD}
    if architecture == "phi":
        own["num_key_value_heads"] = heads
    if architecture in ("gemma", "qwen3"):
        own["head_dim"] = hidden // heads  # the defaults are 256 and 128, at any width
    return AutoConfig.for_model(architecture, **shape, **own)


def _tokenizer(vocab: int, context: int) -> PreTrainedTokenizerFast:
    """Byte-level, without merges: a byte of input is a token, and an output id is a byte or a made-up word."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [BOS, EOS, *alphabet]
    if vocab < len(tokens):
        raise ValueError(f"vocab={vocab} is too small: the bytes and the two marks need {len(tokens)}")
    tokens += islice(_words(), vocab - len(tokens))
    bpe = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, model_max_length=context, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _words() -> Iterator[str]:
    """Ġbaba, Ġbabe, ...: Ġ is the byte-level alphabet's space, so the output reads as words."""
    syllables = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
    return ("Ġ" + "".join(parts) for length in (2, 3) for parts in product(syllables, repeat=length))
