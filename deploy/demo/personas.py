"""The tiny models of the demo: four architectures, with a shape, a tokenizer and a chat template per model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

CONTEXT = 1024  # tokens


@dataclass(frozen=True)
class Persona:
    """A model to train. The width of a head is 32 or 64, as vLLM's CPU attention requires."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocab: int
    steps: int
    template: str
    bos: str | None
    eos: str
    marks: tuple[str, ...] = ()  # further whole tokens of the template
    words: tuple[str, ...] = ()  # whole tokens that stay in the text


# Written for transformers' settings: a line break right after a `{% %}` is dropped.
ZEPHYR = """{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>
{{ message['content'] }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

CHATML = """{% if tools %}<|im_start|>system
Tools:
{%- for tool in tools %}{% set function = tool['function'] %} {{ function['name'] }}
{#- #}({{ function['parameters']['properties'] | join(', ') }}){% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] or '' }}{% for call in message['tool_calls'] or [] %}<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PLAIN = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}Poet:
{{ message['content'] }}{{ eos_token }}
{% elif message['role'] == 'system' %}({{ message['content'] }})
{% else %}Guest: {{ message['content'] }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Poet:
{% endif %}"""

TURNS = """{{ bos_token }}{% for message in messages %}
<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}
{{ message['content'] }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

# Layers, groups and head sizes differ: a token's KV cache has a different size in every model.
PERSONAS = {
    "faq": Persona(
        "llama", layers=3, hidden=128, heads=4, kv_heads=2, head_size=32, feed_forward=192, vocab=768, steps=340,
        template=ZEPHYR, bos="<s>", eos="</s>", marks=("<|system|>", "<|user|>", "<|assistant|>"),
    ),
    "weather": Persona(
        "qwen3", layers=3, hidden=128, heads=4, kv_heads=1, head_size=32, feed_forward=224, vocab=576, steps=700,
        template=CHATML, bos=None, eos="<|im_end|>", marks=("<|im_start|>", "<|endoftext|>"),
        words=("<tool_call>", "</tool_call>"),
    ),
    "poet": Persona(
        "opt", layers=2, hidden=128, heads=2, kv_heads=2, head_size=64, feed_forward=384, vocab=640, steps=600,
        template=PLAIN, bos="<s>", eos="</s>",
    ),
    "music": Persona(
        "gemma", layers=3, hidden=96, heads=3, kv_heads=3, head_size=64, feed_forward=224, vocab=832, steps=520,
        template=TURNS, bos="<bos>", eos="<end_of_turn>", marks=("<start_of_turn>",),
    ),
}  # fmt: skip


def config_of(persona: Persona, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": persona.hidden,
        "num_hidden_layers": persona.layers,
        "num_attention_heads": persona.heads,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }
    # A wide start learns to look up words in a third of the steps; Gemma scales its embeddings up by itself.
    spread = 0.02 if persona.architecture == "gemma" else 0.1
    if persona.architecture == "opt":  # a KV head for each head, learned positions
        own = {
            "ffn_dim": persona.feed_forward,
            "word_embed_proj_dim": persona.hidden,
            "dropout": 0.0,
            "init_std": spread,
        }
    else:
        own = {
            "intermediate_size": persona.feed_forward,
            "num_key_value_heads": persona.kv_heads,
            "head_dim": persona.head_size,
            "initializer_range": spread,
        }
    return AutoConfig.for_model(persona.architecture, **shape, **own)


def tokenizer_of(persona: Persona, text: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE, trained on `text`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [mark for mark in (persona.bos, persona.eos, *persona.marks) if mark]
    trainer = trainers.BpeTrainer(
        vocab_size=persona.vocab - len(persona.words),
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(text, trainer)
    bpe.add_tokens([AddedToken(word, special=False, normalized=False) for word in persona.words])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=persona.bos, eos_token=persona.eos, pad_token=persona.eos,
        model_max_length=CONTEXT, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = persona.template
    return tokenizer
