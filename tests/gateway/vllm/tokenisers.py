"""Tiny models, without weights, with a tokeniser of each kind in which models are published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from deploy.demo.random_weights import CHAT_TEMPLATE, _tokenizer, _words
from tests.conftest import ROOT

FAQ = ROOT / "deploy" / "demo" / "models" / "faq"
VOCABULARY, CONTEXT = 700, 256
BOS, EOS, UNKNOWN, MARK = "<s>", "</s>", "<unk>", "<|mark|>"
REFUSING = "{% if 'hello' in messages[0]['content'] %}{{ raise_exception('no greetings here') }}{% endif %}"
_LETTERS = [chr(code) for code in range(32, 127)]


def _wrapped(tokenizer: Tokenizer, **more: Any) -> PreTrainedTokenizerFast:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("[gap]", special=False, lstrip=True)])
    tokenizer.add_special_tokens([AddedToken(MARK, special=True)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN, model_max_length=CONTEXT, **more
    )
    made.chat_template = REFUSING + CHAT_TEMPLATE
    return made


def _bytes() -> PreTrainedTokenizerFast:
    """The tokeniser of the tests' tiny models: bytes, and words."""
    return _tokenizer(VOCABULARY, CONTEXT)


def _merges() -> PreTrainedTokenizerFast:
    """Bytes with merges, as of GPT-2, Qwen and Llama 3; the tokenizer of a model of the demo."""
    return PreTrainedTokenizerFast.from_pretrained(FAQ)  # type: ignore[no-any-return]


def _fallback() -> PreTrainedTokenizerFast:
    """SentencePiece's BPE with a fallback to bytes, as of Llama 2 and Mistral: the first space of a text is dropped."""
    tokens = [UNKNOWN, BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *_LETTERS[1:]]
    merges = [("▁", letter) for letter in "abcdefghij"] + [("a", "b"), ("▁a", "b"), ("e", "e")]
    tokens += [first + second for first, second in merges]
    made = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token=UNKNOWN,
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(made)


def _unigram() -> PreTrainedTokenizerFast:
    """SentencePiece's unigrams, as of T5 and many multilingual models."""
    words = [word.replace("Ġ", "▁") for word in list(_words())[:200]]
    pieces = [(UNKNOWN, 0.0), (BOS, 0.0), (EOS, 0.0), ("▁", -3.0), *((letter, -4.0) for letter in _LETTERS[1:])]
    pieces += [(word, -2.0 - at / 100) for at, word in enumerate(words)]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return _wrapped(made, clean_up_tokenization_spaces=False)


def _wordpiece() -> PreTrainedTokenizerFast:
    """WordPiece, as of BERT: the decoder puts spaces between words and cleans spaces before marks."""
    tokens = [UNKNOWN, BOS, EOS, *_LETTERS[1:], *(f"##{letter}" for letter in _LETTERS[1:])]
    tokens += ["hello", "##ing", "the", "don", "'", "t", "##s"]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return _wrapped(made)


MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": _bytes,
    "merges": _merges,
    "fallback": _fallback,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
}


def write_tokeniser(folder: Path, name: str) -> Path:
    """Write a model folder with a config and the tokenizer of a kind of MAKERS. Returns the folder."""
    folder.mkdir(parents=True)
    tokenizer = MAKERS[name]()
    tokenizer.save_pretrained(folder)
    config = json.loads((FAQ / "config.json").read_text()) | {"vocab_size": 768, "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(FAQ / "generation_config.json", folder)
    return folder
