"""Limits as a tenant with the official OpenAI client meets them, on the whole platform."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.conftest import AWAKE, READY_S, Platform

QUESTION: Any = [{"role": "user", "content": "Tell me all that you know."}]


def limited(platform: Platform, name: str, **limits: object) -> openai.OpenAI:
    """Make a tenant with `limits` and a deployment `bot`. Returns a client that does not retry."""
    platform.tenant(name)
    response = platform.request("PATCH", f"/api/v1/tenants/{name}", {"limits": limits})
    assert response.status_code == 200, response.text
    platform.deploy(name, "bot", "faq", **AWAKE)
    return platform.client(name, max_retries=0)


def ask(client: openai.OpenAI, max_tokens: int = 1, **more: Any) -> Any:
    """Ask for exactly `max_tokens` tokens."""
    more["extra_body"] = {"ignore_eos": True}
    return client.chat.completions.create(model="bot", messages=QUESTION, max_tokens=max_tokens, **more)


def test_a_minute_has_so_many_requests_and_a_client_that_waits_as_told_goes_on(platform: Platform) -> None:
    client = limited(platform, "hasty", requests_per_minute=30)
    raw = client.chat.completions.with_raw_response.create(model="bot", messages=QUESTION, max_tokens=1)
    assert raw.headers["x-ratelimit-limit-requests"] == "30"
    assert int(raw.headers["x-ratelimit-remaining-requests"]) == 29
    with pytest.raises(openai.RateLimitError, match="30 requests a minute") as caught:
        for _ in range(40):
            ask(client)
    assert caught.value.code == "rate_limit_exceeded" and caught.value.type == "requests"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 2
    assert ask(client.with_options(max_retries=2)).usage.completion_tokens == 1


def test_tokens_are_reserved_at_once_and_settled_at_the_end(platform: Platform) -> None:
    client = limited(platform, "wordy", tokens_per_minute=400)
    raw = client.chat.completions.with_raw_response.create(model="bot", messages=QUESTION, max_tokens=5)
    assert raw.headers["x-ratelimit-limit-tokens"] == "400" and int(raw.headers["x-ratelimit-remaining-tokens"]) < 396
    assert ask(client, 200).usage.completion_tokens == 200
    with pytest.raises(openai.RateLimitError) as caught:
        ask(client, 300, stream=True)
    assert caught.value.type == "tokens" and int(caught.value.response.headers["retry-after"]) > 1
    assert ask(client, 50).usage.completion_tokens == 50


def test_a_budget_ends_a_stream_in_its_middle_and_the_bill_is_what_came(platform: Platform) -> None:
    client = limited(platform, "thrifty", monthly_budget={"amount": "0.120"})
    platform.post("/api/v1/prices", {"prompt_pico": 10**9, "output_pico": 10**9, "tenant": "thrifty"})
    time.sleep(4.5)  # gateways know a price within this time
    chunks = list(ask(client, 600, stream=True, stream_options={"include_usage": True}))
    usage = chunks[-1].usage
    assert usage.prompt_tokens + usage.completion_tokens == 120 and usage.completion_tokens > 50
    (last,) = [choice for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert last.finish_reason == "length" and last.model_extra["stop_reason"] == "budget_exhausted"

    with pytest.raises(openai.RateLimitError, match="budget of 0.120 USD is spent") as caught:
        ask(client.with_options(max_retries=5))  # the answer tells the client not to retry
    assert caught.value.code == "budget_exhausted" and caught.value.type == "insufficient_quota"

    def booked() -> dict[str, int]:
        return platform.usage("thrifty")

    expected = {"requests": 1, "prompt_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
    platform.until(lambda: booked() == expected)
    (row,) = platform.get("/api/v1/usage", key=platform.keys["thrifty"]).json()["data"]
    assert row["amount"] == "0.120000000000"

    body = {"limits": {"monthly_budget": {"amount": "0.240"}}}
    assert platform.request("PATCH", "/api/v1/tenants/thrifty", body).status_code == 200
    assert ask(client, 5).usage.completion_tokens == 5


def test_streams_at_once_are_bounded_also_by_a_gateway_that_died(platform: Platform) -> None:
    client = limited(platform, "broad", concurrent_streams=2)

    def stream(_: int, tokens: int = 400) -> str:
        try:
            return "".join(chunk.choices[0].finish_reason or "" for chunk in ask(client, tokens, stream=True))
        except openai.RateLimitError as error:
            return f"{error.type} {error.response.headers['retry-after']}"

    with ThreadPoolExecutor(6) as threads:
        assert sorted(threads.map(stream, range(6))) == ["length"] * 2 + ["streams 1"] * 4

    left = [ask(client, 700, stream=True) for _ in range(2)]
    platform.child("gateway.app").kill()
    with pytest.raises(openai.APIError):
        for chunks in left:
            list(chunks)
    platform.until(lambda: platform.get("/readyz").status_code == 200, READY_S)
    began = time.monotonic()
    platform.until(lambda: stream(0, 1) == "length", 30)
    assert time.monotonic() - began < 25
