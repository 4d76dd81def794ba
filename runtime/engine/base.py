"""What the runtime asks of an engine: one model, built once, moved one step at a time. Pure; vllm.py carries it out."""

from __future__ import annotations

from typing import Protocol

import msgspec

from runtime.request import RequestId
from store.wire import EngineSpec, Finish


class EngineError(Exception):
    """The engine refused or failed; the message names what, the number and the remedy."""


class BadRequest(EngineError):
    """This request can't be served by this engine; the engine is unharmed."""


class Output(msgspec.Struct, frozen=True):
    """What one step made for one request. `logprobs` is the engine's own encoding, for its own front half."""

    request: RequestId
    tokens: list[int]
    finish: Finish | None = None
    stop_reason: int | str | None = None
    logprobs: bytes | None = None
    cached_tokens: int = 0


class Engine(Protocol):
    """One model. Not thread-safe, and steps of two engines of one process must never overlap."""

    def add(self, request: RequestId, payload: bytes) -> None:
        """Queue a request written by the engine's front half. Raises BadRequest."""

    def abort(self, requests: list[RequestId]) -> None:
        """Forget these requests; ids the engine does not know are ignored. No output follows."""

    def busy(self) -> bool:
        """Whether a step would do something."""

    def step(self) -> list[Output]:
        """One iteration of the batch. Any exception leaves the engine unfit: close it."""

    def close(self) -> None:
        """Give everything back without harming the other engines of the process."""


class Build(Protocol):
    """Makes engines; the only thing the device process knows of vLLM."""

    version: str

    def __call__(self, spec: EngineSpec) -> Engine:
        """Build the engine and load its weights. Raises EngineError."""
