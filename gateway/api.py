"""What every route of the control plane shares: who calls, what the body says, doing a deed once, pages, problems."""

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

from gateway.auth import Auth, Caller
from gateway.errors import Problem, from_store, invalid, not_found, openai_response, problem_response, unauthorized
from gateway.limits import Disconnected, read_body
from store import audit, idempotency
from store.db import Database, DatabaseError, Taken, new_id, now_us
from store.observe import place_of

log = structlog.get_logger()

PREFIX = "/api/v1"
BODY_MOST = 1 << 20  # bytes
BODY_DEADLINE_S = 8.0
PAGE_DEFAULT, PAGE_MOST = 50, 200

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
MONTH = r"[1-9]\d{3}-(0[1-9]|1[0-2])"
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]  # RFC 3339, UTC
T = TypeVar("T")


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may say."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer says."""


class Page(Shown, Generic[T], frozen=True, kw_only=True):
    data: list[T]
    next_cursor: str | None  # None: this is the last


class Identified(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=Identified)


@dataclass(frozen=True)
class Query:
    """A parameter behind the question mark."""

    name: str
    kind: Any
    description: str
    required: bool = False


async def _nothing(*_: Any) -> Response:
    """Of an Operation that does not decorate anything yet."""
    raise NotImplementedError


@dataclass(frozen=True)
class Operation:
    """What a handler takes and answers, said as its decorator; its docstring is what clients read."""

    answer: Any = None  # its type; None: no JSON
    status: int = 200
    _: KW_ONLY
    body: Any = None  # its type
    patch: Any = None  # the type of what a merge patch makes
    media: tuple[str, ...] = ()  # types of an answer that is no JSON
    query: tuple[Query, ...] = ()
    paged: bool = False  # ?limit, ?cursor
    once: bool = False  # Idempotency-Key
    etag: bool = False  # of the answer
    if_match: bool = False
    problems: tuple[int, ...] = ()  # statuses that do not follow from the rest
    openai: bool = False  # it speaks OpenAI's dialect
    lenient: bool = False  # it lets pass parameters that it does not know
    act: Callable[..., Awaitable[Response]] = _nothing
    summary: str = ""  # else the docstring

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
PERIOD = Query("period", Annotated[str, Meta(pattern=MONTH)], "A month, as 2026-11.", required=True)
OF_TENANT = Query("tenant", str, "With the admin key: what is this tenant's.")


@dataclass(frozen=True)
class Endpoint:
    """An operation where it is served."""

    method: str
    path: str  # below PREFIX, unless it is OpenAI's
    operation: Operation
    needs: Literal["admin", "control", "inference", "nothing"] = "control"  # which key
    context: object = None  # what the handler needs besides the call

    @property
    def whole_path(self) -> str:
        return self.path if self.operation.openai or self.needs == "nothing" else PREFIX + self.path


@dataclass(frozen=True)
class Answer:
    """`secret` is shown to the one who asked first, and kept nowhere."""

    status: int
    body: msgspec.Struct
    secret: dict[str, object] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One request of somebody who may make it."""

    request: Request
    caller: Caller
    id: str
    database: Database
    auth: Auth

    @property
    def by(self) -> str:
        """Who is named in the audit log."""
        return self.caller.key_id or "admin"

    def path(self, name: str) -> str:
        return str(self.request.path_params[name])

    @overload
    def query(self, name: str) -> str | None: ...
    @overload
    def query(self, name: str, default: str) -> str: ...
    def query(self, name: str, default: str | None = None) -> str | None:
        return self.request.query_params.get(name, default)

    async def body(self, kind: type[T]) -> T:
        """Of this kind; an empty one is `{}`. Raises Problem."""
        return parsed(await self.raw() or b"{}", kind)

    async def raw(self) -> bytes:
        if not hasattr(self.request.state, "body"):
            self.request.state.body = await read_body(self.request, BODY_MOST, BODY_DEADLINE_S)
        body: bytes = self.request.state.body
        return body

    async def once(self, deed: Callable[[AsyncConnection], Awaitable[Answer]]) -> Response:
        """Do it in one transaction; asked again with the same Idempotency-Key, repeat what was answered."""
        key = self.request.headers.get("idempotency-key")
        if key is not None and not 1 <= len(key) <= 255:
            raise Problem(422, "invalid_idempotency_key", f"Idempotency-Key has {len(key)} characters, 1 to 255 fit")
        scope = f"{self.caller.tenant_id or 'admin'} {self.request.method} {self.request.url.path}"
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
        """In the audit log: what was done, and the values that it changed. The last thing that a deed does."""
        await audit.record(connection, kind, subject_id, tenant_id, self.by, self.id, old, new)

    async def tenant(self, name: str) -> Caller:
        """The caller on the ground of this tenant. Raises Problem: 404, also for a tenant of somebody else."""
        within = await self.auth.within(self.caller, name)
        if within is None:
            raise not_found("tenant", name)
        return within

    async def tenant_id(self, name: str | None = None) -> str | None:
        """Whose things are meant: the caller's, or for the operator those of `name` or `?tenant=`, or (None) all."""
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
        """The id that the last page ended with; empty on the first."""
        cursor = self.query("cursor", "")
        try:
            id = base64.b64decode(cursor.encode(), b"-_", validate=True).decode()
        except (binascii.Error, UnicodeError):
            id = "?"
        if id and not re.fullmatch(r"[0-9a-f]{32}", id):
            raise invalid("?cursor", "it is not one that an earlier answer gave as next_cursor")
        return id

    def page(self, found: list[T], show: Callable[[T], Item]) -> Response:
        """`found` has one more than `limit` when there is another page."""
        shown = [show(item) for item in found[: self.limit]]
        more = len(found) > self.limit
        cursor = base64.urlsafe_b64encode(shown[-1].id.encode()).decode() if more else None
        return answered(Page(data=shown, next_cursor=cursor))

    def check_version(self, version: int) -> None:
        """If-Match. Raises Problem: 412."""
        wanted = self.request.headers.get("if-match")
        if wanted and wanted.strip() != "*" and etag(version) not in (tag.strip() for tag in wanted.split(",")):
            detail = f"it is at {etag(version)} now, not at {wanted}: read it again and decide anew"
            raise Problem(412, "precondition_failed", detail)


def etag(version: int) -> str:
    return f'"{version}"'


def answered(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """As JSON."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def serving(endpoint: Endpoint, database: Database, auth: Auth) -> Callable[[Request], Awaitable[Response]]:
    """For those who may: the operator, and unless it needs the admin key a tenant's key with the scope control."""
    operation = endpoint.operation
    shown = openai_response if operation.openai else problem_response
    context = () if endpoint.context is None else (endpoint.context,)

    async def serve(request: Request) -> Response:
        id = getattr(request.state, "request_id", None) or new_id()
        try:
            caller = await _caller(request, auth, endpoint.needs == "admin")
            if not operation.lenient:
                _check_query(request, operation)
            response = await operation.act(Call(request, caller, id, database.of(caller.tenant_id), auth), *context)
        except (Problem, DatabaseError, Taken) as error:
            return shown(_problem(error, id), id)
        except Disconnected:
            return Response(status_code=400)  # nobody reads it
        except Exception as error:
            log.error("control.failed", request=id, path=request.url.path, error=place_of(error))
            return shown(Problem(500, "internal_error", "our mistake: quote the request_id"), id)
        response.headers["x-request-id"] = id
        return response

    return serve


async def _caller(request: Request, auth: Auth, admin: bool) -> Caller:
    caller = await auth.caller(request.headers)
    if caller is None:
        raise unauthorized()
    if admin and not caller.admin:
        raise Problem(403, "admin_only", "this needs the admin key")
    if "control" not in caller.scopes:
        raise Problem(403, "insufficient_scope", "this key may only be used for inference: use one with scope control")
    return caller


def _check_query(request: Request, operation: Operation) -> None:
    """Raises Problem: a filter that is misspelt must not answer with everything."""
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


def _repeated(said: idempotency.Answered, fingerprint: str, key: str) -> Response:
    if said.fingerprint != fingerprint:
        detail = f"Idempotency-Key {key!r} was used with another body: take a new one for a new request"
        raise Problem(422, "idempotency_key_reused", detail)
    headers = {"idempotency-replayed": "true"}
    return Response(said.body, said.status, headers, media_type="application/json")


# ── bodies and values ─────────────────────────────────────────────────────────────────────────────────────────────────


def parsed(body: bytes, kind: type[T]) -> T:
    """Raises Problem: 400 for what is no JSON, 422 with the pointer for what is not allowed."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, "invalid_json", f"the body is not JSON: {error}") from error


def converted(value: object, kind: type[T]) -> T:
    """Raises Problem: 422."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error


def _invalid(error: msgspec.ValidationError) -> Problem:
    """msgspec says `… unknown field `x` - at `$.slo`` and `… missing required field `name``."""
    message, _, place = str(error).partition(" - at `$")
    pointer = re.sub(r"[.\[]", "/", place.rstrip("`").replace("]", ""))
    if found := re.search(r"(?:unknown|required) field `(.*)`", message):
        pointer += "/" + found[1].replace("~", "~0").replace("/", "~1")
    return invalid(pointer, message)


def patched(old: dict[str, Any], patch: dict[str, Any], kind: type[T]) -> T:
    """RFC 7396: a null takes the field away, an object goes into the object that is there.

    Raises Problem: 422, also for a null of what is not known."""
    made = converted(_merged(old, patch), kind)
    _check_names(patch, kind, "")
    return made


def _check_names(patch: dict[str, Any], kind: Any, pointer: str) -> None:
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in patch.items():
        if name not in known:
            raise invalid(f"{pointer}/{name}", f"Object contains unknown field `{name}`")
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
    """RFC 3339, UTC."""
    return f"{datetime.fromtimestamp(us / 1e6, UTC):%Y-%m-%dT%H:%M:%S.%fZ}" if us is not None else None


def time_us(moment: datetime) -> int:
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e6)


def moment(call: Call, name: str, default_us: int) -> int:
    """UNIX microseconds of a time in the query. Raises Problem."""
    said = call.query(name)
    if not said:
        return default_us
    try:
        return time_us(datetime.fromisoformat(said.replace(" ", "+")))  # a bare + in a query is a space
    except (ValueError, OverflowError) as error:
        raise invalid(f"?{name}", f"{said!r} is not a time like 2026-11-21 or 2026-11-21T12:00:00Z") from error


def month(pointer: str, said: str | None) -> str:
    """Raises Problem."""
    if said is None or not re.fullmatch(MONTH, said):
        raise invalid(pointer, f"{said or ''!r} is not a month like 2026-11")
    return said


def one_of(pointer: str, value: str | None, known: Iterable[str]) -> None:
    """Raises Problem: 422 that lists what may be said."""
    if value is not None and value not in (names := sorted(known)):
        raise invalid(pointer, f"{value!r} is not known, one of {', '.join(names) or '(none)'} is")
