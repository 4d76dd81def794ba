"""What went wrong, said once and shown in two dialects: RFC 9457 on the control plane, OpenAI's on the endpoints."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET, Struct, UnsetType, json
from starlette.responses import Response

from store.db import DatabaseError

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

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


class Fault(Struct, frozen=True):
    """One field that is wrong: a JSON pointer into the body, or `?name` for a query parameter."""

    pointer: str
    message: str


class Problem(Exception):
    """Ends the request with `status`. `code` is for programs, `detail` is one sentence for people."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        faults: list[Fault] | None = None,
        headers: Mapping[str, str] | None = None,
        kind: str | None = None,
    ) -> None:
        """`kind` is OpenAI's `type`, where the status alone does not say it."""
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
    errors: list[Fault] | UnsetType = UNSET  # the fields that are wrong


class OpenAIFault(Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | int | None


class OpenAIError(Struct, frozen=True):
    error: OpenAIFault


def unauthorized() -> Problem:
    detail = "no valid API key: send `Authorization: Bearer sk-st-…`"
    return Problem(401, "invalid_api_key", detail, headers={"www-authenticate": "Bearer"})


def not_found(kind: str, name: str) -> Problem:
    """Also the answer for what belongs to somebody else."""
    return Problem(404, f"{kind}_not_found", f"there is no {kind} {name!r} here")


def invalid(pointer: str, message: str) -> Problem:
    return Problem(422, "invalid_field", f"{pointer or 'the body'}: {message}", [Fault(pointer, message)])


def rate_limited(kind: str, detail: str, wait_s: int) -> Problem:
    """`kind` names the limit: OpenAI puts it into `type`."""
    detail = f"{detail}: try again in {wait_s} s"
    return Problem(429, "rate_limit_exceeded", detail, headers={"retry-after": str(wait_s)}, kind=kind)


def budget_exhausted(detail: str, wait_s: int, retry: bool) -> Problem:
    """429, as OpenAI says it: its clients have no class for 402, and raise RateLimitError with our `code` for this.
    They try a 429 again by themselves unless told not to."""
    headers = {"retry-after": str(wait_s)} | ({} if retry else {"x-should-retry": "false"})
    return Problem(429, "budget_exhausted", detail, headers=headers, kind="insufficient_quota")


def from_store(error: DatabaseError) -> Problem:
    """The sentence names hosts and files, so it is for the operator's log; the client is told to come again."""
    detail = "the database does not answer now: try again in a few seconds"
    return Problem(503, "database_unavailable", detail, headers={"retry-after": "2"})


def problem_response(problem: Problem, request_id: str) -> Response:
    """RFC 9457."""
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
    """The object that stands in a response's body or in a stream's last event."""
    server = "server_error" if problem.status >= 500 else "invalid_request_error"
    kind = problem.kind or _OPENAI_TYPES.get(problem.status, server)
    param = problem.faults[0].pointer.lstrip("/") if problem.faults else None
    return OpenAIError(OpenAIFault(message=problem.detail, type=kind, param=param, code=problem.code))


def openai_response(problem: Problem, request_id: str) -> Response:
    headers = problem.headers | {"x-request-id": request_id}
    return Response(json.encode(openai_error(problem)), problem.status, headers, media_type="application/json")
