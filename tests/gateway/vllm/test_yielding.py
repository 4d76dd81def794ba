"""A large request to vLLM's handlers gives the loop its turns, and is understood as vLLM understands the request."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from fastapi._compat import ModelField
from fastapi.dependencies.utils import get_body_field, get_flat_dependant
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion.api_router import router as chats
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.api_router import router as completions
from vllm.entrypoints.openai.responses import protocol
from vllm.entrypoints.openai.responses.api_router import router as responses
from vllm.entrypoints.pooling.embed.api_router import router as embeddings
from vllm.entrypoints.pooling.scoring.api_router import router as scoring

from gateway.core.way import CHAT, VLLM
from gateway.vllm import yielding
from tests.gateway.vllm.tokenisers import MAKERS, write_tokeniser
from tests.gateway.vllm.ways import BothWays, Script

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the front
MESSAGES = 2048


def body_of(path: str) -> ModelField:
    """The body of the requests that are posted to a path, as FastAPI validates it."""
    routers = (chats, completions, responses, embeddings, scoring)
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    (route,) = (route for route in routes if route.path == path and "POST" in route.methods)
    field = get_body_field(flat_dependant=get_flat_dependant(route.dependant), name="b", embed_body_fields=False)
    assert field is not None
    return field


MESSAGE: st.SearchStrategy[Any] = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "nobody"])},
        optional={
            "content": st.one_of(
                st.none(),
                st.text(max_size=3),
                st.integers(),
                st.lists(st.sampled_from([{"type": "text", "text": "a"}, {"type": "text"}, 7]), max_size=3),
            ),
            "name": st.one_of(st.just("ann"), st.just(5)),
            "tool_calls": st.sampled_from([[], [{"id": "1", "function": {"name": "f", "arguments": "{}"}}], 3]),
            "reasoning_content": st.just("so"),
        },
    ),
    st.sampled_from([7, None, "text"]),
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=9)},
    optional={
        "model": st.just("faq"),
        "temperature": st.sampled_from([0.5, "x"]),
        "top_logprobs": st.sampled_from([2, -3]),
        "stream_options": st.just({"include_usage": True}),
        "tools": st.sampled_from([[], [{"type": "function", "function": {"name": "f"}}], 5]),
        "response_format": st.sampled_from([{"type": "json_object"}, {"type": "nothing"}]),
    },
)


ITEM: st.SearchStrategy[Any] = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "nobody"]), "content": st.sampled_from(["a", [], 5])},
        optional={"type": st.sampled_from(["message", "nothing"])},
    ),
    st.just({"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}),
    st.sampled_from([{"type": "reasoning", "summary": []}, {"type": "function_call"}, {}, 7, None, "text"]),
)
RESPONSE = st.fixed_dictionaries(
    {"input": st.lists(ITEM, max_size=6)},
    optional={
        "model": st.just("faq"),
        "background": st.sampled_from([False, 7]),
        "temperature": st.sampled_from([0.5, "x"]),
        "tools": st.sampled_from([[], [{"type": "function", "name": "f", "parameters": {}}], 5]),
        "tool_choice": st.sampled_from(["auto", "required"]),
        "prompt": st.just({"id": "1"}),
    },
)


async def outcome(validating: Awaitable[Any]) -> Any:
    """Return what a validation came to: values and errors, or the exception that a validator of vLLM let out."""
    try:
        values, errors = await validating
        (value,) = values.values()
        made = value and (value.model_dump_json(exclude={"request_id"}, warnings=False), value.model_fields_set)
    except Exception as error:
        return type(error), str(error)
    return made, [(fault["type"], fault["loc"], fault["msg"]) for fault in errors]


def check_in_slices(path: str, body: dict[str, Any]) -> None:
    """Compare a body in slices with the whole body: equal values, and some of the errors if there are any."""
    field, copied = body_of(path), json.dumps(body)  # validators change what is given to them
    made, errors = asyncio.run(outcome(yielding._validated([field], json.loads(copied), False)))
    expected, all_errors = asyncio.run(outcome(yielding._validated_at_once([field], json.loads(copied), False)))
    if isinstance(all_errors, str):  # an exception that a validator let out, perhaps behind the first faulty slice
        assert errors and made in (None, expected)
        return
    assert made == expected and bool(errors) == bool(all_errors)
    # pydantic reads some lists, tool calls among them, when a validator of vLLM does: in the whole body that validator
    # is not called if another message is faulty. An error in such a list has no field before the number of the item.
    assert {fault for fault in errors if not isinstance([*fault[1], ""][1], int)} <= set(all_errors)


@pytest.fixture
def in_twos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yielding, "LARGE", 0)
    monkeypatch.setattr(yielding, "SLICED", {kind: (name, 2) for kind, (name, _) in yielding.SLICED.items()})
    monkeypatch.setattr(protocol, "random_uuid", lambda: "0")  # names that vLLM draws for items


@given(body=BODY)
@settings(max_examples=300, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_chat_in_slices_is_validated_as_the_whole_chat(in_twos: None, body: dict[str, Any]) -> None:
    check_in_slices(CHAT, body)


@given(body=RESPONSE)
@settings(max_examples=200, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_items_in_slices_are_validated_as_all_items(in_twos: None, body: dict[str, Any]) -> None:
    check_in_slices("/v1/responses", body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [{"role": "nobody", "content": 5}] * MESSAGES}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text"}] * MESSAGES}]}),
        ("/v1/responses", {"input": "a", "tools": [{"type": "nothing"}] * MESSAGES}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "stop_token_ids": [None] * MESSAGES}),
        (CHAT, {"messages": [{"role": "nobody", "content": 5}] * MESSAGES}),
        ("/v1/completions", {"prompt": [1] + [None] * MESSAGES}),
        ("/v1/embeddings", {"input": [1] + [None] * MESSAGES}),
        ("/rerank", {"query": "a", "documents": [None] * MESSAGES}),
    ],
)
def test_of_many_faulty_items_the_first_is_told(path: str, body: dict[str, Any]) -> None:
    """Without an end, the first six bodies have 32,000 to 483,000 faults: the loop was held for up to 19 s."""
    values, errors = asyncio.run(yielding._validated([body_of(path)], {"model": "faq", **body}, False))
    assert list(values.values()) == [None] and 0 < len(errors) < 300


def test_tokens_to_embed_are_tried_as_messages_up_to_the_first_alone() -> None:
    """vLLM takes tokens, texts or messages as `input`: 200,000 tokens tried as messages held the loop for 19 s."""
    tokens = [7] * 100_000
    began_s = time.process_time()
    values, errors = asyncio.run(yielding._validated([body_of("/v1/embeddings")], {"input": tokens}, False))
    assert not errors and next(iter(values.values())).input == tokens
    assert time.process_time() - began_s < 1.0


async def test_vllms_handlers_leave_turns_to_others_and_render_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = await BothWays.over(write_tokeniser(tmp_path / "model", next(iter(MAKERS))))
    renderer = ways.front.state.engine_client.renderer
    threads: list[str] = []
    render = renderer.render_messages

    def watched(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return render(*args)

    monkeypatch.setattr(renderer, "render_messages", watched)
    validated: list[int] = []
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def counted(**args: Any) -> Any:
        before = turns
        result = await yielding._validated(**args)
        validated.append(turns - before)
        return result

    monkeypatch.setattr(yielding.utils, "request_body_to_args", counted)
    body = {"model": "faq", "messages": [{"role": "user", "content": "a"}] * MESSAGES, "max_tokens": 1}
    others = asyncio.create_task(take_turns())
    said = await ways.ask(CHAT, json.dumps(body).encode(), Script(()), 1, False)
    others.cancel()
    assert (said.way, said.status) == (VLLM, 400) and b"maximum context length" in said.body
    assert validated and validated[0] >= MESSAGES // yielding.SLICED[ChatCompletionRequest][1] - 1
    assert threads and not any("MainThread" in name for name in threads)


def test_vllm_and_fastapi_still_have_what_is_replaced() -> None:
    assert yielding.utils.request_body_to_args is yielding._validated
    assert yielding.utils.solve_dependencies.__globals__["request_body_to_args"] is yielding._validated
