"""The tenant's OpenAI endpoints: who asks, for which deployment, is it there; then vLLM answers, and we meter.

Routes: `/v1/...` (the key says the tenant) and `/t/{tenant}/v1/...`. A raw ASGI app: nothing of a framework stands
between vLLM's response and the socket but `Answer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import msgspec
import structlog
import uuid_utils
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.answer import Answer
from gateway.api import answered
from gateway.auth import Auth, Caller, Target
from gateway.canary import takes
from gateway.errors import Fault, Problem, from_store, openai_response, unauthorized
from gateway.extent import Ask, ExtentLimits, first_excess
from gateway.fleet import COLDNESS, Fleet
from gateway.front import Front, Fronts, Served
from gateway.limits import CLOSING, Disconnected, read_body
from gateway.meter import Call, Meter, MeterFull
from gateway.metrics import Metrics, Tally
from gateway.objectives import objective
from gateway.offered import GENERATING, MODELS, REPEATING, ModelCard, ModelCards
from gateway.quotas import Admission, Quotas
from gateway.recent import Recent, Seen
from gateway.spans import begin, end, tell
from gateway.status import loadable
from store import wire
from store.db import DatabaseError
from store.tracing import Span, Traces, traceparent

log = structlog.get_logger()

HOLD_POLL_S = 0.5
LEAVING_S = 0.05  # the longest that a handler may take to notice that its client has left, before it is cancelled


@dataclass(frozen=True)
class Bounds:
    """Of every request, whoever makes it."""

    body_bytes: int
    body_deadline_s: float
    hold_deadline_s: float
    extent: ExtentLimits = ExtentLimits()


@dataclass
class Visit:
    """What becomes of a request, for the counters."""

    request_id: str
    tally: Tally
    status: int = 499  # the client left before an answer began
    began_at: float = field(default_factory=time.monotonic)
    span: Span | None = None  # None: nobody wants traces

    def noting(self, send: Send) -> Send:
        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            await send(message)

        return note


@dataclass(frozen=True)
class Asked:
    """A request that was understood: who wants what of which deployment."""

    caller: Caller
    name: str  # the deployment's, as the client said it
    target: Target
    visit: Visit
    arrived_at: float  # monotonic
    deadline: float  # monotonic


@dataclass
class Inference:
    """The ASGI app mounted at `/v1` and `/t`."""

    auth: Auth
    fleet: Fleet
    fronts: Fronts
    meter: Meter
    quotas: Quotas
    bounds: Bounds
    metrics: Metrics
    salt: bytes  # secret: cache salts are derived from it
    recent: Recent = field(default_factory=Recent)
    traces: Traces | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = Visit(str(uuid_utils.uuid7()), self.metrics.tally("", ""))
        if self.traces:
            visit.span = begin(self.traces, visit.request_id, scope)
        try:
            await self._respond(Request(scope, receive), send, visit)
        except Exception:
            visit.status = 500
            raise
        finally:
            visit.tally.answered(visit.status)
            if visit.span:
                end(visit.span, visit.status)

    async def _respond(self, request: Request, send: Send, visit: Visit) -> None:
        try:
            response = await self._answer(request, send, visit)
        except Problem as problem:
            response = openai_response(problem, visit.request_id)
        except DatabaseError as error:
            log.warning("inference.database", error=str(error))
            response = openai_response(from_store(error), visit.request_id)
        except Disconnected:
            return
        if response is not None:
            visit.status = response.status_code
            await response(request.scope, request.receive, send)

    async def _answer(self, request: Request, send: Send, visit: Visit) -> Response | None:
        """The response, or None when it was sent already."""
        tenant, path = _split(request.scope["path"])
        caller = await self._caller(request, tenant)
        if path == MODELS or path.startswith(MODELS + "/"):
            _allow(request, "GET")
            return await self._models(caller, path.removeprefix(MODELS).strip("/"))
        route = GENERATING.get(path) or REPEATING.get(path)
        if route is None:
            raise Problem(404, "not_found", f"there is no {path} here")
        _allow(request, "POST")
        body = await read_body(request, self.bounds.body_bytes, self.bounds.body_deadline_s)
        name = _model(body, self.bounds.extent)
        target = self._revision(await self._target(caller, name), visit.request_id)
        visit.tally = self.metrics.tally(str(caller.tenant_id), target.deployment_id)
        arrived_at = time.monotonic()
        deadline = arrived_at + min(self.bounds.hold_deadline_s, _prefer_wait_s(request))
        exchange = Exchange(request, send, visit.request_id, route, body)
        asked = Asked(caller, name, target, visit, arrived_at, deadline)
        if path in REPEATING:
            await self._hold(target, deadline)
            front = await self._front(target)
            await exchange.pass_on(self.fronts, front, None, visit.noting(send), asyncio.Event().wait())
        else:
            await self._generate(exchange, asked)
        return None

    # ── who and what ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _caller(self, request: Request, tenant: str | None) -> Caller:
        caller = await self.auth.caller(request.headers)
        if caller is None:
            raise unauthorized()
        if tenant is not None:
            caller = await self.auth.within(caller, tenant)
            if caller is None:
                raise Problem(404, "not_found", "there is no such endpoint")
        if "inference" not in caller.scopes:
            raise Problem(403, "scope_missing", "this key lacks the scope `inference`: make one that has it")
        if caller.tenant_id is None:
            raise Problem(404, "not_found", "the admin key has no tenant of its own: use /t/TENANT/v1")
        return caller

    async def _target(self, caller: Caller, name: str) -> Target:
        assert caller.tenant_id is not None
        target = await self.auth.deployment(caller.tenant_id, name)
        if target is None:
            raise Problem(404, "model_not_found", f"there is no deployment {name!r}", [Fault("/model", "unknown")])
        return target

    def _revision(self, target: Target, request_id: str) -> Target:
        """The canary's, if the request is one of its share and some runtime can serve it."""
        canary = target.canary
        if canary is None or not takes(request_id, target.canary_weight):
            return target
        key = canary.spec.key
        return canary if loadable(self.fleet.states(key).values()) and self.fleet.choose(key) else target

    async def _models(self, caller: Caller, name: str) -> Response:
        assert caller.tenant_id is not None
        if name:
            target = await self._target(caller, name)
            return answered(_card(name, target))
        targets = await self.auth.deployments(caller.tenant_id)
        return answered(ModelCards(data=[_card(target.name, target) for target in targets]))

    def _cache_salt(self, caller: Caller) -> str:
        """Prefix caches are shared within a tenant only, and nobody can guess another's salt."""
        return hmac.new(self.salt, str(caller.tenant_id).encode(), hashlib.sha256).hexdigest()[:32]

    # ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _hold(self, target: Target, deadline: float) -> str:
        """Wait until some runtime can take it; how cold it is: none, host or disk."""
        while True:
            if failure := self.fleet.failure(target.spec.key):
                raise Problem(
                    503, "model_failed", f"the model can't be served: {failure}", headers={"retry-after": "30"}
                )
            if runtime := self.fleet.choose(target.spec.key):
                return COLDNESS[self.fleet.states(target.spec.key)[runtime].residency].name.lower()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Problem(503, "no_runtime", "no runtime can serve the model now", headers={"retry-after": "2"})
            await self.fleet.change(min(left_s, HOLD_POLL_S))

    async def _front(self, target: Target) -> Front:
        try:
            return await self.fronts.get(target.spec, target.tool_parser, target.reasoning_parser)
        except Exception as error:
            log.error("inference.front_failed", model=target.spec.key, error=type(error).__name__)
            raise Problem(503, "model_failed", "the model's tokenizer or template can't be read") from error

    # ── serving ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _generate(self, exchange: Exchange, asked: Asked) -> None:
        admission = await self.quotas.admit(asked.caller, asked.target)
        try:
            await self._generate_admitted(exchange, asked, admission)
        except Problem as problem:
            problem.headers |= admission.headers() if admission else {}
            raise
        finally:
            if admission is not None:
                admission.close()

    async def _generate_admitted(self, exchange: Exchange, asked: Asked, admission: Admission | None) -> None:
        target = asked.target
        cold = await self._hold(target, asked.deadline)
        front = await self._front(target)
        request_id, tally = asked.visit.request_id, asked.visit.tally
        call = self._open(request_id, asked.caller, target)
        if admission is not None:
            admission.call = call
        due = objective(target.slo, target.priority, target.tenant_weight)
        salt = self._cache_salt(asked.caller)
        served = Served(
            asked.name, salt, call, asked.deadline, asked.visit.began_at, asked.arrived_at, due, tally, admission
        )
        served.weight, served.trace = target.tenant_weight, traceparent(asked.visit.span)
        headers = {
            "x-request-id": request_id,
            "x-staccato-cold": cold,
            "x-staccato-revision": str(target.revision),
        }
        answer = Answer(exchange.send, served, self.meter, headers, exchange.prefers_timing)
        try:
            await self._serve(exchange, front, served, answer)
        finally:
            asked.visit.status = answer.status
            if self.traces and asked.visit.span:
                tell(self.traces, asked.visit.span, exchange.path, asked.name, served)

    def _open(self, request_id: str, caller: Caller, target: Target) -> Call:
        now = time.time()
        usage = wire.Usage(
            request=request_id,
            attempt=1,
            seq=0,
            final=False,
            tenant_id=str(caller.tenant_id),
            key_id=caller.key_id or "admin",
            deployment_id=target.deployment_id,
            deployment=target.name,
            revision=target.revision,
            model=target.spec.key,
            prompt_tokens=0,
            cached_tokens=0,
            output_tokens=0,
            started_at=now,
            ended_at=now,
            finish="open",
        )
        try:
            return self.meter.open(usage)
        except MeterFull as error:
            raise Problem(503, "overloaded", str(error), headers={"retry-after": "2"}) from error

    async def _serve(self, exchange: Exchange, front: Front, served: Served, answer: Answer) -> None:
        finish = "error"
        try:
            complete = await exchange.pass_on(self.fronts, front, served, answer.send, answer.patience())
            ended = "budget_exhausted" if served.exhausted else served.call.finish
            finish = "cancelled" if not complete else answer.failure if answer.failed else ended
        finally:
            self._close(served, answer, finish)

    def _close(self, served: Served, answer: Answer, finish: str) -> None:
        call, tally = served.call, served.tally
        self.meter.close(call, finish)
        if served.timing is not None:
            served.timing.end(time.monotonic())
        self.recent.add(call.opened.tenant_id, _seen(served, answer.cold, finish))
        for kind, tokens in zip(
            ("prompt", "cached", "output"), (call.prompt_tokens, call.cached_tokens, call.output_tokens), strict=True
        ):
            tally.tokens(kind, tokens)
        if answer.started and finish in ("cancelled", "error", "refused"):
            self.metrics.aborted("client" if finish == "cancelled" else "platform")


def _seen(served: Served, cold: str, finish: str) -> Seen:
    call, timing = served.call, served.timing
    return Seen(
        id=call.opened.request,
        deployment_id=call.opened.deployment_id,
        revision=call.opened.revision,
        started_at=call.opened.started_at,
        cold=cold,
        finish=finish,
        prompt_tokens=call.prompt_tokens,
        cached_tokens=call.cached_tokens,
        output_tokens=call.output_tokens,
        breakdown=timing.breakdown(timing.ended_at or 0.0) if timing else None,
    )


class Exchange:
    """One HTTP request whose body was read, and the watch for its client going away."""

    def __init__(self, request: Request, send: Send, request_id: str, route: str, body: bytes) -> None:
        self.send = send
        self._receive = request.receive
        self._body: bytes | None = body
        self.path = route
        self._gone = asyncio.Event()
        self._closing: Callable[[], bool] = request.scope.get("extensions", {}).get(CLOSING, lambda: False)
        self.prefers_timing = "timing" in _preferences(request)
        headers = [(name, value) for name, value in request.scope["headers"] if name != b"x-request-id"]
        headers.append((b"x-request-id", request_id.encode()))
        self._scope = {**request.scope, "path": route, "raw_path": route.encode(), "root_path": "", "headers": headers}

    async def pass_on(
        self, fronts: Fronts, front: Front, served: Served | None, send: Send, patience: Coroutine[None, None, object]
    ) -> bool:
        """Let vLLM answer; False when the client went away, or our `patience` with it ended, before the end."""
        ended = False

        async def send_while_there(message: Message) -> None:
            """uvicorn drops what comes between the loss of a connection and the news of it; it must not be counted."""
            nonlocal ended
            if not (self._gone.is_set() or self._closing()):
                await send(message)
                ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        answering = asyncio.create_task(fronts.handle(front, served, self._scope, self._replay, send_while_there))
        waiting = [asyncio.create_task(self._watch()), asyncio.create_task(patience)]
        try:
            await asyncio.wait([answering, *waiting], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
            return ended
        except OSError:  # its socket is gone
            return False
        finally:
            # vLLM runs some handlers in tasks of their own, which nothing but this news ends.
            self._gone.set()
            await asyncio.wait([answering], timeout=LEAVING_S)
            for task in (answering, *waiting):
                task.cancel()
            await asyncio.gather(answering, *waiting, return_exceptions=True)

    async def _replay(self) -> Message:
        """ASGI `receive` for vLLM: the body once, then nothing until the client goes away."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()


def _split(path: str) -> tuple[str | None, str]:
    """(tenant's name or None, the path below)."""
    if path.startswith("/t/"):
        tenant, _, rest = path.removeprefix("/t/").partition("/")
        return tenant, "/" + rest
    return None, path


def _allow(request: Request, method: str) -> None:
    if request.method != method:
        raise Problem(405, "method_not_allowed", f"{request.method} is not possible here: use {method}")


def _model(body: bytes, extent: ExtentLimits) -> str:
    """The deployment that the body names. Raises Problem, also where the body asks for too much."""
    try:
        ask = msgspec.json.decode(body, type=Ask)
        name = msgspec.json.decode(ask.model, type=str | None) if ask.model else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, "invalid_json", f"the body is not the JSON object expected: {error}") from error
    if not name:
        raise Problem(
            400, "missing_model", "`model` is missing: give a deployment's name", [Fault("/model", "missing")]
        )
    if excess := first_excess(ask, extent):
        remedy = f"ask for less, or have the operator raise STACCATO_{excess.setting.upper()}"
        raise Problem(
            400,
            "request_too_extensive",
            f"`{excess.field}`: {excess}: {remedy}",
            [Fault(f"/{excess.field}", str(excess))],
        )
    return name


def _preferences(request: Request) -> dict[str, str]:
    """`Prefer` (RFC 7240): `wait=N`, seconds, and `timing`."""
    said = (preference.strip().partition("=") for preference in request.headers.get("prefer", "").split(","))
    return {name.lower(): value for name, _, value in said}


def _prefer_wait_s(request: Request) -> float:
    with contextlib.suppress(KeyError, ValueError):
        return max(0.0, float(_preferences(request)["wait"]))
    return float("inf")


def _card(name: str, target: Target) -> ModelCard:
    return ModelCard(
        id=name, created=int(target.created_at), owned_by=target.owner, max_model_len=target.spec.max_model_len
    )
