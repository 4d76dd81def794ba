"""The fast way and vLLM's handlers answer alike: equal bytes but for times, equal usage, equal errors.

Hypothesis makes bodies of requests and the deeds of an engine; both ways of a front get both. The fast way may leave a
request to vLLM's handlers, and the share of the fast way is counted.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from gateway.core.way import CHAT, COMPLETION, FAST
from store.contract.wire import Finish
from tests.gateway.vllm.tokenisers import MAKERS, MARK, write_tokeniser
from tests.gateway.vllm.ways import BothWays, Script, Step

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the front
FEW, MANY = 80, 1000  # requests for each tokeniser
FAST_SHARE_MIN = 0.7
TAKEN: Counter[str] = Counter()  # requests by way


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────

DROPPED = "x-anthropic-billing-header: a"  # a line of a system message that vLLM drops
SAID = st.text(st.sampled_from("ab ceh.,'\n\"\\<>é日😀\x00\x1f"), max_size=12)
TEXTS = st.one_of(
    SAID,
    st.sampled_from(
        ["hello", "the dont", f"a{MARK}b", "</s> x", "<tool>", " two  spaces ", DROPPED, f"{DROPPED}\nhello"]
    ),
)
CONTENTS = st.one_of(
    TEXTS, st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXTS), min_size=1, max_size=2)
)
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENTS}, optional={"name": st.just("ann")}
)
BOOLS, NONE = st.booleans(), st.none()
STOPS = st.sampled_from(["e", "he", " ", "ba", "ab", "�", "\n", "😀", "</s>"])
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.one_of(NONE, st.integers(1, 40)),
    "temperature": st.one_of(NONE, st.floats(0, 2), st.integers(0, 2)),
    "top_p": st.one_of(NONE, st.floats(0.1, 1)),
    "min_p": st.floats(0, 1),
    "top_k": st.one_of(NONE, st.integers(-1, 50)),
    "frequency_penalty": st.one_of(NONE, st.floats(-2, 2)),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "seed": st.one_of(NONE, st.integers(-(1 << 63), (1 << 63) - 1)),
    "n": st.sampled_from([1, 1, 2, 3]),
    "stop": st.one_of(NONE, STOPS, st.lists(STOPS, max_size=3)),
    "stop_token_ids": st.one_of(NONE, st.lists(st.integers(0, 300), max_size=3)),
    "logit_bias": st.one_of(NONE, st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=3)),
    "min_tokens": st.integers(0, 4),
    "ignore_eos": BOOLS,
    "include_stop_str_in_output": BOOLS,
    "skip_special_tokens": BOOLS,
    "spaces_between_special_tokens": BOOLS,
    "user": st.one_of(NONE, st.just("me")),
    "service_tier": st.just("auto"),
}
STREAMS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.just({"stream": False}),
    st.just({"stream": True}),
    st.builds(
        lambda usage, each: {
            "stream": True,
            "stream_options": {"include_usage": usage, "continuous_usage_stats": each},
        },
        st.one_of(NONE, BOOLS),
        st.one_of(NONE, BOOLS),
    ),
)
# Fields and values left to vLLM's handlers by the fast way: many are errors of the client.
ODD: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"temperature": 9},
        {"temperature": "1"},
        {"top_p": 0},
        {"max_tokens": 0},
        {"max_tokens": 100_000},
        {"n": 0},
        {"n": 2, "temperature": 0},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"stop": ""},
        {"min_tokens": 50, "max_tokens": 3},
        {"stream_options": {"include_usage": True}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"100000": 1}},
        {"stop_token_ids": [-1]},
        {"seed": 1 << 70},
        {"messages": []},
        {"messages": [{"role": "user", "content": "a " * 400}]},
        {"messages": [{"role": "user", "content": "a" * 90}] * 60},
        {"prompt": ""},
        {"prompt": [10**6]},
        {"prompt": "a" * 5000},
        {"prompt": "a " * 400},
        {"prompt": ["a"]},
        {"unknown_field": 1},
        {"ignore_eos": None},
        {"user": 5},
    ]
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """The path of a request, and the body."""
    path = draw(st.sampled_from([CHAT, COMPLETION]))
    names = draw(st.lists(st.sampled_from(sorted(SAMPLING)), max_size=6, unique=True))
    body = {"model": "faq"} | draw(st.fixed_dictionaries({name: SAMPLING[name] for name in names})) | draw(STREAMS)
    if path == CHAT:
        body["messages"] = draw(st.lists(TURNS, min_size=1, max_size=3))
        if "max_tokens" in body and draw(BOOLS):
            body["max_completion_tokens"] = body.pop("max_tokens")
    else:
        body["prompt"] = draw(st.one_of(TEXTS.filter(bool), st.lists(st.integers(0, 290), min_size=1, max_size=20)))
    if draw(st.integers(0, 9)) == 6:  # hypothesis draws the ends of a range more often than a tenth of the time
        for odd in draw(st.lists(ODD, min_size=1, max_size=2)):  # both ways tell the same fault
            body |= odd
    return path, body


TOKENS = st.lists(st.one_of(st.integers(0, 310), st.integers(0, 767), st.just(10**6)), min_size=1, max_size=3)


@st.composite
def scripts(draw: st.DrawFn, answers: int) -> Script:
    """The deeds of an engine for a request of some answers."""
    steps = draw(
        st.lists(st.builds(Step, st.dictionaries(st.integers(0, answers - 1), TOKENS, min_size=1), BOOLS), max_size=8)
    )
    last = Step({index: draw(TOKENS) for index in draw(st.permutations(range(answers)))}, draw(BOOLS))
    script = Script((*steps, last), cached=draw(st.integers(0, 3)))
    finish = draw(st.sampled_from([Finish.LENGTH, Finish.LENGTH, Finish.STOP, Finish.ABORT, Finish.REPETITION]))
    reason = draw(st.sampled_from([None, 7])) if finish is Finish.STOP else None
    fault = draw(st.integers(0, 19))
    if fault == 18:
        return replace(script, refusal="the runtime takes no such request")
    if fault in (9, 19):
        return replace(script, error="the engine failed", refused=draw(BOOLS))
    return replace(script, finish=finish, stop_reason=reason)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, bytes, Script, int]:
    path, body = draw(bodies())
    n = body.get("n")
    answers = n if isinstance(n, int) and n > 0 else 1
    return path, json.dumps(body, ensure_ascii=draw(BOOLS)).encode(), draw(scripts(answers)), answers


# ── both ways ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=MAKERS)
def ways(request: pytest.FixtureRequest, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> BothWays:
    folder = write_tokeniser(tmp_path_factory.mktemp("tokenisers") / request.param, request.param)
    return runner.run(BothWays.over(folder))


def compare(runner: asyncio.Runner, ways: BothWays, case: tuple[str, bytes, Script, int]) -> None:
    path, body, script, answers = case

    async def both() -> Any:
        fast = await ways.ask(path, body, script, answers, True)
        return fast, await ways.ask(path, body, script, answers, False)

    fast, vllm = runner.run(both())
    TAKEN[fast.way] += 1
    event(f"{fast.way}, {fast.status}")
    assert replace(fast, way=vllm.way) == vllm


ANY = dict(database=None, suppress_health_check=list(HealthCheck))


@given(case=cases())
@settings(max_examples=FEW, **ANY)  # type: ignore[arg-type]
def test_both_ways_answer_alike(runner: asyncio.Runner, ways: BothWays, case: tuple[str, bytes, Script, int]) -> None:
    compare(runner, ways, case)


@pytest.mark.long
@given(case=cases())
@settings(max_examples=MANY, **ANY)  # type: ignore[arg-type]
def test_both_ways_answer_thousands_alike(
    runner: asyncio.Runner, ways: BothWays, case: tuple[str, bytes, Script, int]
) -> None:
    compare(runner, ways, case)


def test_most_requests_take_the_fast_way() -> None:
    asked = sum(TAKEN.values())
    assert asked == 0 or TAKEN[FAST] / asked >= FAST_SHARE_MIN, TAKEN
