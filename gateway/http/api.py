"""Shared by all routes of the control plane: caller, body, idempotent deeds, pages of results, problems."""

from __future__ import annotations

import base64
import binascii
import hashlib
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar, get_args, overload

import msgspec
import structlog
from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import Response

from gateway.core import wording
from gateway.http.auth import Auth, Caller
from gateway.http.errors import Problem, from_store, invalid, not_found, openai_response, problem_response
from gateway.http.limits import Disconnected, read_body
from store.db import audit, idempotency
from store.db.database import Database, DatabaseError, Taken, new_id, now_us
from store.db.operators import EVERYTHING
from store.db.operators import Scope as OperatorScope
from store.telemetry.observe import place_of

log = structlog.get_logger()

PREFIX = "/api/v1"
BODY_MOST = 1 << 20  # bytes
BODY_DEADLINE_S = 8.0
PAGE_DEFAULT, PAGE_MOST = 50, 200

Name = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="1 to 63 letters, digits, dots, underscores and dashes, the first a letter or a digit, as faq-v2",
    ),
]
MONTH = r"[1-9]\d{3}-(0[1-9]|1[0-2])"
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]  # RFC 3339, UTC
T = TypeVar("T")


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of request bodies."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """Base of answers."""


class Page(Shown, Generic[T], frozen=True, kw_only=True):
    data: list[T]
    next_cursor: str | None  # None: the last page


class Identified(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=Identified)


@dataclass(frozen=True)
class Query:
    """A query parameter."""

    name: str
    kind: Any
    description: str
    required: bool = False


async def _nothing(*_: Any) -> Response:
    """Placeholder until the Operation decorates a handler."""
    raise NotImplementedError


@dataclass(frozen=True)
class Operation:
    """Input and output of a handler, used as the handler's decorator. Clients read the handler's docstring."""

    answer: Any = None  # type of the answer; None: no JSON
    status: int = 200
    _: KW_ONLY
    body: Any = None  # type of the body
    patch: Any = None  # type of the object after a merge patch
    media: tuple[str, ...] = ()  # media types of an answer other than JSON
    query: tuple[Query, ...] = ()
    paged: bool = False  # ?limit, ?cursor
    once: bool = False  # Idempotency-Key
    etag: bool = False  # the answer has an ETag
    if_match: bool = False
    problems: tuple[int, ...] = ()  # statuses not implied by the other fields
    openai: bool = False  # the handler speaks OpenAI's dialect
    anthropic: bool = False  # the handler answers errors in Anthropic's form
    lenient: bool = False  # the handler ignores unknown parameters
    operator: tuple[OperatorScope, ...] = ()  # an operator's key needs one of these scopes, or `everything`
    act: Callable[..., Awaitable[Response]] = _nothing
    summary: str = ""  # empty: the docstring

    def __call__(self, act: Callable[..., Awaitable[Response]]) -> Operation:
        return replace(self, act=act)

    @property
    def description(self) -> str:
        return self.summary or inspect.getdoc(self.act) or ""

    @property
    def parameters(self) -> tuple[Query, ...]:
        return self.query + (_PAGES if self.paged else ())


_PAGES = (
    Query("limit", Annotated[int, Meta(ge=1, le=PAGE_MOST)], f"How many, {PAGE_DEFAULT} unless it is said."),
    Query("cursor", str, "An earlier answer's `next_cursor`."),
)
PERIOD = Query(
    "period",
    Annotated[str, Meta(pattern=MONTH, description="a month, as 2026-11")],
    "A month, as 2026-11.",
    required=True,
)
OF_TENANT = Query("tenant", str, "With an operator's key: what is this tenant's.")


@dataclass(frozen=True)
class Endpoint:
    """An operation and its place in the HTTP interface."""

    method: str
    path: str  # below PREFIX, except for OpenAI's routes
    operation: Operation
    needs: Literal["admin", "control", "inference", "nothing"] = "control"  # kind of key that the caller needs
    context: object = None  # argument for the handler besides the call

    @property
    def whole_path(self) -> str:
        return self.path if self.operation.openai or self.needs == "nothing" else PREFIX + self.path


@dataclass(frozen=True)
class Answer:
    """Answer of a deed. `secret` is shown only in the first answer, and stored nowhere."""

    status: int
    body: msgspec.Struct
    secret: dict[str, object] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """A request of an authorised caller."""

    request: Request
    caller: Caller
    id: str
    database: Database
    auth: Auth

    def path(self, name: str) -> str:
        return str(self.request.path_params[name])

    @overload
    def query(self, name: str) -> str | None: ...
    @overload
    def query(self, name: str, default: str) -> str: ...
    def query(self, name: str, default: str | None = None) -> str | None:
        return self.request.query_params.get(name, default)

    async def body(self, kind: type[T]) -> T:
        """Return the body as `kind`; an empty body counts as `{}`. Raises Problem."""
        return parsed(await self.raw() or b"{}", kind)

    async def raw(self) -> bytes:
        if not hasattr(self.request.state, "body"):
            self.request.state.body = await read_body(self.request, BODY_MOST, BODY_DEADLINE_S)
        body: bytes = self.request.state.body
        return body

    async def once(self, deed: Callable[[AsyncConnection], Awaitable[Answer]]) -> Response:
        """Do the deed in one transaction. If an Idempotency-Key comes again, repeat the first answer."""
        key = self.request.headers.get("idempotency-key")
        if key is not None and not 1 <= len(key) <= 255:
            raise Problem(422, "invalid_idempotency_key", f"Idempotency-Key has {len(key)} characters, 1 to 255 fit")
        scope = f"{self.caller.tenant_id or self.caller.by} {self.request.method} {self.request.url.path}"
        fingerprint = hashlib.sha256(await self.raw()).hexdigest()
        async with self.database.write() as connection:
            if key is not None:
                said = await idempotency.claim(connection, scope, key, fingerprint, now_us())
                if said is not None:
                    return _repeated(said, fingerprint, key)
            answer = await deed(connection)
            if key is not None:
                text = msgspec.json.encode(answer.body).decode()
                await idempotency.answered(connection, scope, key, answer.status, text)
        return answered(msgspec.to_builtins(answer.body) | answer.secret, answer.status, answer.headers)

    async def record(
        self,
        connection: AsyncConnection,
        kind: str,
        subject_id: str,
        tenant_id: str | None,
        old: object = None,
        new: object = None,
    ) -> None:
        """Write the deed and the values that it changed to the audit log. Call this last in a deed."""
        await audit.record(connection, kind, subject_id, tenant_id, self.caller.by, self.id, old, new)

    async def tenant(self, name: str) -> Caller:
        """Return the caller with its rights within a tenant. Raises Problem: 404, also for another tenant's name."""
        within = await self.auth.within(self.caller, name)
        if within is None:
            raise not_found("tenant", name)
        return within

    async def tenant_id(self, name: str | None = None) -> str | None:
        """Return the tenant whose objects the request is about.

        For a tenant's key: the caller's own tenant. For an operator's key: the tenant `name` or `?tenant=`, or None for
        all tenants.
        """
        name = self.query("tenant") if name is None else name
        return self.caller.tenant_id if name is None else (await self.tenant(name)).tenant_id

    # ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def limit(self) -> int:
        said = self.query("limit", str(PAGE_DEFAULT))
        if not re.fullmatch(r"\d{1,3}", said) or not 1 <= int(said) <= PAGE_MOST:
            raise invalid("?limit", f"{said!r} is not a number from 1 to {PAGE_MOST}")
        return int(said)

    @property
    def after(self) -> str:
        """The last id of the page before; empty for the first page."""
        cursor = self.query("cursor", "")
        try:
            id = base64.b64decode(cursor.encode(), b"-_", validate=True).decode()
        except (binascii.Error, UnicodeError):
            id = "?"
        if id and not re.fullmatch(r"[0-9a-f]{32}", id):
            raise invalid("?cursor", "it is not one that an earlier answer gave as next_cursor")
        return id

    def page(self, found: list[T], show: Callable[[T], Item]) -> Response:
        """Answer one page. `found` must have `limit` + 1 items if another page follows."""
        shown = [show(item) for item in found[: self.limit]]
        more = len(found) > self.limit
        cursor = base64.urlsafe_b64encode(shown[-1].id.encode()).decode() if more else None
        return answered(Page(data=shown, next_cursor=cursor))

    def check_version(self, version: int) -> None:
        """Compare the object's version with If-Match. Raises Problem: 412."""
        wanted = self.request.headers.get("if-match")
        if wanted and wanted.strip() != "*" and etag(version) not in (tag.strip() for tag in wanted.split(",")):
            detail = f"it is at {etag(version)} now, not at {wanted}: read it again and decide anew"
            raise Problem(412, "precondition_failed", detail)


def etag(version: int) -> str:
    return f'"{version}"'


def answered(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Answer with `body` as JSON."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def serving(endpoint: Endpoint, database: Database, auth: Auth) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint's handler for Starlette.

    The endpoint accepts operators' keys with a scope of the operation and, unless the endpoint needs an operator,
    tenants' keys with the scope control.
    """
    operation = endpoint.operation
    shown = openai_response if operation.openai else problem_response
    context = () if endpoint.context is None else (endpoint.context,)

    async def serve(request: Request) -> Response:
        id = getattr(request.state, "request_id", None) or new_id()
        try:
            caller = await _caller(request, auth, endpoint)
            if not operation.lenient:
                _check_query(request, operation)
            response = await operation.act(Call(request, caller, id, database.of(caller.tenant_id), auth), *context)
        except (Problem, DatabaseError, Taken) as error:
            return shown(_problem(error, id), id)
        except Disconnected:
            return Response(status_code=400)  # no client reads this answer
        except Exception as error:
            log.error("control.failed", request=id, path=request.url.path, error=place_of(error))
            return shown(Problem(500, "internal_error", "our mistake: quote the request_id"), id)
        response.headers["x-request-id"] = id
        return response

    return serve


async def _caller(request: Request, auth: Auth, endpoint: Endpoint) -> Caller:
    caller = await auth.caller(request.headers)
    if caller.admin:
        check_operator(caller, endpoint.operation.operator)
        return caller
    if endpoint.needs == "admin":
        raise Problem(403, "admin_only", "this needs an operator's key")
    if "control" not in caller.scopes:
        raise Problem(403, "insufficient_scope", "this key may only be used for inference: use one with scope control")
    return caller


def check_operator(caller: Caller, scopes: tuple[OperatorScope, ...]) -> None:
    """Raises Problem: 403 unless the operator's key has one of the scopes."""
    if not caller.permits(scopes):
        wanted = " or ".join((*scopes, EVERYTHING))
        detail = (
            f"this needs an operator's key with the scope {wanted}; this key has {', '.join(sorted(caller.operator))}"
        )
        raise Problem(403, "insufficient_scope", detail)


def _check_query(request: Request, operation: Operation) -> None:
    """Raises Problem for unknown query parameters: a misspelt filter must not answer with every object."""
    known = {parameter.name for parameter in operation.parameters}
    for name in request.query_params:
        if name not in known:
            raise invalid(f"?{name}", f"it is not known here, one of {', '.join(sorted(known)) or '(none)'} is")


def _problem(error: Problem | DatabaseError | Taken, request_id: str) -> Problem:
    match error:
        case Problem():
            return error
        case Taken():
            return Problem(409, f"{error.kind}_exists", str(error))
        case _:
            log.warning("control.database", request=request_id, error=str(error))
            return from_store(error)


def _repeated(said: idempotency.StoredAnswer, fingerprint: str, key: str) -> Response:
    if said.fingerprint != fingerprint:
        detail = f"Idempotency-Key {key!r} was used with another body: take a new one for a new request"
        raise Problem(422, "idempotency_key_reused", detail)
    headers = {"idempotency-replayed": "true"}
    return Response(said.body, said.status, headers, media_type="application/json")


# ── bodies and values ─────────────────────────────────────────────────────────────────────────────────────────────────


def parsed(body: bytes, kind: type[T]) -> T:
    """Decode a body as `kind`. Raises Problem: 400 if it is not JSON, 422 with the pointer of an invalid value."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(*wording.fault_of(error, kind)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, "invalid_json", f"the body is not JSON: {error}") from error


def converted(value: object, kind: type[T]) -> T:
    """Convert a value to `kind`. Raises Problem: 422."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise invalid(*wording.fault_of(error, kind)) from error


def patched(old: dict[str, Any], patch: dict[str, Any], kind: type[T]) -> T:
    """Apply a merge patch (RFC 7396): null removes a field, an object is merged into the existing object.

    Raises Problem: 422, also for a null of an unknown field.
    """
    made = converted(_merged(old, patch), kind)
    _check_names(patch, kind, "")
    return made


def _check_names(patch: dict[str, Any], kind: Any, pointer: str) -> None:
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in patch.items():
        if name not in known:
            raise invalid(f"{pointer}/{name}", wording.unknown_field(name, kind))
        for part in get_args(known[name]) or (known[name],):
            if isinstance(value, dict) and isinstance(part, type) and issubclass(part, msgspec.Struct):
                _check_names(value, part, f"{pointer}/{name}")


def _merged(old: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    kept = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = _merged(kept.get(name), value)
    return kept


@overload
def time_text(us: int) -> str: ...
@overload
def time_text(us: int | None) -> str | None: ...
def time_text(us: int | None) -> str | None:
    """Format a time as RFC 3339 in UTC."""
    return f"{datetime.fromtimestamp(us / 1e6, UTC):%Y-%m-%dT%H:%M:%S.%fZ}" if us is not None else None


def time_us(moment: datetime) -> int:
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e6)


def moment(call: Call, name: str, default_us: int) -> int:
    """Return a time in the query as UNIX microseconds. Raises Problem."""
    said = call.query(name)
    if not said:
        return default_us
    try:
        return time_us(datetime.fromisoformat(said.replace(" ", "+")))  # a bare + in a query is a space
    except (ValueError, OverflowError) as error:
        raise invalid(f"?{name}", f"{said!r} is not a time like 2026-11-21 or 2026-11-21T12:00:00Z") from error


def month(pointer: str, said: str | None) -> str:
    """Check a month, as 2026-11. Raises Problem."""
    if said is None or not re.fullmatch(MONTH, said):
        raise invalid(pointer, f"{said or ''!r} is not a month like 2026-11")
    return said


def one_of(pointer: str, value: str | None, known: Iterable[str]) -> None:
    """Check that a value is known. Raises Problem: 422 that lists the known values."""
    if value is not None and value not in (names := sorted(known)):
        raise invalid(pointer, f"{value!r} is not known, one of {', '.join(names) or '(none)'} is")
