"""Holds answers against /openapi.json, more strictly than a client: an answer may have no undescribed field."""

from __future__ import annotations

import re
from typing import Any

import httpx
from jsonschema import Draft202012Validator

METHODS = ("get", "post", "put", "patch", "delete")


class Described:
    """The openapi document of an app."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self._components = _strict(document["components"])
        self._validators: dict[str, Draft202012Validator] = {}
        self._paths = [(re.compile(re.sub(r"{\w+}", "[^/]+", path) + "$"), path) for path in document["paths"]]

    def operation(self, method: str, path: str) -> dict[str, Any] | None:
        for pattern, template in self._paths:
            if pattern.match(path) and method.lower() in self.document["paths"][template]:
                found: dict[str, Any] = self.document["paths"][template][method.lower()]
                return found
        return None

    async def check(self, answer: httpx.Response) -> None:
        """Check an answer. Made to be an event hook of httpx's client."""
        await answer.aread()
        request = answer.request
        said = f"{request.method} {request.url.path} {answer.status_code} {answer.text[:500]}"
        operation = self.operation(request.method, request.url.path)
        if operation is None:
            assert answer.status_code in (401, 403, 404, 405), said
            return
        response = operation["responses"].get(str(answer.status_code))
        assert response is not None, f"a status that is not described: {said}"
        response = self._resolved(response)
        content = response.get("content")
        if not content:
            assert not answer.content, f"a body that is not described: {said}"
            return
        media = answer.headers["content-type"].partition(";")[0]
        assert media in content, f"a type that is not described: {said}"
        if "schema" in content[media]:
            errors = list(self._validator(content[media]["schema"]).iter_errors(answer.json()))
            assert not errors, f"{errors[0].message}: {said}"
        if "idempotency-replayed" not in answer.headers:
            assert all(name in answer.headers for name in response.get("headers", {})), f"a header is missing: {said}"

    def _resolved(self, part: dict[str, Any]) -> dict[str, Any]:
        if "$ref" not in part:
            return part
        found: dict[str, Any] = self.document["components"]["responses"][part["$ref"].rpartition("/")[2]]
        return found

    def _validator(self, schema: dict[str, Any]) -> Draft202012Validator:
        key = str(schema)
        if key not in self._validators:
            whole = _strict(schema) | {"components": self._components}
            self._validators[key] = Draft202012Validator(whole, format_checker=Draft202012Validator.FORMAT_CHECKER)
        return self._validators[key]


def _strict(schema: Any) -> Any:
    """The schema without additional properties, except in maps."""
    match schema:
        case {"type": "object", "properties": dict(), **_rest}:
            return {key: _strict(value) for key, value in schema.items()} | {"additionalProperties": False}
        case dict():
            return {key: _strict(value) for key, value in schema.items()}
        case list():
            return [_strict(value) for value in schema]
    return schema
