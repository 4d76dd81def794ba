"""vLLM's engine cores, many in one process: with gateway/front.py the only place that knows vLLM's inside.

One `EngineCore` per model, built in this process and stepped by our loop. What makes that safe (each met in practice):
the cores share process-wide state, so steps never overlap and a core's `shutdown`, which destroys the process groups of
every core, is never called: `close` takes apart only what is the core's own.
"""

from __future__ import annotations

import gc
import os
from typing import cast

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # cores live in this process

from runtime.engine.settings import check_version, engine_args  # isort: skip  (sets vLLM's environment, so: first)

from pydantic import ValidationError
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.worker.utils import clear_layer_kv_caches

from runtime.engine.base import BadRequest, Engine, EngineError, Output
from runtime.request import RequestId
from store.wire import EngineSpec, Finish

INLINE_MOST = 1 << 62  # bytes: arrays always inside the one buffer we ship


class Builder:
    """Builds engines for specs, each with `kv_bytes` of KV cache."""

    def __init__(self, kv_bytes: int) -> None:
        self.version = check_version()
        self._kv_bytes = kv_bytes

    def __call__(self, spec: EngineSpec) -> Engine:
        try:
            args = engine_args(spec, kv_cache_memory_bytes=self._kv_bytes)
            config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
            core = EngineCore(config, Executor.get_class(config), log_stats=False)
        except Exception as error:  # vLLM raises what its layers raise: pydantic, torch, safetensors, OSError, ...
            gc.collect()
            raise EngineError(_first_line(error)) from error
        return VllmEngine(core)


class VllmEngine:
    """One EngineCore."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder(size_threshold=INLINE_MOST)

    def add(self, request: RequestId, payload: bytes) -> None:
        try:
            message: EngineCoreRequest = self._decoder.decode(payload)
            message.request_id = request
            self._core.add_request(*self._core.preprocess_add_request(message))
        except Exception as error:
            raise BadRequest(_first_line(error)) from error

    def abort(self, requests: list[RequestId]) -> None:
        self._core.abort_requests(list(requests))

    def busy(self) -> bool:
        return self._core.scheduler.has_requests()

    def step(self) -> list[Output]:
        outputs, executed = self._core.step()
        self._core.post_step(executed)
        return [self._output(output) for made in outputs.values() for output in made.outputs]

    def _output(self, output: EngineCoreOutput) -> Output:
        finish, cached = output.finish_reason, output.prefill_stats
        return Output(
            RequestId(output.request_id),
            output.new_token_ids,
            None if finish is None else Finish(int(finish)),
            output.stop_reason,
            self._logprobs(output),
            cached.num_cached_tokens if cached else 0,
        )

    def _logprobs(self, output: EngineCoreOutput) -> bytes | None:
        if output.new_logprobs is None and output.new_prompt_logprobs_tensors is None:
            return None
        (data,) = self._encoder.encode(
            EngineCoreOutput(
                request_id="",
                new_token_ids=[],
                new_logprobs=output.new_logprobs,
                new_prompt_logprobs_tensors=output.new_prompt_logprobs_tensors,
            )
        )
        return bytes(cast(bytes, data))

    def close(self) -> None:
        """Everything of this core and nothing of the others: `EngineCore.shutdown` would end the groups all share."""
        core, self._core = self._core, None  # type: ignore[assignment]
        core.structured_output_manager.clear_backend()
        core.scheduler.shutdown()
        context = core.vllm_config.compilation_config.static_forward_context
        clear_layer_kv_caches(context.values())
        core.model_executor.driver_worker.worker.model_runner.kv_caches.clear()
        context.clear()
        gc.unfreeze()  # EngineCore froze the heap when it was built: without this nothing of it would be collected
        del core
        gc.collect()


def _first_line(error: Exception) -> str:
    """One sentence for a client: vLLM's messages may span pages and name internals below the first line."""
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"])[:500]
    text = str(error).strip().splitlines()
    return text[0][:500] if text else type(error).__name__
