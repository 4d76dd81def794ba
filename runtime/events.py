"""Everything the Instance machine hears (events) and everything it asks for (effects). Pure values.

Device effects (Build, Step, Check, Close) use the device: one at a time, and each is answered by one event before the
next is asked for. Memory effects move pages and wait for nobody: Evict, Grow and Shrink are done at once, Fetch and
Park begin a transfer whose end is heard later. All are carried out in the order in which they were asked for. Structs,
not dataclasses: some are made for every token, and a frozen dataclass takes ten times as long to make.
"""

from __future__ import annotations

import msgspec

from runtime.engine.base import Held, Output
from runtime.request import ModelKey, Request, RequestId
from store.wire import EngineSpec, Finish

# ── events: commands ──────────────────────────────────────────────────────────────────────────────────────────────────


class Placed(msgspec.Struct, frozen=True):
    """This runtime is to be able to serve the model; it is brought in once to prove that it can be."""

    spec: EngineSpec
    prove: bool = True  # false: it was proved elsewhere, and waits until somebody asks for it


class Withdrawn(msgspec.Struct, frozen=True):
    """The model is no longer wanted here."""

    model: ModelKey


class Arrived(msgspec.Struct, frozen=True):
    request: Request


class Cancelled(msgspec.Struct, frozen=True):
    requests: list[RequestId]


class Expected(msgspec.Struct, frozen=True):
    """A request with so many tokens may come from another device: nobody waits for it yet."""

    model: ModelKey
    tokens: int


class Leaving(msgspec.Struct, frozen=True):
    """A running request was taken out of its engine's batch, to go on at another device."""

    request: RequestId


class Stayed(msgspec.Struct, frozen=True):
    """One that was leaving goes on here after all."""

    request: RequestId


class Departed(msgspec.Struct, frozen=True):
    """These go on at another device, with what was computed for them here."""

    requests: list[RequestId]


class Ordered(msgspec.Struct, frozen=True):
    """An operator's command."""

    model: ModelKey
    awake: bool


# ── events: answers to device effects ─────────────────────────────────────────────────────────────────────────────────


class Built(msgspec.Struct, frozen=True):
    model: ModelKey
    took_s: float
    weights_pages: int  # all of its weights
    kv_pages_least: int  # with fewer it could not serve its longest request
    held: Held = Held()  # no pages; what it wants for its first step


class BuildFailed(msgspec.Struct, frozen=True):
    model: ModelKey
    error: str


class Stepped(msgspec.Struct, frozen=True):
    """One step, or several of the same batch: then each output has as many tokens, made `step_s` apart."""

    model: ModelKey
    outputs: list[Output]
    busy: bool  # whether the engine has more to do
    held: Held
    step_s: float  # that each took
    steps: int = 1


class StepFailed(msgspec.Struct, frozen=True):
    """The engine raised in its step: it is unfit, its requests are lost."""

    model: ModelKey
    error: str


class Checked(msgspec.Struct, frozen=True):
    model: ModelKey
    wrong: str | None  # what is: then it must not serve
    held: Held


class Closed(msgspec.Struct, frozen=True):
    model: ModelKey


# ── events: memory ────────────────────────────────────────────────────────────────────────────────────────────────────


class Fetched(msgspec.Struct, frozen=True):
    model: ModelKey
    took_s: float
    held: Held


class FetchFailed(msgspec.Struct, frozen=True):
    """It could not begin, or broke off; the engine is as before and can be fetched again."""

    model: ModelKey
    error: str
    held: Held


class Parked(msgspec.Struct, frozen=True):
    model: ModelKey
    held: Held


class Told(msgspec.Struct, frozen=True):
    """What the engine has and wants changed without a step: requests came or went, or it grew, perhaps by less."""

    model: ModelKey
    held: Held


# ── events: failures of the engine ────────────────────────────────────────────────────────────────────────────────────


class EngineFailed(msgspec.Struct, frozen=True):
    """The engine raised outside a step: it is unfit as well. If the device is to step or check it, that fails too."""

    model: ModelKey
    error: str


class Refused(msgspec.Struct, frozen=True):
    """The engine did not take this request."""

    request: RequestId
    model: ModelKey
    error: str


Event = (
    Placed
    | Withdrawn
    | Arrived
    | Cancelled
    | Expected
    | Leaving
    | Stayed
    | Departed
    | Ordered
    | Built
    | BuildFailed
    | Stepped
    | StepFailed
    | Checked
    | Closed
    | Fetched
    | FetchFailed
    | Parked
    | Told
    | EngineFailed
    | Refused
)

# ── device effects ────────────────────────────────────────────────────────────────────────────────────────────────────


class Build(msgspec.Struct, frozen=True):
    """Make the engine; it holds no pages yet."""

    spec: EngineSpec


class Step(msgspec.Struct, frozen=True):
    """One, or up to so many as long as nothing else is heard: nothing else would be decided."""

    model: ModelKey
    steps: int


class Check(msgspec.Struct, frozen=True):
    """Does it still say what it said when it was read from its files?"""

    model: ModelKey


class Close(msgspec.Struct, frozen=True):
    """Give the engine and its memory back; its requests, if any, were ended before."""

    model: ModelKey


DeviceEffect = Build | Step | Check | Close

# ── memory effects: pages ─────────────────────────────────────────────────────────────────────────────────────────────


class Fetch(msgspec.Struct, frozen=True):
    """Bring in what is missing of the weights, and parked requests into `kv_pages`."""

    model: ModelKey
    kv_pages: int


class Park(msgspec.Struct, frozen=True):
    """Take its requests and its KV cache out; the weights stay as clean cache."""

    model: ModelKey


class Evict(msgspec.Struct, frozen=True):
    """Of clean weights."""

    model: ModelKey
    pages: int


class Grow(msgspec.Struct, frozen=True):
    """The KV cache; answered by Told."""

    model: ModelKey
    pages: int


class Shrink(msgspec.Struct, frozen=True):
    """The KV cache, of its spare pages."""

    model: ModelKey
    pages: int


MemoryEffect = Fetch | Park | Evict | Grow | Shrink

# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Add(msgspec.Struct, frozen=True):
    """Answered by Told, or by Refused."""

    request: Request


class Abort(msgspec.Struct, frozen=True):
    """Answered by Told."""

    model: ModelKey
    requests: list[RequestId]


class Tell(msgspec.Struct, frozen=True):
    """Tokens, or the end, of one request, for the gateway that asked. `at` is the index of the first token."""

    request: Request
    at: int
    output: Output


class Lose(msgspec.Struct, frozen=True):
    """The end, here, of one request without an answer: for good, or LOST, when another device can go on with it.
    `suspect`: it was in the step in which the engine failed."""

    request: Request
    error: str
    finish: Finish = Finish.LOST
    suspect: bool = False


Effect = DeviceEffect | MemoryEffect | Add | Abort | Tell | Lose
