"""Everything the Instance machine hears (events) and everything it asks for (effects). Pure values.

The device is one: at most one of Load, Unload and Step is under way, and its event (Loaded, Unloaded, Stepped, or the
failure) must come before the machine asks for the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.engine.base import Output
from runtime.request import ModelKey, Request, RequestId
from store.wire import EngineSpec, Finish

# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Placed:
    """This runtime is to be able to serve the model; it is loaded once to prove that it can be."""

    spec: EngineSpec


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The model is no longer wanted here."""

    model: ModelKey


@dataclass(frozen=True, slots=True)
class Arrived:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancelled:
    requests: list[RequestId]


@dataclass(frozen=True, slots=True)
class Ordered:
    """An operator's command."""

    model: ModelKey
    awake: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    model: ModelKey
    took_s: float


@dataclass(frozen=True, slots=True)
class Unloaded:
    model: ModelKey


@dataclass(frozen=True, slots=True)
class LoadFailed:
    model: ModelKey
    error: str


@dataclass(frozen=True, slots=True)
class Stepped:
    model: ModelKey
    outputs: list[Output]
    busy: bool  # whether the engine has more to do


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The engine raised in its step: it is unfit, its requests are lost."""

    model: ModelKey
    error: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine did not take this request."""

    request: RequestId
    model: ModelKey
    error: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went by."""


Event = (
    Placed
    | Withdrawn
    | Arrived
    | Cancelled
    | Ordered
    | Loaded
    | Unloaded
    | LoadFailed
    | Stepped
    | StepFailed
    | Refused
    | Tick
)

# ── effects ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Load:
    spec: EngineSpec


@dataclass(frozen=True, slots=True)
class Unload:
    """Give the engine and its memory back; its requests, if any, were ended before."""

    model: ModelKey


@dataclass(frozen=True, slots=True)
class Step:
    model: ModelKey


@dataclass(frozen=True, slots=True)
class Add:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    model: ModelKey
    requests: list[RequestId]


@dataclass(frozen=True, slots=True)
class Tell:
    """Tokens, or the end, of one request, for the gateway that asked. `at` is the index of the first token."""

    request: Request
    at: int
    output: Output


@dataclass(frozen=True, slots=True)
class Lose:
    """The end of one request that brings no answer."""

    request: Request
    error: str
    finish: Finish = Finish.ERROR


Effect = Load | Unload | Step | Add | Abort | Tell | Lose
