"""The way of a request through the gateway: the fast way, or vLLM's own handlers. Pure: a body in, the way out.

The fast way answers what nearly every request asks for: a chat or a completion of one prompt, streamed or whole, with
sampling parameters, stop strings and several answers. A body with any further field, or with a value of an unusual
type, goes to vLLM's handlers: the fast way never guesses what vLLM would make of a field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from store.contract.series import WAYS

FAST, VLLM = WAYS
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
JSON = "application/json"
# Headers that vLLM's handlers read and the fast way does not.
READ_BY_VLLM = ("x-session-id", "x-data-parallel-rank", "endpoint-load-metrics-format")
BODY_BYTES_MOST = 2 << 20  # a larger body is parsed by vLLM's way alone: parsing 2 MiB takes some 2 ms of the loop
STOPS_MOST = 4  # stop strings; vLLM's bound
BIASES_MOST = 1024  # tokens with a bias, and stop tokens

Count = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Number: TypeAlias = float | None | UnsetType
Bias: TypeAlias = Annotated[dict[str, float], Meta(max_length=BIASES_MOST)] | None | UnsetType
Stop: TypeAlias = str | Annotated[list[str], Meta(max_length=STOPS_MOST)] | None | UnsetType
StopTokens: TypeAlias = Annotated[list[Count], Meta(max_length=BIASES_MOST)] | None | UnsetType


class StreamSaid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream is to say besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message's content. Only text goes the fast way."""

    text: str
    type: Literal["text"]


class ChatTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]
    name: str | UnsetType = UNSET


class FastAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of a body that the fast way knows. A field that the client left out is UNSET: vLLM's default counts."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamSaid | None = None
    user: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: Raw = Raw()
    max_tokens: Count | None | UnsetType = UNSET
    temperature: Number = UNSET
    top_p: Number = UNSET
    min_p: Number = UNSET
    frequency_penalty: Number = UNSET
    presence_penalty: Number = UNSET
    repetition_penalty: Number = UNSET
    top_k: Count | None | UnsetType = UNSET
    seed: Seed | None | UnsetType = UNSET
    stop: Stop = UNSET
    stop_token_ids: StopTokens = UNSET
    logit_bias: Bias = UNSET
    min_tokens: Count | UnsetType = UNSET
    ignore_eos: bool | UnsetType = UNSET
    include_stop_str_in_output: bool | UnsetType = UNSET
    skip_special_tokens: bool | UnsetType = UNSET
    spaces_between_special_tokens: bool | UnsetType = UNSET

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_each(self) -> bool:
        """Whether each event of a stream has the usage so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatAsk(FastAsk, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A chat that can go the fast way."""

    messages: Annotated[list[ChatTurn], Meta(min_length=1)]
    n: Count | None | UnsetType = UNSET
    max_completion_tokens: Count | None | UnsetType = UNSET
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: None = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: None = None


class CompletionAsk(FastAsk, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A completion of one prompt, text or tokens, that can go the fast way."""

    prompt: Annotated[str, Meta(min_length=1)] | Annotated[list[TokenId], Meta(min_length=1)]
    n: Count | UnsetType = UNSET
    logprobs: None = None
    echo: bool | None = None
    suffix: None = None


KINDS: dict[str, type[ChatAsk | CompletionAsk]] = {CHAT: ChatAsk, COMPLETION: CompletionAsk}
# Fields with a meaning for the answer alone, or with no meaning for vLLM.
_APART = ("model", "stream_options", "user", "service_tier", "store", "metadata", "messages", "prompt")
_OFF = ("logprobs", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "response_format", "echo", "suffix")
_SAMPLING = {
    kind: tuple(name for name in kind.__struct_fields__ if name not in (*_APART, *_OFF)) for kind in KINDS.values()
}


def fast_ask(route: str, headers: Mapping[str, str], body: bytes) -> ChatAsk | CompletionAsk | None:
    """Return what a request asks for if the fast way can answer the request; None: the request takes vLLM's way.

    `route` is vLLM's path of the request. `headers` find a value by the name in lower case.
    """
    kind = KINDS.get(route)
    if kind is None or len(body) > BODY_BYTES_MOST or any(name in headers for name in READ_BY_VLLM):
        return None
    if headers.get("content-type", "").lower().partition(";")[0] != JSON:
        return None
    try:
        ask = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if ask.stream_options is not None and not ask.stream:
        return None  # an error, in vLLM's words
    if isinstance(ask, ChatAsk):
        return None if ask.logprobs or ask.top_logprobs else ask
    return None if ask.echo else ask


def sampling_fields(ask: ChatAsk | CompletionAsk) -> dict[str, Any]:
    """Return the fields that the client gave for sampling, by vLLM's names."""
    named = ((name, getattr(ask, name)) for name in _SAMPLING[type(ask)])
    return {name: value for name, value in named if value is not UNSET}
