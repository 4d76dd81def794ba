"""How much one request may ask for: answers, messages, logprobs, bytes of text and of a grammar.

vLLM parses, tokenises and fans out on the loop that serves every tenant, so the extent of a request is measured before
vLLM sees the request. Pure: a body in, the first bound that the body exceeds out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from msgspec import Raw


@dataclass(frozen=True)
class ExtentLimits:
    """The most that one request may ask for. Each field is the setting `STACCATO_` + its name in capitals."""

    answers_max: int = 128  # sequences that are generated: `n` times the prompts of the body
    messages_max: int = 2048
    logprobs_max: int = 20  # alternatives for each generated token
    prompt_logprobs_max: int = 1  # alternatives for each token of the prompt
    text_bytes_max: int = 2 << 20  # of the body, as far as the body is text to tokenise
    grammar_bytes_max: int = 32 << 10  # of what generated text must match


@dataclass(frozen=True)
class Excess:
    """A bound that a request exceeds. `field` names the part of the body, `setting` the field of `ExtentLimits`."""

    field: str
    asked: int
    allowed: int
    what: str
    setting: str

    def __str__(self) -> str:
        return f"{self.asked} {self.what}, the most that one request may have here is {self.allowed}"


NOTHING = Raw()  # of a field that a body does not have


class Ask(msgspec.Struct):
    """The parts of a body that say how much is asked for, as they came; vLLM checks what they mean."""

    model: Raw = NOTHING
    n: Raw = NOTHING
    best_of: Raw = NOTHING
    prompt: Raw = NOTHING
    messages: Raw = NOTHING
    input: Raw = NOTHING
    logprobs: Raw = NOTHING
    top_logprobs: Raw = NOTHING
    prompt_logprobs: Raw = NOTHING
    response_format: Raw = NOTHING
    structured_outputs: Raw = NOTHING
    guided_json: Raw = NOTHING
    guided_regex: Raw = NOTHING
    guided_choice: Raw = NOTHING
    guided_grammar: Raw = NOTHING
    text: Raw = NOTHING  # /v1/responses: the format of the text
    tools: Raw = NOTHING
    tool_choice: Raw = NOTHING


GRAMMARS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "text",
)
TEXTS = ("prompt", "messages", "input")
NO_CHOICE = (b'"auto"', b'"none"', b"null")  # tool choices that make no grammar of the tools


def first_excess(ask: Ask, limits: ExtentLimits) -> Excess | None:
    """Return the first bound that the body exceeds, or None.

    A field of a wrong type has no extent here: vLLM refuses such a body with a sentence of its own."""
    return next((excess for excess in _measured(ask, limits) if excess.asked > excess.allowed), None)


def _measured(ask: Ask, limits: ExtentLimits) -> Iterator[Excess]:
    answers = max(_number(ask.n), _number(ask.best_of), 1) * _prompts(ask.prompt)
    yield Excess("n", answers, limits.answers_max, "answers (n times prompts)", "answers_max")
    for field in ("messages", "input"):
        yield Excess(field, _items(getattr(ask, field)), limits.messages_max, "messages", "messages_max")
    for field in ("logprobs", "top_logprobs"):
        yield Excess(field, _number(getattr(ask, field)), limits.logprobs_max, "logprobs a token", "logprobs_max")
    of_prompt = _number(ask.prompt_logprobs)
    what = "logprobs a token of the prompt"
    yield Excess("prompt_logprobs", of_prompt, limits.prompt_logprobs_max, what, "prompt_logprobs_max")
    for field in TEXTS:
        size = len(bytes(getattr(ask, field)))
        yield Excess(field, size, limits.text_bytes_max, "bytes of text", "text_bytes_max")
    for field in GRAMMARS:
        size = len(bytes(getattr(ask, field)))
        yield Excess(field, size, limits.grammar_bytes_max, "bytes of a grammar", "grammar_bytes_max")
    if (bytes(ask.tool_choice) or b"null") not in NO_CHOICE:
        size = len(bytes(ask.tools))
        yield Excess("tools", size, limits.grammar_bytes_max, "bytes of tools to choose from", "grammar_bytes_max")


def _number(raw: Raw) -> int:
    """The number; for true 1, and for anything else 0. vLLM takes numbers in quotes, too."""
    try:
        value = msgspec.json.decode(bytes(raw or b"0"), type=int | float | bool | None, strict=False)
    except (msgspec.DecodeError, RecursionError):
        return 0
    return int(value or 0) if value == value and abs(value or 0) < 1 << 53 else 1 << 53


def _items(raw: Raw) -> int:
    """Items of a list, 1 for a text, 0 for nothing."""
    try:
        return len(msgspec.json.decode(bytes(raw or b"[]"), type=list[Raw]))
    except (msgspec.DecodeError, RecursionError):
        return 1


def _prompts(raw: Raw) -> int:
    """Prompts of a body: a list may be one prompt in tokens, or many prompts."""
    try:
        items = msgspec.json.decode(bytes(raw or b"[]"), type=list[Raw])
    except (msgspec.DecodeError, RecursionError):
        return 1
    tokens = bool(items) and bytes(items[0])[:1] in b"-0123456789"
    return 1 if tokens else max(1, len(items))
