"""Requests of a dead engine go on in a second engine: old and new tokens together equal the tokens of a single engine,
for any sampling and at any cut. Real vLLM cores."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.core.device.request import RequestId
from runtime.core.engine import BadRequest, EngineError, Output
from runtime.engine.vllm import VllmEngine
from store.contract.wire import Finish
from tests.runtime.engines import add, asleep, awake, drive, payload, spec, tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
POOL_BYTES, HOST_BYTES = 128 << 20, 256 << 20
BLOCK = 128  # tokens, vLLM's choice for a CPU
WORDS = random.Random(1)
PROMPT = [WORDS.randrange(3, 500) for _ in range(BLOCK - 8)]  # the ninth token begins a block
CUTS = [1, 2, 7, 8, 9, -1]  # tokens made before the cut; -1: every token but the last
STOPS = list(range(0, 512, 4))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0),
    "seeded": dict(temperature=0.8, top_p=0.95, top_k=40, seed=7),
    "penalised": dict(temperature=0.7, seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    "min_tokens": dict(temperature=1, seed=5, min_tokens=12, stop_token_ids=STOPS),
    "regex": dict(temperature=1, seed=11, regex="([a-m]|[n-z]{2}){6}[0-9]{5}-[A-Z]{5}", stop_token_ids=[1]),
    "json": dict(temperature=0, json={"type": "array", "items": {"type": "boolean"}, "minItems": 6, "maxItems": 9}),
    "logprobs": dict(temperature=0.9, seed=13, logprobs=2),
}


@pytest.fixture(scope="module")
def engines(random_models: dict[str, Path]) -> Iterator[dict[str, VllmEngine]]:
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, HOST_BYTES)
    engines = {name: build(spec(path)) for name, path in random_models.items()}
    for engine in engines.values():
        awake(engine)
    yield engines
    for engine in engines.values():
        engine.close()
    build.close()


def asked(kind: str, salt: str = "", **more: Any) -> bytes:
    from vllm.sampling_params import StructuredOutputsParams

    sampling = {"max_tokens": 24, "ignore_eos": kind not in ("regex", "json"), **KINDS[kind], **more}
    structure = {key: sampling.pop(key) for key in ("regex", "json") if key in sampling}
    if structure:
        structured = StructuredOutputsParams(**structure)
        structured._backend = "xgrammar"  # as vLLM's front half decides
        sampling["structured_outputs"] = structured
    return payload(PROMPT, salt, **sampling)


def say(engine: VllmEngine, kind: str, made: Sequence[int] = (), salt: str = "") -> list[Output]:
    add(engine, RequestId("a"), asked(kind, salt), made)
    return drive({"": engine}, random.Random(0))[RequestId("a")]


def logprobs(outputs: Sequence[Output]) -> list[tuple[list[int], list[float]]]:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.serial_utils import MsgpackDecoder

    decoded = [MsgpackDecoder(EngineCoreOutput).decode(output.logprobs).new_logprobs for output in outputs]
    return [(lists.logprob_token_ids[0].tolist(), lists.logprobs[0].tolist()) for lists in decoded]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["llama", "qwen3", "opt"])
def test_what_was_made_and_what_comes_is_what_is_said_in_one_go(
    engines: dict[str, VllmEngine], model: str, kind: str
) -> None:
    whole = say(engines[model], kind)
    said = tokens(whole)
    assert len(said) > 12 and len(set(said)) > 4, f"{said} proves nothing"
    for cut, salt in [*((cut, f"{cut}") for cut in CUTS), (9, "")]:  # a separate salt: no prefix is found
        rest = say(engines[model], kind, said[:cut], salt)
        assert tokens(rest) == said[cut:], (cut, said)
        assert [(o.finish, o.stop_reason) for o in rest] == [(o.finish, o.stop_reason) for o in whole[cut:]]
        if kind == "logprobs":
            for (ids, values), (others, expected) in zip(logprobs(rest), logprobs(whole[cut:]), strict=True):
                assert ids == others and values == pytest.approx(expected, abs=1e-4)


def test_a_resumed_request_may_be_resumed_again(engines: dict[str, VllmEngine]) -> None:
    for kind in ("seeded", "regex"):
        whole = tokens(say(engines["llama"], kind))
        add(engines["llama"], RequestId("a"), asked(kind), whole[:3])
        said = whole[:3]
        while len(said) < 9:
            for output in engines["llama"].step():
                said += output.tokens
        engines["llama"].abort([RequestId("a")])  # and the name again, before the runner has heard of the abort
        assert said + tokens(say(engines["llama"], kind, said)) == whole


@pytest.mark.parametrize("seed", range(3))
def test_resumed_requests_mix_with_fresh_ones_and_with_parking(engines: dict[str, VllmEngine], seed: int) -> None:
    rng, engine = random.Random(seed), engines["qwen3"]
    whole = {kind: tokens(say(engine, kind)) for kind in KINDS}
    said: dict[RequestId, list[int]] = {}
    todo = [(kind, cut) for kind in KINDS for cut in (0, rng.randrange(1, 12))]
    rng.shuffle(todo)
    while todo or engine.busy():
        if todo and rng.random() < 0.4:
            kind, cut = todo.pop()
            id = RequestId(f"{kind}/{cut}")
            said[id] = whole[kind][:cut]
            add(engine, id, asked(kind), said[id])
            if rng.random() < 0.3:  # before the first step in the new engine
                awake(asleep(engine))
        for output in engine.step():
            said[output.request] += output.tokens
        if rng.random() < 0.2:
            awake(asleep(engine), rng.randint(1, 3))
    assert said == {id: whole[id.split("/")[0]] for id in said} and len(said) == 2 * len(KINDS)
    assert engine._scheduler.recomputed == 0
    assert engine._scheduler.blocks.used_blocks == engine._scheduler._slabs.taken == 0


def test_a_resumed_request_that_is_aborted_leaves_nothing(engines: dict[str, VllmEngine]) -> None:
    engine = engines["opt"]
    for steps in range(3):
        add(engine, RequestId("a"), asked("regex"), tokens(say(engine, "regex"))[:4])
        for _ in range(steps):
            engine.step()
        engine.abort([RequestId("a")])
        assert not engine.busy() and not engine._scheduler._behind
        assert engine._scheduler.blocks.used_blocks == 0


def test_prompt_logprobs_are_not_told_twice(engines: dict[str, VllmEngine]) -> None:
    engine = engines["llama"]
    whole = tokens(say(engine, "greedy"))
    engine.add(RequestId("a"), asked("greedy", prompt_logprobs=1), whole[:5])
    outputs = drive({"": engine}, random.Random(0))[RequestId("a")]
    assert whole[:5] + tokens(outputs) == whole
    assert all(output.logprobs is None for output in outputs)


def test_a_seeded_prompt_that_is_read_in_pieces_draws_nothing_for_them(random_models: dict[str, Path]) -> None:
    """vLLM takes back the draw for a piece, but a CPU's generators can't go back: the step used to fail."""
    from runtime.engine.builder import Builder

    build = Builder(POOL_BYTES, HOST_BYTES)
    whole_at_once = awake(build.build(spec(random_models["llama"])))
    in_pieces = awake(build.build(spec(random_models["llama"]), max_num_batched_tokens=48, max_num_seqs=8))
    for kind in ("seeded", "penalised"):
        said = tokens(say(whole_at_once, kind))
        assert tokens(say(in_pieces, kind)) == said
        assert said[:9] + tokens(say(in_pieces, kind, said[:9])) == said
    whole_at_once.close()
    in_pieces.close()
    build.close()


def test_an_output_that_is_whole_or_of_another_vocabulary_is_refused(engines: dict[str, VllmEngine]) -> None:
    engine = engines["llama"]
    whole = tokens(say(engine, "greedy"))
    with pytest.raises(BadRequest, match="the 24 tokens that were made before are all of its output"):
        engine.add(RequestId("a"), asked("greedy"), whole)
    with pytest.raises(BadRequest, match="the 2 tokens that were made before are all of its output"):
        engine.add(RequestId("a"), asked("greedy", stop_token_ids=[whole[1]]), whole[:2])
    for strange in (512, -1):
        with pytest.raises(BadRequest, match=rf"token {strange} was made before, but the vocabulary has 512"):
            engine.add(RequestId("a"), asked("greedy"), [5, strange])
    assert not engine.busy()


def test_an_output_that_its_grammar_forbids_ends_with_an_error(engines: dict[str, VllmEngine]) -> None:
    (output,) = say(engines["llama"], "regex", [5, 6, 7])
    assert (output.tokens, output.finish) == ([], Finish.ERROR)
    assert not engines["llama"].busy()


def test_a_name_that_is_taken_is_refused_and_its_owner_goes_on(engines: dict[str, VllmEngine]) -> None:
    engine = engines["llama"]
    whole = tokens(say(engine, "regex"))
    add(engine, RequestId("a"), asked("regex"), whole[:3])
    with pytest.raises(EngineError, match="request a is here already"):
        engine.add(RequestId("a"), asked("greedy"), [5])
    assert whole[:3] + tokens(drive({"": engine}, random.Random(0))[RequestId("a")]) == whole
