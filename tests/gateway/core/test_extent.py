"""The extent of a request is bounded, and the refusal says the number and the bound."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.extent import (
    DENSE,
    LONG,
    PLAIN_FIELDS,
    BodyExtent,
    ExtentLimits,
    TokenizeWatch,
    _measured,
    first_excess,
    is_small,
)

LIMITS = ExtentLimits(
    answers_max=4,
    messages_max=3,
    entries_max=2,
    inputs_max=4,
    pictures_max=2,
    logprobs_max=5,
    prompt_logprobs_max=1,
    text_bytes_max=100,
    grammar_bytes_max=30,
)
URL = "data:image/png;base64," + "A" * 201
TINY = {"type": "image_url", "image_url": {"url": "data:,"}}
PICTURE = {"type": "image_url", "image_url": {"url": URL}}
RESULT = {"type": "tool_result", "content": [{"type": "image", "source": {"type": "base64", "data": URL}}] * 3}
MESSAGE = {"role": "user", "content": "a"}
TOO_MUCH: dict[str, tuple[dict[str, object], str, int, int]] = {
    "n": ({"n": 5}, "n", 5, 4),
    "n in quotes": ({"n": "16384"}, "n", 16384, 4),
    "n as a float": ({"n": 5.0}, "n", 5, 4),
    "n beyond any number": ({"n": 1e300}, "n", 1 << 53, 4),
    "best_of": ({"best_of": 9}, "n", 9, 4),
    "prompts": ({"prompt": ["a"] * 5}, "n", 5, 4),
    "prompts in tokens": ({"prompt": [[1], [2], [3]], "n": 2}, "n", 6, 4),
    "messages": ({"messages": [MESSAGE] * 4}, "messages", 4, 3),
    "conversations": ({"messages": [[MESSAGE]] * 5}, "messages", 5, 4),
    "messages of conversations": ({"messages": [[MESSAGE] * 2] * 2}, "messages", 4, 3),
    "input": ({"input": [MESSAGE] * 4}, "input", 4, 3),
    "logprobs": ({"logprobs": 6}, "logprobs", 6, 5),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 7}, "top_logprobs", 7, 5),
    "prompt_logprobs": ({"prompt_logprobs": 2}, "prompt_logprobs", 2, 1),
    "parts": ({"messages": [{"content": [{"type": "text", "text": ""}] * 4}]}, "messages", 4, 3),
    "parts beside odd messages": ({"messages": [{"content": [""] * 3}, 7]}, "messages", 4, 3),
    "calls of tools": ({"messages": [{"content": [""] * 2, "tool_calls": [{}] * 2}]}, "messages", 4, 3),
    "parts of an input": ({"input": [{"content": [""] * 2}] * 2}, "input", 4, 3),
    "biases": ({"logit_bias": {"1": 1, "2": 2, "3": 3}}, "logit_bias", 3, 2),
    "metadata": ({"metadata": dict.fromkeys("abc")}, "metadata", 3, 2),
    "further arguments": ({"vllm_xargs": dict.fromkeys("abcd", 1)}, "vllm_xargs", 4, 2),
    "stops": ({"stop_token_ids": [7, 8, 9]}, "stop_token_ids", 3, 2),
    "very many biases": ({"logit_bias": dict.fromkeys(range(DENSE + 2), 1)}, "logit_bias", DENSE + 2, 2),
    "very many messages": ({"messages": [0] * (DENSE + 1)}, "messages", 2 * DENSE + 3, 100),
    "long messages": ({"messages": ["a" * LONG] * 4}, "messages", 4 * LONG + 13, 100),
    "a long text": ({"prompt": "a" * LONG, "n": 5}, "prompt", LONG + 2, 100),
    "a long text with pictures": (
        {"messages": [{"content": "a" * LONG}, {"content": [PICTURE] * 3}]},
        "messages",
        3,
        2,
    ),
    "very many tools": ({"tools": [{}] * (DENSE + 1)}, "tools", 3 * DENSE + 4, 100),
    "very many odd messages and an image": ({"input": ["image"] + [0] * DENSE}, "input", 2 * DENSE + 9, 100),
    "many tools": ({"tools": [{}] * 4}, "tools", 4, 3),
    "pictures": ({"messages": [{"content": [PICTURE] * 3}]}, "messages", 3, 2),
    "pictures of responses": ({"input": [{"content": [{"type": "input_image", "image_url": URL}] * 3}]}, "input", 3, 2),
    "pictures in tools' results": ({"messages": [{"content": [RESULT]}]}, "messages", 3, 2),
    "pictures in an odd part": ({"messages": [{"content": [PICTURE | {"content": 5}] * 3}]}, "messages", 3, 2),
    "pictures in odd content": ({"messages": [{"content": [TINY, TINY, TINY, 7]}]}, "messages", 6, 2),
    "text beside a picture": ({"messages": [{"content": ["a" * 99, PICTURE]}]}, "messages", 151, 100),
    "text in the form of a picture": ({"prompt": URL}, "prompt", 225, 100),
    "a picture among odd messages": ({"messages": [{"content": [PICTURE]}, 7]}, "messages", 284, 100),
    "text": ({"prompt": "a" * 99}, "prompt", 101, 100),
    "choices": ({"structured_outputs": {"choice": ["yes"] * 9}}, "structured_outputs", 66, 30),
    "regex": ({"guided_regex": "a" * 29}, "guided_regex", 31, 30),
    "schema": ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", 39, 30),
    "tools": ({"tools": ["t" * 28], "tool_choice": "required"}, "tools", 32, 30),
}


TEXT = "a" * 30
# Calls for vectors and scores.
TOO_MANY_INPUTS: dict[str, tuple[dict[str, object], str, int, int]] = {
    "texts": ({"input": ["a"] * 5}, "input", 5, 4),
    "lists of tokens": ({"input": [[1, 2]] * 5}, "input", 5, 4),
    "conversations": ({"input": [[MESSAGE]] * 5}, "input", 5, 4),
    "messages": ({"input": [MESSAGE] * 4}, "input", 4, 3),
    "messages of conversations": ({"input": [[{"content": [""] * 2}] * 2] * 2}, "input", 8, 3),
    "documents": ({"query": "a", "documents": ["a"] * 5}, "documents", 5, 4),
    "queries": ({"queries": ["a"] * 5, "documents": ["a"]}, "queries", 5, 4),
    "items": ({"queries": "a", "items": ["a"] * 6}, "items", 6, 4),
    "first texts": ({"text_1": ["a"] * 5, "text_2": "a"}, "text_1", 5, 4),
    "second texts": ({"text_1": "a", "text_2": ["a"] * 5}, "text_2", 5, 4),
    "first data": ({"data_1": ["a"] * 5, "data_2": "a"}, "data_1", 5, 4),
    "second data": ({"data_1": "a", "data_2": [{"content": []}] * 5}, "data_2", 5, 4),
    "very many texts": ({"input": ["a"] * (DENSE + 2)}, "input", 4 * (DENSE + 2) + 1, 100),
    "bytes of texts": ({"input": [TEXT] * 4}, "input", 133, 100),
    "bytes of tokens": ({"input": [100] * 26}, "input", 105, 100),
    "bytes of documents": ({"query": "a", "documents": [TEXT] * 3}, "documents", 109, 100),
    "a query for each document": ({"query": TEXT, "documents": ["a"] * 3}, "query", 109, 100),
    "a query alone in a list": ({"queries": [TEXT], "documents": ["a"] * 3}, "queries", 115, 100),
    "an instruction for each text": (
        {"instruction": TEXT, "text_1": "a", "text_2": ["a"] * 3},
        "instruction",
        118,
        100,
    ),
}


def ask(body: dict[str, object]) -> BodyExtent:
    return msgspec.json.decode(json.dumps(body, separators=(",", ":")), type=BodyExtent)


@pytest.mark.parametrize("case", TOO_MUCH)
def test_what_exceeds_a_bound_is_named_with_both_numbers(case: str) -> None:
    body, field, asked, allowed = TOO_MUCH[case]
    excess = first_excess(ask(body), LIMITS)
    assert excess is not None and (excess.field, excess.asked, excess.allowed) == (field, asked, allowed)
    assert str(asked) in str(excess) and str(allowed) in str(excess)


@pytest.mark.parametrize("case", TOO_MANY_INPUTS)
def test_what_exceeds_a_bound_of_inputs_is_named_with_both_numbers(case: str) -> None:
    body, field, asked, allowed = TOO_MANY_INPUTS[case]
    excess = first_excess(ask(body), LIMITS, pools=True)
    assert excess is not None and (excess.field, excess.asked, excess.allowed) == (field, asked, allowed)
    assert str(asked) in str(excess) and str(allowed) in str(excess)


@pytest.mark.parametrize(
    "body",
    [
        {"input": "a"},
        {"input": ["a,b,c,d,e,f"] * 4},
        {"input": list(range(30))},
        {"input": [[1, 2, 3, 4, 5, 6]] * 4},
        {"input": [MESSAGE] * 3},
        {"query": TEXT, "documents": ["a", "b"]},
        {"text_1": [TEXT, "b"], "text_2": ["c", TEXT]},
        {"messages": [MESSAGE] * 3},
    ],
)
def test_inputs_within_the_bounds_pass(body: dict[str, object]) -> None:
    assert first_excess(ask(body), LIMITS, pools=True) is None


def test_a_call_of_the_most_texts_with_many_tokens_passes_the_default_bounds() -> None:
    assert first_excess(ask({"input": [[7] * 1000] * 256}), ExtentLimits(), pools=True) is None


def test_items_of_a_request_for_text_are_no_inputs() -> None:
    assert first_excess(ask({"input": [MESSAGE] * 300}), ExtentLimits()) is None


def test_a_picture_is_counted_however_its_name_is_written() -> None:
    text = b'{"messages": [{"content": [%s]}]}' % b",".join([b'{"\\u0069mage_url": {"url": "data:,"}}'] * 3)
    excess = first_excess(msgspec.json.decode(text, type=BodyExtent), LIMITS)
    assert excess is not None and (excess.asked, excess.setting) == (3, "pictures_max")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": [1, 2, 3, 4, 5, 6]},
        {"prompt": ["a", "b"], "n": 2},
        {"messages": [[MESSAGE], [MESSAGE], [MESSAGE]]},
        {"messages": [MESSAGE] * 3, "logprobs": True, "top_logprobs": 5, "n": 4},
        {"messages": [{"role": "user", "content": [PICTURE, PICTURE]}]},
        {"messages": [[{"content": [PICTURE]}], [{"content": "a"}]]},
        {"messages": [{"content": [{"type": "text", "text": '"image"'}]}]},
        {"tools": ["t" * 28], "tool_choice": "auto"},
        {"n": None, "logprobs": None},
    ],
)
def test_what_stays_within_the_bounds_passes(body: dict[str, object]) -> None:
    assert first_excess(ask(body), LIMITS) is None


@given(st.integers(1, 9000), st.sampled_from(["input_image", "image", "\\u0069mage"]))
def test_a_body_to_tokenise_is_watched_until_its_first_picture(size: int, kind: str) -> None:
    limits = ExtentLimits(tokenize_bytes_max=100)
    allowed = LONG + 100
    text = b"a" * (allowed - 30)
    pictured = text + b'{"type":"%s","image_url":"' % kind.encode() + b"A" * 9000
    watches = TokenizeWatch(limits), TokenizeWatch(limits)
    chunks = [pictured[at : at + size] for at in range(0, len(pictured), size)] if size > 99 else [pictured]
    assert not any(map(watches[0].add, chunks)) and watches[0].excess is None
    assert [watches[1].add(more) for more in (text, b"a" * 30, b"a", pictured)] == [False, False, True, True]
    excess = watches[1].excess
    assert excess is not None and (excess.asked, excess.allowed) == (allowed + 1 + len(pictured), allowed)


@pytest.mark.parametrize("slash", ["/", "\\/"])
def test_a_large_picture_beside_a_text_of_many_commas_is_no_text(slash: str) -> None:
    large = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "AAA/" * 5000}}
    body = {"messages": [{"content": [large, {"type": "text", "text": "," * DENSE}]}]}
    text = json.dumps(body, separators=(",", ":")).replace("/", slash)
    asked = msgspec.json.decode(text, type=BodyExtent)
    assert first_excess(asked, ExtentLimits(text_bytes_max=DENSE + 200)) is None


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(BodyExtent.__struct_fields__), anything), st.booleans())
def test_no_body_however_odd_is_an_error_here(body: dict[str, object], pools: bool) -> None:
    text = json.dumps(body).replace("NaN", "null").replace("-Infinity", "-1e999").replace("Infinity", "1e999")
    first_excess(msgspec.json.decode(text, type=BodyExtent), LIMITS, pools=pools)


SAID = st.text(max_size=12) | st.sampled_from(['"image', "\\", "[", ",,,,", "{"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": SAID, "content": SAID}), max_size=4)
BOUNDS = st.builds(
    ExtentLimits,
    answers_max=st.integers(0, 2),
    messages_max=st.integers(0, 6),
    entries_max=st.integers(0, 2),
    text_bytes_max=st.integers(0, 200),
    tokenize_bytes_max=st.integers(0, 200),
)
FIELDS = {"model": SAID, "prompt": SAID | anything, "messages": MESSAGES | anything, "n": st.integers(0, 3)}


@given(st.fixed_dictionaries({}, optional=FIELDS), BOUNDS, st.booleans())
def test_a_small_body_exceeds_no_bound(body: dict[str, object], limits: ExtentLimits, repeats: bool) -> None:
    text = json.dumps(body).replace("NaN", "null").replace("-Infinity", "-1e999").replace("Infinity", "1e999")
    asked = msgspec.json.decode(text, type=BodyExtent)
    if is_small(asked, limits, limits.tokenize_bytes_max if repeats else limits.text_bytes_max):
        assert [each for each in _measured(asked, limits, repeats, False) if each.asked > each.allowed] == []


@pytest.mark.parametrize(
    "body", [{"messages": [MESSAGE] * 9, "stream": True}, {"prompt": "a [", "service_tier": "flex"}]
)
def test_an_ordinary_body_is_small_and_with_any_further_field_is_measured(body: dict[str, object]) -> None:
    assert is_small(ask(body), ExtentLimits(), 2000)
    assert PLAIN_FIELDS == BodyExtent.__struct_fields__[: len(PLAIN_FIELDS)]
    for field in BodyExtent.__struct_fields__[len(PLAIN_FIELDS) :]:
        assert not is_small(ask(body | {field: 1}), ExtentLimits(), 2000)


def commas(value: object) -> int:
    """Commas between the items of the lists and objects in a value."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(0, len(items) - 1) + sum(map(commas, items))


@given(anything)
def test_values_are_counted_by_the_commas_outside_strings(value: object) -> None:
    text = "[" + "0," * DENSE + msgspec.json.encode([value, '\\",', "\\\\"]).decode() + "]"
    asked = msgspec.json.decode(f'{{"messages": {text}}}', type=BodyExtent)
    excess = first_excess(asked, ExtentLimits(messages_max=0))
    assert excess is not None and excess.asked == DENSE + commas([value, "", ""]) + 1


def test_a_tool_with_a_long_description_has_few_values_whatever_the_bound_of_messages() -> None:
    body = ask({"tools": [{"description": "," * DENSE, "parameters": dict.fromkeys("abcdefghijklmnopqrstuvwxyz")}]})
    assert first_excess(body, ExtentLimits(messages_max=1)) is None


@pytest.mark.parametrize("item", ["0", '""', "{}", "[]", "[0]", '{"content":[]}'])
@pytest.mark.parametrize("field", ["messages", "input", "tools", "prompt"])
def test_a_field_of_very_many_values_is_refused_without_being_taken_apart(field: str, item: str) -> None:
    items = ",".join([item] * (DENSE + 1))
    body = f'{{"{field}": [{items}]}}'
    excess = first_excess(msgspec.json.decode(body, type=BodyExtent), ExtentLimits())
    if (field, item) == ("prompt", "0"):
        assert excess is None, "a prompt of many tokens"
    else:
        assert excess is not None and (excess.field, excess.asked) == ("n" if field == "prompt" else field, DENSE + 1)


@given(st.integers(1, 100), st.integers(1, 100))
def test_answers_are_n_times_prompts(n: int, prompts: int) -> None:
    excess = first_excess(ask({"n": n, "prompt": ["p"] * prompts}), ExtentLimits(answers_max=0))
    assert excess is not None and excess.asked == n * prompts


def test_what_is_only_tokenised_has_a_bound_of_its_own_and_all_texts_of_a_body_count() -> None:
    limits = ExtentLimits(text_bytes_max=100, tokenize_bytes_max=10)
    body = ask({"prompt": "a" * 20})
    assert first_excess(body, limits) is None
    excess = first_excess(body, limits, repeats=True)
    assert excess is not None and (excess.asked, excess.allowed, excess.setting) == (22, 10, "tokenize_bytes_max")
    both = first_excess(ask({"messages": ["b" * 50], "system": "c" * 60}), limits)
    assert both is not None and (both.field, both.asked, both.setting) == ("system", 54 + 62, "text_bytes_max")
    assert first_excess(ask({"tokens": [1] * 9}), limits, repeats=True) is not None
