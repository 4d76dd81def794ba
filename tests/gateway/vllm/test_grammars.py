"""Grammars at the gateway: handed on unchanged, never compiled by the gateway, and refused as the client's fault."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from store.contract import wire
from store.contract.wire import Delta, Finish
from store.tasks import ended
from tests.gateway.http.test_hostile import CHAT, RESIDENT, deployed
from tests.gateway.plane import Plane
from tests.gateway.vllm.test_front import asked, runs_of

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the front

REASON = "the grammar takes more than 5 s to compile: make it smaller"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"structured_outputs": {"regex": "\\p{L}+"}}, "regex"),
    "choice": ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
    "grammar": ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar"),
    "schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}, "json"),
    "json_object": ({"response_format": {"type": "json_object"}}, "json_object"),
}


@contextlib.asynccontextmanager
async def alive(plane: Plane, engine: str) -> AsyncIterator[None]:
    """Keep reporting the model as resident: building a front may take longer than a lease lasts."""

    async def say() -> None:
        while True:
            await plane.report({engine: RESIDENT})
            await asyncio.sleep(0.5)

    saying = asyncio.create_task(say())
    yield
    await ended(saying)


@pytest.mark.parametrize("kind", ASKED)
async def test_a_grammar_goes_to_the_runtime_as_it_is_and_is_compiled_by_nobody_here(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    import xgrammar
    from vllm.v1.structured_output import backend_xgrammar

    def never(*arguments: object) -> None:
        raise AssertionError("a grammar was compiled on the gateway's loop")

    for name in ("from_regex", "from_ebnf", "from_json_schema", "from_structural_tag", "from_lark"):
        monkeypatch.setattr(xgrammar.Grammar, name, never)
    monkeypatch.setattr(backend_xgrammar, "validate_xgrammar_grammar", never)
    key, engine = await deployed(plane, "acme")
    runs = await runs_of(plane)
    body, field = ASKED[kind]
    async with asked(plane, key) as client, alive(plane, engine):
        answer = await client.post("/v1/chat/completions", json=CHAT | body)
        assert answer.status_code == 200, answer.text
        free = await client.post("/v1/chat/completions", json=CHAT)
        assert free.status_code == 200, free.text
    with_grammar, without = runs
    said = json.loads(with_grammar.grammar)
    assert field in said and all(value is not None for value in said.values())
    assert without.grammar == b""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_refused_grammar_is_a_bad_request_with_the_reason(plane: Plane, path: str, stream: bool) -> None:
    key, engine = await deployed(plane, "acme")

    async def take(data: bytes) -> wire.Reply:
        run = wire.decode(wire.Run, data)
        delta = Delta(run.stream, [], 0, Finish.REFUSED, error=REASON)
        frame = wire.encode(wire.Frame(runtime="r1", epoch=1, seq=1, deltas=[delta]))
        asyncio.get_running_loop().call_later(0.01, asyncio.ensure_future, plane.bus.publish(subject, frame))
        return wire.Reply(epoch=1, seq=0)

    subject = wire.frame_subject("g1")
    await plane.bus.respond(wire.run_subject("r1"), take)
    body = (CHAT if "chat" in path else {"model": "chat", "prompt": "a", "max_tokens": 1}) | {
        "structured_outputs": {"regex": "a{1,100}"},
        "stream": stream,
    }
    async with asked(plane, key) as client, alive(plane, engine):
        answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert REASON in answer.text
