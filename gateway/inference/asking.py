"""What a request asks for: the body within its bounds, the deployment and revision, the priority, the longest wait."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from gateway.core.canary import takes
from gateway.core.extent import BodyExtent, Excess, ExtentLimits, TokenizeWatch, first_excess, pictures_in
from gateway.core.priority import HEADER, PriorityTooHigh, UnknownPriority, asked, granted
from gateway.core.status import loadable
from gateway.core.way import fast_ask
from gateway.http.auth import Auth, Caller, Target
from gateway.http.errors import Fault, Problem
from gateway.http.limits import read_body
from gateway.inference.context import RequestContext
from gateway.inference.metrics import Metrics
from gateway.inference.resuming import resumable, resumed
from gateway.inference.routes import BATCH, OF_EVERY_TASK, OF_TASK, POOLING, REPEATING
from gateway.streams.runtimes import RuntimesView
from store.contract.priorities import Priority, priority
from store.contract.tasks import Task

NAMES_MOST = 8  # deployments that an error names
PREPARING = ("mm_processor_kwargs", "media_io_kwargs")  # a client could have a picture made as large as it likes


@dataclass(frozen=True)
class Bounds:
    """Bounds of every request, for every caller."""

    body_bytes: int
    body_deadline_s: float
    hold_deadline_s: float
    extent: ExtentLimits = ExtentLimits()
    fast_way: bool = True  # False: vLLM's handlers answer every request
    resumable_s: float = 10.0  # time in which a client may resume a stream; 0: no stream can be resumed


@dataclass(frozen=True)
class Asking:
    """Finds out what requests ask for. No limit of a tenant is touched here, and no runtime is asked."""

    auth: Auth
    fleet: RuntimesView
    metrics: Metrics
    bounds: Bounds

    async def understand(self, request: Request, path: str, caller: Caller, context: RequestContext) -> bytes:
        """Read a request's body, and note in `context` what the request asks for. Returns the body for vLLM.

        `path`: the platform's path, without a tenant. Raises Problem, DatabaseError, Disconnected.
        """
        body = await self._body(request, path)
        if "last-event-id" in request.headers:
            context.request_id, context.resumes_after = resumed(request.headers)
        sent = body
        ask, said = _read(body, self.bounds.extent, path)
        if path == BATCH:
            _check_batch(ask)
        name, named = await self._named(caller, said)
        body = body if said else _naming(body, name)
        target = self._revision(named, context.request_id)
        _check_task(path, name, target)
        _check_pictures(ask, name, target)
        tally = self.metrics.tally(str(caller.tenant_id), target.deployment_id)
        prefers = _preferences(request)
        wait_s = min(self.bounds.hold_deadline_s, _wait_s(prefers))
        granted_priority = _priority(request, ask, caller, target)
        context.ask = fast_ask(path, request.headers, body) if self.bounds.fast_way else None
        if context.resumes_after is not None or "resume" in prefers:
            context.resumable = await resumable(path, sent, caller, context, self.bounds.resumable_s)
        context.understood(caller, name, target, tally, wait_s, granted_priority, "timing" in prefers)
        return body

    async def _body(self, request: Request, path: str) -> bytes:
        """Read the body. Raises Problem, Disconnected."""
        most, deadline_s = self.bounds.body_bytes, self.bounds.body_deadline_s
        if path not in REPEATING:
            return await read_body(request, most, deadline_s)
        watch = TokenizeWatch(self.bounds.extent)
        body = await read_body(request, most, deadline_s, watch.add)
        if watch.excess is not None:
            raise _too_extensive(watch.excess)
        return body

    async def target(self, caller: Caller, name: str) -> Target:
        """The tenant's deployment of that name. Raises Problem, DatabaseError."""
        assert caller.tenant_id is not None
        target = await self.auth.deployment(caller.tenant_id, name)
        if target is None:
            raise Problem(404, "model_not_found", f"there is no deployment {name!r}", [Fault("/model", "unknown")])
        return target

    async def _named(self, caller: Caller, name: str | None) -> tuple[str, Target]:
        """The deployment of that name; without a name the tenant's only deployment. Raises Problem."""
        if name is not None:
            return name, await self.target(caller, name)
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

    def _revision(self, target: Target, request_id: str) -> Target:
        """The canary's revision, if the request is in the canary's share and some runtime can serve the canary."""
        canary = target.canary
        if canary is None or not takes(request_id, target.canary_weight):
            return target
        key = canary.spec.key
        return canary if loadable(self.fleet.states(key).values()) and self.fleet.choose(key) else target


def _read(body: bytes, extent: ExtentLimits, path: str) -> tuple[BodyExtent, str | None]:
    """The body, and the deployment named in the body or None. `path`: the platform's path, without a tenant.

    Raises Problem if the body is not the JSON expected, or asks for too much.
    """
    try:
        ask = msgspec.json.decode(body, type=BodyExtent)
        name = msgspec.json.decode(ask.model, type=str | None) if ask.model else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, "invalid_json", f"the body is not the JSON object expected: {error}") from error
    for field in PREPARING:
        if (bytes(getattr(ask, field)) or b"null") not in (b"null", b"{}"):
            remedy = "the model's own settings prepare pictures: leave the field out"
            raise Problem(400, "invalid_request", f"`{field}`: {remedy}", [Fault(f"/{field}", "not taken")])
    if excess := first_excess(ask, extent, path in REPEATING, path in POOLING):
        raise _too_extensive(excess)
    return ask, name or None


def _too_extensive(excess: Excess) -> Problem:
    remedy = f"ask for less, or have the operator raise STACCATO_{excess.setting.upper()}"
    said = [Fault("" if excess.field == "body" else f"/{excess.field}", str(excess))]
    return Problem(400, "request_too_extensive", f"`{excess.field}`: {excess}: {remedy}", said)


def _check_task(path: str, name: str, target: Target) -> None:
    """Refuse a request that the deployment's model has no answer to. Raises Problem."""
    task = Task(target.spec.task or Task.GENERATE)
    if path in OF_TASK[task] or path in OF_EVERY_TASK:
        return
    others = " or ".join(f"`{other}`" for other, paths in OF_TASK.items() if path in paths)
    detail = (
        f"{name!r} has the task `{task}`, and {path} needs a model with the task {others}: ask one of "
        f"{', '.join(OF_TASK[task])}, or name another deployment"
    )
    raise Problem(404, "wrong_task", detail, [Fault("/model", "another task")])


def _check_batch(ask: BodyExtent) -> None:
    """Refuse a streamed batch: vLLM answers a streamed batch with the last piece of each text alone.

    Raises Problem.
    """
    if bytes(ask.stream) in (b"true", b"1"):
        remedy = "leave `stream` out, or send each conversation to /v1/chat/completions"
        raise Problem(400, "invalid_request", f"`stream`: a batch is answered in one piece: {remedy}")


def _check_pictures(ask: BodyExtent, name: str, target: Target) -> None:
    """Refuse pictures for a deployment whose engine holds the language model alone. Raises Problem."""
    if target.spec.language_model_only and pictures_in(ask):
        remedy = "leave the pictures out, or deploy a model that sees pictures, without `language_model_only`"
        raise Problem(400, "no_pictures", f"{name!r} is served as text, and the request has pictures: {remedy}")


def _naming(body: bytes, name: str) -> bytes:
    """The body with the deployment's name added: vLLM wants the name on some routes."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(fields | {"model": msgspec.Raw(msgspec.json.encode(name))})


def _preferences(request: Request) -> dict[str, str]:
    """The preferences of the header `Prefer` (RFC 7240): `wait=N`, in seconds, and `timing`."""
    said = (preference.strip().partition("=") for preference in request.headers.get("prefer", "").split(","))
    return {name.lower(): value for name, _, value in said}


def _wait_s(preferences: Mapping[str, str]) -> float:
    """Seconds that the client is willing to wait; infinite if the client does not say."""
    with contextlib.suppress(KeyError, ValueError):
        return max(0.0, float(preferences["wait"]))
    return float("inf")


def _priority(request: Request, ask: BodyExtent, caller: Caller, target: Target) -> Priority:
    """The request's priority. Raises Problem."""
    try:
        return granted(asked(request.headers.get(HEADER), ask.service_tier), priority(target.priority), caller.priority)
    except UnknownPriority as error:
        raise Problem(400, "invalid_request", str(error)) from error
    except PriorityTooHigh as error:
        raise Problem(403, "priority_too_high", str(error)) from error
