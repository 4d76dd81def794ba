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
from functools import cache, lru_cache, partial
from typing import Any, cast

from runtime.engine.settings import engine_args  # isort: skip  (sets vLLM's environment, so: first)

from fastapi import FastAPI
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import chat_template_utils
from vllm import ModelRegistry
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
from vllm.reasoning import ReasoningParserManager
from vllm.renderers import hf
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tokenizers import registry as tokenizers
from vllm.tool_parsers import ToolParserManager
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser  # vLLM 0.33
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # vLLM 0.32

from gateway.fast.stream import send_failure
from gateway.http.errors import openai_response, rate_limited
from gateway.inference.computed import Computed
from gateway.inference.context import CONTEXT, RequestContext
from gateway.inference.resuming import not_resumable
from gateway.vllm import pooling, templates, yielding
from gateway.vllm.bus_core import BusCore, BusLLM, Deps
from gateway.vllm.fast_front import FastFront, template_busy
from gateway.vllm.threads import TenantThreads, TooManyWaiting
from store.contract.tasks import Task
from store.contract.wire import EngineSpec
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
# vLLM keeps the last 128 tokenisers, some tens of MB each for a large vocabulary. A front keeps its own tokeniser.
vars(tokenizers)["cached_get_tokenizer"] = lru_cache(maxsize=4)(tokenizers.get_tokenizer)
yielding.install()


def known() -> Known:
    """Architectures that vLLM can serve, and model types whose config.json vLLM or transformers can read."""
    return Known(frozenset(ModelRegistry.get_supported_archs()), frozenset([*CONFIG_MAPPING, *_CONFIG_REGISTRY]))


def tool_parsers() -> frozenset[str]:
    """vLLM's names of the parsers that read tool calls out of a model's text."""
    return frozenset(ToolParserManager.lazy_parsers) | frozenset(ToolParserManager.tool_parsers)


def reasoning_parsers() -> frozenset[str]:
    """vLLM's names of the parsers that read reasoning out of a model's text."""
    return frozenset(ReasoningParserManager.list_registered())


class NamedModels(OpenAIServingModels):
    """Names the model as the client did, since a front serves deployments of many names."""

    def is_base_model(self, model_name: str) -> bool:
        return True

    def model_name(self, lora_request: Any = None) -> str:
        return CONTEXT.get().name


# ── fronts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Front:
    """Objects that vLLM's handlers need for one artefact and its settings. Named `app` in the handlers' scope."""

    def __init__(self, state: State, app: ASGIApp, fast: FastFront | None) -> None:
        """`app`: vLLM's routes, common to all fronts. `fast`: None if every request needs vLLM's handlers."""
        self.state, self._app, self._fast = state, app, fast
        self._requests, self._dropped = 0, False

    async def handle(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request the fast way, or let vLLM's handlers answer.

        The caller must run this coroutine in a task of its own, since CONTEXT is a context variable.
        """
        CONTEXT.set(context)
        self._requests += 1
        try:
            await self._handle(context, scope, receive, send)
        finally:
            self._requests -= 1
            self._end_unused()

    async def _handle(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        if self._fast is not None and await self._fast.answered(context, send):
            return
        if context.resumes_after is not None:
            context.refused = not_resumable()
            await send_failure(send, False, context.refused.status, b"")
            return
        await self._app({**scope, "app": self}, receive, send)

    def drop(self) -> None:
        """End the front's processes once no request needs the front. Python's collection may be minutes away."""
        self._dropped = True
        self._end_unused()

    def _end_unused(self) -> None:
        if self._dropped and not self._requests:
            if self._fast is not None:
                self._fast.close()
            _threads(self.state.engine_client).rest()  # a thread's process ends with the thread

    async def leave(self, computed: Computed) -> None:
        """End the work of runtimes for a call whose client left."""
        await self.state.engine_client.engine_core.abort_requests_async(list(computed.open))


def _build_llm(spec: EngineSpec, deps: Deps) -> BusLLM:
    # Else vLLM's errors would name the model's folder. gateway/http/vllm_errors.py replaces the key by the name in
    # the client's request.
    args = engine_args(spec, served_model_name=spec.key)
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    llm = BusLLM(config, BusCore(deps, spec.key, Task(spec.task or Task.GENERATE)))
    _share_threads(llm)
    yielding.render_in_thread(llm.renderer)
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


def _threads(llm: BusLLM) -> TenantThreads:
    """The threads of a front, after `_share_threads`."""
    return cast(TenantThreads, llm.renderer._executor._inner)


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


def _warm_up(renderer: OnlineRenderer) -> None:
    """vLLM's warm-up, which renders a chat. No process makes the chat's text, for the text does not matter."""
    with templates.noting():
        renderer.warmup()


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
    await rendering(_warm_up, state.online_renderer)
    state.serving_tokenization = ServingTokenization(
        state.openai_serving_models, state.online_renderer, chat_template=template, chat_template_content_format="auto"
    )
    state.enable_server_load_tracking = False
    fast: FastFront | None = None
    if spec.pools:
        await rendering(pooling.init_state, llm, state, args)
    else:
        await init_generate_state(llm, state, args, None, ("generate",), {})
        fast = await rendering(FastFront.of, llm, llm.engine_core, state)
    if fast is not None:
        fast.watch()
    _threads(llm).rest()  # a thread that checked the template has a process, which ends with the thread
    return Front(state, app, fast)


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
            _, dropped = self._fronts.popitem(last=False)
            dropped.add_done_callback(_drop)
        return front


def _drop(task: asyncio.Task[Front]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().drop()


def _vllm_app() -> ASGIApp:
    """vLLM's routes and error handlers, below the point where an app would put itself into the scope."""
    app = FastAPI(openapi_url=None)
    app.state.args = _vllm_args([])
    for attach in (attach_chat, attach_completions, attach_responses, attach_messages, attach_tokenize, pooling.attach):
        attach(app)
    init_exception_handler(app)
    app.add_exception_handler(TimeoutError, _waited)
    app.add_exception_handler(TooManyWaiting, _too_many)
    return app.build_middleware_stack()


async def _waited(request: Request, error: Exception) -> Response:
    """Answer a timeout of the only wait that vLLM bounds: the wait for a rendering thread of the front."""
    return openai_response(template_busy(), request.headers.get("x-request-id", ""))


async def _too_many(request: Request, error: Exception) -> Response:
    return openai_response(rate_limited("requests", str(error), 2), request.headers.get("x-request-id", ""))


def _vllm_args(arguments: list[str]) -> Namespace:
    return cast(Namespace, _vllm_parser().parse_args(arguments))


@cache
def _vllm_parser() -> FlexibleArgumentParser:
    """vLLM's parser of its server's arguments. The event loop makes the parser once, for some hundred arguments."""
    return cast(FlexibleArgumentParser, make_arg_parser(FlexibleArgumentParser()))  # type: ignore[no-untyped-call]
