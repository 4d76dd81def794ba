"""Driving engines in tests: requests as the gateway's front would write them, models stepped in any order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runtime.engine.base import Engine, Output
from runtime.request import RequestId
from store.wire import EngineSpec


def spec(path: Path, max_model_len: int = 512, key: str | None = None) -> EngineSpec:
    return EngineSpec(
        key=key or path.name,
        path=str(path),
        digest="",
        architecture="",
        dtype="float32",
        max_model_len=max_model_len,
        weight_bytes=0,
        kv_bytes_per_token=0,
    )


def payload(prompt: Sequence[int], salt: str = "", **sampling: object) -> bytes:
    """A request for these prompt tokens; `sampling` as vLLM's SamplingParams takes it."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackEncoder

    request = EngineCoreRequest(
        request_id="",
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=SamplingParams(**sampling),  # type: ignore[arg-type]
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=salt or None,
        data_parallel_rank=None,
    )
    return bytes(MsgpackEncoder(size_threshold=1 << 62).encode(request)[0])


def awake(engine: Engine, kv_pages: int = 4) -> Engine:
    """The same engine, with its weights and so many pages of KV cache on the device."""
    engine.fetch(kv_pages)
    until(engine.arrived)
    return engine


def asleep(engine: Engine) -> Engine:
    """The same engine, its requests parked, without a page."""
    engine.park()
    until(engine.parked)
    engine.evict(engine.held().weights)
    return engine


def until(done: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"{done} is not true after {timeout_s} s"
        time.sleep(1e-4)


def drive(engines: Mapping[str, Engine], rng: random.Random) -> dict[RequestId, list[Output]]:
    """Step engines with work in random order until none has any."""
    made: dict[RequestId, list[Output]] = {}
    while busy := [engine for engine in engines.values() if engine.busy()]:
        for output in rng.choice(busy).step():
            made.setdefault(output.request, []).append(output)
    return made


def tokens(outputs: Sequence[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]
