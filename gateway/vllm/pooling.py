"""Vectors and scores of texts: vLLM's handlers of `/v1/embeddings`, `/rerank`, `/score` and `/classify`.

vLLM prepares a text for each input of a call. The preparation is replaced here, for two reasons. vLLM cuts texts to
the lengths that a request wants on the event loop, and hands each text to the front's threads alone, more texts than a
tenant may have waiting there. And the tenant's limits have to hold for all texts of a call together. vLLM has no seam
for the replacement; tests/gateway/vllm/test_pooling.py fails if the replacement does not hold.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from runtime.engine.settings import RENDER_WAIT_S  # isort: skip  (sets vLLM's environment, so: first)

import msgspec
from fastapi import FastAPI
from starlette.datastructures import State
from starlette.responses import StreamingResponse
from vllm.entrypoints.pooling.base.io_processor import PoolingIOProcessor
from vllm.entrypoints.pooling.classify.api_router import router as classify_router
from vllm.entrypoints.pooling.embed.api_router import router as embed_router
from vllm.entrypoints.pooling.embed.protocol import EmbeddingResponse
from vllm.entrypoints.pooling.factories import init_pooling_state
from vllm.entrypoints.pooling.scoring.api_router import router as scoring_router
from vllm.entrypoints.pooling.typing import PoolingEngineInput, PoolingServeContext
from vllm.entrypoints.pooling.utils import JsonEncodingFormat, get_pooling_output_encoder, get_pooling_usage
from vllm.outputs import PoolingRequestOutput
from vllm.utils.serial_utils import EmbedDType, Endianness

from gateway.inference.context import CONTEXT
from gateway.vllm.bus_core import BusCore, BusLLM

PIECE_BYTES = 64 << 10  # of an answer, before the loop has a turn
Preparing = Callable[[Any, PoolingServeContext[Any]], Awaitable[None]]


def vectors_response(
    outputs: list[PoolingRequestOutput],
    request_id: str,
    created_time: int,
    model_name: str,
    encoding_format: JsonEncodingFormat,
    embed_dtype: EmbedDType,
    endianness: Endianness,
) -> StreamingResponse:
    """Return the answer of `/v1/embeddings` as vLLM's `_openai_json_response` does, but written vector by vector.

    The loop has turns between pieces of the answer. For 256 vectors of 4,096 numbers, vLLM's own answer holds the loop,
    and with the loop every stream of the gateway, for 0.5 s; a piece holds the loop for 0.4 ms."""
    encode = get_pooling_output_encoder(encoding_format, embed_dtype, endianness)
    usage = get_pooling_usage(outputs)
    answer = EmbeddingResponse(id=request_id, created=created_time, model=model_name, data=[], usage=usage)
    head, tail = msgspec.json.encode(answer.model_dump()).split(b"[]", 1)

    async def pieces() -> AsyncIterator[bytes]:
        waiting = bytearray(head + b"[")
        for index, output in enumerate(outputs):
            waiting += b"," if index else b""
            waiting += msgspec.json.encode({"index": index, "object": "embedding", "embedding": encode(output)})
            if len(waiting) >= PIECE_BYTES:
                yield bytes(waiting)
                waiting.clear()
                await asyncio.sleep(0)
        yield bytes(waiting + b"]" + tail)

    return StreamingResponse(pieces(), media_type="application/json")


class PreparedTexts:
    """Stands where vLLM's handlers expect what prepares texts, and has the texts prepared."""

    def __init__(self, texts: list[PoolingEngineInput]) -> None:
        self._texts = texts

    def get_request_factory_online(self, _: PoolingServeContext[Any]) -> list[PoolingEngineInput]:
        return self._texts

    async def render_async(self, text: PoolingEngineInput) -> PoolingEngineInput:
        return text


def attach(app: FastAPI) -> None:
    """Give vLLM's routes for vectors and scores to `app`."""
    for router in (embed_router, scoring_router, classify_router):
        app.include_router(router)


def init_state(llm: BusLLM, state: State, args: Namespace) -> None:
    """Put vLLM's handlers for the front's task into `state`. Reads files, and may import the model's class."""
    core: BusCore = llm.engine_core
    init_pooling_state(llm, state, args, None, (core.task.value,))
    if state.serving_embedding is not None:
        state.serving_embedding._openai_json_response = vectors_response
    for serving in (state.serving_embedding, state.serving_scores, state.serving_classification):
        if serving is not None:
            serving._preprocessing = partial(_prepare, llm, serving._preprocessing)


async def _prepare(
    llm: BusLLM, original: Preparing, io_processor: PoolingIOProcessor, context: PoolingServeContext[Any]
) -> None:
    """Prepare the texts of a call in a thread of the front, and reserve the tenant's limits for all texts.

    `original`: vLLM's method for the same, which takes the texts from here. Raises TimeoutError without a thread for
    RENDER_WAIT_S, vLLM's exceptions for a faulty text, GracefulHTTPError for a call beyond the limits.
    """
    async with asyncio.timeout(RENDER_WAIT_S):
        loop = asyncio.get_running_loop()
        texts = await loop.run_in_executor(llm.renderer._executor, _texts, io_processor, context)
    prompts: list[Any] = [text["prompts"] for text in texts]
    await llm.engine_core.reserve(CONTEXT.get(), sum(len(prompt["prompt_token_ids"]) for prompt in prompts))
    await original(PreparedTexts(texts), context)


def _texts(io_processor: PoolingIOProcessor, context: PoolingServeContext[Any]) -> list[PoolingEngineInput]:
    return [io_processor.render(params) for params in io_processor.get_request_factory_online(context)]
