"""The fast way of a front: does the work of vLLM's handlers for a request, without the handlers.

A process renders a chat, the prompt is tokenised, and vLLM's own classes make the sampling parameters: on the event
loop for a short prompt, else in a thread at which tenants take turns. `gateway/fast` writes the stream. A request with
a fault goes to vLLM's handlers: the client reads the error in vLLM's words.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

from runtime.engine.settings import RENDER_WAIT_S  # isort: skip  (sets vLLM's environment, so: first)

import msgspec
import structlog
from jinja2 import TemplateError
from starlette.datastructures import State
from starlette.types import Send
from tokenizers import Tokenizer
from transformers import TokenizersBackend
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.inputs.engine import tokens_input
from vllm.renderers import hf
from vllm.renderers.params import ChatParams, TokenizeParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest

from gateway.core.way import FAST, ChatAsk, CompletionAsk, sampling_fields
from gateway.fast.answer import AnswerFailed, Answers
from gateway.fast.chunks import EventTemplates, StreamEvents
from gateway.fast.resume import ResumedListener
from gateway.fast.stream import Flusher, StreamSender, send_failure
from gateway.fast.text import TextDecoder, TextStyle, primer
from gateway.http.errors import Problem, rate_limited
from gateway.http.vllm_errors import unavailable
from gateway.inference.context import RequestContext
from gateway.vllm import events, templates
from gateway.vllm.bus_core import BusCore, BusLLM, failed
from gateway.vllm.chats import ChatRenderer
from gateway.vllm.conversation import conversation
from gateway.vllm.threads import TooManyWaiting

log = structlog.get_logger()

Ask = ChatAsk | CompletionAsk
# Requests without a field of the client. A copy takes 1 % of the time of a request made anew.
CHAT_OF_DEFAULTS, COMPLETION_OF_DEFAULTS = ChatCompletionRequest.model_construct(), CompletionRequest.model_construct()
# Characters, or tokens, of a prompt prepared on the event loop; the hardest text found takes 1.1 ms to tokenise.
ON_LOOP_MOST = 2048
MESSAGES_ON_LOOP = 64  # of a chat, and parts of a message
PROBE = [{"role": "user", "content": "t"}]


class NotFast(Exception):
    """The fast way can't prepare the request: vLLM's handlers answer."""


class PromptRefused(Exception):
    """The template refused the chat or did not end, or the prompt is too long. The cause is vLLM's exception.

    vLLM's handlers would render the chat again for the same error, and hold the gateway for as long.
    """


@dataclass(frozen=True)
class PreparedAsk:
    """A request as runtimes take the request: an engine request for each answer."""

    id: str
    requests: list[EngineCoreRequest]
    prompt_tokens: int
    primer: list[int]  # tokens with which the decoders of the answers begin
    style: TextStyle


class FastFront:
    """Answers requests for an engine spec the fast way."""

    def __init__(self, llm: BusLLM, core: BusCore, state: State) -> None:
        self._llm, self._core, self._state = llm, core, state
        self._model = llm.model_config
        tokenizer: Any = llm.renderer.get_tokenizer()
        self._rust: Tokenizer = tokenizer._tokenizer
        if self._rust.truncation is not None:
            self._rust.no_truncation()
        if self._rust.padding is not None:
            self._rust.no_padding()
        if self._rust.encode_special_tokens != tokenizer.split_special_tokens:
            self._rust.encode_special_tokens = tokenizer.split_special_tokens
        self._added = {token: added.content for token, added in self._rust.get_added_tokens_decoder().items()}
        params = _chat_params(state)
        self._chats = self._made_chats(params, tokenizer)
        form = hf.resolve_chat_template_content_format(
            params.chat_template, None, params.chat_template_content_format, tokenizer, model_config=self._model
        )
        self._in_parts = form == "openai"
        self._templates = cache(self._made_templates)
        self._flusher = Flusher()

    def _made_chats(self, params: ChatParams, tokenizer: Any) -> ChatRenderer | None:
        """Return the renderer of chats; None if vLLM's handlers must render, or there is no template for chats."""
        renderer = self._state.online_renderer
        if renderer.parser is not None or renderer.use_harmony:
            return None
        with templates.noting() as noted:
            try:
                text = hf.safe_apply_chat_template(
                    self._model, tokenizer, list[Any](PROBE), **params.get_apply_chat_template_kwargs()
                )
            except Exception as error:
                log.debug("fast.no_chats", error=type(error).__name__)
                return None
        if text != templates.NOTED or len(noted) != 1 or noted[0].variables.pop("messages", None) != PROBE:
            return None  # the tokeniser's class does more than to render the template
        return ChatRenderer(noted[0], templates.process_of_thread())

    @classmethod
    def of(cls, llm: BusLLM, core: BusCore, state: State) -> FastFront | None:
        """Return the fast way of a front; None if the front's model or tokeniser needs vLLM's handlers.

        To be called in the front's thread: the thread's rendering process, if any, becomes the renderer's of chats.
        Raises TemplateError."""
        renderer, model = llm.renderer, llm.model_config
        if type(renderer).__name__ != hf.HfRenderer.__name__ or not isinstance(renderer.tokenizer, TokenizersBackend):
            return None
        if model.is_multimodal_model or model.is_encoder_decoder or model.enable_prompt_embeds or model.is_diffusion:
            return None
        if llm.scheduler_config.stream_interval != 1 or not _tokenises_plainly(type(renderer.tokenizer)):
            return None
        return cls(llm, core, state)

    # ── the answer ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def answered(self, context: RequestContext, send: Send) -> bool:
        """Answer a request. Returns False, with no byte sent, if vLLM's handlers must answer.

        The caller has set CONTEXT, and runs the coroutine in a separate task.
        """
        ask = context.ask
        if ask is None or (isinstance(ask, ChatAsk) and self._chats is None):
            return False
        try:
            async with asyncio.timeout(RENDER_WAIT_S):
                prepared = await self._ready(ask, context.request_id)
        except (TimeoutError, TooManyWaiting) as error:
            late = isinstance(error, TimeoutError)
            context.refused = template_busy() if late else rate_limited("requests", str(error), 2)
            await send_failure(send, False, context.refused.status, b"")
            return True
        except PromptRefused as error:
            assert isinstance(error.__cause__, VLLMValidationError)
            context.way = FAST
            await send_failure(send, False, 400, _error(error.__cause__))
            return True
        except Exception as error:  # faults of the client: vLLM's handlers answer in vLLM's words
            log.debug("fast.not_prepared", error=type(error).__name__)
            return False
        context.way = FAST
        await self._answer(ask, prepared, context, send)
        return True

    def watch(self) -> None:
        """From now on, end the processes that render chats after a time without chats: see `ChatRenderer.watch`."""
        if self._chats is not None:
            self._chats.watch()

    def close(self) -> None:
        """End the processes that render chats. A later chat would start a process anew."""
        if self._chats is not None:
            self._chats.close()

    async def _answer(self, ask: Ask, prepared: PreparedAsk, context: RequestContext, send: Send) -> None:
        ids = [request.request_id for request in prepared.requests]
        decoders = [TextDecoder(self._rust, self._added, prepared.primer, prepared.style) for _ in ids]
        answers = Answers(decoders, not ask.stream, lambda index: self._core.end(ids[index]))
        created = int(context.resumable.started_at if context.resumable else time.time())
        try:
            if ask.stream:
                chunks = StreamEvents(
                    self._templates(isinstance(ask, ChatAsk), ask.usage_in_each),
                    prepared.id,
                    context.name,
                    created,
                    prepared.prompt_tokens,
                    len(ids),
                )
                submitting = self._submit(prepared, answers, context.found is not None)
                sender = StreamSender(context, answers, chunks, ask.includes_usage, self._flusher)
                await sender.run(send, submitting)
            else:
                await self._submit(prepared, answers, False)
                await self._send_whole(ask, prepared, context, answers, created, send)
        except (GracefulHTTPError, VLLMValidationError) as error:
            await self._fail(ask, context, send, error)
        except AnswerFailed as failure:
            await self._fail(ask, context, send, failed(str(failure), failure.refused))
        finally:
            if not answers.ended and (context.resumable is None or context.there()):
                await self._core.abort_requests_async(ids)  # else the client may resume, and RequestServing waits

    async def _submit(self, prepared: PreparedAsk, answers: Answers, resumed: bool) -> None:
        """Submit the request to runtimes, or go on with a resumed request. Raises GracefulHTTPError."""
        for index, request in enumerate(prepared.requests):
            listener = ResumedListener(answers) if resumed else answers.listener(index)
            await self._core.add_heard(request, listener)

    async def _send_whole(
        self, ask: Ask, prepared: PreparedAsk, context: RequestContext, answers: Answers, created: int, send: Send
    ) -> None:
        await answers.text()
        pieces = sorted(answers.take(), key=lambda piece: piece.index)
        tokens = sum(piece.tokens for piece in pieces)
        context.call.prompt_tokens += prepared.prompt_tokens
        context.call.cached_tokens += answers.cached_tokens
        context.made_tokens += tokens
        context.call.finish = pieces[-1].finish or context.call.finish
        head = {"id": prepared.id, "created": created, "model": context.name}
        written = answers.written_tokens if isinstance(ask, ChatAsk) else None
        usage = events.usage_of(prepared.prompt_tokens, tokens, answers.cached_tokens, written)
        if isinstance(ask, ChatAsk):
            serving = self._state.openai_serving_chat
            said = events.whole_chat(head, serving.response_role, serving.system_fingerprint, pieces, usage)
        else:
            fingerprint = self._state.openai_serving_completion.system_fingerprint
            said = events.whole_completion(head, fingerprint, pieces, usage)
        await send({"type": "http.response.start", "status": 200, "headers": said.raw_headers})
        await send({"type": "http.response.body", "body": said.body, "more_body": False})

    async def _fail(self, ask: Ask, context: RequestContext, send: Send, error: Exception) -> None:
        """Tell the client an error, as vLLM's handlers would."""
        status = int(getattr(error, "http_status", 400))
        context.failure = unavailable(status, str(error))
        await send_failure(send, bool(ask.stream), status, _error(error))

    def _made_templates(self, chat: bool, usage_in_each: bool) -> EventTemplates:
        if chat:
            serving = self._state.openai_serving_chat
            return events.chat_templates(serving.response_role, serving.system_fingerprint, usage_in_each)
        fingerprint = self._state.openai_serving_completion.system_fingerprint
        return events.completion_templates(fingerprint, usage_in_each)

    # ── the prompt ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _ready(self, ask: Ask, request_id: str) -> PreparedAsk:
        """Render a chat, tokenise, and make the engine's request: long texts in the front's thread.

        Raises TooManyWaiting, PromptRefused, NotFast, and vLLM's exceptions for a bad request."""
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._llm.renderer._executor)
        request = _request(ask)
        try:
            limits = request.build_tok_params(self._model)
        except VLLMValidationError as error:
            raise PromptRefused from error
        if isinstance(ask, ChatAsk):
            assert self._chats is not None
            job = self._job(ask) if _is_short(ask) else await in_thread(self._job, ask)
            try:
                prompt: str | list[int] = await self._chats.text(job)
            except TemplateError as error:
                raise PromptRefused from VLLMValidationError(str(error))
        else:
            prompt = ask.prompt
        if len(prompt) <= ON_LOOP_MOST:
            return self._prepared(request, limits, prompt, request_id)
        return await in_thread(self._prepared, request, limits, prompt, request_id)

    def _job(self, ask: ChatAsk) -> bytes:
        return templates.chat_job(conversation(ask.messages, self._in_parts))

    def _prepared(self, request: Any, limits: TokenizeParams, prompt: str | list[int], request_id: str) -> PreparedAsk:
        """Tokenise, and make the engine's request. `request`: vLLM's request.

        Raises NotFast, PromptRefused, and vLLM's exceptions for a bad request."""
        tokens = self._tokens(prompt, limits)
        if isinstance(request, ChatCompletionRequest):
            name = part = f"chatcmpl-{request_id}"
            serving, most = self._state.openai_serving_chat, request.max_completion_tokens
            most = request.max_tokens if most is None else most
        else:
            name = f"cmpl-{request_id}"
            part = f"{name}-0"
            serving, most = self._state.openai_serving_completion, request.max_tokens
        defaults = serving.default_sampling_params
        most = get_max_tokens(self._model.max_model_len, most, len(tokens), defaults, serving.override_max_tokens)
        params = request.to_sampling_params(most, defaults)
        asked = self._llm.input_processor.process_inputs(
            part, tokens_input(tokens), params, ("generate",), arrival_time=time.time()
        )
        self._llm.input_processor.assign_request_id(asked)
        style = TextStyle(
            tuple(params.stop),
            params.include_stop_str_in_output,
            params.min_tokens,
            params.skip_special_tokens,
            params.spaces_between_special_tokens,
        )
        first = primer(self._rust, tokens, style.skip_special_tokens)
        return PreparedAsk(name, _each(asked), len(tokens), first, style)

    def _tokens(self, prompt: str | list[int], limits: TokenizeParams) -> list[int]:
        """Return the tokens of a prompt. Raises PromptRefused for a prompt that is too long; NotFast without a token.

        While a thread runs `encode_batch_fast`, the loop goes on: the library gives the interpreter free for batches,
        and for single texts not."""
        tokenizer = self._llm.renderer.get_tokenizer()
        try:
            if isinstance(prompt, str):
                limits.apply_pre_tokenization(tokenizer, TextPrompt(prompt=prompt))
                (encoded,) = self._rust.encode_batch_fast([prompt], add_special_tokens=limits.add_special_tokens)
                # vLLM's tokeniser ends at a token more than the most, and the error tells that number.
                most = limits.max_input_tokens
                tokens = list(encoded.ids)[: None if most is None else most + 1]
            else:
                tokens = prompt
            limits.apply_post_tokenization(tokenizer, TokensPrompt(prompt_token_ids=tokens))
        except VLLMValidationError as error:
            raise PromptRefused from error
        if not tokens:
            raise NotFast
        return tokens


def _request(ask: Ask) -> Any:
    """Return vLLM's request with the fields that the client gave for sampling."""
    fields = sampling_fields(ask)
    if isinstance(ask, ChatAsk):
        return CHAT_OF_DEFAULTS.model_copy(update=fields)
    if fields.get("max_tokens") is None:  # vLLM's class has a default for a missing field alone
        fields.pop("max_tokens", None)
    return COMPLETION_OF_DEFAULTS.model_copy(update=fields)


def template_busy() -> Problem:
    """Return the Problem of a request without a thread of the front in time."""
    detail = (
        f"the model's chat template was busy with other requests for {RENDER_WAIT_S} s: come again, or let it loop less"
    )
    return Problem(503, "template_busy", detail, headers={"retry-after": "2"})


def _is_short(ask: ChatAsk) -> bool:
    """Whether the messages of a chat can be written as JSON on the event loop."""
    if len(ask.messages) > MESSAGES_ON_LOOP:
        return False
    size = 0
    for message in ask.messages:
        content = message.content
        if isinstance(content, str):
            size += len(content)
        elif len(content) > MESSAGES_ON_LOOP:
            return False
        else:
            size += sum([len(part.text) for part in content])
    return size <= ON_LOOP_MOST


def _error(error: Exception) -> bytes:
    """Return the body of vLLM's answer to an error."""
    return msgspec.json.encode(create_error_response(error).model_dump())


def _chat_params(state: State) -> ChatParams:
    """Parameters that vLLM's handlers give to the template for a request without wishes for the template."""
    renderer = state.online_renderer
    asked = ChatCompletionRequest.model_construct()
    params = asked.build_chat_params(renderer.chat_template, renderer.chat_template_content_format)
    return cast(ChatParams, params.with_defaults({"tools": None, "tokenize": False}))


def _tokenises_plainly(kind: type[Any]) -> bool:
    """Whether a tokeniser's class leaves the making of tokens to the tokeniser library alone."""
    own = [parent for parent in kind.__mro__ if not issubclass(TokenizersBackend, parent)]
    changed = {name for parent in own for name in vars(parent) if not parent.__name__.startswith("TokenizerPool")}
    return not changed & {"__call__", "_encode_plus", "encode", "_decode", "convert_tokens_to_string"}


def _each(asked: EngineCoreRequest) -> list[EngineCoreRequest]:
    """Return an engine request for each of the `n` answers, with the ids and seeds that vLLM gives."""
    assert asked.sampling_params is not None
    if asked.sampling_params.n == 1:
        return [asked]
    parent, requests = ParentRequest(asked), []
    for index in range(parent.n):
        request_id, params = parent.get_child_info(index)
        requests.append(msgspec.structs.replace(asked, request_id=request_id, sampling_params=params))
    return requests
