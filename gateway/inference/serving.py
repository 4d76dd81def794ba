"""One request while it is served: let in by the tenant's limits, held until a runtime can take it, answered, metered.

Below this file a front answers: `gateway/vllm/bus_core.py` hands the prompt to `gateway/streams/dispatch.py`,
and `ResponseWriter` counts each piece in the request's slot of the journal as the piece goes to the socket.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from dataclasses import dataclass, field
from functools import partial

import structlog

from gateway.core.objectives import objective
from gateway.core.salts import cache_salt
from gateway.core.status import first_build
from gateway.http.auth import Caller, Target
from gateway.http.errors import Problem
from gateway.http.reserve import Reserve
from gateway.http.vllm_errors import Reworded
from gateway.inference.admission import Admission, Quotas
from gateway.inference.context import TENANT, ModelFront, ModelFronts, RequestContext
from gateway.inference.exchange import Exchange
from gateway.inference.meter import Meter, MeteredCall, MeterFull
from gateway.inference.metrics import Metrics
from gateway.inference.recent import Recent, Seen
from gateway.inference.response import ResponseWriter
from gateway.inference.resuming import find
from gateway.inference.spans import tell
from gateway.streams.dispatch import PARTING_S
from gateway.streams.resuming import RequestFinder
from gateway.streams.runtimes import RuntimesView
from store.contract import wire
from store.contract.wire import ONCE
from store.telemetry.tracing import Traces

log = structlog.get_logger()

HOLD_POLL_S = 0.5
FIRST_RUNTIME_S = 2.0  # longest wait where no runtime was ever seen, and none is being started on this machine


@dataclass
class RequestServing:
    """Serves the requests of a gateway. The state of a request is in the context of the request."""

    fleet: RuntimesView
    fronts: ModelFronts
    meter: Meter
    quotas: Quotas
    metrics: Metrics
    salt: bytes  # secret: cache salts are derived from it
    recent: Recent = field(default_factory=Recent)
    traces: Traces | None = None
    reserve: Reserve | None = None  # None: the disk may become full
    awaits_runtimes: bool = True  # runtimes on this machine may just be starting
    resuming: RequestFinder | None = None  # None: no request can be resumed at this gateway

    async def serve(self, exchange: Exchange, context: RequestContext, works: bool) -> None:
        """Answer the client of `exchange`. Raises Problem, DatabaseError.

        `works`: False for a request about tokens of a text, for which no device works. The tenant's limits count such
        a request, with no tokens and no price.
        """
        TENANT.set(str(context.caller.tenant_id))
        if works and self.reserve:
            self.reserve.check()
        resumes = context.resumes_after is not None
        context.expected_s = partial(self._build_s, context.target.spec.key)  # no closure: no cycle
        admission = await self.quotas.admit(context.caller, context.target, works, resumes)
        try:
            if resumes:
                await self._find(context)
            cold = "none" if context.found else await self._hold(context.target, context.deadline)
            front = await self._front(context.target)
            if works:
                await self._work(exchange, front, context, admission, cold)
            else:
                await self._repeat(exchange, front, context, admission)
        except Problem as problem:
            problem.headers |= admission.headers() if admission else {}
            raise
        finally:
            if admission is not None:
                admission.close()

    async def _find(self, context: RequestContext) -> None:
        """Find the runtime that keeps a request to resume, and count what came of the search. Raises Problem."""
        try:
            await find(context, self.resuming)
        except Problem as problem:
            self.metrics.resumed(problem.code)
            raise
        self.metrics.resumed("resumed")

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
                after_s = max(2, math.ceil(self._build_s(target.spec.key) or 0))
                raise Problem(503, "no_runtime", self._no_runtime(), headers={"retry-after": str(after_s)})
            await self.fleet.change(min(left_s, HOLD_POLL_S))

    def _build_s(self, key: str) -> float | None:
        """Seconds until a runtime has built the engine for which requests to the model wait; None: not known, or no
        request waits for a build."""
        first = first_build(self.fleet.states(key).values())
        return first.build_eta_s or None if first else None

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

    # ── the answer ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _repeat(
        self, exchange: Exchange, front: ModelFront, context: RequestContext, admission: Admission | None
    ) -> None:
        """Pass on a request for which no device works."""
        send = context.noting(exchange.send, admission.headers() if admission else {})
        await exchange.pass_on(front, context, Reworded(send, exchange.wording(context)), asyncio.Event().wait())

    async def _work(
        self, exchange: Exchange, front: ModelFront, context: RequestContext, admission: Admission | None, cold: str
    ) -> None:
        """Answer with the work of a device, under a call of the meter. `cold`: where the model was, by `_hold`."""
        target = context.target
        started_at = context.resumable.started_at if context.resumable is not None else time.time()
        call = self._open(context.request_id, context.caller, target, started_at)
        due = objective(target.slo, context.priority, target.tenant_weight)
        context.opened(call, due, self._cache_salt(context.caller, target), admission)
        headers = {
            "x-request-id": context.request_id,
            "x-staccato-cold": cold,
            "x-staccato-revision": str(target.revision),
        }
        answer = ResponseWriter(exchange.send, context, self.meter, headers, context.timed, exchange.wording(context))
        context.writer = answer
        try:
            await self._metered(exchange, front, context, answer)
        finally:
            context.status = answer.status
            if self.traces and context.span:
                tell(self.traces, context.span, exchange.path, context)

    def _open(self, request_id: str, caller: Caller, target: Target, started_at: float) -> MeteredCall:
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
            started_at=started_at,
            ended_at=time.time(),
            finish="open",
        )
        try:
            return self.meter.open(usage)
        except MeterFull as error:
            raise Problem(503, "overloaded", str(error), headers={"retry-after": "2"}) from error

    def _cache_salt(self, caller: Caller, target: Target) -> str:
        """The tenant's cache salt; for a deployment that keeps no prefixes, a salt for this request alone."""
        return cache_salt(self.salt, str(caller.tenant_id)) if target.keep_prefixes else ONCE + secrets.token_hex(16)

    async def _metered(
        self, exchange: Exchange, front: ModelFront, context: RequestContext, answer: ResponseWriter
    ) -> None:
        """Let vLLM answer, and close the request's call at the end, whatever the end is."""
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
        if context.kept_by_runtime is not None:  # the client may resume, here or at another gateway
            await computed.settled(context.kept_by_runtime.keep_s)
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
        self.metrics.took(context.way)
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
