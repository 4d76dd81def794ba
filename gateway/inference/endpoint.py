"""The tenant's OpenAI endpoints: find the caller and the deployment, wait for the model, let vLLM answer, and meter.

Routes: `/v1/...` (the key says the tenant) and `/t/{tenant}/v1/...`. The endpoints are a raw ASGI app: no framework
stands between vLLM's response and the socket, only `ResponseWriter`.
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

from gateway.core.canary import takes
from gateway.core.extent import BodyExtent, ExtentLimits, first_excess
from gateway.core.objectives import objective
from gateway.core.priority import HEADER, PriorityTooHigh, UnknownPriority, asked, granted
from gateway.core.status import loadable
from gateway.http.api import answered, check_operator
from gateway.http.auth import Auth, Caller, Target
from gateway.http.errors import Fault, Problem, endpoint_response, from_store
from gateway.http.limits import CLOSING, Disconnected, read_body
from gateway.http.reserve import Reserve
from gateway.http.vllm_errors import Reworded, Wording
from gateway.inference.admission import Admission, Quotas
from gateway.inference.context import TENANT, ModelFront, ModelFronts, RequestContext
from gateway.inference.meter import Meter, MeteredCall, MeterFull
from gateway.inference.metrics import Metrics
from gateway.inference.recent import Recent, Seen
from gateway.inference.response import ResponseWriter
from gateway.inference.routes import (
    BATCH,
    GENERATING,
    MODELS,
    OPERATOR,
    REPEATING,
    ModelCard,
    ModelCards,
    ModelPermission,
)
from gateway.inference.spans import begin, end, tell
from gateway.streams.dispatch import PARTING_S
from gateway.streams.runtimes import RuntimesView
from store.contract import wire
from store.contract.priorities import Priority, priority
from store.db.database import DatabaseError
from store.telemetry.tracing import Traces

log = structlog.get_logger()

HOLD_POLL_S = 0.5
FIRST_RUNTIME_S = 2.0  # longest wait where no runtime was ever seen, and none is being started on this machine
NAMES_MOST = 8  # deployments that an error names
LEAVING_S = 0.05  # longest time for a handler to notice that the client has left, before the handler is cancelled


@dataclass(frozen=True)
class Bounds:
    """Bounds of every request, for every caller."""

    body_bytes: int
    body_deadline_s: float
    hold_deadline_s: float
    extent: ExtentLimits = ExtentLimits()


@dataclass
class Inference:
    """The ASGI app mounted at `/v1` and `/t`."""

    auth: Auth
    fleet: RuntimesView
    fronts: ModelFronts
    meter: Meter
    quotas: Quotas
    bounds: Bounds
    metrics: Metrics
    salt: bytes  # secret: cache salts are derived from it
    recent: Recent = field(default_factory=Recent)
    traces: Traces | None = None
    reserve: Reserve | None = None  # None: the disk may become full
    awaits_runtimes: bool = True  # runtimes on this machine may just be starting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext(str(uuid_utils.uuid7()), self.metrics.tally("", ""))
        if self.traces:
            context.span = begin(self.traces, context.request_id, scope)
        try:
            await self._respond(Request(scope, receive), send, context)
        except Exception:
            context.status = 500
            raise
        finally:
            context.tally.answered(context.status)
            if context.span:
                end(context.span, context.status)

    async def _respond(self, request: Request, send: Send, context: RequestContext) -> None:
        _, path = _split(request.scope["path"])
        try:
            response = await self._answer(request, send, context)
        except Problem as problem:
            response = endpoint_response(problem, context.request_id, path)
        except DatabaseError as error:
            log.warning("inference.database", error=str(error))
            response = endpoint_response(from_store(error), context.request_id, path)
        except Disconnected:
            return
        if response is not None:
            context.status = response.status_code
            await response(request.scope, request.receive, send)

    async def _answer(self, request: Request, send: Send, context: RequestContext) -> Response | None:
        """The response, or None if the response was sent already."""
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
        ask, said = _read(body, self.bounds.extent, path in REPEATING)
        if path == BATCH:
            _check_batch(body)
        name, named = await self._named(caller, said)
        body = body if said else _naming(body, name)
        target = self._revision(named, context.request_id)
        tally = self.metrics.tally(str(caller.tenant_id), target.deployment_id)
        wait_s = min(self.bounds.hold_deadline_s, _prefer_wait_s(request))
        context.understood(caller, name, target, tally, wait_s, _priority(request, ask, caller, target))
        exchange = Exchange(request, send, context.request_id, route, body)
        TENANT.set(str(caller.tenant_id))
        if path in REPEATING:
            await self._repeat(exchange, context)
        else:
            await self._generate(exchange, context)
        return None

    # ── who and what ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _caller(self, request: Request, tenant: str | None) -> Caller:
        found = await self.auth.caller(request.headers)
        if found.admin:
            check_operator(found, OPERATOR)
        caller = found if tenant is None else await self.auth.within(found, tenant)
        if caller is None:
            raise Problem(404, "not_found", "there is no such endpoint")
        if "inference" not in caller.scopes:
            raise Problem(403, "scope_missing", "this key lacks the scope `inference`: make one that has it")
        if caller.tenant_id is None:
            raise Problem(404, "not_found", "an operator's key has no tenant of its own: use /t/TENANT/v1")
        return caller

    async def _named(self, caller: Caller, name: str | None) -> tuple[str, Target]:
        """The deployment of that name; without a name the tenant's only deployment. Raises Problem."""
        if name is not None:
            return name, await self._target(caller, name)
        assert caller.tenant_id is not None
        targets = await self.auth.deployments(caller.tenant_id)
        if len(targets) == 1:
            return targets[0].name, targets[0]
        if not targets:
            detail = "this tenant has no deployment: make one with `staccato deploy`"
            raise Problem(404, "no_deployment", detail, [Fault("/model", "missing")])
        names = ", ".join(target.name for target in targets[:NAMES_MOST]) + (" …" if len(targets) > NAMES_MOST else "")
        detail = f"`model` is missing: this tenant has {len(targets)} deployments, name one of them: {names}"
        raise Problem(400, "missing_model", detail, [Fault("/model", "missing")])

    async def _target(self, caller: Caller, name: str) -> Target:
        assert caller.tenant_id is not None
        target = await self.auth.deployment(caller.tenant_id, name)
        if target is None:
            raise Problem(404, "model_not_found", f"there is no deployment {name!r}", [Fault("/model", "unknown")])
        return target

    def _revision(self, target: Target, request_id: str) -> Target:
        """The canary's revision, if the request is in the canary's share and some runtime can serve the canary."""
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
        """The tenant's cache salt: prefix caches are shared within a tenant only, and no tenant can guess a salt."""
        return hmac.new(self.salt, str(caller.tenant_id).encode(), hashlib.sha256).hexdigest()[:32]

    # ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _hold(self, target: Target, deadline: float) -> str:
        """Wait until some runtime can take the model. Returns how cold the model is there: none, host or disk.

        Raises Problem if the model has failed, or no runtime can take the model before `deadline` (monotonic).
        """
        began_s = time.monotonic()
        while True:
            if failure := self.fleet.failure(target.spec.key):
                raise Problem(
                    503, "model_failed", f"the model can't be served: {failure}", headers={"retry-after": "30"}
                )
            if runtime := self.fleet.choose(target.spec.key):
                return self.fleet.coldness(target.spec.key, runtime).name.lower()
            if not (self.awaits_runtimes or self.fleet.seen_any):
                deadline = min(deadline, began_s + FIRST_RUNTIME_S)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Problem(503, "no_runtime", self._no_runtime(), headers={"retry-after": "2"})
            await self.fleet.change(min(left_s, HOLD_POLL_S))

    def _no_runtime(self) -> str:
        if any(lease.engine for lease in self.fleet.leases.values()):
            return "no runtime can serve the model now"
        return "no runtime is up: the operator starts one with `staccato runtime` or `staccato up --runtimes 1`"

    async def _front(self, target: Target) -> ModelFront:
        try:
            return await self.fronts.get(target.spec, target.tool_parser)
        except Exception as error:
            log.error("inference.front_failed", model=target.spec.key, error=type(error).__name__)
            raise Problem(503, "model_failed", "the model's tokenizer or template can't be read") from error

    # ── serving ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _repeat(self, exchange: Exchange, context: RequestContext) -> None:
        """Pass on a request that generates nothing: the tenant's limits count the request, with no tokens, no price."""
        admission = await self.quotas.admit(context.caller, context.target, generates=False)
        try:
            await self._hold(context.target, context.deadline)
            front = await self._front(context.target)
            send = context.noting(exchange.send, admission.headers() if admission else {})
            said = Reworded(send, _wording(exchange, context.name, context.target))
            await exchange.pass_on(front, context, said, asyncio.Event().wait())
        except Problem as problem:
            problem.headers |= admission.headers() if admission else {}
            raise
        finally:
            if admission is not None:
                admission.close()

    async def _generate(self, exchange: Exchange, context: RequestContext) -> None:
        if self.reserve:
            self.reserve.check()
        admission = await self.quotas.admit(context.caller, context.target)
        try:
            await self._generate_admitted(exchange, context, admission)
        except Problem as problem:
            problem.headers |= admission.headers() if admission else {}
            raise
        finally:
            if admission is not None:
                admission.close()

    async def _generate_admitted(
        self, exchange: Exchange, context: RequestContext, admission: Admission | None
    ) -> None:
        target = context.target
        cold = await self._hold(target, context.deadline)
        front = await self._front(target)
        call = self._open(context.request_id, context.caller, target)
        due = objective(target.slo, context.priority, target.tenant_weight)
        context.opened(call, due, self._cache_salt(context.caller), admission)
        headers = {
            "x-request-id": context.request_id,
            "x-staccato-cold": cold,
            "x-staccato-revision": str(target.revision),
        }
        wording = _wording(exchange, context.name, target)
        answer = ResponseWriter(exchange.send, context, self.meter, headers, exchange.prefers_timing, wording)
        try:
            await self._serve(exchange, front, context, answer)
        finally:
            context.status = answer.status
            if self.traces and context.span:
                tell(self.traces, context.span, exchange.path, context)

    def _open(self, request_id: str, caller: Caller, target: Target) -> MeteredCall:
        now = time.time()
        usage = wire.Usage(
            request=request_id,
            attempt=1,
            seq=0,
            final=False,
            tenant_id=str(caller.tenant_id),
            key_id=caller.key_id or caller.by,
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

    async def _serve(
        self, exchange: Exchange, front: ModelFront, context: RequestContext, answer: ResponseWriter
    ) -> None:
        finish = "error"
        said = Reworded(answer.send, answer.wording)
        try:
            complete = await exchange.pass_on(front, context, said, answer.patience())
            ended = "budget_exhausted" if context.exhausted else context.call.finish
            finish = "cancelled" if not complete else answer.failure if answer.failed else ended
        finally:
            try:
                if finish == "cancelled":
                    await self._charge_computed(front, context)
            finally:
                self._close(context, answer, finish)

    async def _charge_computed(self, front: ModelFront, context: RequestContext) -> None:
        """After the client left, raise the call's counters to the tokens that devices computed until told so."""
        call, computed = context.call, context.computed
        computed.charge(call)
        self.meter.count(call)  # in case the process dies while the runtimes are asked
        await front.leave(computed)
        await computed.settled(PARTING_S)
        computed.charge(call)

    def _close(self, context: RequestContext, answer: ResponseWriter, finish: str) -> None:
        call, tally = context.call, context.tally
        timing = context.timing
        if timing is not None:
            timing.end(time.monotonic())
        self.meter.close(call, finish, timing.elapsed(answer.cold) if timing else None)
        self.recent.add(call.opened.tenant_id, _seen(context, answer.cold, finish))
        for kind, tokens in zip(
            ("prompt", "cached", "output"), (call.prompt_tokens, call.cached_tokens, call.output_tokens), strict=True
        ):
            tally.tokens(kind, tokens)
        if answer.started and finish in ("cancelled", "error", "refused"):
            self.metrics.aborted("client" if finish == "cancelled" else "platform")


def _seen(context: RequestContext, cold: str, finish: str) -> Seen:
    call, timing = context.call, context.timing
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
    """An HTTP request after its body was read, and the watch for a client that goes away."""

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
        self, front: ModelFront, context: RequestContext, send: Send, patience: Coroutine[None, None, object]
    ) -> bool:
        """Let vLLM answer. Returns False if the client left, or `patience` with the client ended, before the end."""
        ended = False

        async def send_while_there(message: Message) -> None:
            """Send a message while the client is there. uvicorn drops messages between the loss of a connection and the
            news of the loss: dropped messages must not be counted."""
            nonlocal ended
            if not (self._gone.is_set() or self._closing()):
                await send(message)
                ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        answering = asyncio.create_task(front.handle(context, self._scope, self._replay, send_while_there))
        waiting = [asyncio.create_task(self._watch()), asyncio.create_task(patience)]
        try:
            await asyncio.wait([answering, *waiting], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
            return ended
        except OSError:  # the client's socket is gone
            return False
        finally:
            # vLLM runs some handlers in separate tasks. Only the news that the client left ends the tasks.
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
    """Split a path into (tenant's name or None, the path below)."""
    if path.startswith("/t/"):
        tenant, _, rest = path.removeprefix("/t/").partition("/")
        return tenant, "/" + rest
    return None, path


def _allow(request: Request, method: str) -> None:
    if request.method != method:
        raise Problem(405, "method_not_allowed", f"{request.method} is not possible here: use {method}")


def _wording(exchange: Exchange, name: str, target: Target) -> Wording:
    return Wording(exchange.path, name, (target.spec.path, target.spec.key))


def _priority(request: Request, ask: BodyExtent, caller: Caller, target: Target) -> Priority:
    """The request's priority. Raises Problem."""
    try:
        return granted(asked(request.headers.get(HEADER), ask.service_tier), priority(target.priority), caller.priority)
    except UnknownPriority as error:
        raise Problem(400, "invalid_request", str(error)) from error
    except PriorityTooHigh as error:
        raise Problem(403, "priority_too_high", str(error)) from error


def _read(body: bytes, extent: ExtentLimits, repeats: bool) -> tuple[BodyExtent, str | None]:
    """The body, and the deployment named in the body or None. `repeats`: the request generates no tokens.

    Raises Problem if the body is not the JSON expected, or asks for too much.
    """
    try:
        ask = msgspec.json.decode(body, type=BodyExtent)
        name = msgspec.json.decode(ask.model, type=str | None) if ask.model else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, "invalid_json", f"the body is not the JSON object expected: {error}") from error
    if excess := first_excess(ask, extent, repeats):
        remedy = f"ask for less, or have the operator raise STACCATO_{excess.setting.upper()}"
        raise Problem(
            400,
            "request_too_extensive",
            f"`{excess.field}`: {excess}: {remedy}",
            [Fault(f"/{excess.field}", str(excess))],
        )
    return ask, name or None


def _check_batch(body: bytes) -> None:
    """Refuse a streamed batch: vLLM answers a streamed batch with the last piece of each text alone.

    Raises Problem.
    """
    if bytes(msgspec.json.decode(body, type=BodyExtent).stream) in (b"true", b"1"):
        remedy = "leave `stream` out, or send each conversation to /v1/chat/completions"
        raise Problem(400, "invalid_request", f"`stream`: a batch is answered in one piece: {remedy}")


def _naming(body: bytes, name: str) -> bytes:
    """The body with the deployment's name added: vLLM wants the name on some routes."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(fields | {"model": msgspec.Raw(msgspec.json.encode(name))})


def _preferences(request: Request) -> dict[str, str]:
    """The preferences of the header `Prefer` (RFC 7240): `wait=N`, in seconds, and `timing`."""
    said = (preference.strip().partition("=") for preference in request.headers.get("prefer", "").split(","))
    return {name.lower(): value for name, _, value in said}


def _prefer_wait_s(request: Request) -> float:
    with contextlib.suppress(KeyError, ValueError):
        return max(0.0, float(_preferences(request)["wait"]))
    return float("inf")


def _card(name: str, target: Target) -> ModelCard:
    created = int(target.created_at)
    return ModelCard(
        id=name,
        created=created,
        owned_by=target.owner,
        root=target.spec.digest,
        max_model_len=target.spec.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{target.deployment_id}", created=created)],
    )
