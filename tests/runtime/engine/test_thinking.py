"""A grammar begins behind the thinking, also where the request is parked or resumed elsewhere. Real vLLM cores."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from runtime.core.device.request import RequestId
from runtime.engine.vllm import VllmEngine
from store.contract import wire
from tests.e2e.thinker import END_THINK, THINK, write_thinker
from tests.runtime.engines import add, asleep, awake, drive, payload, spec, tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers, not ours
POOL_BYTES, HOST_BYTES = 64 << 20, 128 << 20
BUDGET, DIGITS = 6, 5
PROMPT = [*range(40, 52), THINK]
A = RequestId("a")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinker(tmp_path_factory.mktemp("thinker") / "model")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VllmEngine]:
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, HOST_BYTES)
    engine = build(wire.replace(spec(folder), reasoning_parser="qwen3"))
    awake(engine)
    yield engine
    engine.close()
    build.close()


def asked(salt: str) -> bytes:
    from vllm.sampling_params import StructuredOutputsParams

    structured = StructuredOutputsParams(regex=f"[0-9]{{{DIGITS}}}")
    structured._backend = "xgrammar"  # as vLLM's front half decides
    sampling = dict(temperature=1, seed=4, max_tokens=32, stop_token_ids=[0], thinking_token_budget=BUDGET)
    return payload(PROMPT, salt, structured_outputs=structured, **sampling)


def say(engine: VllmEngine, made: Sequence[int] = (), salt: str = "") -> list[int]:
    add(engine, A, asked(salt), made)
    return tokens(drive({"": engine}, random.Random(0))[A])


def test_what_follows_the_thinking_matches_the_grammar_and_the_thinking_need_not(
    engine: VllmEngine, folder: Path
) -> None:
    from transformers import AutoTokenizer

    whole = say(engine)
    at = whole.index(END_THINK)
    decode = AutoTokenizer.from_pretrained(folder).decode
    assert at == BUDGET and not re.fullmatch(r"\d+", decode(whole[:at]))
    assert re.fullmatch(rf"\d{{{DIGITS}}}", decode([token for token in whole[at + 1 :] if token]))


def test_a_request_that_is_taken_up_in_or_behind_its_thinking_says_what_it_says_in_one_go(engine: VllmEngine) -> None:
    whole = say(engine)
    for cut in range(1, len(whole) - 1):
        assert say(engine, whole[:cut], salt=f"{cut}") == whole[cut:], cut


def test_a_request_that_is_parked_after_each_token_says_the_same(engine: VllmEngine) -> None:
    whole = say(engine)
    add(engine, A, asked("parked"))
    said: list[int] = []
    while engine.busy():
        said += tokens(engine.step())
        awake(asleep(engine))
    assert said == whole
