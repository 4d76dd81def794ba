"""Errors of a request in three dialects: RFC 9457 on the control plane, OpenAI's on the endpoints, and Anthropic's on
the endpoints below /v1/messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import UNSET, Struct, UnsetType, json
from starlette.responses import Response

from store.db.database import DatabaseError

TITLES = {
    400: "Bad request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    408: "Request timeout",
    409: "Conflict",
    412: "Precondition failed",
    413: "Too large",
    422: "Not valid",
    429: "Too many requests",
    500: "Internal error",
    501: "Not implemented",
    503: "Not available",
}

NO_KEY = "no API key: send `Authorization: Bearer sk-st-…` or `x-api-key: sk-st-…`"

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {413: "request_too_large", 503: "overloaded_error"}
MESSAGES = "/v1/messages"


class Fault(Struct, frozen=True):
    """A wrong field: a JSON pointer into the body, or `?name` for a query parameter."""

    pointer: str
    message: str


class Problem(Exception):
    """Ends the request with `status`. `code` is for programs, `detail` is a sentence for people."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        faults: list[Fault] | None = None,
        headers: Mapping[str, str] | None = None,
        kind: str | None = None,
    ) -> None:
        """`kind` is OpenAI's `type`, if the status alone does not imply the type."""
        super().__init__(detail)
        self.status, self.code, self.detail, self.kind = status, code, detail, kind
        self.faults, self.headers = faults or [], dict(headers or {})


class ShownProblem(Struct, frozen=True, kw_only=True):
    """RFC 9457; `code` is for programs."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    request_id: str
    errors: list[Fault] | UnsetType = UNSET  # wrong fields


class OpenAIFault(Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | int | None


class OpenAIError(Struct, frozen=True):
    error: OpenAIFault


class AnthropicFault(Struct, frozen=True, kw_only=True):
    type: str
    message: str


class AnthropicError(Struct, frozen=True, kw_only=True):
    """The form in which Anthropic's clients read errors."""

    type: Literal["error"] = "error"
    error: AnthropicFault


def unauthorized(detail: str = NO_KEY, code: str = "invalid_api_key") -> Problem:
    return Problem(401, code, detail, headers={"www-authenticate": "Bearer"})


def not_found(kind: str, name: str) -> Problem:
    """Return the 404 for an unknown object. Objects of another tenant get an equal answer."""
    return Problem(404, f"{kind}_not_found", f"there is no {kind} {name!r} here")


def invalid(pointer: str, message: str) -> Problem:
    return Problem(422, "invalid_field", f"{pointer or 'the body'}: {message}", [Fault(pointer, message)])


def rate_limited(kind: str, detail: str, wait_s: int) -> Problem:
    """Return the 429 for the limit `kind`. OpenAI's clients read `kind` as `type`."""
    detail = f"{detail}: try again in {wait_s} s"
    return Problem(429, "rate_limit_exceeded", detail, headers={"retry-after": str(wait_s)}, kind=kind)


def budget_exhausted(detail: str, wait_s: int, retry: bool) -> Problem:
    """Return the 429 for an exhausted budget, as OpenAI's API does.

    OpenAI's clients have no class for 402; for a 429 they raise RateLimitError with our `code`. The clients also try a
    429 again, unless a header forbids a retry.
    """
    headers = {"retry-after": str(wait_s)} | ({} if retry else {"x-should-retry": "false"})
    return Problem(429, "budget_exhausted", detail, headers=headers, kind="insufficient_quota")


def from_store(error: DatabaseError) -> Problem:
    """Return a 503 that tells the client to come again. Only the operator's log may show the error's own sentence:
    the sentence names hosts and files."""
    detail = "the database does not answer now: try again in a few seconds"
    return Problem(503, "database_unavailable", detail, headers={"retry-after": "2"})


def problem_response(problem: Problem, request_id: str) -> Response:
    """Return the answer in RFC 9457's form."""
    body = ShownProblem(
        title=TITLES.get(problem.status, "Error"),
        status=problem.status,
        detail=problem.detail,
        code=problem.code,
        request_id=request_id,
        errors=problem.faults or UNSET,
    )
    headers = problem.headers | {"x-request-id": request_id}
    return Response(json.encode(body), problem.status, headers, media_type="application/problem+json")


def openai_error(problem: Problem) -> OpenAIError:
    """Return the error for a response's body or a stream's last event."""
    server = "server_error" if problem.status >= 500 else "invalid_request_error"
    kind = problem.kind or _OPENAI_TYPES.get(problem.status, server)
    param = problem.faults[0].pointer.lstrip("/") if problem.faults else None
    return OpenAIError(OpenAIFault(message=problem.detail, type=kind, param=param, code=problem.code))


def anthropic_error(problem: Problem) -> AnthropicError:
    """Return the error for a response's body or a stream's last event. The form has no place for `code`."""
    server = "api_error" if problem.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(problem.status, server)
    return AnthropicError(error=AnthropicFault(type=kind, message=problem.detail))


def endpoint_error(problem: Problem, path: str) -> OpenAIError | AnthropicError:
    """Return the error of a tenant's endpoint in the dialect of `path`, a path without the tenant."""
    spoken = anthropic_error if path == MESSAGES or path.startswith(MESSAGES + "/") else openai_error
    return spoken(problem)


def endpoint_response(problem: Problem, request_id: str, path: str) -> Response:
    """Return the whole answer of a tenant's endpoint; `path` as in `endpoint_error`."""
    headers = problem.headers | {"x-request-id": request_id}
    body = json.encode(endpoint_error(problem, path))
    return Response(body, problem.status, headers, media_type="application/json")


def openai_response(problem: Problem, request_id: str) -> Response:
    headers = problem.headers | {"x-request-id": request_id}
    return Response(json.encode(openai_error(problem)), problem.status, headers, media_type="application/json")
