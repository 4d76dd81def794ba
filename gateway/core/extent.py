"""How much one request may ask for: answers, inputs, messages, pictures, logprobs, bytes of text and of a grammar.

vLLM parses, tokenises and fans out on the loop that serves every tenant, so the extent of a request is measured before
vLLM sees the request. Pure: a body in, the first bound that the body exceeds out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from msgspec import Raw


@dataclass(frozen=True)
class ExtentLimits:
    """Largest extent of one request. Each field is the setting `STACCATO_` + its name in capitals."""

    # Generated sequences: `n` times the prompts of the body. 128 held up a stream of another model for 112 ms.
    answers_max: int = 64
    # Messages with their parts and calls of tools; tools. vLLM validates a part in 15 µs, and holds the loop meanwhile.
    messages_max: int = 2048
    entries_max: int = 1024  # of logit_bias, metadata or vllm_xargs: each faulty entry takes vLLM 15 µs
    # Texts, or texts to compare with a query, of a call for vectors or scores. Each is a request to a runtime.
    # LangChain's client sends 1,000 texts at a time.
    inputs_max: int = 1024
    pictures_max: int = 16
    logprobs_max: int = 20  # alternatives per generated token
    prompt_logprobs_max: int = 1  # alternatives per token of the prompt
    # Text to tokenise in the body, pictures aside: tokenising 1 MiB holds the interpreter for up to 90 ms.
    text_bytes_max: int = 1 << 20
    tokenize_bytes_max: int = 128 << 10  # if the request generates nothing: 256 KiB took the gateway 182 ms of CPU time
    grammar_bytes_max: int = 32 << 10  # grammar for the generated text


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


class TokenizeWatch:
    """Looks at the body of a request that only tokenises, while the body comes: text beyond the bound is not kept.

    Beside text, a body without a picture may have LONG bytes of other fields. A picture's mark is in front of the
    picture's data, and text in front of a mark is text in any case."""

    def __init__(self, limits: ExtentLimits) -> None:
        self._allowed = limits.tokenize_bytes_max + LONG
        self._size, self._tail = 0, b""  # the last bytes: a mark may lie across two chunks
        self._pictures = self._exceeded = False

    def add(self, chunk: bytes) -> bool:
        """Take the next bytes of the body. Returns whether the body exceeds the bound."""
        self._size += len(chunk)
        if not (self._pictures or self._exceeded):
            text = self._tail + chunk
            self._tail = text[-MARK_BYTES:]
            self._pictures = _may_have_pictures(text)
            self._exceeded = not self._pictures and self._size > self._allowed
        return self._exceeded

    @property
    def excess(self) -> Excess | None:
        """The bound that the body exceeds, once all bytes came; None if the body exceeds no bound."""
        if not self._exceeded:
            return None
        return Excess("body", self._size, self._allowed, "bytes without a picture", "tokenize_bytes_max")


NOTHING = Raw()  # a field missing in the body
# A field with so many commas is not taken apart to be counted: 4 million items kept the loop for 2 s.
DENSE = 1 << 15
LONG = 256 << 10  # bytes of a field whose items are not counted if the field is too long as a text
# Values that a message, part, tool or call may have on average where a field is DENSE: 350,000 empty conversations kept
# the loop for 0.2 s while the conversations' messages were counted.
VALUES_EACH = 16
_LONG_STRING = re.compile(rb'"[^"\\]{1024,}"')  # a picture's data have neither quotes nor backslashes
_FIRST_ITEM = re.compile(rb"\s*\[\s*(.)", re.DOTALL)
_MESSAGE_FIRST = re.compile(rb"\s*\[\s*(?:\[\s*)?\{")  # a list of messages or of conversations
_SPACE = b" \t\r\n"
_PICTURE, _ESCAPE = b'"image', b"\\u"  # JSON may write any letter as \u and a number
MARK_BYTES = len(_PICTURE) - 1


class ContentPart(msgspec.Struct):
    """A part of a message's content. Only a part with a picture has a size besides its text."""

    type: Raw = NOTHING
    image_url: Raw = NOTHING  # a picture of /v1/chat/completions or /v1/responses
    source: Raw = NOTHING  # a picture of /v1/messages, if the type says so
    content: Raw = NOTHING  # parts of a tool's result, in /v1/messages

    def pictures(self) -> Iterator[int]:
        """Yield the number of bytes of each picture in the part."""
        if bytes(self.image_url):
            yield len(bytes(self.image_url))
        elif bytes(self.type) == b'"image"':
            yield len(bytes(self.source))
        elif bytes(self.type) == b'"tool_result"':
            yield from _pictures_of(self.content)


class SaidMessage(msgspec.Struct):
    """A message of a conversation, as far as the message may have pictures."""

    content: Raw = NOTHING


class MessageParts(msgspec.Struct):
    """Parts of a message: of the content, and calls of tools."""

    content: list[Raw] | str | int | float | bool | None = None
    tool_calls: list[Raw] | str | int | float | bool | None = None


def _pictures_of(content: Raw) -> Iterator[int]:
    """Yield the number of bytes of each picture in the content of a message or of a tool's result.

    In content of a wrong form every word that begins with "image" counts as a picture without bytes.
    """
    if bytes(content)[:1] != b"[":
        return
    try:
        parts = msgspec.json.decode(bytes(content), type=list[ContentPart | str])
    except (msgspec.DecodeError, RecursionError):
        yield from [0] * bytes(content).count(b'"image')
        return
    for part in parts:
        if isinstance(part, ContentPart):
            yield from part.pictures()


class BodyExtent(msgspec.Struct):
    """Fields of a body that determine its extent, unparsed; vLLM checks their meaning."""

    model: Raw = NOTHING
    stream: Raw = NOTHING
    service_tier: Raw = NOTHING  # gateway/core/priority.py reads the meaning
    prompt: Raw = NOTHING
    messages: Raw = NOTHING
    n: Raw = NOTHING  # from here on, plain requests have no field
    best_of: Raw = NOTHING
    mm_processor_kwargs: Raw = NOTHING  # vLLM's settings for preparing pictures, with media_io_kwargs
    media_io_kwargs: Raw = NOTHING
    input: Raw = NOTHING
    system: Raw = NOTHING  # /v1/messages
    instructions: Raw = NOTHING  # /v1/responses
    tokens: Raw = NOTHING  # /v1/detokenize
    query: Raw = NOTHING  # /v1/rerank; the next are of /v1/score, in the four forms that vLLM takes
    queries: Raw = NOTHING
    documents: Raw = NOTHING
    items: Raw = NOTHING
    text_1: Raw = NOTHING
    text_2: Raw = NOTHING
    data_1: Raw = NOTHING
    data_2: Raw = NOTHING
    instruction: Raw = NOTHING
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
    stop_token_ids: Raw = NOTHING
    logit_bias: Raw = NOTHING
    metadata: Raw = NOTHING
    vllm_xargs: Raw = NOTHING


PLAIN_FIELDS = ("model", "stream", "service_tier", "prompt", "messages")
_ABSENT = msgspec.structs.astuple(BodyExtent())[len(PLAIN_FIELDS) :]
GRAMMARS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "text",
)
ENTRIES = ("logit_bias", "metadata", "vllm_xargs")
ASKING = ("query", "queries", "text_1", "data_1", "instruction")  # a text here goes along with each text of COMPARED
COMPARED = ("documents", "items", "text_2", "data_2")
INPUTS = ("input", *ASKING, *COMPARED)
TEXTS = ("prompt", "messages", "system", "instructions", "tools", "tokens", *INPUTS)
NO_CHOICE = (b'"auto"', b'"none"', b"null")  # tool choices that make no grammar of the tools


def first_excess(ask: BodyExtent, limits: ExtentLimits, repeats: bool = False, pools: bool = False) -> Excess | None:
    """Return the first bound that the body exceeds, or None.

    `repeats`: the request only tokenises. `pools`: the request asks for vectors or scores, so `input` has texts, and
    not messages. A field of a wrong type has no extent: vLLM refuses such a body with a sentence of its own.
    """
    if not pools and is_small(ask, limits, limits.tokenize_bytes_max if repeats else limits.text_bytes_max):
        return None
    return next((excess for excess in _measured(ask, limits, repeats, pools) if excess.asked > excess.allowed), None)


def is_small(ask: BodyExtent, limits: ExtentLimits, text_bytes_max: int) -> bool:
    """Whether the body certainly exceeds no bound. That takes 2 µs, where measuring a short chat takes 160.

    A small body has a text, or messages without pictures and lists, and no other field of those that are measured."""
    if msgspec.structs.astuple(ask)[len(PLAIN_FIELDS) :] != _ABSENT or min(limits.answers_max, limits.entries_max) < 1:
        return False
    prompt, messages = bytes(ask.prompt), bytes(ask.messages)
    return (
        prompt[:1] in (b"", b'"')
        and len(prompt) + len(messages) <= text_bytes_max
        and messages.count(b",") < min(limits.messages_max, DENSE)
        and messages.count(b"[") < 2
        and not _may_have_pictures(messages)
    )


def pictures_in(ask: BodyExtent) -> int:
    """Return the number of pictures in a body."""
    return len(_pictures(ask.messages)) + len(_pictures(ask.input))


def _measured(ask: BodyExtent, limits: ExtentLimits, repeats: bool, pools: bool) -> Iterator[Excess]:
    said = ("messages",) if pools and not _MESSAGE_FIRST.match(bytes(ask.input)) else ("messages", "input")
    setting = "tokenize_bytes_max" if repeats else "text_bytes_max"
    for field in TEXTS:
        allowed = getattr(limits, setting)
        yield Excess(field, _certain_bytes(getattr(ask, field), allowed), allowed, "bytes of text", setting)
    for field in (*said, "tools"):
        values, allowed = _dense_values(getattr(ask, field)), max(DENSE, VALUES_EACH * limits.messages_max)
        yield Excess(field, values, allowed, f"values ({VALUES_EACH} for each message)", "messages_max")
    answers = max(_number(ask.n), _number(ask.best_of), 1) * _prompts(ask.prompt)
    yield Excess("n", answers, limits.answers_max, "answers (n times prompts)", "answers_max")
    talks = _talks(ask.messages)
    yield Excess("messages", len(talks), limits.answers_max, "answers (one for each conversation)", "answers_max")
    for field in INPUTS if pools else ():
        yield Excess(field, _prompts(getattr(ask, field)), limits.inputs_max, "inputs", "inputs_max")
    for field in said:
        items = (sum(talks) if field == "messages" else 0) or _items(getattr(ask, field))
        yield Excess(field, items, limits.messages_max, "messages", "messages_max")
    yield Excess("tools", _items(ask.tools), limits.messages_max, "tools", "messages_max")
    for field in ENTRIES:
        yield Excess(field, _entries(getattr(ask, field)), limits.entries_max, "entries", "entries_max")
    stops = bytes(ask.stop_token_ids).count(b",") + 1
    yield Excess("stop_token_ids", stops, limits.entries_max, "token ids", "entries_max")
    for field in ("logprobs", "top_logprobs"):
        yield Excess(field, _number(getattr(ask, field)), limits.logprobs_max, "logprobs a token", "logprobs_max")
    of_prompt = _number(ask.prompt_logprobs)
    what = "logprobs a token of the prompt"
    yield Excess("prompt_logprobs", of_prompt, limits.prompt_logprobs_max, what, "prompt_logprobs_max")
    sizes = {field: len(bytes(getattr(ask, field))) for field in TEXTS}
    what = "bytes of text"
    texts = max(_prompts(getattr(ask, field)) for field in COMPARED) if pools else 1
    for field in ASKING if texts > 1 else ():
        if sizes[field] and _prompts(getattr(ask, field)) == 1:
            what, sizes[field] = "bytes of text (a query counts for each text)", texts * sizes[field]
    for field in said:
        pictures = _pictures(getattr(ask, field))
        yield Excess(field, len(pictures), limits.pictures_max, "pictures", "pictures_max")
        parts = _parts(getattr(ask, field), limits.messages_max)
        yield Excess(field, parts, limits.messages_max, "parts of messages", "messages_max")
        sizes[field] -= sum(pictures)
    largest = max(sizes, key=sizes.__getitem__)
    yield Excess(largest, sum(sizes.values()), getattr(limits, setting), what, setting)
    for field in GRAMMARS:
        size = len(bytes(getattr(ask, field)))
        yield Excess(field, size, limits.grammar_bytes_max, "bytes of a grammar", "grammar_bytes_max")
    if (bytes(ask.tool_choice) or b"null") not in NO_CHOICE:
        size = len(bytes(ask.tools))
        yield Excess("tools", size, limits.grammar_bytes_max, "bytes of tools to choose from", "grammar_bytes_max")


def _number(raw: Raw) -> int:
    """Return the number; 1 for true, 0 for any other value. Numbers in quotes count too, as in vLLM."""
    try:
        value = msgspec.json.decode(bytes(raw or b"0"), type=int | float | bool | None, strict=False)
    except (msgspec.DecodeError, RecursionError):
        return 0
    return int(value or 0) if value == value and abs(value or 0) < 1 << 53 else 1 << 53


def _items(raw: Raw) -> int:
    """Return the number of items of a list; 1 for a text, 0 for a missing field."""
    try:
        return len(msgspec.json.decode(bytes(raw or b"[]"), type=list[Raw]))
    except (msgspec.DecodeError, RecursionError):
        return 1


def _certain_bytes(raw: Raw, allowed: int) -> int:
    """Return the bytes of text in a field with more than `allowed` bytes, if counting anything else would take long.

    That is so for LONG fields, and for fields with DENSE commas or more. A text, and a list without a picture, count
    whole. A DENSE list counts without its long strings, for pictures may be among the long strings. For any other field
    the result is 0."""
    text = bytes(raw)
    dense = text.count(b",") >= DENSE
    if len(text) <= allowed or not (dense or len(text) >= LONG):
        return 0
    if text[:1] == b'"' or not _may_have_pictures(text):
        return len(text)
    if not dense:
        return 0
    text = text.replace(b"\\/", b"/")  # as some clients write the data of a picture
    return len(text) - sum(len(found.group()) for found in _LONG_STRING.finditer(text))


def _dense_values(raw: Raw) -> int:
    """Return the number of values of a field with DENSE commas or more: commas outside strings, and one. A field with
    fewer commas is counted otherwise, and the result is 0."""
    text = bytes(raw)
    if text.count(b",") < DENSE:
        return 0
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(unescaped.split(b'"')[::2]).count(b",") + 1


def _entries(raw: Raw) -> int:
    """Return the number of entries of an object; 0 for a value of another kind.

    In an object with DENSE commas or more each comma counts as the end of an entry."""
    if (commas := bytes(raw).count(b",")) >= DENSE:
        return commas + 1
    try:
        return len(msgspec.json.decode(bytes(raw or b"{}"), type=dict[str, Raw]))
    except (msgspec.DecodeError, RecursionError):
        return 0


def _may_have_pictures(text: bytes) -> bool:
    return _PICTURE in text or (b"\\" in text and _ESCAPE in text)


def _may_have_lists(text: bytes) -> bool:
    """Whether a list may have a list among its items. (A regular expression took 9 ms for 1 MiB.)"""
    if text.count(b"[") < 2:
        return False
    dense = text.translate(None, _SPACE)
    return dense.startswith(b"[[") or b",[" in dense


def _talks(raw: Raw) -> list[int]:
    """Return the number of messages of each conversation in a batch; [] for a single conversation."""
    if not _may_have_lists(bytes(raw)):
        return []
    try:
        items = msgspec.json.decode(bytes(raw or b"[]"), type=list[Raw])
    except (msgspec.DecodeError, RecursionError):
        return []
    return [_items(item) for item in items if bytes(item)[:1] == b"["]


def _pictures(raw: Raw) -> list[int]:
    """Return the bytes of each picture in messages or conversations; [] for messages of a wrong form."""
    if not _may_have_pictures(bytes(raw)):
        return []
    try:
        said = msgspec.json.decode(bytes(raw), type=list[SaidMessage | list[SaidMessage]])
    except (msgspec.DecodeError, RecursionError):
        return []
    messages = (message for item in said for message in (item if isinstance(item, list) else [item]))
    return [size for message in messages for size in _pictures_of(message.content)]


def _parts(raw: Raw, most: int) -> int:
    """Return the number of parts of the messages in a conversation or in a batch. A message of a wrong form counts.

    Where no more than `most` parts are possible the number is not counted: the result is 0.
    """
    if bytes(raw).count(b",") < most:
        return 0
    try:
        said = msgspec.json.decode(bytes(raw), type=list[MessageParts | list[MessageParts]])
    except (msgspec.DecodeError, RecursionError):
        return _parts_of_odd(raw)
    count = 0
    for item in said:
        count += sum(map(_count, item)) if isinstance(item, list) else _count(item)
    return count


def _count(message: MessageParts) -> int:
    content, calls = message.content, message.tool_calls
    return ((len(content) if type(content) is list else 0) + (len(calls) if type(calls) is list else 0)) or 1


def _parts_of_odd(raw: Raw) -> int:
    try:
        items = msgspec.json.decode(bytes(raw), type=list[Raw])
    except (msgspec.DecodeError, RecursionError):
        return 0
    count = 0
    for item in items:
        if bytes(item)[:1] == b"[":
            count += _parts_of_odd(item)
            continue
        try:
            message = msgspec.json.decode(bytes(item), type=MessageParts)
        except (msgspec.DecodeError, RecursionError):
            count += 1
        else:
            count += _count(message)
    return count


def _prompts(raw: Raw) -> int:
    """Return the number of prompts of a body: a list may be one prompt in tokens, or many prompts.

    In a list with DENSE commas or more each text counts, and each list of tokens."""
    begins = _FIRST_ITEM.match(bytes(raw))
    if begins is not None and begins[1] in b"-0123456789":
        return 1
    if begins is not None and bytes(raw).count(b",") >= DENSE:
        return bytes(raw).count(b"[") - 1 if begins[1] == b"[" else _dense_values(raw)
    try:
        items = msgspec.json.decode(bytes(raw or b"[]"), type=list[Raw])
    except (msgspec.DecodeError, RecursionError):
        return 1
    return max(1, len(items))
