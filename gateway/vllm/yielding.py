"""Lets the gateway's loop go on while vLLM's handlers read a large request.

vLLM validates a body, and makes a conversation of the messages, on the event loop: 2,048 messages held every stream of
the gateway for some 80 ms. vLLM and FastAPI have no seam for the two replacements here;
tests/gateway/vllm/test_yielding.py fails if the replacements do not hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from runtime.engine.settings import RENDER_WAIT_S  # isort: skip  (sets vLLM's environment, so: first)

from fastapi._compat import ModelField
from fastapi.dependencies import utils
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.base import BaseRenderer
from vllm.renderers.chat_utils import has_non_text_content

MESSAGES = "messages"  # the field of a body
SLICE = 64  # messages that vLLM validates in a turn of the loop, in 0.5 to 2 ms

Validated = tuple[dict[str, Any], list[dict[str, Any]]]  # values by parameter, and errors

_validated_at_once: Callable[..., Awaitable[Validated]] = utils.request_body_to_args


def install() -> None:
    """Let FastAPI validate long chats in slices, with turns of the loop between the slices."""
    utils.request_body_to_args = _validated


def render_in_thread(renderer: BaseRenderer[Any]) -> None:
    """Let a renderer make conversations of text in the renderer's threads."""
    renderer.render_messages_async = partial(_rendered, renderer, renderer.render_messages_async)  # type: ignore[method-assign]


async def _rendered(renderer: BaseRenderer[Any], original: Callable[..., Any], messages: Any, params: Any) -> Any:
    """Render in a thread. Raises TimeoutError after RENDER_WAIT_S. Pictures are fetched on the loop, as vLLM does."""
    if has_non_text_content(messages):
        return await original(messages, params)
    async with asyncio.timeout(RENDER_WAIT_S):
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(renderer._executor, renderer.render_messages, messages, params)


async def _validated(body_fields: list[ModelField], received_body: Any, embed_body_fields: bool) -> Validated:
    """Validate a body as `request_body_to_args` of FastAPI does.

    Each slice of the messages is validated within the whole body, so that every validator sees every message. The
    errors are the errors of the slices, under the numbers that the messages have in the body.
    """
    messages: Any = received_body.get(MESSAGES) if isinstance(received_body, dict) else None
    (field, *_) = body_fields
    long = isinstance(messages, list) and len(messages) > SLICE
    if not long or field.field_info.annotation is not ChatCompletionRequest:
        return await _validated_at_once(body_fields, received_body, embed_body_fields)
    parts: list[ChatCompletionRequest] = []
    of_messages: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for begin in range(0, len(messages), SLICE):
        body = {**received_body, MESSAGES: messages[begin : begin + SLICE]}
        part, faults = field.validate(body, {}, loc=("body",))
        parts.append(part)
        shifted = [_shifted(fault, begin) for fault in faults if _of_message(fault)]
        if shifted or not (of_messages or others):
            # Beside a faulty message the others are faults of fields; else they may come from checks of the whole body,
            # which vLLM leaves out if a message is faulty.
            others = [fault for fault in faults if not _of_message(fault)]
        of_messages += shifted
        await asyncio.sleep(0)
    if errors := [*of_messages, *others]:
        return {field.name: None}, errors
    whole = parts[0]
    whole.messages = [message for part in parts for message in part.messages]
    return {field.name: whole}, []


def _of_message(fault: dict[str, Any]) -> bool:
    loc = fault["loc"]
    return len(loc) > 2 and loc[1] == MESSAGES and isinstance(loc[2], int)


def _shifted(fault: dict[str, Any], begin: int) -> dict[str, Any]:
    """Return an error of a slice that begins at message `begin`, as an error of the body."""
    loc = fault["loc"]
    return {**fault, "loc": (*loc[:2], loc[2] + begin, *loc[3:])}
