"""A decoder begun with the tail of a long prompt makes the same text as a decoder begun with the whole prompt."""

from __future__ import annotations

import random

import pytest
from tokenizers.decoders import DecodeStream

from gateway.fast.text import PRIMED_MOST, TAILS, TextDecoder, TextStyle, primer
from tests.gateway.vllm.tokenisers import MAKERS

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of transformers
PROMPTS, TOKENS = 30, 20


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("skips", [True, False])
def test_the_tail_of_a_long_prompt_is_as_good_as_the_prompt(kind: str, skips: bool) -> None:
    tokenizer = MAKERS[kind]()._tokenizer
    noise, known = random.Random(1), tokenizer.get_vocab_size()
    cut = 0
    for _ in range(PROMPTS):
        prompt = [noise.randrange(known) for _ in range(PRIMED_MOST + 1 + noise.randrange(100))]
        answer = [noise.randrange(known) for _ in range(TOKENS)]
        short = primer(tokenizer, prompt, skips)
        cut += len(short) in TAILS
        decoder = TextDecoder(tokenizer, {}, short, TextStyle(skip_special_tokens=skips))
        stream, texts = DecodeStream(ids=prompt, skip_special_tokens=skips), []
        for token in answer:
            decoder.update([token], False)
            try:
                texts.append((decoder.take(False), stream.step(tokenizer, token) or ""))
            except Exception as error:  # the whole prompt's text is no prefix: the decoder began anew
                assert str(error).startswith("Invalid prefix")
                break
        assert all(ours == theirs for ours, theirs in texts)
    assert cut or kind == "wordpiece"
