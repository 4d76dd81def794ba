"""vLLM's front half, one per artefact and settings: templates, tokeniser, OpenAI objects, detokeniser, parsers.

With runtime/engine the only place that knows vLLM's inside. vLLM's own serving classes run unchanged on top of
`BusLLM`, an AsyncLLM whose engine core is somewhere on the bus. One FastAPI app with vLLM's routes serves every front:
its handlers find their objects in `request.app.state`, and we put the front that the request is for there.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from runtime.engine.settings import RENDER_WAIT_S, check_version, engine_args  # isort: skip  (sets vLLM's environment, so: first)

import msgspec
from fastapi import FastAPI
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers.utils import chat_template_utils
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.entrypoints.anthropic.api_router import attach_router as attach_messages
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.api_router import init_generate_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.api_router import attach_router as attach_chat
from vllm.entrypoints.openai.completion.api_router import attach_router as attach_completions
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.api_router import attach_router as attach_responses
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.tokenize.api_router import attach_router as attach_tokenize
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import GracefulHTTPError
from vllm.outputs import RequestOutput
from vllm.reasoning import ReasoningParserManager
from vllm.renderers import hf, renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers import ToolParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from gateway import templates
from gateway.dispatch import Dispatcher, Unserved
from gateway.errors import Problem, openai_response
from gateway.fleet import Fleet
from gateway.meter import Call
from gateway.metrics import Tally
from gateway.objectives import label
from gateway.quotas import Admission
from gateway.relay import Refused, Relay
from gateway.timing import Timing
from runtime.request import Objective
from store import wire
from store.bus import TooLarge
from store.wire import NOTHING_SPENT, Delta, EngineSpec, Spent

FRONTS_MOST = 64
INLINE_MOST = 1 << 62  # bytes: arrays always inside the one buffer we ship

# Where transformers and vLLM compile and try chat templates, the last on the event loop. There is no seam; that it
# holds is seen in tests/gateway/test_templates.py.
chat_template_utils._compile_jinja_template = templates.Compiled  # type: ignore[assignment]
hf._cached_resolve_chat_template_kwargs = templates.variables
AnthropicServingMessages._detect_merge_inline_system = staticmethod(templates.system_first)  # type: ignore[method-assign]
hf._CONTENT_FORMATS_MAXSIZE = 4 * FRONTS_MOST  # two for each front: else they are read again, on the event loop


def supported_architectures() -> frozenset[str]:
    """What vLLM can serve, by the names in a model's config.json."""
    return frozenset(ModelRegistry.get_supported_archs())


def tool_parsers() -> frozenset[str]:
    """vLLM's names of what reads tool calls out of a model's text."""
    return frozenset(ToolParserManager.lazy_parsers) | frozenset(ToolParserManager.tool_parsers)


def reasoning_parsers() -> frozenset[str]:
    """vLLM's names of what reads reasoning out of a model's text."""
    return frozenset(ReasoningParserManager.list_registered())


@dataclass(slots=True)
class Served:
    """What vLLM's code below must know of the request it works for, though it never passes it on."""

    name: str  # the deployment's, as the client said it
    cache_salt: str  # of the tenant: prefixes are never shared across tenants
    call: Call
    deadline: float  # monotonic; a model must take the request until then
    began_at: float  # monotonic; its first byte came
    arrived_at: float  # monotonic; it was read and understood: its objective counts from here
    objective: Objective
    tally: Tally
    admission: Admission | None = None  # None: the tenant has no limits
    refused: Problem | None = None  # what the client is to hear instead of vLLM's words
    streaming: bool = False
    made_tokens: int = 0  # handed to the code that writes the response
    weight: float = 1.0  # of the tenant
    trace: str = ""  # traceparent of its span; empty: it is not traced
    timing: Timing | None = None  # of its stream, of several the one that was asked for last

    @property
    def exhausted(self) -> bool:
        """The tenant's budget ended it."""
        return self.admission is not None and self.admission.exhausted


@dataclass(slots=True)
class Cost:
    """What one of a call's requests has cost so far."""

    call: Call
    spent: Spent = NOTHING_SPENT

    def add(self, delta: Delta) -> None:
        """Its sums go on; the call has those of all its requests."""
        call, before, self.spent = self.call, self.spent, delta.spent
        call.gpu_us += delta.spent.gpu_us - before.gpu_us
        call.switch_us += delta.spent.switch_us - before.switch_us
        call.kv_byte_s += delta.spent.kv_byte_s - before.kv_byte_s
        call.cache_byte_s += delta.spent.cache_byte_s - before.cache_byte_s


SERVED: ContextVar[Served] = ContextVar("served")


@dataclass(frozen=True)
class Deps:
    """What every front shares."""

    relay: Relay
    fleet: Fleet
    gateway: str
    resume_s: float


# ── the engine core that is elsewhere ─────────────────────────────────────────────────────────────────────────────────


class _Alive:
    engine_dead = False


class BusCore:
    """Stands where vLLM's AsyncMPClient stands: requests go out, outputs come in, over the relay."""

    engine_ranks_managed = (0,)
    resources = _Alive()

    def __init__(self, deps: Deps, model: str) -> None:
        self._deps, self._model = deps, model
        self._engine = check_version()
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()  # drained every loop turn by output_handler
        self._dispatcher = Dispatcher(deps.relay, deps.fleet, self, deps.resume_s)
        self._paying: dict[str, Admission] = {}  # by request: those whose tenants have limits
        self._costs: dict[str, Cost] = {}  # by request
        self._cancelling: set[asyncio.Task[None]] = set()
        self._encoder = MsgpackEncoder(size_threshold=INLINE_MOST)
        self._decoder = MsgpackDecoder(EngineCoreOutput)
        self.llm: BusLLM | None = None

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
        await self._dispatcher.cancel(request_ids)

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to end: the core is not ours."""

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Raises GracefulHTTPError with the status the client is to see."""
        served = SERVED.get()
        await self._reserve(served, request)
        request.cache_salt, request.priority = served.cache_salt, 0
        (payload,) = self._encoder.encode(request)
        sampling = request.sampling_params
        run = wire.Run(
            gateway=self._deps.gateway,
            stream=0,
            model=self._model,
            request=served.call.opened.request,
            attempt=served.call.opened.attempt,
            prompt_tokens=len(request.prompt_token_ids or ()),
            max_tokens=(sampling.max_tokens if sampling else None) or 0,
            payload=bytes(cast(bytes, payload)),
            engine=self._engine,
            label=label(served.call.opened.tenant_id, served.call.opened.deployment_id),
            tenant=served.call.opened.tenant_id,
            weight=served.weight,
            tbt_s=served.objective.tbt_s,
            patience_s=served.objective.patience_s,
            trace=served.trace,
        )
        self._costs[request.request_id] = Cost(served.call)
        if served.admission is not None:
            self._paying[request.request_id] = served.admission
        try:
            await self._submit(request.request_id, run, served)
        except BaseException:
            self._forget(request.request_id)
            raise

    def _forget(self, request_id: str) -> None:
        self._paying.pop(request_id, None)
        self._costs.pop(request_id, None)

    async def _submit(self, id: str, run: wire.Run, served: Served) -> None:
        due_at = served.arrived_at + served.objective.ttft_s
        try:
            timing = served.timing = Timing(served.began_at, served.tally)
            await self._dispatcher.submit(id, run, due_at, served.deadline, timing)
        except TooLarge as error:
            raise GracefulHTTPError(str(error), HTTPStatus.REQUEST_ENTITY_TOO_LARGE) from error
        except Refused as error:
            raise GracefulHTTPError(str(error), HTTPStatus.INTERNAL_SERVER_ERROR) from error
        except Unserved as error:
            raise GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from error

    async def _reserve(self, served: Served, request: EngineCoreRequest) -> None:
        """What the request may take of its tenant's limits. Raises GracefulHTTPError."""
        sampling = request.sampling_params
        if served.admission is None or sampling is None:
            return
        try:
            most = await served.admission.begin(len(request.prompt_token_ids or ()), sampling.max_tokens or 0)
        except Problem as problem:
            served.refused = problem
            raise GracefulHTTPError(problem.detail, HTTPStatus(problem.status)) from problem
        sampling.max_tokens, sampling.min_tokens = most, min(most, sampling.min_tokens)

    # ── Taker ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def made(self, deltas: list[tuple[str, Delta]]) -> None:
        outputs = []
        for request_id, delta in deltas:
            if cost := self._costs.get(request_id):
                cost.add(delta)
            paid = self._paid(request_id, delta)
            outputs.append(self._output(request_id, paid))
            if paid.finish is not None:
                self._forget(request_id)
        self._outputs.put_nowait(EngineCoreOutputs(outputs=outputs))

    def _paid(self, request_id: str, delta: Delta) -> Delta:
        """The delta, or the request's end in its place when there is no money for its tokens."""
        admission = self._paying.get(request_id)
        if admission is None:
            return delta
        if admission.pay(len(delta.tokens)):
            return delta
        cancelling = asyncio.create_task(self._dispatcher.cancel([request_id]))
        self._cancelling.add(cancelling)
        cancelling.add_done_callback(self._cancelling.discard)
        return msgspec.structs.replace(
            delta, tokens=[], logprobs=None, finish=wire.Finish.LENGTH, stop_reason="budget_exhausted"
        )

    def failed(self, request: str, error: str) -> None:
        self._forget(request)
        assert self.llm is not None
        self.llm.fail(request, error)

    def _output(self, request_id: str, delta: Delta) -> EngineCoreOutput:
        output = self._decoder.decode(delta.logprobs) if delta.logprobs else EngineCoreOutput("", [])
        output.request_id, output.new_token_ids = request_id, delta.tokens
        output.finish_reason = None if delta.finish is None else FinishReason(int(delta.finish))
        output.stop_reason = delta.stop_reason
        if delta.at == 0:
            output.prefill_stats = PrefillStats(num_cached_tokens=delta.cached_tokens)
        return output


class BusLLM(AsyncLLM):
    """AsyncLLM without an engine of its own: what its constructor makes, but for the core, which is on the bus."""

    def __init__(self, config: VllmConfig, core: BusCore) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self.scheduler_config = config.scheduler_config
        self.observability_config = config.observability_config
        self.log_requests = self.log_stats = False
        self.admission_stats = None
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)
        self.output_processor = OutputProcessor(
            self.renderer.tokenizer, log_stats=False, stream_interval=config.scheduler_config.stream_interval
        )
        self.engine_core = core
        self.logger_manager = None
        self.output_handler = None
        self.profiler = None
        core.llm = self

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        """Says what the code that writes the response has; gateway/answer.py counts it when it was written."""
        served = SERVED.get()
        prompt_counted = False
        async for output in super().generate(*args, **kwargs):
            if not prompt_counted:
                prompt_counted = True
                served.call.prompt_tokens += len(output.prompt_token_ids or ())
                served.call.cached_tokens += output.num_cached_tokens or 0
            served.made_tokens += sum(len(choice.token_ids) for choice in output.outputs)
            for choice in output.outputs:
                served.call.finish = choice.finish_reason or served.call.finish
            yield output

    def fail(self, request_id: str, error: str) -> None:
        """End one request with an error its client will see."""
        state = self.output_processor.request_states.get(request_id)
        if state is None:
            return
        queue = state.queue
        self.output_processor.abort_requests((request_id,), internal=True)
        if queue is not None:
            queue.put(GracefulHTTPError(error, HTTPStatus.SERVICE_UNAVAILABLE))


class NamedModels(OpenAIServingModels):
    """One front serves deployments of many names: the name is the one the client used."""

    def is_base_model(self, model_name: str) -> bool:
        return True

    def model_name(self, lora_request: Any = None) -> str:
        return SERVED.get().name


# ── fronts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Dressing:
    """How a deployment wants its model's output read: names of vLLM's parsers."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None


class Front:
    """Everything vLLM's handlers look for, for one artefact under one set of settings. Named `app` in their scope."""

    def __init__(self, state: State) -> None:
        self.state = state


def _build_llm(spec: EngineSpec, deps: Deps) -> BusLLM:
    config = engine_args(spec).create_engine_config(UsageContext.OPENAI_API_SERVER)
    return BusLLM(config, BusCore(deps, spec.key))


def _instead(llm: BusLLM) -> str | None:
    """What refuses to chat, in the place of an artefact's template that vLLM must not read; None: it may."""
    renderer, tokenizer = llm.renderer, llm.renderer.tokenizer
    if not isinstance(renderer, hf.HfRenderer) or tokenizer is None:
        return None
    for tools in (None, []):  # an artefact may have a template of its own for those with tools
        own = hf.resolve_chat_template(tokenizer, None, tools, model_config=llm.model_config)
        if own is not None and (fault := templates.fault(own)):
            refusing = templates.refusing(fault)
            templates.system_first(refusing)  # so that it is known when the event loop asks
            return refusing
    return None


async def _build_front(spec: EngineSpec, dressing: Dressing, deps: Deps) -> Front:
    llm = await asyncio.to_thread(_build_llm, spec, deps)  # reads files; the first of an architecture takes seconds
    rendering = partial(asyncio.get_running_loop().run_in_executor, llm.renderer._executor)  # one thread, of this front
    template = await rendering(_instead, llm)
    arguments = ["--model", spec.path, "--max-model-len", str(spec.max_model_len), "--enable-prompt-tokens-details"]
    if dressing.tool_parser:
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", dressing.tool_parser]
    if dressing.reasoning_parser:
        arguments += ["--reasoning-parser", dressing.reasoning_parser]
    if template:
        arguments += ["--chat-template", template]
    args = _vllm_args(arguments)
    state = State()
    state.engine_client, state.vllm_config, state.args, state.tool_server = llm, llm.vllm_config, args, None
    state.openai_serving_models = NamedModels(llm, [BaseModelPath(name=spec.key, model_path=spec.path)])
    state.online_renderer = OnlineRenderer(
        llm.model_config,
        llm.renderer,
        request_logger=None,
        chat_template=template,
        chat_template_content_format="auto",
        enable_auto_tools=bool(dressing.tool_parser),
        tool_parser=dressing.tool_parser,
        reasoning_parser=dressing.reasoning_parser,
    )
    await rendering(state.online_renderer.warmup)
    state.serving_tokenization = ServingTokenization(
        state.openai_serving_models, state.online_renderer, chat_template=template, chat_template_content_format="auto"
    )
    await init_generate_state(llm, state, args, None, ("generate",), {})
    state.enable_server_load_tracking = False
    return Front(state)


class Fronts:
    """The fronts in use, the least recently used dropped first, and the app that runs them."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._fronts: OrderedDict[tuple[str, Dressing], asyncio.Task[Front]] = OrderedDict()
        self._app = _vllm_app()

    async def get(self, spec: EngineSpec, tool_parser: str | None, reasoning_parser: str | None) -> Front:
        """Built on first use; the parsers are named as vLLM names them. Raises what vLLM raises for a bad model."""
        dressing = Dressing(tool_parser, reasoning_parser)
        key = (spec.key, dressing)
        task = self._fronts.get(key)
        if task is None:
            task = self._fronts[key] = asyncio.create_task(_build_front(spec, dressing, self._deps))
        self._fronts.move_to_end(key)
        try:
            front = await asyncio.shield(task)
        except Exception:
            self._fronts.pop(key, None)
            raise
        while len(self._fronts) > FRONTS_MOST:
            self._fronts.popitem(last=False)
        return front

    async def handle(self, front: Front, served: Served | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Let vLLM answer; `served` is None for what generates nothing. To be run in a task of its own."""
        if served is not None:
            SERVED.set(served)
        await self._app({**scope, "app": front}, receive, send)


def _vllm_app() -> ASGIApp:
    """vLLM's routes and error handlers, below the point where an app would put itself into the scope."""
    app = FastAPI(openapi_url=None)
    app.state.args = _vllm_args([])
    for attach in (attach_chat, attach_completions, attach_responses, attach_messages, attach_tokenize):
        attach(app)
    init_exception_handler(app)
    app.add_exception_handler(TimeoutError, _waited)
    return app.build_middleware_stack()


async def _waited(request: Request, error: Exception) -> Response:
    """The one wait that vLLM bounds: for the front's rendering thread."""
    detail = (
        f"the model's chat template was busy with other requests for {RENDER_WAIT_S} s: come again, or let it loop less"
    )
    problem = Problem(503, "template_busy", detail, headers={"retry-after": "2"})
    return openai_response(problem, request.headers.get("x-request-id", ""))


def _vllm_args(arguments: list[str]) -> Namespace:
    parser = make_arg_parser(FlexibleArgumentParser())  # type: ignore[no-untyped-call]
    return cast(Namespace, parser.parse_args(arguments))
