"""What every route of the control plane shares: who calls, what the body says, doing a deed once, pages, problems."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import msgspec
import structlog
from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.auth import Auth, Caller
from gateway.errors import Problem, from_store, invalid, not_found, problem_response, unauthorized
from gateway.limits import Disconnected, TooLong, TooSlow, read_body
from store import events, idempotency
from store.db import Database, DatabaseError, Taken, new_id, now_us

log = structlog.get_logger()

BODY_MOST = 1 << 20  # bytes
BODY_DEADLINE_S = 30.0
PAGE_DEFAULT, PAGE_MOST = 50, 200

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
T = TypeVar("T")


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may say."""


@dataclass(frozen=True)
class Answer:
    """`secret` is shown to the one who asked first, and kept nowhere."""

    status: int
    body: dict[str, object]
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
        """Who is named in the events."""
        return self.caller.key_id or "admin"

    def path(self, name: str) -> str:
        return str(self.request.path_params[name])

    def query(self, name: str) -> str | None:
        return self.request.query_params.get(name)

    async def body(self, kind: type[T]) -> T:
        """Of this kind; an empty one is `{}`. Raises Problem."""
        return parsed(await self.raw() or b"{}", kind)

    async def raw(self) -> bytes:
        if not hasattr(self.request.state, "body"):
            try:
                self.request.state.body = await read_body(self.request.receive, BODY_MOST, BODY_DEADLINE_S)
            except TooLong as error:
                raise Problem(413, "request_too_large", str(error)) from error
            except TooSlow as error:
                raise Problem(408, "request_timeout", str(error)) from error
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
        return JSONResponse(answer.body | answer.secret, answer.status, answer.headers)

    async def record(
        self, connection: AsyncConnection, kind: str, subject_id: str, tenant_id: str | None, detail: str = ""
    ) -> None:
        await events.record(connection, kind, subject_id, tenant_id, self.by, detail)

    async def tenant(self, name: str) -> Caller:
        """The caller on the ground of this tenant. Raises Problem: 404, also for a tenant of somebody else."""
        within = await self.auth.within(self.caller, name)
        if within is None:
            raise not_found("tenant", name)
        return within

    async def tenant_id(self, name: str | None = None) -> str | None:
        """Whose things are meant: the caller's, or for the operator those of `name` or `?tenant=`, or (None) all."""
        name = name or self.query("tenant")
        return (await self.tenant(name)).tenant_id if name else self.caller.tenant_id

    # ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def limit(self) -> int:
        said = self.query("limit") or str(PAGE_DEFAULT)
        if not re.fullmatch(r"\d{1,3}", said) or not 1 <= int(said) <= PAGE_MOST:
            raise invalid("?limit", f"{said!r} is not a number from 1 to {PAGE_MOST}")
        return int(said)

    @property
    def after(self) -> str:
        """The id that the last page ended with; empty on the first."""
        cursor = self.query("cursor") or ""
        try:
            id = base64.b64decode(cursor.encode(), b"-_", validate=True).decode()
        except (binascii.Error, UnicodeError):
            id = "?"
        if id and not re.fullmatch(r"[0-9a-f]{32}", id):
            raise invalid("?cursor", "it is not one that an earlier answer gave as next_cursor")
        return id

    def page(self, found: list[T], show: Callable[[T], dict[str, object]]) -> Response:
        """`found` has one more than `limit` when there is another page."""
        shown = [show(item) for item in found[: self.limit]]
        more = len(found) > self.limit
        cursor = base64.urlsafe_b64encode(str(shown[-1]["id"]).encode()).decode() if more else None
        return JSONResponse({"data": shown, "next_cursor": cursor})

    def check_version(self, version: int) -> None:
        """If-Match. Raises Problem: 412."""
        wanted = self.request.headers.get("if-match")
        if wanted and wanted.strip() != "*" and etag(version) not in (tag.strip() for tag in wanted.split(",")):
            detail = f"it is at {etag(version)} now, not at {wanted}: read it again and decide anew"
            raise Problem(412, "precondition_failed", detail)


Act = Callable[[Call], Awaitable[Response]]


def etag(version: int) -> str:
    return f'"{version}"'


def endpoint(
    act: Act,
    database: Database,
    auth: Auth,
    admin: bool = False,
    shown: Callable[[Problem, str], Response] = problem_response,
) -> Callable[[Request], Awaitable[Response]]:
    """`act` for those who may: the operator, and unless `admin` a tenant's key with the scope control. `shown`: how
    a problem is said."""

    async def serve(request: Request) -> Response:
        id = getattr(request.state, "request_id", None) or new_id()
        try:
            caller = await _caller(request, auth, admin)
            response = await act(Call(request, caller, id, database, auth))
        except (Problem, DatabaseError, Taken) as error:
            return shown(_problem(error, id), id)
        except Disconnected:
            return Response(status_code=400)  # nobody reads it
        except Exception:
            log.exception("control.failed", request=id, path=request.url.path)
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


def merged(old: Any, patch: Any) -> Any:
    """RFC 7396: a null takes the field away, an object goes into the object that is there."""
    if not isinstance(patch, dict):
        return patch
    kept = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = merged(kept.get(name), value)
    return kept


def time_text(us: int | None) -> str | None:
    """RFC 3339, UTC."""
    return f"{datetime.fromtimestamp(us / 1e6, UTC):%Y-%m-%dT%H:%M:%S.%fZ}" if us is not None else None


def time_us(moment: datetime) -> int:
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e6)


def month(pointer: str, said: str | None) -> str:
    """Raises Problem."""
    if said is None or not re.fullmatch(r"[1-9]\d{3}-(0[1-9]|1[0-2])", said):
        raise invalid(pointer, f"{said or ''!r} is not a month like 2026-11")
    return said


def one_of(pointer: str, value: str | None, known: Iterable[str]) -> None:
    """Raises Problem: 422 that lists what may be said."""
    if value is not None and value not in (names := sorted(known)):
        raise invalid(pointer, f"{value!r} is not known, one of {', '.join(names) or '(none)'} is")
