"""Both ways on the whole platform: equal answers, told apart by `Server-Timing`, and a bill for clients that leave."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx

from deploy.demo.corpus import read_corpus
from tests.e2e.api.test_left import rows_of
from tests.e2e.conftest import Platform

QUESTION = read_corpus("faq").lessons[0].questions[0]
CHAT = {"model": "faq", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "seed": 1}
TEXT = {"model": "faq", "prompt": "hello", "temperature": 0, "max_tokens": 12, "stop": ["zzz"]}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
_OWN = re.compile(r'"(id|created)":("[^"]*"|\d+)')
READ = 20  # events, after which a client leaves


def asked(platform: Platform, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Ask. Returns the way that the request took, and the answer without ids and times."""
    answer = platform.request("POST", path, body, platform.keys["acme"])
    assert answer.status_code == 200, answer.text
    found = re.search(r'way;desc="(\w+)"', answer.headers["server-timing"])
    assert found is not None
    return found[1], _OWN.sub("", answer.text)


def joined(answer: str) -> tuple[str, list[Any]]:
    """The text of a stream, however cut, and what the stream says besides."""
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    return text, [event["usage"] for event in events if event.get("usage")] + [choices[-1]["finish_reason"]]


def cleaned(answer: str) -> str:
    return answer.replace("{,", "{").replace(",,", ",")


def test_both_ways_give_one_answer(platform: Platform) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        asked(platform, path, body)  # from now on the prompt is in the prefix cache
        way, fast = asked(platform, path, body)
        other, vllm = asked(platform, path, body | {"echo": False} | {"unknown_field": 1})
        assert (way, other) == ("fast", "vllm")
        assert fast == vllm
        way, fast = asked(platform, path, body | USAGE)
        other, vllm = asked(platform, path, body | USAGE | {"unknown_field": 1})
        assert (way, other) == ("fast", "vllm")
        assert joined(cleaned(fast)) == joined(cleaned(vllm))
    shown = platform.get("/api/v1/metrics").text
    for way in ("fast", "vllm"):
        assert re.search(rf'staccato_request_ways_total{{way="{way}"}} [1-9]', shown)


def test_a_client_that_leaves_the_fast_way_pays_for_the_computed_tokens(platform: Platform) -> None:
    before = [row for row in rows_of(platform, "faq") if row["finish"] == "cancelled"]
    body = TEXT | {"max_tokens": 80, "ignore_eos": True, "stream": True, "n": 2, "temperature": 1}
    headers = {"authorization": f"Bearer {platform.keys['acme']}"}
    with httpx.Client(base_url=platform.url, headers=headers, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = (line for line in response.iter_lines() if line.startswith("data: {"))
            for _, _ in zip(range(READ), lines, strict=False):
                pass
    new: list[Any] = []

    def booked() -> bool:
        new[:] = [row for row in rows_of(platform, "faq") if row["finish"] == "cancelled"][len(before) :]
        return bool(new)

    platform.until(booked)
    assert len(new) == 1 and READ <= new[0]["output_tokens"] < 160 and new[0]["prompt_tokens"] > 0
