"""vLLM's engine client on top of the bus: `BusLLM`, an AsyncLLM, with `BusCore`, an engine core somewhere on the bus.

Requests of vLLM's handlers and requests of the fast way pass `BusCore` alike: limits are reserved, costs counted and
budgets paid in one place. Deltas of a request with a listener go to the listener, all others to vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol, cast

from runtime.engine.settings import check_version  # isort: skip  (sets vLLM's environment, so: first)

import msgspec
from vllm import PoolingRequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from gateway.core.objectives import label
from gateway.http.errors import Problem
from gateway.http.vllm_errors import unavailable
from gateway.inference.admission import Admission
from gateway.inference.computed import Cost
from gateway.inference.context import CONTEXT, RequestContext
from gateway.inference.resuming import not_kept
from gateway.inference.timing import Timing
from gateway.streams.dispatch import Dispatcher, Gone, Unserved
from gateway.streams.relay import Relay, RuntimeRefused
from gateway.streams.runtimes import RuntimesView
from gateway.vllm import pictures
from store.bus import TooLarge
from store.contract import wire
from store.contract.tasks import Task
from store.contract.wire import Delta

# A resumed request is booked under the numbers from here on: later than every number of the gateway before.
SEQ_STEP = 1 << 20
INLINE_MOST = 1 << 62  # bytes: arrays stay inside the single buffer sent over the bus


@dataclass(frozen=True)
class Deps:
    """Objects shared by all fronts."""

    relay: Relay
    fleet: RuntimesView
    gateway: str
    resume_s: float


class DeltaListener(Protocol):
    """Hears the deltas of a request in place of vLLM."""

    def made(self, delta: Delta) -> None:
        """Take a delta, in order. A delta with `finish` is the last."""

    def failed(self, error: str, refused: bool) -> None:
        """The request ended without an answer. `refused`: the client is at fault."""


class _Alive:
    engine_dead = False


class BusCore:
    """Replaces vLLM's AsyncMPClient: sends requests and receives outputs over the relay."""

    engine_ranks_managed = (0,)
    resources = _Alive()

    def __init__(self, deps: Deps, model: str, task: Task) -> None:
        """`model`: the key of the engine. `task`: what the model makes."""
        self._deps, self._model, self.task = deps, model, task
        self._engine = check_version()
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()  # drained every loop turn by output_handler
        self._dispatcher = Dispatcher(deps.relay, deps.fleet, self, deps.resume_s)
        self._paying: dict[str, Admission] = {}  # by request id; only requests of tenants with limits
        self._costs: dict[str, Cost] = {}  # by request id
        self._listeners: dict[str, DeltaListener] = {}  # by request id; requests of the fast way
        self._ending: set[asyncio.Task[None]] = set()
        self._encoder = MsgpackEncoder(size_threshold=INLINE_MOST)
        self._decoder = MsgpackDecoder(EngineCoreOutput)
        self.llm: BusLLM | None = None

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return (self.task.value,)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def abort_requests_async(self, request_ids: list[str], keep: bool = False) -> None:
        """End requests of a client that left.

        A runtime still reports how far each stream came, since the leaving client pays for computed tokens. `keep`: the
        text has ended, and the client may still resume the stream.
        """
        parting = await self._dispatcher.leave(request_ids, keep)
        for request_id in request_ids:
            if request_id not in parting:
                self._forget(request_id)

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: the engine core belongs to the runtime."""

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Reserve the tenant's limits for a request and submit the request to a runtime.

        Raises GracefulHTTPError with the status for the client.
        """
        context = CONTEXT.get()
        await self._reserve(context, request)
        request.cache_salt, request.priority = context.cache_salt, 0
        request.mm_features = pictures.of_tenant(request.mm_features or [], context.cache_salt) or None
        (payload,) = self._encoder.encode(request)
        sampling = request.sampling_params
        run = wire.Run(
            gateway=self._deps.gateway,
            stream=0,
            model=self._model,
            request=context.call.opened.request,
            attempt=context.call.opened.attempt,
            prompt_tokens=len(request.prompt_token_ids or ()),
            max_tokens=(sampling.max_tokens if sampling else None) or 0,
            payload=bytes(cast(bytes, payload)),
            engine=self._engine,
            label=label(context.call.opened.tenant_id, context.call.opened.deployment_id),
            tenant=context.call.opened.tenant_id,
            weight=context.target.tenant_weight,
            tbt_s=context.objective.tbt_s,
            patience_s=context.objective.patience_s,
            priority=context.objective.priority,
            trace=context.trace,
            grammar=_grammar(sampling),
            resumable=context.kept_by_runtime,
        )
        prompt = context.computed.begin(request.request_id, _prompt_of(request), run.prompt_tokens)
        self._costs[request.request_id] = Cost(context.call, context.computed, prompt)
        if context.admission is not None:
            self._paying[request.request_id] = context.admission
        try:
            await self._submit(request, run, context)
        except BaseException:
            self._forget(request.request_id)
            raise

    async def add_heard(self, request: EngineCoreRequest, listener: DeltaListener) -> None:
        """Submit a request whose deltas `listener` is to hear. Raises GracefulHTTPError."""
        self._listeners[request.request_id] = listener
        try:
            await self.add_request_async(request)
        except BaseException:
            self._listeners.pop(request.request_id, None)
            raise

    def end(self, request_id: str) -> None:
        """End a request that needs no further token."""
        self._spawn(self.abort_requests_async([request_id], keep=True))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _forget(self, request_id: str) -> None:
        self._paying.pop(request_id, None)
        self._listeners.pop(request_id, None)
        if cost := self._costs.pop(request_id, None):
            cost.computed.end(request_id)

    async def _submit(self, request: EngineCoreRequest, run: wire.Run, context: RequestContext) -> None:
        due_at = context.arrived_at + context.objective.ttft_s
        try:
            timing = context.timing = Timing(context.began_at, context.tally)
            if context.found is not None:
                kept = await self._dispatcher.resume(request.request_id, run, context.found, timing)
                context.call.seq = SEQ_STEP * (kept.resumable.taken if kept.resumable else 1)
            else:
                await self._dispatcher.submit(request.request_id, run, due_at, context.deadline, timing)
        except Gone as error:
            context.refused = not_kept()
            raise GracefulHTTPError(context.refused.detail, HTTPStatus.NOT_FOUND) from error
        except TooLarge as error:
            why = pictures.too_large(error, len(request.mm_features or ()))
            raise GracefulHTTPError(why, HTTPStatus.REQUEST_ENTITY_TOO_LARGE) from error
        except RuntimeRefused as error:
            raise GracefulHTTPError(str(error), HTTPStatus.INTERNAL_SERVER_ERROR) from error
        except Unserved as error:
            raise GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from error

    async def reserve(self, context: RequestContext, tokens: int) -> None:
        """Reserve the tenant's limits for `tokens` tokens of texts that get vectors. Raises GracefulHTTPError.

        To be called for all texts of a call together: a call beyond the limits is refused before any device works."""
        if context.admission is None:
            return
        try:
            await context.admission.begin_texts(tokens)
        except Problem as problem:
            context.refused = problem
            raise GracefulHTTPError(problem.detail, HTTPStatus(problem.status)) from problem
        context.reserved_tokens += tokens

    async def _reserve(self, context: RequestContext, request: EngineCoreRequest) -> None:
        """Reserve the request's share of its tenant's limits and bound its output. Raises GracefulHTTPError."""
        prompt, sampling = len(request.prompt_token_ids or ()), request.sampling_params
        if context.admission is None:
            return
        if sampling is None:
            lacking = max(0, prompt - context.reserved_tokens)
            context.reserved_tokens -= prompt - lacking
            if lacking:
                await self.reserve(context, lacking)
                context.reserved_tokens -= lacking
            return
        try:
            most = sampling.max_tokens or 0
            if context.resumes_after is not None:
                most = await context.admission.go_on(prompt, context.resumes_after.tokens, most)
            else:
                most = await context.admission.begin(prompt, most)
        except Problem as problem:
            context.refused = problem
            raise GracefulHTTPError(problem.detail, HTTPStatus(problem.status)) from problem
        sampling.max_tokens, sampling.min_tokens = most, min(most, sampling.min_tokens)

    # ── Taker ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def made(self, deltas: list[tuple[str, Delta]]) -> None:
        outputs = []
        for request_id, delta in deltas:
            cost = self._costs.get(request_id)
            paid = self._paid(request_id, delta)
            if cost is not None:
                cost.add(delta)
                cost.count(paid)
            if (listener := self._listeners.get(request_id)) is not None:
                listener.made(paid)
            elif (output := self._output(request_id, paid)).pooling_output is None and self.task.pools:
                self.failed(request_id, "its runtime sent no vector")  # else vLLM would fail every open request
            else:
                outputs.append(output)
            if paid.finish is not None:
                self._forget(request_id)
        if outputs:
            self._outputs.put_nowait(EngineCoreOutputs(outputs=outputs))

    def _paid(self, request_id: str, delta: Delta) -> Delta:
        """Return the delta. If the budget can't pay for the delta's tokens, cancel the request and return its end."""
        admission = self._paying.get(request_id)
        if admission is None:
            return delta
        if admission.pay(len(delta.tokens)):
            return delta
        self._spawn(self._dispatcher.cancel([request_id]))
        return msgspec.structs.replace(
            delta, tokens=[], logprobs=None, finish=wire.Finish.LENGTH, stop_reason="budget_exhausted"
        )

    def failed(self, request: str, error: str, refused: bool = False) -> None:
        listener = self._listeners.get(request)
        self._forget(request)
        if listener is not None:
            listener.failed(error, refused)
            return
        assert self.llm is not None
        self.llm.fail(request, failed(error, refused))

    def _output(self, request_id: str, delta: Delta) -> EngineCoreOutput:
        output = self._decoder.decode(delta.logprobs) if delta.logprobs else EngineCoreOutput("", [])
        output.request_id, output.new_token_ids = request_id, delta.tokens
        output.finish_reason = None if delta.finish is None else FinishReason(int(delta.finish))
        output.stop_reason = delta.stop_reason
        if delta.at == 0:
            output.prefill_stats = PrefillStats(
                num_cached_tokens=delta.cached_tokens, num_cache_creation_tokens=delta.written_tokens
            )
        return output


def failed(error: str, refused: bool) -> GracefulHTTPError | VLLMValidationError:
    """Return the exception for a request that came to no end. `refused`: the client is at fault."""
    return VLLMValidationError(error) if refused else GracefulHTTPError(error, HTTPStatus.SERVICE_UNAVAILABLE)


def _grammar(sampling: SamplingParams | None) -> bytes:
    """Return the grammar of the output for the runtime: the fields of vLLM's parameters that describe it, as JSON."""
    params = sampling.structured_outputs if sampling else None
    if params is None or params.all_constraints_none():
        return b""
    said = {name: value for name, value in vars(params).items() if value is not None and not name.startswith("_")}
    return msgspec.json.encode(said)


def _prompt_of(request: EngineCoreRequest) -> str:
    """Return the name of a request's prompt: vLLM calls choice 2 of `NAME-RANDOM` `2_NAME-RANDOM`."""
    at = request.request_id.find(request.external_req_id or request.request_id)
    return request.request_id[max(0, at) :]


class BusLLM(AsyncLLM):
    """AsyncLLM with a remote engine: has the attributes of AsyncLLM's constructor, and an engine core on the bus."""

    def __init__(self, config: VllmConfig, core: BusCore) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self.scheduler_config = config.scheduler_config
        self.observability_config = config.observability_config
        self.log_requests = self.log_stats = False
        self.admission_stats = None
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)
        # vLLM would check grammars here, by compiling on the event loop. The runtime compiles in a separate process.
        self.input_processor.structured_outputs_config = None  # type: ignore[assignment]
        self.output_processor = OutputProcessor(
            self.renderer.tokenizer, log_stats=False, stream_interval=config.scheduler_config.stream_interval
        )
        self.engine_core = core
        self.logger_manager = None
        self.output_handler = None
        self.profiler = None
        core.llm = self

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs of a request. gateway/inference/response.py counts the tokens written to the client."""
        context = CONTEXT.get()
        prompt_counted = False
        try:
            async for output in super().generate(*args, **kwargs):
                if not prompt_counted:
                    prompt_counted = True
                    context.call.prompt_tokens += len(output.prompt_token_ids or ())
                    context.call.cached_tokens += output.num_cached_tokens or 0
                context.made_tokens += sum(len(choice.token_ids) for choice in output.outputs)
                for choice in output.outputs:
                    context.call.finish = choice.finish_reason or context.call.finish
                yield output
        except (GracefulHTTPError, VLLMValidationError) as error:
            context.failure = unavailable(int(getattr(error, "http_status", 400)), str(error))
            raise

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield the vector of a text. A call has TEXTS_AT_ONCE texts with runtimes at a time, and the others wait."""
        context = CONTEXT.get()
        async with context.sending:
            async for output in super().encode(*args, **kwargs):
                context.call.prompt_tokens += len(output.prompt_token_ids)
                context.call.cached_tokens += output.num_cached_tokens
                context.call.finish = "stop"
                yield output

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request with an error for its client."""
        state = self.output_processor.request_states.get(request_id)
        if state is None:
            return
        queue = state.queue
        self.output_processor.abort_requests((request_id,), internal=True)
        if queue is not None:
            queue.put(error)
