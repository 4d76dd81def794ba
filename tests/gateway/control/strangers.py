"""Requests for a foreign tenant's things, made from /openapi.json: every operation, every place that names a thing.

A stranger asks for a thing of the victim, and for a thing that never was. Apart from names in the request, both answers
must be equal. The tables below list the parameters that can name a thing. A parameter missing from the tables is an
error: the author of a new parameter has to say whether the parameter names a thing.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pyarrow.parquet as arrow_parquet
from starlette.types import ASGIApp, Message

from tests.gateway.http.described import METHODS

# Parameter or field → the kind of thing named.
THINGS = ("tenant", "key", "model", "deployment", "gpu", "request", "token", "runtime")
IN_PATH = {name: name for name in THINGS} | {"name": "served"}
IN_QUERY = {
    "tenant": "tenant",
    "deployment": "deployment",
    "cursor": "cursor",
    "head": "head",
    "after": "event",
    "project_ids": "tenant",
    "api_key_ids": "key",
    "models": "served",
}
IN_BODY = {"tenant": "tenant", "model": "model"}
IN_HEADER = {"Last-Event-ID": "event"}
HARMLESS_QUERY = {
    *("limit", "order", "from", "to", "group_by", "period", "format", "detail"),
    *("start_time", "end_time", "bucket_width", "page", "user_ids", "batch", "slower_than_ms"),
}
HARMLESS_FIELDS = {
    *("name", "weight", "limits", "scopes", "expires_at", "overlap_s", "source", "dtype", "max_model_len", "slo"),
    *("priority", "scaling", "price", "tool_parser", "reasoning_parser", "revision", "canary", "role", "on", "reason"),
    *("language_model_only", "keep_prefixes", "warm"),
    "runtime",  # of a join token: an id that is free, so the field names no thing
    *("prompt_pico", "output_pico", "cached_pico", "gpu_s_pico", "switch_s_pico", "cache_gb_s_pico", "kv_gb_s_pico"),
    *("currency", "valid_from", "amount_minor", "corrects", "percent", "digest", "service_tier", "managed_by"),
}
# Required fields and parameters that name no thing.
REQUIRED = {
    "name": "mine",
    "scopes": ["metrics:read"],
    "source": "/nowhere",
    "prompt_pico": 1,
    "output_pico": 1,
    "amount_minor": 5,
    "reason": "because",
    "role": "both",
    "period": "2026-11",
    "start_time": "0",
}
REPLAYED = "replayed"  # the Idempotency-Key of every request by which the victim made a thing
HEADERS = {"Idempotency-Key": REPLAYED, "If-Match": '"1"'}
LISTEN_S = 0.3


@dataclass(frozen=True)
class Ask:
    """A request. `said`: names in the request, which an answer may repeat."""

    method: str
    template: str
    path: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    needs: str = "control"
    streams: bool = False

    @property
    def url(self) -> str:
        path = self.template
        for name, value in self.path.items():
            path = path.replace(f"{{{name}}}", value)
        return path

    def __str__(self) -> str:
        return f"{self.method} {self.url} {self.query or ''} {self.body or ''}"


@dataclass(frozen=True)
class Pair:
    """Two requests: `foreign` names a thing of the victim, `never` a thing that never was. `addressed`: the request is
    for the thing itself."""

    foreign: Ask
    never: Ask
    addressed: bool


def never(value: str) -> str:
    """A name of a thing that never was, equal to `value` but for the last character: a neighbour in any order."""
    if "@" in value:
        name, _, revision = value.partition("@")
        return f"{never(name)}@{revision}"
    return value[:-1] + ("0" if value[-1] != "0" else "1")


def cursor(id: str) -> str:
    return base64.urlsafe_b64encode(id.encode()).decode()


@dataclass
class Strangers:
    """Makes the requests of a stranger. `own` has a thing of each kind, `foreign` every name of the victim's things."""

    document: dict[str, Any]
    own: dict[str, str]
    foreign: dict[str, list[str]]

    def asks(self) -> Iterator[Ask]:
        """Each operation that needs a key, about the stranger's own things."""
        for template, item in self.document["paths"].items():
            for method, operation in item.items():
                if method in METHODS and operation["security"]:
                    yield self._own(method.upper(), template, operation)

    def _own(self, method: str, template: str, operation: dict[str, Any]) -> Ask:
        ask = Ask(
            method,
            template,
            needs=operation["security"][0]["key"][0],
            streams=method == "GET" and "text/event-stream" in operation["responses"]["200"].get("content", {}),
        )
        for parameter in operation["parameters"]:
            name = parameter["name"]
            match parameter["in"]:
                case "path":
                    ask.path[name] = self.own[IN_PATH[name]]
                case "query":
                    assert name in IN_QUERY or name in HARMLESS_QUERY, (
                        f"{method} {template}: does ?{name} name a thing?"
                    )
                    if parameter.get("required"):
                        ask.query[name] = REQUIRED[name]
                case "header" if name not in IN_HEADER:
                    ask.headers[name] = HEADERS[name]
        schema = self._body(operation)
        if schema is None:
            return ask
        for name in schema.get("properties", {}):
            assert name in IN_BODY or name in HARMLESS_FIELDS, (
                f"{method} {template}: does {name} in the body name a thing?"
            )
        needed = schema.get("required", [])
        body = {name: self.own[IN_BODY[name]] if name in IN_BODY else REQUIRED[name] for name in needed}
        return replace(ask, body=body)

    def _body(self, operation: dict[str, Any]) -> dict[str, Any] | None:
        content = operation.get("requestBody", {}).get("content", {})
        if not content:
            return None
        schema: dict[str, Any] = content["application/json"]["schema"]
        if "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    def takes(self, ask: Ask, parameter: str) -> bool:
        operation = self.document["paths"][ask.template][ask.method.lower()]
        return any(taken["name"] == parameter for taken in operation["parameters"])

    # ── what is not the stranger's ────────────────────────────────────────────────────────────────────────────────────

    def pairs(self) -> Iterator[Pair]:
        for ask in self.asks():
            operation = self.document["paths"][ask.template][ask.method.lower()]
            yield from self._in_path(ask)
            for parameter in operation["parameters"]:
                if parameter["in"] == "query" and parameter["name"] in IN_QUERY:
                    yield from self._beside(ask, "query", parameter["name"], IN_QUERY)
                if parameter["in"] == "header" and parameter["name"] in IN_HEADER:
                    yield from self._beside(ask, "headers", parameter["name"], IN_HEADER)
            for name in (self._body(operation) or {}).get("properties", {}):
                if name in IN_BODY:
                    yield from self._beside(ask, "body", name, IN_BODY)

    def _in_path(self, ask: Ask) -> Iterator[Pair]:
        """Pairs whose path names the victim's things at some places, and the stranger's own at the rest."""
        kinds = {name: IN_PATH[name] for name in ask.path}
        choices = [[None, *self.foreign[kind]] for kind in kinds.values()]
        for values in itertools.product(*choices):
            chosen = {name: value for name, value in zip(kinds, values, strict=True) if value is not None}
            if chosen:
                yield Pair(*(self._named(ask, "path", values) for values in (chosen, _nevers(chosen))), addressed=True)

    def _beside(self, ask: Ask, place: str, name: str, kinds: dict[str, str]) -> Iterator[Pair]:
        """Pairs whose path is the stranger's own, with a foreign name in the query, the headers or the body."""
        for value in self.foreign[kinds[name]]:
            asks = (self._named(ask, place, values) for values in ({name: value}, _nevers({name: value})))
            yield Pair(*asks, addressed=place == "query" and name == "tenant")

    def _named(self, ask: Ask, place: str, values: dict[str, str]) -> Ask:
        return replace(ask, said=tuple(values.values()), **{place: (getattr(ask, place) or {}) | values})


def _nevers(chosen: dict[str, str]) -> dict[str, str]:
    """For each chosen name a name of a thing that never was. A cursor becomes a valid cursor of such a name."""
    return {
        name: cursor(never(base64.urlsafe_b64decode(value).decode())) if name == "cursor" else never(value)
        for name, value in chosen.items()
    }


# ── asking ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Heard:
    """An answer without the parts that differ each time."""

    status: int
    headers: tuple[tuple[str, str], ...]
    text: str

    def without(self, said: tuple[str, ...]) -> Heard:
        text = self.text
        for name in said:
            text = text.replace(name, "·" * len(name))
        return replace(self, text=text)


async def ask(client: httpx.AsyncClient, app: ASGIApp, said: Ask) -> Heard:
    if said.streams:
        client = httpx.AsyncClient(transport=Listening(app), base_url=client.base_url, headers=client.headers)
    answer = await client.request(
        said.method, f"http://gateway{said.url}", params=said.query, json=said.body, headers=said.headers
    )
    id = answer.headers.get("x-request-id", "-")
    kept = [(name, value) for name, value in sorted(answer.headers.items()) if name != "x-request-id"]
    return Heard(answer.status_code, tuple(kept), readable(answer).replace(id, ""))


def readable(answer: httpx.Response) -> str:
    if "parquet" in answer.headers.get("content-type", ""):
        table = arrow_parquet.read_table(io.BytesIO(answer.content))  # type: ignore[no-untyped-call]
        return json.dumps(table.to_pylist(), default=str)
    return answer.text


class Listening(httpx.AsyncBaseTransport):
    """A transport whose client leaves after LISTEN_S, for streams without an end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        messages: list[Message] = []
        asked = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> Message:
            if (message := next(asked, None)) is not None:
                return message
            await asyncio.sleep(LISTEN_S)
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            messages.append(message)

        scope = {
            "type": "http",
            "method": request.method,
            "path": request.url.path,
            "query_string": request.url.query,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
        }
        async with asyncio.timeout(LISTEN_S * 20):
            await self._app(scope, receive, send)
        body = b"".join(message.get("body", b"") for message in messages)
        return httpx.Response(messages[0]["status"], headers=messages[0]["headers"], content=body, request=request)
