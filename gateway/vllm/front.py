"""vLLM's front half, one per artefact and settings: chat templates, tokeniser, OpenAI objects, detokeniser, parsers.

Besides runtime/engine, gateway/vllm is the only place that knows vLLM's internals. vLLM's own serving classes run
unchanged on top of `BusLLM`, an AsyncLLM with an engine core somewhere on the bus. A single FastAPI app with vLLM's
routes serves every front: vLLM's handlers find their objects in `request.app.state`, so the gateway puts the request's
front there.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections import OrderedDict
from collections.abc import AsyncGenerator
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
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import chat_template_utils
from vllm import ModelRegistry, SamplingParams
from vllm.config import VllmConfig
from vllm.entrypoints.anthropic.api_router import attach_router as attach_messages
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.api_router import init_generate_state
from vllm.entrypoints.openai.chat_completion.api_router import attach_router as attach_chat
from vllm.entrypoints.openai.completion.api_router import attach_router as attach_completions
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.api_router import attach_router as attach_responses
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.tokenize.api_router import attach_router as attach_tokenize
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.reasoning import ReasoningParserManager
from vllm.renderers import hf, renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers import ToolParserManager
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser  # vLLM 0.33
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # vLLM 0.32

from gateway.core.objectives import label
from gateway.http.errors import Problem, openai_response, rate_limited
from gateway.http.vllm_errors import unavailable
from gateway.inference.admission import Admission
from gateway.inference.computed import Computed, Cost
from gateway.inference.context import CONTEXT, RequestContext
from gateway.inference.timing import Timing
from gateway.streams.dispatch import Dispatcher, Unserved
from gateway.streams.relay import Relay, RuntimeRefused
from gateway.streams.runtimes import RuntimesView
from gateway.vllm import pictures, templates
from gateway.vllm.threads import TenantThreads, TooManyWaiting
from store.bus import TooLarge
from store.contract import wire
from store.contract.wire import Delta, EngineSpec
from store.files.architectures import Known

FRONTS_MOST = 64
INLINE_MOST = 1 << 62  # bytes: arrays stay inside the single buffer sent over the bus

# Functions of transformers and vLLM that compile and try chat templates; vLLM calls the last function on the event
# loop. vLLM has no seam for replacing them; tests/gateway/vllm/test_templates.py fails if the replacements do not hold.
chat_template_utils._compile_jinja_template = templates.Compiled  # type: ignore[assignment]
hf._cached_resolve_chat_template_kwargs = templates.variables
AnthropicServingMessages._detect_merge_inline_system = staticmethod(templates.system_first)  # type: ignore[method-assign]
# Two formats for each front. vLLM reads a template again, on the event loop, if its format fell out of the cache.
hf._CONTENT_FORMATS_MAXSIZE = 4 * FRONTS_MOST


def known() -> Known:
    """Architectures that vLLM can serve, and model types whose config.json vLLM or transformers can read."""
    return Known(frozenset(ModelRegistry.get_supported_archs()), frozenset([*CONFIG_MAPPING, *_CONFIG_REGISTRY]))


def tool_parsers() -> frozenset[str]:
    """vLLM's names of the parsers that read tool calls out of a model's text."""
    return frozenset(ToolParserManager.lazy_parsers) | frozenset(ToolParserManager.tool_parsers)


def reasoning_parsers() -> frozenset[str]:
    """vLLM's names of the parsers that read reasoning out of a model's text."""
    return frozenset(ReasoningParserManager.list_registered())


@dataclass(frozen=True)
class Deps:
    """Objects shared by all fronts."""

    relay: Relay
    fleet: RuntimesView
    gateway: str
    resume_s: float


# ── the engine core that is elsewhere ─────────────────────────────────────────────────────────────────────────────────


class _Alive:
    engine_dead = False


class BusCore:
    """Replaces vLLM's AsyncMPClient: sends requests and receives outputs over the relay."""

    engine_ranks_managed = (0,)
    resources = _Alive()

    def __init__(self, deps: Deps, model: str) -> None:
        self._deps, self._model = deps, model
        self._engine = check_version()
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()  # drained every loop turn by output_handler
        self._dispatcher = Dispatcher(deps.relay, deps.fleet, self, deps.resume_s)
        self._paying: dict[str, Admission] = {}  # by request id; only requests of tenants with limits
        self._costs: dict[str, Cost] = {}  # by request id
        self._cancelling: set[asyncio.Task[None]] = set()
        self._encoder = MsgpackEncoder(size_threshold=INLINE_MOST)
        self._decoder = MsgpackDecoder(EngineCoreOutput)
        self.llm: BusLLM | None = None

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """End requests of a client that left.

        A runtime still reports how far each stream came, since the leaving client pays for computed tokens.
        """
        parting = await self._dispatcher.leave(request_ids)
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

    def _forget(self, request_id: str) -> None:
        self._paying.pop(request_id, None)
        if cost := self._costs.pop(request_id, None):
            cost.computed.end(request_id)

    async def _submit(self, request: EngineCoreRequest, run: wire.Run, context: RequestContext) -> None:
        due_at = context.arrived_at + context.objective.ttft_s
        try:
            timing = context.timing = Timing(context.began_at, context.tally)
            await self._dispatcher.submit(request.request_id, run, due_at, context.deadline, timing)
        except TooLarge as error:
            why = pictures.too_large(error, len(request.mm_features or ()))
            raise GracefulHTTPError(why, HTTPStatus.REQUEST_ENTITY_TOO_LARGE) from error
        except RuntimeRefused as error:
            raise GracefulHTTPError(str(error), HTTPStatus.INTERNAL_SERVER_ERROR) from error
        except Unserved as error:
            raise GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from error

    async def _reserve(self, context: RequestContext, request: EngineCoreRequest) -> None:
        """Reserve the request's share of its tenant's limits and bound its output. Raises GracefulHTTPError."""
        sampling = request.sampling_params
        if context.admission is None or sampling is None:
            return
        try:
            most = await context.admission.begin(len(request.prompt_token_ids or ()), sampling.max_tokens or 0)
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
            outputs.append(self._output(request_id, paid))
            if paid.finish is not None:
                self._forget(request_id)
        self._outputs.put_nowait(EngineCoreOutputs(outputs=outputs))

    def _paid(self, request_id: str, delta: Delta) -> Delta:
        """Return the delta. If the budget can't pay for the delta's tokens, cancel the request and return its end."""
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

    def failed(self, request: str, error: str, refused: bool = False) -> None:
        self._forget(request)
        assert self.llm is not None
        why = VLLMValidationError(error) if refused else GracefulHTTPError(error, HTTPStatus.SERVICE_UNAVAILABLE)
        self.llm.fail(request, why)

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

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request with an error for its client."""
        state = self.output_processor.request_states.get(request_id)
        if state is None:
            return
        queue = state.queue
        self.output_processor.abort_requests((request_id,), internal=True)
        if queue is not None:
            queue.put(error)


class NamedModels(OpenAIServingModels):
    """Names the model as the client did, since a front serves deployments of many names."""

    def is_base_model(self, model_name: str) -> bool:
        return True

    def model_name(self, lora_request: Any = None) -> str:
        return CONTEXT.get().name


# ── fronts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Front:
    """Objects that vLLM's handlers need for one artefact and its settings. Named `app` in the handlers' scope."""

    def __init__(self, state: State, app: ASGIApp) -> None:
        """`app`: vLLM's routes, common to all fronts."""
        self.state, self._app = state, app

    async def handle(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        """Let vLLM answer a request.

        The caller must run this coroutine in a task of its own, since CONTEXT is a context variable.
        """
        CONTEXT.set(context)
        await self._app({**scope, "app": self}, receive, send)

    async def leave(self, computed: Computed) -> None:
        """End the work of runtimes for a call whose client left."""
        await self.state.engine_client.engine_core.abort_requests_async(list(computed.open))


def _build_llm(spec: EngineSpec, deps: Deps) -> BusLLM:
    # Else vLLM's errors would name the model's folder. gateway/http/vllm_errors.py replaces the key by the name in
    # the client's request.
    args = engine_args(spec, served_model_name=spec.key)
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    llm = BusLLM(config, BusCore(deps, spec.key))
    _share_threads(llm)
    return llm


def _share_threads(llm: BusLLM) -> None:
    """Let tenants take turns at the thread in which vLLM renders and tokenises.

    vLLM has no seam for this; tests/gateway/vllm/test_threads.py fails if the turns do not hold. vLLM would give up a
    late thread, and the turns with the thread. Here the kernel ends a late template, and the bounds of a request keep
    tokenising short.
    """
    executor = llm.renderer._executor
    executor._inner.shutdown(wait=False)
    executor._inner = TenantThreads()  # type: ignore[assignment]
    executor.replace_inner = lambda: None  # type: ignore[method-assign]


def _instead(llm: BusLLM) -> str | None:
    """Return a template that refuses to chat if vLLM must not read the artefact's own template; else None."""
    renderer, tokenizer = llm.renderer, llm.renderer.tokenizer
    if not isinstance(renderer, hf.HfRenderer) or tokenizer is None:
        return None
    for tools in (None, []):  # an artefact may have a separate template for requests with tools
        own = hf.resolve_chat_template(tokenizer, None, tools, model_config=llm.model_config)
        if own is not None and (fault := templates.fault(own)):
            refusing = templates.refusing(fault)
            templates.system_first(refusing)  # cached now: the event loop must not wait for the result
            return refusing
    return None


async def _build_front(spec: EngineSpec, tool_parser: str | None, deps: Deps, app: ASGIApp) -> Front:
    # Reads files. The first front of an architecture takes seconds.
    llm = await asyncio.to_thread(_build_llm, spec, deps)
    rendering = partial(asyncio.get_running_loop().run_in_executor, llm.renderer._executor)
    template = await rendering(_instead, llm)
    arguments = ["--model", spec.path, "--max-model-len", str(spec.max_model_len), "--enable-prompt-tokens-details"]
    if tool_parser:
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", tool_parser]
    if template:
        arguments += ["--chat-template", template]
    args = _vllm_args(arguments)
    args.structured_outputs_config = llm.vllm_config.structured_outputs_config  # vLLM reads its reasoning parser there
    state = State()
    state.engine_client, state.vllm_config, state.args, state.tool_server = llm, llm.vllm_config, args, None
    state.openai_serving_models = NamedModels(llm, [BaseModelPath(name=spec.key, model_path=spec.path)])
    state.online_renderer = OnlineRenderer(
        llm.model_config,
        llm.renderer,
        request_logger=None,
        chat_template=template,
        chat_template_content_format="auto",
        enable_auto_tools=bool(tool_parser),
        tool_parser=tool_parser,
        reasoning_parser=spec.reasoning_parser or None,
    )
    await rendering(state.online_renderer.warmup)
    state.serving_tokenization = ServingTokenization(
        state.openai_serving_models, state.online_renderer, chat_template=template, chat_template_content_format="auto"
    )
    await init_generate_state(llm, state, args, None, ("generate",), {})
    state.enable_server_load_tracking = False
    return Front(state, app)


class Fronts:
    """Fronts in use and the app that runs them. The least recently used front is dropped first."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._fronts: OrderedDict[tuple[str, str | None], asyncio.Task[Front]] = OrderedDict()  # by engine, tool parser
        self._app = _vllm_app()

    async def get(self, spec: EngineSpec, tool_parser: str | None) -> Front:
        """Return the front of an engine and a tool parser (vLLM's name), built on first use.

        Raises vLLM's own exceptions for a bad model.
        """
        key = (spec.key, tool_parser)
        task = self._fronts.get(key)
        if task is None:
            task = self._fronts[key] = asyncio.create_task(_build_front(spec, tool_parser, self._deps, self._app))
        self._fronts.move_to_end(key)
        try:
            front = await asyncio.shield(task)
        except Exception:
            self._fronts.pop(key, None)
            raise
        while len(self._fronts) > FRONTS_MOST:
            self._fronts.popitem(last=False)
        return front


def _vllm_app() -> ASGIApp:
    """vLLM's routes and error handlers, below the point where an app would put itself into the scope."""
    app = FastAPI(openapi_url=None)
    app.state.args = _vllm_args([])
    for attach in (attach_chat, attach_completions, attach_responses, attach_messages, attach_tokenize):
        attach(app)
    init_exception_handler(app)
    app.add_exception_handler(TimeoutError, _waited)
    app.add_exception_handler(TooManyWaiting, _too_many)
    return app.build_middleware_stack()


async def _waited(request: Request, error: Exception) -> Response:
    """Answer a timeout of the only wait that vLLM bounds: the wait for a rendering thread of the front."""
    detail = (
        f"the model's chat template was busy with other requests for {RENDER_WAIT_S} s: come again, or let it loop less"
    )
    problem = Problem(503, "template_busy", detail, headers={"retry-after": "2"})
    return openai_response(problem, request.headers.get("x-request-id", ""))


async def _too_many(request: Request, error: Exception) -> Response:
    return openai_response(rate_limited("requests", str(error), 2), request.headers.get("x-request-id", ""))


def _vllm_args(arguments: list[str]) -> Namespace:
    parser = make_arg_parser(FlexibleArgumentParser())  # type: ignore[no-untyped-call]
    return cast(Namespace, parser.parse_args(arguments))
