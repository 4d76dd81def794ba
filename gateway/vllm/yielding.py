"""Lets the gateway's loop go on while vLLM's handlers read a large request.

vLLM validates a body, and makes a conversation of the messages, on the event loop: 2,048 messages held every stream of
the gateway for some 80 ms, and 2,048 faulty items of `/v1/responses`, with 236 errors each, for 19 s. vLLM and FastAPI
have no seam for the two replacements here; tests/gateway/vllm/test_yielding.py fails if the replacements do not hold.
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
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.renderers.base import BaseRenderer
from vllm.renderers.chat_utils import has_non_text_content

REPORTED = 10  # errors of which vLLM's answer tells; further errors are counted there
# By class of body: the field with the messages, and the messages that vLLM validates in a turn of the loop: in 1 ms if
# the messages are right, and in 5 ms if all are faulty.
SLICED: dict[Any, tuple[str, int]] = {ChatCompletionRequest: ("messages", 16), ResponsesRequest: ("input", 8)}

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
    errors are the errors of the slices, under the numbers that the messages have in the body. Once as many errors are
    found as vLLM's answer tells of, further messages are not looked at, and are not in the count of the answer.
    """
    (field, *_) = body_fields
    name, size = SLICED.get(field.field_info.annotation, ("", 0))
    messages: Any = received_body.get(name) if isinstance(received_body, dict) else None
    if not isinstance(messages, list) or len(messages) <= size:
        return await _validated_at_once(body_fields, received_body, embed_body_fields)
    parts: list[Any] = []
    of_messages: list[dict[str, Any]] = []
    before: list[dict[str, Any]] = []  # errors of other fields, in the order of the fields
    behind: list[dict[str, Any]] = []
    for begin in range(0, len(messages), size):
        part, faults = field.validate({**received_body, name: messages[begin : begin + size]}, {}, loc=("body",))
        parts.append(part)
        places = [place for place, fault in enumerate(faults) if _number_at(fault, name)]
        if (places and not of_messages) or not begin:
            # Beside a faulty message the others are faults of fields; else they may come from checks of the whole body,
            # which vLLM leaves out if a message is faulty.
            first, last = (places[0], places[-1] + 1) if places else (len(faults), len(faults))
            before, behind = faults[:first], faults[last:]
        of_messages += [_shifted(faults[place], name, begin) for place in places]
        if len(of_messages) >= REPORTED:
            break
        await asyncio.sleep(0)
    if errors := [*before, *of_messages, *behind]:
        return {field.name: None}, errors
    whole = parts[0]
    setattr(whole, name, [message for part in parts for message in getattr(part, name)])
    return {field.name: whole}, []


def _number_at(fault: dict[str, Any], field: str) -> int | None:
    """The place in an error's path of the number of a message in `field`; None: the error is of no message.

    A union of types, as in `/v1/responses`, puts the name of a type in front of the number."""
    loc = fault["loc"]
    return next((at for at in (2, 3) if len(loc) > at and loc[1] == field and isinstance(loc[at], int)), None)


def _shifted(fault: dict[str, Any], field: str, begin: int) -> dict[str, Any]:
    """Return an error of a slice that begins at message `begin`, as an error of the body."""
    loc, at = fault["loc"], _number_at(fault, field)
    assert at is not None
    return {**fault, "loc": (*loc[:at], loc[at] + begin, *loc[at + 1 :])}
