"""Everything the Instance machine hears (events) and everything it asks for (effects). Pure values.

The device is one: at most one of Load, Unload and Step is under way, and its event (Loaded, Unloaded, Stepped, or the
failure) must come before the machine asks for the next. Structs, not dataclasses: some are made for every token, and a
frozen dataclass takes ten times as long to make.
"""

from __future__ import annotations

import msgspec

from runtime.engine.base import Output
from runtime.request import ModelKey, Request, RequestId
from store.wire import EngineSpec, Finish

# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Placed(msgspec.Struct, frozen=True):
    """This runtime is to be able to serve the model; it is loaded once to prove that it can be."""

    spec: EngineSpec


class Withdrawn(msgspec.Struct, frozen=True):
    """The model is no longer wanted here."""

    model: ModelKey


class Arrived(msgspec.Struct, frozen=True):
    request: Request


class Cancelled(msgspec.Struct, frozen=True):
    requests: list[RequestId]


class Ordered(msgspec.Struct, frozen=True):
    """An operator's command."""

    model: ModelKey
    awake: bool


class Loaded(msgspec.Struct, frozen=True):
    model: ModelKey
    took_s: float


class Unloaded(msgspec.Struct, frozen=True):
    model: ModelKey


class LoadFailed(msgspec.Struct, frozen=True):
    model: ModelKey
    error: str


class Stepped(msgspec.Struct, frozen=True):
    model: ModelKey
    outputs: list[Output]
    busy: bool  # whether the engine has more to do


class StepFailed(msgspec.Struct, frozen=True):
    """The engine raised in its step: it is unfit, its requests are lost."""

    model: ModelKey
    error: str


class Refused(msgspec.Struct, frozen=True):
    """The engine did not take this request."""

    request: RequestId
    model: ModelKey
    error: str


class Tick(msgspec.Struct, frozen=True):
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


class Load(msgspec.Struct, frozen=True):
    spec: EngineSpec


class Unload(msgspec.Struct, frozen=True):
    """Give the engine and its memory back; its requests, if any, were ended before."""

    model: ModelKey


class Step(msgspec.Struct, frozen=True):
    model: ModelKey


class Add(msgspec.Struct, frozen=True):
    request: Request


class Abort(msgspec.Struct, frozen=True):
    model: ModelKey
    requests: list[RequestId]


class Tell(msgspec.Struct, frozen=True):
    """Tokens, or the end, of one request, for the gateway that asked. `at` is the index of the first token."""

    request: Request
    at: int
    output: Output


class Lose(msgspec.Struct, frozen=True):
    """The end of one request that brings no answer."""

    request: Request
    error: str
    finish: Finish = Finish.ERROR


Effect = Load | Unload | Step | Add | Abort | Tell | Lose
