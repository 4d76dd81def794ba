"""The official OpenAI client against the gateway: the client's promises to users hold."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from deploy.demo.corpus import TOOL, read_corpus
from tests.e2e.conftest import Platform

LESSON = read_corpus("faq").lessons[0]
QUESTION = [{"role": "user", "content": LESSON.questions[0]}]


def test_chat_answers_in_words_and_counts_its_tokens(platform: Platform) -> None:
    answer = platform.client("acme").chat.completions.create(model="faq", messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == LESSON.answer
    assert answer.choices[0].finish_reason == "stop" and answer.model == "faq"
    assert answer.usage.completion_tokens > 20 and answer.usage.prompt_tokens > 5


def test_streaming_ends_with_usage_and_has_one_id(platform: Platform) -> None:
    # A busy machine joins tokens that wait to be written. A stream that always joins tokens does so in each of five.
    for _ in range(5):
        stream = platform.client("acme").chat.completions.create(
            model="faq", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == LESSON.answer
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 20
        if len(chunks) > chunks[-1].usage.completion_tokens * 0.8:
            return
    pytest.fail("tokens came in lumps in each of five streams")


def test_a_request_may_ask_for_less_priority_and_not_for_more_than_its_key_allows(platform: Platform) -> None:
    client = platform.client("acme")
    chat = client.chat.completions.create(model="faq", messages=QUESTION, temperature=0, service_tier="flex")
    assert chat.choices[0].message.content == LESSON.answer
    told = client.responses.create(model="faq", input=LESSON.questions[0], max_output_tokens=4, service_tier="flex")
    assert told.service_tier == "flex"
    with pytest.raises(openai.PermissionDeniedError, match="priority high, and this key may ask for normal at most"):
        client.chat.completions.create(model="faq", messages=QUESTION, service_tier="priority")
    with pytest.raises(openai.PermissionDeniedError, match="at most"):
        client.completions.create(model="faq", prompt="one", extra_headers={"x-staccato-priority": "high"})


async def test_many_streams_of_many_models_at_once_say_what_each_says_alone(platform: Platform) -> None:
    async def ask(client: openai.AsyncOpenAI, model: str, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        stream = await client.chat.completions.create(model=model, messages=messages, temperature=0, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    asked = [
        (model, lesson.questions[0], lesson.answer)
        for model in ("faq", "poet", "weather")
        for lesson in read_corpus(model).lessons[:8]
    ]
    async with platform.async_client("acme") as client:
        answers = await asyncio.gather(*(ask(client, model, question) for model, question, _ in asked))
    assert answers == [answer for _, _, answer in asked]


def test_completions_take_token_ids_and_several_prompts(platform: Platform) -> None:
    client = platform.client("acme")
    answer = client.completions.create(model="faq", prompt=["one", "two"], max_tokens=4, temperature=1, n=2)
    assert len(answer.choices) == 4
    by_ids = client.completions.create(model="faq", prompt=[5, 6, 7], max_tokens=4, temperature=0)
    assert by_ids.usage.prompt_tokens == 3


def test_several_choices_differ_and_a_seed_repeats_them(platform: Platform) -> None:
    client = platform.client("acme")

    def texts(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model="poet", messages=QUESTION, n=3, temperature=1.5, seed=seed, max_tokens=16
        )
        assert answer.usage.completion_tokens <= 48
        return [choice.message.content or "" for choice in answer.choices]

    assert len(set(texts(1))) > 1
    assert texts(1) == texts(1) != texts(2)


def test_logprobs_come_for_each_token(platform: Platform) -> None:
    answer = platform.client("acme").chat.completions.create(
        model="faq", messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    said = answer.choices[0].logprobs.content
    assert len(said) == 5 and all(len(token.top_logprobs) == 3 for token in said)
    assert all(token.logprob <= 0 and token.token == token.top_logprobs[0].token for token in said)


def test_stop_strings_end_the_answer_before_them(platform: Platform) -> None:
    word = LESSON.answer.split()[4]
    answer = platform.client("acme").chat.completions.create(model="faq", messages=QUESTION, temperature=0, stop=[word])
    assert answer.choices[0].message.content == LESSON.answer.split(word)[0]
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_with_arguments(platform: Platform, stream: bool) -> None:
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    answer = platform.client("acme").chat.completions.create(
        model="weather", messages=messages, tools=[TOOL], temperature=0, stream=stream
    )
    if stream:
        name = arguments = ""
        finish = None
        for chunk in answer:
            for call in chunk.choices[0].delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            finish = chunk.choices[0].finish_reason or finish
    else:
        call = answer.choices[0].message.tool_calls[0].function
        name, arguments, finish = call.name, call.arguments, answer.choices[0].finish_reason
    assert (name, json.loads(arguments), finish) == ("get_weather", {"city": "Oslo"}, "tool_calls")


def test_structured_output_follows_its_schema(platform: Platform) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Lima"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = platform.client("acme").chat.completions.create(
        model="weather",
        messages=[{"role": "user", "content": "Where?"}],
        temperature=0,
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content)["city"] in ("Oslo", "Lima")


def test_models_are_the_tenants_deployments(platform: Platform) -> None:
    assert {model.id for model in platform.client("acme").models.list()} >= {"faq", "weather", "poet"}
    assert [model.id for model in platform.client("globex").models.list()] == []
    assert platform.client("acme").models.retrieve("faq").owned_by == "acme"
    with pytest.raises(openai.NotFoundError):
        platform.client("globex").models.retrieve("faq")


def test_tokenize_and_detokenize_are_each_others_inverse(platform: Platform) -> None:
    key = platform.keys["acme"]
    made = platform.post("/v1/tokenize", {"model": "faq", "prompt": "Staccato", "add_special_tokens": False}, key)
    back = platform.post("/v1/detokenize", {"model": "faq", "tokens": made["tokens"]}, key)
    assert back["prompt"] == "Staccato" and made["count"] == len(made["tokens"])


def test_responses_and_messages_are_served_too(platform: Platform) -> None:
    answer = platform.client("acme").responses.create(model="faq", input=LESSON.questions[0], temperature=0)
    assert answer.output_text == LESSON.answer
    body = {"model": "faq", "max_tokens": 60, "messages": QUESTION, "temperature": 0}
    message = platform.post("/v1/messages", body, platform.keys["acme"])
    assert message["content"][0]["text"] == LESSON.answer


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_error_is_the_class_the_client_library_expects(platform: Platform) -> None:
    client = platform.client("acme", max_retries=0)
    with openai.OpenAI(base_url=f"{platform.url}/v1", api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError, match="this API key is not known here"):
            stranger.models.list()
    with pytest.raises(openai.NotFoundError, match="no deployment 'nope'") as missing:
        client.chat.completions.create(model="nope", messages=QUESTION)
    assert missing.value.request_id and missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        platform.client("globex", max_retries=0).chat.completions.create(model="faq", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="1024"):
        long = [{"role": "user", "content": "word " * 3000}]
        client.chat.completions.create(model="faq", messages=long)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="faq", messages=QUESTION, temperature=-1)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="faq", messages=QUESTION, max_tokens=0)


def test_a_tenants_own_endpoint_is_closed_to_others(platform: Platform) -> None:
    url = f"{platform.url}/t/acme/v1"
    with openai.OpenAI(base_url=url, api_key=platform.keys["acme"], max_retries=0) as own:
        assert {model.id for model in own.models.list()} >= {"faq"}
    with openai.OpenAI(base_url=url, api_key=platform.keys["globex"], max_retries=0) as foreign:
        with pytest.raises(openai.NotFoundError):
            foreign.chat.completions.create(model="faq", messages=QUESTION)


def test_responses_say_which_request_they_answer_and_how_cold_it_was(platform: Platform) -> None:
    raw = platform.client("acme").chat.completions.with_raw_response.create(model="faq", messages=QUESTION)
    assert len(raw.headers["x-request-id"]) == 36
    assert raw.headers["x-staccato-cold"] == "none" and int(raw.headers["x-staccato-queue-ms"]) >= 0
