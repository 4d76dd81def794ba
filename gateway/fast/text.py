"""Tokens to text, as the tokens come: the tokeniser library's own incremental decoder, and stop strings.

The text equals the text of vLLM's detokeniser to the letter; a differential test compares both.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

INVALID_PREFIX = "Invalid prefix encountered"  # the decoder's error for text that is no continuation
PRIMED_MOST = 2048  # tokens of a prompt that a decoder decodes first; longer prompts are cut to a tail
TAILS = (64, 512)  # lengths of tails, in tokens


@dataclass(frozen=True)
class TextStyle:
    """The client's wishes for the text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0  # stop strings within these first tokens do not count
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


def primer(tokenizer: Tokenizer, prompt: list[int], skip_special_tokens: bool) -> list[int]:
    """Return the tokens with which a decoder begins: the whole prompt, or the tail of a long prompt.

    A decoder decodes these tokens at the first step, on the event loop. A tail is as good as the prompt if
    the tail's text is the end of the prompt's text. The function itself takes long for long prompts.
    """
    if len(prompt) <= PRIMED_MOST:
        return prompt
    (text,) = tokenizer.decode_batch([prompt], skip_special_tokens=skip_special_tokens)
    for length in TAILS:
        tail = prompt[-length:]
        said = tokenizer.decode(tail, skip_special_tokens=skip_special_tokens)
        if said and not said.endswith("�") and text.endswith(said):
            return tail
    return prompt


class TextDecoder:
    """The text of an answer."""

    __slots__ = (
        "_tokenizer",
        "_stream",
        "_style",
        "_added",
        "_last_added",
        "_text",
        "_given",
        "_held",
        "_stops",
        "tokens",
    )

    def __init__(self, tokenizer: Tokenizer, added: dict[int, str], primer: list[int], style: TextStyle) -> None:
        """`added`: text of the tokenizer's added tokens, by token. `primer`: tokens before the answer."""
        self._tokenizer, self._style = tokenizer, style
        self._stream = DecodeStream(ids=primer, skip_special_tokens=style.skip_special_tokens)
        apart = style.skip_special_tokens or style.spaces_between_special_tokens
        self._added = {} if apart else added
        self._last_added = False
        self._stops = style.stop
        # Characters held back while the answer goes on: the characters may begin a stop string.
        self._held = max(map(len, style.stop)) - 1 if style.stop and not style.include_stop else 0
        self._text = ""  # without stop strings: text not given out yet; with stop strings: the whole text
        self._given = 0  # characters of `_text` given out
        self.tokens = 0  # tokens of the answer

    def update(self, tokens: list[int], stopped: bool) -> tuple[str | None, int]:
        """Take tokens. Returns the stop string that ended the answer or None, and how many of the tokens count.

        `stopped`: the engine ended the answer at its last token, an end-of-text or a stop token.
        """
        if not tokens:
            return None, 0
        shown = tokens[:-1] if stopped and not self._style.include_stop else tokens
        if not self._stops:
            self.tokens += len(tokens)
            if len(shown) == 1 and not self._added:
                self._text += self._step(shown[0]) or ""
                return None, len(tokens)
            for token in shown:
                self._text += self._decoded(token)
            return None, len(tokens)
        return self._searched(tokens, shown)

    def _searched(self, tokens: list[int], shown: list[int]) -> tuple[str | None, int]:
        before, ends = self.tokens, [len(self._text)]  # offsets in the text at which tokens end
        for token in shown:
            self._text += self._decoded(token)
            ends.append(len(self._text))
        if len(shown) < len(tokens):
            ends.append(len(self._text))
        self.tokens += len(tokens)
        if self.tokens <= self._style.min_tokens:
            return None, len(tokens)
        new = len(self._text) - ends[max(self._style.min_tokens - before, 0)]
        found = _first_stop(self._text, new, self._stops)
        if found is None:
            return None, len(tokens)
        stop, end = found
        kept = bisect_left(ends, end, lo=1)
        if kept < len(tokens):
            self.tokens = before + kept
        self._text = self._text[: end if self._style.include_stop else end - len(stop)]
        return stop, min(kept, len(tokens))

    def take(self, ended: bool) -> str:
        """Return the text that was not given out yet, as far as the text is certain. `ended`: nothing more comes."""
        if not self._stops:
            text, self._text = self._text, ""
            return text
        until = len(self._text) - (0 if ended else self._held)
        if self._given >= until:
            return ""
        text, self._given = self._text[self._given : until], until
        return text

    def _decoded(self, token: int) -> str:
        text = self._step(token)
        if self._added:
            added = self._added.get(token)
            if added is not None and self._last_added:
                text = added  # without the space that the decoder puts between added tokens
            self._last_added = added is not None
        return text or ""

    def _step(self, token: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token)
        except (OverflowError, TypeError):  # no token of the tokenizer
            return None
        except Exception as error:
            if not str(error).startswith(INVALID_PREFIX):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._style.skip_special_tokens)
            return self._stream.step(self._tokenizer, token)


def _first_stop(text: str, new: int, stops: tuple[str, ...]) -> tuple[str, int] | None:
    """Return the stop string with the first end in the last `new` characters of the text, and the offset of the end."""
    if not new:
        return None
    best, best_end = None, sys.maxsize
    for stop in stops:
        at = text.find(stop, 1 - new - len(stop))
        if at >= 0 and at + len(stop) < best_end:
            best, best_end = stop, at + len(stop)
    return None if best is None else (best, best_end)
