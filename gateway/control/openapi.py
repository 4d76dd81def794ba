"""`/openapi.json`: the HTTP interface, made from the operations served, so that document and routes can't differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from gateway.http.api import Endpoint, Operation, Query
from gateway.http.errors import TITLES, AnthropicError, OpenAIError, ShownProblem
from gateway.inference import routes
from gateway.ops.health import Ready
from store.db.operators import EVERYTHING

Json = dict[str, Any]

PATHS = {
    "tenant": "The tenant's name.",
    "key": "The key's id.",
    "model": "The model's name, id or digest.",
    "deployment": "The deployment's name or id.",
    "gpu": "The id of the device's runtime.",
    "request": "The x-request-id of an answer.",
    "token": "The join token's id.",
    "runtime": "The id of the runtime that joined.",
    "name": "The deployment's name, or name@revision.",
}
# Fields of an answer that fill a parameter of a path; every other parameter is filled with the id.
NAMED = {"tenant": "name"}
_REF = "#/components/schemas/{name}"
_IDEMPOTENCY = Annotated[str, Meta(min_length=1, max_length=255)]


class Alive(Struct, frozen=True):
    status: str


_ready = Operation(Ready, problems=(503,), summary="Say whether a request could be served.")
PLATFORM = [
    Endpoint("GET", "/healthz", Operation(Alive, summary="Say that the gateway lives."), "nothing"),
    Endpoint("GET", "/readyz", _ready, "nothing"),
    Endpoint("GET", "/metrics", Operation(media=("text/plain",), summary="Show the gateway's metrics."), "nothing"),
    Endpoint("GET", "/openapi.json", Operation(dict[str, Any], summary="Show this document."), "nothing"),
]


def document(control: Iterable[Endpoint]) -> Json:
    """Return the OpenAPI 3.1 document. Raises KeyError for a path's parameter missing in PATHS."""
    endpoints = [*control, *routes.endpoints(), *PLATFORM]
    schemas = _Schemas(endpoints)
    paths: dict[str, Json] = {}
    for endpoint in endpoints:
        described = _operation(endpoint, schemas)
        if endpoint.method == "POST" and (links := dict(_links(endpoint, endpoints))):
            described["responses"][str(endpoint.operation.status)]["links"] = links
        paths.setdefault(endpoint.whole_path, {})[endpoint.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Staccato",
            "version": version("staccato"),
            "description": "Many models of many tenants on few GPUs: OpenAI's endpoints, and the control plane.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": _problems(schemas),
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A tenant's key with the scope `inference` or `control`, or an operator's key with "
                    "one of the operation's `x-operator-scopes`. `admin`: an operator's key alone.",
                },
                "x_api_key": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "x-api-key",
                    "description": "The same keys, as Anthropic's clients send a key.",
                },
            },
        },
    }


class _Schemas:
    """JSON schemas of the types that operations name."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        operations = [endpoint.operation for endpoint in endpoints]
        kinds = {kind for said in operations for kind in (said.answer, said.body, said.patch) if kind is not None}
        ordered = [ShownProblem, OpenAIError, AnthropicError, *sorted(kinds, key=str)]
        made = msgspec.json.schema_components(ordered, ref_template=_REF)
        # After the round trip, tuples are lists.
        schemas, self.components = msgspec.json.decode(msgspec.json.encode(made))
        self._schemas = dict(zip(ordered, schemas, strict=True))

    def of(self, kind: Any) -> Json:
        schema: Json = self._schemas[kind]
        return schema

    def patch_of(self, kind: Any) -> Json:
        """Return the schema of a merge patch (RFC 7396): every field is optional, and null removes a field."""
        return self._loosened(self.of(kind))

    def _loosened(self, schema: Json) -> Json:
        if "$ref" in schema:
            schema = self.components[schema["$ref"].rpartition("/")[2]]
        if schema.get("type") != "object" or "properties" not in schema:
            return schema
        fields = {name: self._nullable(self._loosened(field)) for name, field in schema["properties"].items()}
        return {"type": "object", "properties": fields, "additionalProperties": False}

    def _nullable(self, schema: Json) -> Json:
        return {"anyOf": [{key: value for key, value in schema.items() if key != "default"}, {"type": "null"}]}


def _operation(endpoint: Endpoint, schemas: _Schemas) -> Json:
    operation, path = endpoint.operation, endpoint.whole_path
    summary, _, more = operation.description.partition("\n")
    described: Json = {
        "operationId": _id(endpoint),
        "tags": [_tag(endpoint)],
        "summary": summary,
        "security": []
        if endpoint.needs == "nothing"
        else [{scheme: [endpoint.needs]} for scheme in ("key", "x_api_key")],
        "parameters": [*_in_path(path), *map(_in_query, operation.parameters), *_headers(operation)],
        "responses": _responses(endpoint, schemas),
    }
    if endpoint.needs != "nothing":  # an operator's key needs one of these scopes
        described["x-operator-scopes"] = list(dict.fromkeys((*operation.operator, EVERYTHING)))
    if more:
        described["description"] = more.strip()
    if operation.body is not None:
        # vLLM reads further fields of a tenant's body.
        required = operation.openai or any(field.required for field in msgspec.structs.fields(operation.body))
        content = {"application/json": {"schema": schemas.of(operation.body)}}
        described["requestBody"] = {"required": required, "content": content}
    if operation.patch is not None:
        schema = {"schema": schemas.patch_of(operation.patch)}
        content = {"application/merge-patch+json": schema, "application/json": schema}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _id(endpoint: Endpoint) -> str:
    place = " platform" if endpoint.needs == "nothing" else ""
    return re.sub(r"\W+", "_", f"{endpoint.method.lower()}{place}{endpoint.path}").strip("_")


def _tag(endpoint: Endpoint) -> str:
    if endpoint.needs == "nothing":
        return "platform"
    if endpoint.operation.openai:
        return "openai"
    return re.split(r"[/:]", endpoint.path)[1]


# ── what is taken ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _in_path(path: str) -> list[Json]:
    return [
        {"name": name, "in": "path", "required": True, "description": PATHS[name], "schema": {"type": "string"}}
        for name in _names(path)
    ]


def _names(path: str) -> list[str]:
    return re.findall(r"{(\w+)}", path)


def _in_query(query: Query) -> Json:
    schema = msgspec.json.schema(query.kind)
    shown = {"name": query.name, "in": "query", "description": query.description, "schema": schema}
    return shown | ({"required": True} if query.required else {})


def _headers(operation: Operation) -> list[Json]:
    headers = []
    if operation.once:
        said = "Sent again with the same one, it is not done again, and the first answer is repeated. Kept for a day."
        headers.append(_header("Idempotency-Key", said, _IDEMPOTENCY))
    if operation.if_match:
        headers.append(_header("If-Match", "An ETag: done only if it is still that.", str))
    if "text/event-stream" in operation.media and not operation.openai:
        headers.append(_header("Last-Event-ID", "As `after`, when that is not there.", str))
    return headers


def _header(name: str, description: str, kind: Any) -> Json:
    return {"name": name, "in": "header", "description": description, "schema": msgspec.json.schema(kind)}


# ── what is answered ──────────────────────────────────────────────────────────────────────────────────────────────────


def _responses(endpoint: Endpoint, schemas: _Schemas) -> Json:
    operation = endpoint.operation
    answered: Json = {"description": "Done."}
    content: Json = {media: {} for media in operation.media}
    if operation.answer is not None:
        content = {"application/json": {"schema": schemas.of(operation.answer)}} | content
    if content:
        answered["content"] = content
    if operation.etag:
        answered["headers"] = {"ETag": {"description": "For If-Match.", "schema": {"type": "string"}}}
    if endpoint.needs == "nothing":
        return {str(status): answered for status in (operation.status, *operation.problems)}
    dialect = "anthropic" if operation.anthropic else "openai" if operation.openai else "problem"
    problems = {str(status): {"$ref": f"#/components/responses/{dialect}_{status}"} for status in _statuses(endpoint)}
    return {str(operation.status): answered} | dict(sorted(problems.items()))


def _links(maker: Endpoint, endpoints: Iterable[Endpoint]) -> Iterator[tuple[str, Json]]:
    """Yield links from a route that makes an object to the routes for the object."""
    given = {name: f"$request.path.{name}" for name in _names(maker.path)}
    for endpoint in endpoints:
        if endpoint.path.startswith(maker.path + "/{"):
            made = _names(endpoint.path)[len(given)]
            parameters = given | {made: f"$response.body#/{NAMED.get(made, 'id')}"}
            yield _id(endpoint), {"operationId": _id(endpoint), "parameters": parameters}


def _problems(schemas: _Schemas) -> Json:
    """Return error responses in the three dialects."""
    problem = {"application/problem+json": {"schema": schemas.of(ShownProblem)}}
    openai = {"application/json": {"schema": schemas.of(OpenAIError)}}
    anthropic = {"application/json": {"schema": schemas.of(AnthropicError)}}
    return {
        f"{dialect}_{status}": {"description": title, "content": content}
        for dialect, content in (("problem", problem), ("openai", openai), ("anthropic", anthropic))
        for status, title in TITLES.items()
    }


def _statuses(endpoint: Endpoint) -> set[int]:
    """Return the error statuses implied by the operation."""
    operation = endpoint.operation
    wrong = {401, 403, 500, 503, *operation.problems}
    if "{" in endpoint.path or any(query.name == "tenant" for query in operation.query):
        wrong.add(404)
    if not operation.lenient and not operation.openai:
        wrong.add(422)  # also for an unknown parameter
    if operation.once or operation.body is not None or operation.patch is not None:
        wrong |= {400, 408, 413}
    if operation.if_match:
        wrong.add(412)
    return wrong
