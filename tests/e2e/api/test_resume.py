"""A client takes up a stream after a lost connection: the same text, one row of the bill, and nothing for strangers."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.api.test_left import rows_of
from tests.e2e.api.test_limits import limited
from tests.e2e.conftest import Platform

TEXT = {"model": "faq", "prompt": "hello", "temperature": 0, "max_tokens": 90, "ignore_eos": True, "stream": True}
TEXT |= {"stream_options": {"include_usage": True}}
CHAT = {name: value for name, value in TEXT.items() if name != "prompt"}
CHAT |= {"messages": [{"role": "user", "content": "hello"}]}
ASKED = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT}
RESUME = {"prefer": "resume"}
UNKNOWN = "01a219b4-0000-7000-8000-000000000000"


def headers_of(platform: Platform, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {platform.keys['acme']}"} | {n.replace("_", "-"): v for n, v in more.items()}


def events(
    platform: Platform, path: str, body: dict[str, Any], headers: dict[str, str], most: int = 1 << 30
) -> tuple[httpx.Headers, list[tuple[str, Any]]]:
    """Headers of the response, and ids with data of the first `most` events; then the client breaks the connection."""
    found: list[tuple[str, Any]] = []
    with httpx.Client(base_url=platform.url, timeout=60) as client:
        with client.stream("POST", path, json=body, headers=headers) as response:
            if response.status_code != 200:
                raise AssertionError(f"{response.status_code} {response.read().decode()}")
            id = ""
            for line in response.iter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    id = value
                elif name == "data" and value != "[DONE]":
                    found.append((id, json.loads(value)))
                    if len(found) == most:
                        break
            return response.headers, found


def said(found: list[tuple[str, Any]]) -> tuple[str, list[Any], list[Any]]:
    """Text, finish reasons and usage of events."""
    choices = [choice for _, event in found for choice in event["choices"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    usages = [event["usage"] for _, event in found if event.get("usage")]
    return text, finishes, [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages]


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("most", [1, 2, 7, 30])
def test_a_broken_connection_costs_no_token_and_no_second_bill(platform: Platform, path: str, most: int) -> None:
    body = ASKED[path]
    _, whole = events(platform, path, body, headers_of(platform))
    assert {id for id, _ in whole} == {""}, "a client that did not ask for ids got ids"
    told, had = events(platform, path, body, headers_of(platform) | RESUME, most)
    assert told["preference-applied"] == "resume" and all(id for id, _ in had)
    request = told["x-request-id"]
    again = headers_of(platform, x_request_id=request, last_event_id=had[-1][0]) | RESUME
    later, rest = events(platform, path, body, again)
    assert later["x-request-id"] == request
    assert said([*had, *rest]) == said(whole)
    assert {event["id"] for _, event in (*had, *rest)} == {had[0][1]["id"]}
    assert len({event["created"] for _, event in (*had, *rest)}) == 1

    def booked() -> list[tuple[int, str]]:
        rows = [row for row in rows_of(platform, "faq") if row["request"] == request]
        return [(row["output_tokens"], row["finish"]) for row in rows]

    platform.until(lambda: booked() == [(90, "length")])
    time.sleep(1.0)  # the words of the first connection change nothing
    assert booked() == [(90, "length")]


def test_an_ended_stream_can_be_read_again_from_any_event(platform: Platform) -> None:
    body = CHAT | {"stop": ["e"], "ignore_eos": False}
    told, whole = events(platform, "/v1/chat/completions", body, headers_of(platform) | RESUME)
    for at in range(len(whole)):
        seen = whole[at][0]
        again = headers_of(platform, x_request_id=told["x-request-id"], last_event_id=seen)
        _, rest = events(platform, "/v1/chat/completions", body, again)
        assert said([*whole[: at + 1], *rest]) == said(whole)
    again = headers_of(platform, x_request_id=told["x-request-id"], last_event_id="0")
    assert said(events(platform, "/v1/chat/completions", body, again)[1]) == said(whole)


def refused(platform: Platform, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, str]:
    answer = httpx.post(f"{platform.url}/v1/completions", json=body, headers=headers, timeout=60)
    return answer.status_code, answer.json()["error"]["code"]


def resumptions(platform: Platform) -> Counter[str]:
    """Return how many resumptions the gateway has counted, by outcome."""
    families = text_string_to_metric_families(platform.get("/api/v1/metrics").text)
    found = [each for family in families for each in family.samples if each.name == "staccato_stream_resumptions_total"]
    return Counter({sample.labels["outcome"]: int(sample.value) for sample in found})


def test_nobody_but_the_owner_learns_of_a_request(platform: Platform) -> None:
    before = resumptions(platform)
    told, had = events(platform, "/v1/completions", TEXT, headers_of(platform) | RESUME, 3)
    again = headers_of(platform, x_request_id=told["x-request-id"], last_event_id=had[-1][0])
    other = platform.post("/api/v1/tenants/acme/keys", {"name": "other"})["key"]
    unknown = again | {"x-request-id": UNKNOWN}
    for headers in (again | {"authorization": f"Bearer {other}"}, unknown):
        assert refused(platform, TEXT, headers) == (404, "not_kept")
    assert refused(platform, TEXT | {"max_tokens": 80}, again) == (400, "other_request")
    rest = events(platform, "/v1/completions", TEXT, again)[1]
    assert said([*had, *rest])[1] == ["length"]
    assert resumptions(platform) - before == {"not_kept": 2, "other_request": 1, "resumed": 1}


def test_a_tenant_with_one_stream_at_once_resumes_beside_the_broken_connection(platform: Platform) -> None:
    limited(platform, "single", concurrent_streams=1, tokens_per_minute=100_000)
    told, body = {"authorization": f"Bearer {platform.keys['single']}"}, TEXT | {"model": "bot"}
    first, had = events(platform, "/v1/completions", body, told | RESUME, 3)
    again = told | {"x-request-id": first["x-request-id"], "last-event-id": had[-1][0]}
    _, rest = events(platform, "/v1/completions", body, again)
    assert said([*had, *rest])[1:] == said(events(platform, "/v1/completions", TEXT, headers_of(platform))[1])[1:]


@pytest.mark.parametrize(
    ("change", "headers", "code"),
    [
        ({}, {"last_event_id": "seven"}, "invalid_request"),
        ({}, {"last_event_id": "1.2", "x_request_id": "mine"}, "invalid_request"),
        ({"n": 2}, {}, "not_resumable"),
        ({"stream": False, "stream_options": None}, {}, "not_resumable"),
        ({"logprobs": 1}, {}, "not_resumable"),
    ],
)
def test_requests_without_ids_of_events_are_refused_in_clear_words(
    platform: Platform, change: dict[str, Any], headers: dict[str, str], code: str
) -> None:
    told = headers_of(platform, **({"x_request_id": UNKNOWN, "last_event_id": "1.2"} | headers))
    assert refused(platform, TEXT | change, told) == (400, code)


def test_a_stream_on_the_way_of_vllm_has_no_ids(platform: Platform) -> None:
    body = TEXT | {"logprobs": 1, "max_tokens": 5}
    told, found = events(platform, "/v1/completions", body, headers_of(platform) | RESUME)
    assert "preference-applied" not in told and {id for id, _ in found} == {""}
