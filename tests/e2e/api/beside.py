"""A request to two servers: both answers, with ids and times masked, and the places where the answers differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

# vLLM's server compiles for its first request with log probabilities: more than a minute beside two busy loops.
ANSWER_S = 300.0
# Fields with the name of a request or with a moment.
MASKED = {
    *("id", "created", "created_at", "completed_at", "request_id", "item_id", "call_id", "tool_call_id"),
    *("system_fingerprint", "sequence_number", "signature"),
}
# Texts and lists sent in pieces: servers may cut a stream at different tokens.
GROWING = {
    *("text", "content", "reasoning", "arguments", "delta", "thinking", "partial_json", "token_ids"),
    *("tokens", "token_logprobs", "top_logprobs", "text_offset", "logprobs"),
}
CLOSE = 2e-3  # logprobs may differ by CLOSE: servers may compute a batch in different orders


@dataclass(frozen=True)
class Case:
    """A request, and the status due from both servers. Streams have `"stream": true` in the body."""

    name: str
    path: str
    body: dict[str, Any] = field(default_factory=dict)
    status: int = 200
    method: str = "POST"

    @property
    def below_v1(self) -> Case:
        """The request on the gateway's path: vLLM has some routes beside /v1, the gateway none."""
        return self if self.path.startswith("/v1/") else replace(self, path=f"/v1{self.path}")


@dataclass(frozen=True)
class Answered:
    """An answer in a form fit for comparing."""

    status: int
    media: str
    body: Any


def ask(client: httpx.Client, case: Case, model: str) -> Answered:
    """Send the request and read the answer to the end. A body without a model asks for `model`."""
    body = {"model": model, **case.body} if case.method == "POST" else None
    answer = client.request(case.method, case.path, json=body, timeout=ANSWER_S)
    media = answer.headers.get("content-type", "").partition(";")[0]
    if media == "text/event-stream":
        return Answered(answer.status_code, media, masked(joined(list(_events(answer.text)))))
    return Answered(answer.status_code, media, masked(answer.json()))


def _events(text: str) -> Iterator[Any]:
    """Yield the data of server-sent events, without comments."""
    for line in text.splitlines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: "…" if key in MASKED and item is not None else _pieces(key, masked(item))
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [masked(item) for item in value]
    return value


def _pieces(key: str, value: Any) -> Any:
    """Join the pieces of a tool call within a delta: the number of pieces in a delta is chance."""
    return _calls(value) if key == "tool_calls" and isinstance(value, list) else value


def _calls(pieces: list[Any]) -> list[Any]:
    """Tool calls joined from pieces with equal indices."""
    found: list[Any] = []
    for piece in pieces:
        if found and "index" in piece and found[-1].get("index") == piece["index"]:
            found[-1] = _join(found[-1], piece)
        else:
            found.append(piece)
    return found


# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def joined(events: list[Any]) -> list[Any]:
    """Join neighbouring events of a kind, after sorting events by choice."""
    found: list[Any] = []
    for event in sorted(events, key=_choice):
        if found and _kind(found[-1]) == _kind(event):
            found[-1] = _join(found[-1], event)
        else:
            found.append(event)
    return found


def _choice(event: Any) -> int:
    """Index of the event's choice. Events without a choice come last."""
    if isinstance(event, dict) and "choices" in event:
        choices = event["choices"]
        return int(choices[0]["index"]) if choices else 1 << 20
    return 1 << 20


def _kind(event: Any) -> object:
    if not isinstance(event, dict):
        return event
    return event.get("type"), event.get("index"), event.get("output_index"), _choice(event)


def _join(one: Any, other: Any, key: str = "") -> Any:
    match one, other:
        case dict(), dict():
            both = {k: _join(one[k], other[k], k) if k in one and k in other else one.get(k, other.get(k)) for k in one}
            return both | {k: v for k, v in other.items() if k not in one}
        case str(), str() if key in GROWING:
            return one + other
        case list(), list() if key in GROWING:
            return one + other
        case list(), list() if key == "tool_calls":
            return _calls([*one, *other])
        case list(), list() if key == "choices" and len(one) == len(other):
            return [_join(left, right) for left, right in zip(one, other, strict=True)]
        case _:
            return one if other is None else other


# ── differences ───────────────────────────────────────────────────────────────────────────────────────────────────────


def differences(theirs: Answered, ours: Answered) -> Iterator[tuple[str, str]]:
    """Yield a JSON pointer and a text with both values, for every difference of two answers."""
    if theirs.status != ours.status:
        yield "status", f"{theirs.status}, ours {ours.status}"
    if theirs.media != ours.media:
        yield "media", f"{theirs.media}, ours {ours.media}"
    yield from _differences(theirs.body, ours.body, "")


def _differences(theirs: Any, ours: Any, place: str) -> Iterator[tuple[str, str]]:
    match theirs, ours:
        case dict(), dict():
            for key in sorted(theirs.keys() | ours.keys()):
                if key not in theirs or key not in ours:
                    yield f"{place}/{key}", f"missing in {'theirs' if key in ours else 'ours'}"
                else:
                    yield from _differences(theirs[key], ours[key], f"{place}/{key}")
        case list(), list() if len(theirs) == len(ours):
            for at, (left, right) in enumerate(zip(theirs, ours, strict=True)):
                yield from _differences(left, right, f"{place}/{at}")
        case float() | int(), float() | int() if "logprob" in place and math.isclose(theirs, ours, abs_tol=CLOSE):
            pass
        case _ if theirs != ours:
            yield place, f"{_short(theirs)}, ours {_short(ours)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 400 else f"{text[:400]}… ({len(text)} characters)"
