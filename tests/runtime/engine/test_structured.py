"""A grammar compiled in a separate process gives bare vLLM's tokens, also if parked, or begun elsewhere."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.core.device.request import RequestId
from runtime.engine.vllm import VllmEngine
from tests.runtime.bare import ask_under_grammars
from tests.runtime.engines import add, asleep, awake, drive, grammar_of, payload, spec, tokens, until

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers, not ours
POOL_BYTES, HOST_BYTES = 64 << 20, 128 << 20
PROMPT = [44, 301, 17, 9]
MAX_TOKENS = 24
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}, "c": {"type": "array", "maxItems": 3}},
    "required": ["a"],
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {"json": SCHEMA},
    "json_object": {"json_object": True},
    "regex": {"regex": "([a-m]|[n-z]{2}){6}[0-9]{5}-[A-Z]{5}"},
    "choice": {"choice": ["yes indeed", "no way", "perhaps"]},
    "ebnf": {"grammar": 'root ::= "(" root ")" | [a-f]+ "," [0-9]+'},
    "tags": {
        "structural_tag": json.dumps(
            {"structures": [{"begin": "a", "schema": {"type": "object"}, "end": "b"}], "triggers": ["a"]}
        )
    },
}


@pytest.fixture(scope="module")
def bare(random_models: dict[str, Path]) -> dict[str, list[int]]:
    return ask_under_grammars(random_models["llama"], GRAMMARS, PROMPT, MAX_TOKENS)


@pytest.fixture(scope="module")
def engine(random_models: dict[str, Path]) -> Iterator[VllmEngine]:
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, HOST_BYTES)
    engine = build(spec(random_models["llama"]))
    awake(engine)
    yield engine
    engine.close()
    build.close()


def asked(kind: str) -> bytes:
    from vllm.sampling_params import StructuredOutputsParams

    params = StructuredOutputsParams(**GRAMMARS[kind])
    return payload(PROMPT, temperature=0, max_tokens=MAX_TOKENS, structured_outputs=params, stop_token_ids=[1])


def test_a_build_reads_no_tokenizer(random_models: dict[str, Path]) -> None:
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, HOST_BYTES)
    engine = build(spec(random_models["llama"]))
    assert isinstance(engine, VllmEngine)
    assert engine._core.structured_output_manager.tokenizer is None
    engine.close()
    build.close()


def test_tokens_under_a_grammar_are_bare_vllms(engine: VllmEngine, bare: dict[str, list[int]]) -> None:
    assert len({tuple(said) for said in bare.values()}) >= 5, f"{bare} proves nothing"
    for kind in GRAMMARS:
        add(engine, RequestId(kind), asked(kind))
    made = drive({"": engine}, random.Random(0))
    assert {kind: tokens(made[RequestId(kind)]) for kind in GRAMMARS} == bare


@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_request_that_is_parked_or_begun_elsewhere_goes_on_under_its_grammar(
    engine: VllmEngine, bare: dict[str, list[int]], kind: str
) -> None:
    said = bare[kind]
    for cut in {1, len(said) // 2}:
        add(engine, RequestId("a"), asked(kind), said[:cut])
        made = tokens(engine.step())
        awake(asleep(engine))
        made += tokens(drive({"": engine}, random.Random(0)).get(RequestId("a"), []))
        assert said[:cut] + made == said


def test_a_grammar_that_was_read_before_makes_no_engine_wait_and_is_shared(engine: VllmEngine) -> None:
    grammar = grammar_of(engine, asked("regex"))
    engine.read(grammar)
    until(lambda: engine.has_read(grammar))
    for id in ("a", "b"):
        engine.add(RequestId(id), asked("regex"), (), grammar)
    requests = [engine._scheduler.requests[id].structured_output_request for id in ("a", "b")]
    assert requests[0].grammar.ctx is requests[1].grammar.ctx
    engine.abort([RequestId("a"), RequestId("b")])
    assert not engine.busy()
