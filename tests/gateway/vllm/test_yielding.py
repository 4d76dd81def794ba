"""A large request to vLLM's handlers gives the loop its turns, and is understood as vLLM understands the request."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from fastapi.dependencies.utils import get_body_field, get_flat_dependant
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion.api_router import router

from gateway.core.way import CHAT, VLLM
from gateway.vllm import yielding
from tests.gateway.vllm.tokenisers import MAKERS, write_tokeniser
from tests.gateway.vllm.ways import BothWays, Script

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the front
MESSAGES = 2048


@pytest.fixture(scope="module")
def route() -> APIRoute:
    return next(route for route in router.routes if isinstance(route, APIRoute) and route.path == CHAT)


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


async def outcome(validating: Awaitable[Any]) -> Any:
    """Return what a validation came to: values and errors, or the exception that a validator of vLLM let out."""
    try:
        values, errors = await validating
        (value,) = values.values()
        made = value and (value.model_dump_json(exclude={"request_id"}, warnings=False), value.model_fields_set)
    except Exception as error:
        return type(error), str(error)
    return made, [(fault["type"], fault["loc"], fault["msg"]) for fault in errors]


@given(body=BODY)
@settings(max_examples=300, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_body_in_slices_is_validated_as_the_whole_body(
    monkeypatch: pytest.MonkeyPatch, route: APIRoute, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(yielding, "SLICE", 2)
    field = get_body_field(flat_dependant=get_flat_dependant(route.dependant), name="b", embed_body_fields=False)
    sliced, whole = json.dumps(body), json.dumps(body)  # validators change what is given to them

    async def both() -> tuple[Any, Any]:
        return (
            await outcome(yielding._validated([field], json.loads(sliced), False)),
            await outcome(yielding._validated_at_once([field], json.loads(whole), False)),
        )

    said, expected = asyncio.run(both())
    assert said == expected


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
    assert validated and validated[0] >= MESSAGES // yielding.SLICE - 1
    assert threads and not any("MainThread" in name for name in threads)


def test_vllm_and_fastapi_still_have_what_is_replaced(route: APIRoute) -> None:
    assert yielding.utils.request_body_to_args is yielding._validated
    assert yielding.utils.solve_dependencies.__globals__["request_body_to_args"] is yielding._validated
