"""Answers in vLLM's form: events with marks for the fast way (`gateway/fast/chunks.py`), and whole answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatMessage,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo, UsageInfo

from gateway.fast.answer import TextPiece
from gateway.fast.chunks import NUMBERS, EventTemplates, Template, text_mark

_CREATED, _INDEX = NUMBERS["created"], NUMBERS["index"]
_ID, _MODEL, _CONTENT, _FINISH, _STOP = (text_mark(name) for name in ("id", "model", "content", "finish", "stop"))
_COUNTS: dict[str, Any] = {name: NUMBERS[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def _of_release(kind: type[BaseModel]) -> dict[str, None]:
    """Fields that vLLM's handlers leave empty in objects of a class: fields of the installed release."""
    return {name: None for name in ("weight_versions", "kv_transfer_params") if name in kind.model_fields}


def chat_templates(role: str, fingerprint: str | None, usage_in_each: bool) -> EventTemplates:
    """Return the events of a streamed chat. `usage_in_each`: every event tells the usage up to the event."""

    def event(choice: dict[str, Any], delta: dict[str, Any], more: dict[str, Any], stamped: bool = False) -> Template:
        said = ChatCompletionResponseStreamChoice(index=_INDEX, delta=DeltaMessage(**delta), logprobs=None, **choice)
        chunk = ChatCompletionStreamResponse(
            id=_ID, object="chat.completion.chunk", created=_CREATED, choices=[said], model=_MODEL, **more
        )
        if stamped and fingerprint is not None:
            chunk.system_fingerprint = fingerprint
        if usage_in_each:
            chunk.usage = UsageInfo(**_COUNTS, completion_tokens_details=None)
        return Template.of_event(chunk.model_dump_json(exclude_unset=True))

    going = {"finish_reason": None}
    ended = {"finish_reason": _FINISH, "stop_reason": _STOP, "token_ids": None}
    ended |= _of_release(ChatCompletionResponseStreamChoice)
    content, more = {"content": _CONTENT}, _of_release(ChatCompletionStreamResponse)
    usage = UsageInfo(**_COUNTS, completion_tokens_details=None)
    usage.prompt_tokens_details = PromptTokenUsageInfo(
        cached_tokens=NUMBERS["cached_tokens"], created_cache_tokens=NUMBERS["written_tokens"], multimodal_tokens=None
    )
    last = ChatCompletionStreamResponse(
        id=_ID,
        object="chat.completion.chunk",
        created=_CREATED,
        choices=[],
        model=_MODEL,
        usage=usage,
        system_fingerprint=fingerprint,
        metrics=None,
    )
    return EventTemplates(
        first=event(going, {"role": role, "content": ""}, {"prompt_token_ids": None, "prompt_text": None}),
        piece=event(going | {"token_ids": None}, content, more),
        last=event(ended, content, more),
        last_of_all=event(ended, content, more, stamped=True),
        usage=Template.of_event(last.model_dump_json(exclude_unset=True, exclude_none=True)),
    )


def completion_templates(fingerprint: str | None, usage_in_each: bool) -> EventTemplates:
    """Return the events of a streamed completion. `usage_in_each`: every event tells the usage up to the event."""

    def event(finish: str | None, stop: str | None, stamped: bool = False) -> Template:
        said = CompletionResponseStreamChoice(
            index=_INDEX,
            text=_CONTENT,
            logprobs=None,
            finish_reason=finish,
            stop_reason=stop,
            prompt_token_ids=None,
            token_ids=None,
            **_of_release(CompletionResponseStreamChoice),
        )
        chunk = CompletionStreamResponse(
            id=_ID,
            object="text_completion",
            created=_CREATED,
            model=_MODEL,
            choices=[said],
            **_of_release(CompletionStreamResponse),
        )
        if stamped and fingerprint is not None:
            chunk.system_fingerprint = fingerprint
        if usage_in_each:
            chunk.usage = UsageInfo(**_COUNTS)
        return Template.of_event(chunk.model_dump_json(exclude_unset=True))

    usage = UsageInfo(**_COUNTS, prompt_tokens_details=PromptTokenUsageInfo(cached_tokens=NUMBERS["cached_tokens"]))
    last = CompletionStreamResponse(
        id=_ID, created=_CREATED, model=_MODEL, choices=[], usage=usage, system_fingerprint=fingerprint, metrics=None
    )
    return EventTemplates(
        first=None,
        piece=event(None, None),
        last=event(_FINISH, _STOP),
        last_of_all=event(_FINISH, _STOP, stamped=True),
        usage=Template.of_event(last.model_dump_json(exclude_unset=False, exclude_none=True)),
    )


def whole_chat(
    head: dict[str, Any], role: str, fingerprint: str | None, pieces: list[TextPiece], usage: UsageInfo
) -> JSONResponse:
    """Return an unstreamed chat. `head`: id, created and model."""
    choices = [
        ChatCompletionResponseChoice(
            index=piece.index,
            message=ChatMessage(role=role, reasoning=None, content=piece.text),
            logprobs=None,
            finish_reason=piece.finish or "stop",
            stop_reason=piece.stop,
        )
        for piece in pieces
    ]
    answer = ChatCompletionResponse(**head, choices=choices, usage=usage, system_fingerprint=fingerprint)
    return JSONResponse(answer.model_dump())


def whole_completion(
    head: dict[str, Any], fingerprint: str | None, pieces: list[TextPiece], usage: UsageInfo
) -> JSONResponse:
    """Return an unstreamed completion. `head`: id, created and model."""
    choices = [
        CompletionResponseChoice(
            index=piece.index, text=piece.text, logprobs=None, finish_reason=piece.finish, stop_reason=piece.stop
        )
        for piece in pieces
    ]
    answer = CompletionResponse(**head, choices=choices, usage=usage, system_fingerprint=fingerprint)
    return JSONResponse(answer.model_dump())


def usage_of(prompt_tokens: int, output_tokens: int, cached_tokens: int, written_tokens: int | None) -> UsageInfo:
    """Return the usage of an unstreamed answer. `written_tokens`: None for completions."""
    usage = UsageInfo(
        prompt_tokens=prompt_tokens, completion_tokens=output_tokens, total_tokens=prompt_tokens + output_tokens
    )
    usage.prompt_tokens_details = PromptTokenUsageInfo(cached_tokens=cached_tokens, created_cache_tokens=written_tokens)
    return usage
