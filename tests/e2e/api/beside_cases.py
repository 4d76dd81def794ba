"""Requests to both vLLM's API server and the gateway: tests/e2e/api/test_against_vllm.py compares the answers.

Every generating request is greedy or has a seed, so that both servers must make the same tokens.
"""

from __future__ import annotations

from typing import Any

from deploy.demo.corpus import TOOL
from tests.e2e.api.beside import Case
from tests.e2e.thinker import END_THINK

CHAT, BATCH, COMPLETIONS = "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

OSLO = [{"role": "user", "content": "What is the weather in Oslo?"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": [{"type": "text", "text": "What is the weather in Lima?"}]},
]
LONG = [{"role": "user", "content": "What is the weather in Oslo and in Lima and in Rome? " * 12}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}  # the reasoning parser takes the whole text for content
STOPS_THINKING = {"logit_bias": {str(END_THINK): 100}}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
OTHER = {"type": "function", "function": {"name": "x"}}
FLAT_TOOL = {"type": "function", **TOOL["function"]}
CLAUDE_TOOL = {
    "name": TOOL["function"]["name"],
    "description": TOOL["function"].get("description", ""),
    "input_schema": TOOL["function"]["parameters"],
}
NAMED = {"type": "function", "function": {"name": TOOL["function"]["name"]}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def chat(name: str, messages: object = OSLO, status: int = 200, **body: Any) -> Case:
    return Case(f"chat: {name}", CHAT, {"messages": messages, **GREEDY, **body}, status)


def completion(name: str, prompt: object = "The weather", status: int = 200, **body: Any) -> Case:
    return Case(f"completions: {name}", COMPLETIONS, {"prompt": prompt, **GREEDY, **body}, status)


def response(name: str, said: object = "What is the weather in Oslo?", status: int = 200, **body: Any) -> Case:
    return Case(
        f"responses: {name}", RESPONSES, {"input": said, "temperature": 0, "max_output_tokens": 24, **body}, status
    )


def message(name: str, messages: object = OSLO, status: int = 200, path: str = MESSAGES, **body: Any) -> Case:
    settings = {} if path == COUNT else {"temperature": 0, "max_tokens": 24}
    return Case(f"{path.removeprefix('/v1/')}: {name}", path, {"messages": messages, **settings, **body}, status)


def batch(name: str, conversations: object, status: int = 200, **body: Any) -> Case:
    return Case(f"batch: {name}", BATCH, {"messages": conversations, **GREEDY, **body}, status)


THINKING = [
    chat("a role that nobody knows", [{"role": "nobody", "content": "x"}]),
    chat("thinking that does not end"),
    chat("thinking that ends by a budget", max_tokens=40, thinking_token_budget=8),
    chat("thinking that ends by a budget, streamed", max_tokens=40, thinking_token_budget=8, **USAGE),
    chat("no thinking", **PLAIN),
    chat("no reasoning in the answer", max_tokens=40, thinking_token_budget=8, include_reasoning=False),
    chat("a grammar without thinking", **PLAIN, **FORMAT),
    chat("a grammar behind thinking that ends at once", max_tokens=40, **STOPS_THINKING, **FORMAT),
    chat("a grammar behind thinking", max_tokens=60, thinking_token_budget=8, **FORMAT),
    chat("a grammar behind thinking, streamed", max_tokens=60, thinking_token_budget=8, **FORMAT, **USAGE),
    chat("a choice behind thinking", thinking_token_budget=4, structured_outputs={"choice": ["Oslo", "Lima"]}),
    chat("a tool behind thinking", thinking_token_budget=6, max_tokens=60, tools=[TOOL], tool_choice=NAMED),
    response("thinking that does not end"),
    response("thinking that does not end, streamed", stream=True),
    message("thinking that does not end"),
    message("thinking that does not end, streamed", stream=True),
    batch("thinking", [OSLO, TALK]),
]
TOOLS = [
    chat("a tool that the model chooses", tools=[TOOL], max_tokens=60, **PLAIN),
    chat("a tool that the model chooses, streamed", tools=[TOOL], max_tokens=60, **PLAIN, **USAGE),
    chat("a named tool", tools=[TOOL], tool_choice=NAMED, max_tokens=60, **PLAIN),
    chat("a named tool, streamed", tools=[TOOL], tool_choice=NAMED, max_tokens=60, **PLAIN, **USAGE),
    chat("a required tool", tools=[TOOL], tool_choice="required", max_tokens=60, **PLAIN),
    chat("no tool", tools=[TOOL], tool_choice="none", max_tokens=60, **PLAIN),
    chat(
        "the answer of a tool",
        [
            *OSLO,
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "call-1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call-1", "content": "rain"},
        ],
        **PLAIN,
    ),
    response("a tool", tools=[FLAT_TOOL], max_output_tokens=60),
    message("a tool", tools=[CLAUDE_TOOL], max_tokens=60),
    message("a tool that must be called", tools=[CLAUDE_TOOL], tool_choice={"type": "any"}, max_tokens=60),
]
SAMPLING = [
    chat("a talk", TALK, **PLAIN),
    chat("a stream with usage", **PLAIN, **USAGE),
    chat("a stream without usage", stream=True, **PLAIN),
    chat("a stream that tells usage again and again", **PLAIN, **USAGE | {"stream_options": {"include_usage": True}}),
    chat("logprobs", logprobs=True, top_logprobs=3, max_tokens=6, **PLAIN),
    chat("logprobs, streamed", logprobs=True, top_logprobs=2, max_tokens=6, **PLAIN, **USAGE),
    chat("three answers from a seed", n=3, seed=7, temperature=1.2, **PLAIN),
    chat("two answers from a seed, streamed", n=2, seed=7, temperature=1.2, max_tokens=8, **PLAIN, **USAGE),
    chat("a stop", stop=["a"], **PLAIN),
    chat("a stop that is kept", stop=["a"], include_stop_str_in_output=True, **PLAIN),
    chat("token ids", return_token_ids=True, max_tokens=5, **PLAIN),
    chat("penalties", frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2, **PLAIN),
    chat(
        "a continued answer",
        [*OSLO, {"role": "assistant", "content": "It"}],
        add_generation_prompt=False,
        continue_final_message=True,
        **PLAIN,
    ),
    chat("an echo", echo=True, add_generation_prompt=True, **PLAIN),
    completion("greedy"),
    completion("several prompts", ["The", "A"], max_tokens=5),
    completion("token ids as a prompt", [5, 6, 7], max_tokens=5),
    completion("several answers from a seed", n=2, seed=3, temperature=1.0),
    completion("logprobs", logprobs=3, max_tokens=5),
    completion("an echo with logprobs", echo=True, logprobs=1, max_tokens=3),
    completion("logprobs of the prompt", prompt_logprobs=1, max_tokens=2),
    completion("a stream with usage", **USAGE),
    completion("logprobs, streamed", logprobs=2, max_tokens=5, **USAGE),
    completion("a stop", stop=["e"], max_tokens=40),
    completion("a stop token", stop_token_ids=[10, 11, 12], max_tokens=40),
    completion("min_tokens", min_tokens=10, max_tokens=20),
    completion("top_k, top_p and min_p from a seed", top_k=20, top_p=0.9, min_p=0.01, seed=5, temperature=1.0),
    completion("a regular expression", structured_outputs={"regex": "[0-9]{4}"}),
    completion("a choice", structured_outputs={"choice": ["rain", "sun"]}),
    completion("a JSON schema", structured_outputs={"json": CITY}, max_tokens=40),
    completion("ignore_eos", ignore_eos=True, max_tokens=40),
    response("instructions", instructions="Be brief."),
    response("a talk", [{"role": "user", "content": "Hello"}]),
    response(
        "a format", text={"format": {"type": "json_schema", "name": "place", "schema": CITY}}, max_output_tokens=60
    ),
    message("a system prompt", system="Be brief."),
    message("a stop", stop_sequences=["a"]),
    batch("two talks", [OSLO, TALK], **PLAIN),
    batch("logprobs", [OSLO, OSLO], logprobs=True, top_logprobs=1, max_tokens=4, **PLAIN),
]
CACHE = [  # asked twice: the second request finds the blocks of the first
    *(chat(f"a long prompt, {time}", LONG, max_tokens=4, **PLAIN) for time in ("cold", "cached")),
    *(message(f"another long prompt, {time}", LONG[:] + TALK[2:], max_tokens=4) for time in ("cold", "cached")),
    *(
        message(f"a third long prompt, streamed, {time}", LONG + LONG, max_tokens=4, stream=True, system="Mind.")
        for time in ("cold", "cached")
    ),
]
TOKENS = [
    Case("tokenize: a text", TOKENIZE, {"prompt": "The weather in Oslo"}),
    Case("tokenize: a text with strings", TOKENIZE, {"prompt": "The weather", "return_token_strs": True}),
    Case("tokenize: messages", TOKENIZE, {"messages": OSLO}),
    Case("tokenize: messages with tools", TOKENIZE, {"messages": OSLO, "tools": [TOOL]}),
    Case("detokenize: tokens", DETOKENIZE, {"tokens": [40, 50, 60]}),
    message("messages", path=COUNT),
    message("tools and a system prompt", path=COUNT, tools=[CLAUDE_TOOL], system="Be brief."),
]
REFUSED = [
    chat("a temperature below 0", temperature=-1, status=400),
    chat("no tokens", max_tokens=0, status=400),
    chat("too long a prompt", [{"role": "user", "content": "word " * 3000}], status=400),
    chat("messages that are none", "hello", status=400),
    chat("no messages", [], status=400),
    chat("an image", [{"role": "user", "content": [IMAGE]}], status=400),
    chat("a grammar that is none", structured_outputs={"grammar": "root ::= ("}, status=400, **PLAIN),
    chat("a regular expression that is none", structured_outputs={"regex": "("}, status=400, **PLAIN),
    chat("top_logprobs without logprobs", top_logprobs=3, status=400),
    chat("a tool that is not there", tools=[TOOL], tool_choice=OTHER, status=400),
    chat("usage without a stream", stream_options={"include_usage": True}, status=400),
    completion("a token outside the vocabulary", [100000], status=400),
    completion("an empty prompt", "", status=400),
    completion("an n of 0", n=0, status=400),
    completion("a stream that is refused", temperature=-1, stream=True, status=400),
    response("a temperature below 0", temperature=-1, status=400),
    response("an answer before that is not there", previous_response_id="resp_none", status=404),
    message("no max_tokens", max_tokens=None, status=400),
    message("too long a prompt", [{"role": "user", "content": "word " * 3000}], status=400),
    message("messages that are none", "hello", status=400, path=COUNT),
    batch("two answers each", [OSLO], n=2, status=400),
    batch("a talk that is none", [[]], status=400),
    Case("tokenize: nothing", TOKENIZE, {}, 400),
    Case("detokenize: words", DETOKENIZE, {"tokens": ["a"]}, 400),
    Case("chat: a model that is not there", CHAT, {"model": "nope", "messages": OSLO}, 404),
    Case("completions: a model that is not there", COMPLETIONS, {"model": "nope", "prompt": "x"}, 404),
    Case("messages: a model that is not there", MESSAGES, {"model": "nope", "messages": OSLO, "max_tokens": 4}, 404),
    Case("tokenize: a model that is not there", TOKENIZE, {"model": "nope", "prompt": "x"}, 404),
]
CASES = [
    Case("models", "/v1/models", method="GET"),
    *THINKING,
    *TOOLS,
    *SAMPLING,
    *CACHE,
    *TOKENS,
    *REFUSED,
]
