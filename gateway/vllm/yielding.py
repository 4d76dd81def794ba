"""Lets the gateway's loop go on while vLLM's handlers read a large request.

vLLM validates a body, and makes a conversation of the messages, on the event loop: 2,048 messages held every stream of
the gateway for some 80 ms, and 2,048 faulty items of `/v1/responses`, with 236 errors each, for 19 s. vLLM and FastAPI
have no seam for the two replacements here; tests/gateway/vllm/test_yielding.py fails if the replacements do not hold.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from runtime.engine.settings import RENDER_WAIT_S  # isort: skip  (sets vLLM's environment, so: first)

from fastapi._compat import ModelField
from fastapi.dependencies import utils
from pydantic_core import SchemaValidator
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.renderers.base import BaseRenderer
from vllm.renderers.chat_utils import has_non_text_content

LARGE = 256  # values in a body; vLLM finds every fault of a smaller body in 5 ms
# By class of body: the field with the messages, and the messages that vLLM validates in a turn of the loop, in 1 ms.
SLICED: dict[Any, tuple[str, int]] = {ChatCompletionRequest: ("messages", 32), ResponsesRequest: ("input", 8)}

Validated = tuple[dict[str, Any], list[dict[str, Any]]]  # values by parameter, and errors

_validated_at_once: Callable[..., Awaitable[Validated]] = utils.request_body_to_args


def install() -> None:
    """Let FastAPI validate large bodies in slices, with turns of the loop between the slices."""
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

    A large body is validated in slices of its messages, each within the whole body, so that every validator sees every
    message. Of the faults of a large body, the faults of the first faulty item of a list are told, and no others.
    """
    (field, *_) = body_fields
    if _at_most(LARGE, received_body):
        return await _validated_at_once(body_fields, received_body, embed_body_fields)
    name, size = SLICED.get(field.field_info.annotation, ("", 1))
    messages = received_body.get(name) if isinstance(received_body, dict) else None
    bodies = [(0, received_body)]
    if isinstance(messages, list) and messages:
        starts = range(0, len(messages), size)
        bodies = [(start, {**received_body, name: messages[start : start + size]}) for start in starts]
    first_faults, parts = _of_first_faults(field.field_info.annotation, field), list[Any]()
    for start, body in bodies:
        part, faults = first_faults.validate(body, {}, loc=("body",))
        if faults:
            return {field.name: None}, [_shifted(fault, name, start) for fault in faults]
        parts.append(part)
        await asyncio.sleep(0)
    if len(parts) > 1:
        setattr(parts[0], name, [message for part in parts for message in getattr(part, name)])
    return {field.name: parts[0]}, []


def _at_most(values: int, body: Any) -> bool:
    """Whether a body has at most so many values. No more values are looked at."""
    waiting, seen = [body], 0
    while waiting:
        value = waiting.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        seen += 1 + len(inner)
        if seen > values:
            return False
        waiting += inner
    return True


_FIRST_FAULTS: dict[Any, ModelField] = {}  # by class of body


def _of_first_faults(kind: Any, field: ModelField) -> ModelField:
    """Return a copy of a field whose validation of a list ends with the first faulty item."""
    if kind not in _FIRST_FAULTS:
        adapter = copy.copy(field._type_adapter)
        adapter.validator = SchemaValidator(_ending_early(adapter.core_schema))
        _FIRST_FAULTS[kind] = copy.copy(field)
        _FIRST_FAULTS[kind]._type_adapter = adapter
    return _FIRST_FAULTS[kind]


def _ending_early(schema: Any) -> Any:
    """Return a copy of a pydantic schema whose lists are validated up to the first faulty item."""
    if isinstance(schema, list | tuple):
        return type(schema)(_ending_early(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    copied = {key: value if key == "metadata" else _ending_early(value) for key, value in schema.items()}
    return copied | {"fail_fast": True} if schema.get("type") in ("list", "set", "frozenset", "tuple") else copied


def _shifted(fault: dict[str, Any], field: str, start: int) -> dict[str, Any]:
    """Return an error of a slice that begins at message `start` of a field, as an error of the body.

    A union of types, as in `/v1/responses`, puts the name of a type in front of the number of the message."""
    loc = fault["loc"]
    at = next((at for at in (2, 3) if len(loc) > at and loc[1] == field and isinstance(loc[at], int)), None)
    return fault if at is None else {**fault, "loc": (*loc[:at], loc[at] + start, *loc[at + 1 :])}
