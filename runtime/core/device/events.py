"""Everything that the Instance machine hears (events) and asks for (effects). Pure values.

Device effects (Build, StageImage, Step, Check, Close) use the device. At most one is under way; an event answers the
effect before the machine asks for the next. A long Build or Check is answered by Unfinished again and again, and other
models step in between. Memory effects move pages and block nothing: Evict, Grow and Shrink are done at once, while
Fetch and Park begin a transfer whose end is heard later. The device process carries effects out in the order in which
the machine asked. Events and effects are structs, not dataclasses: some are made for every token, and a frozen
dataclass takes ten times as long to make.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from runtime.core.device.request import ModelKey, Request, RequestId
from runtime.core.engine import Held, Output, WeightSource
from store.contract.wire import EngineSpec, Finish

# ── events: commands ──────────────────────────────────────────────────────────────────────────────────────────────────


class Placed(msgspec.Struct, frozen=True):
    """The runtime is to host the model. The model is loaded once to prove that the device can serve the model."""

    spec: EngineSpec
    prove: bool = True  # False: the proof was made elsewhere; the model is loaded on its first request
    build_pages: int | msgspec.UnsetType = msgspec.UNSET  # pages of the pool that a build takes while it lasts
    # With `prove` False: the proof was made by an earlier process of such a device, and is noted on the disk.
    noted: bool = False


class Withdrawn(msgspec.Struct, frozen=True):
    """The runtime is to host the model no longer."""

    model: ModelKey


class Arrived(msgspec.Struct, frozen=True):
    """A request came to the device, from a gateway or from another device."""

    request: Request


class Cancelled(msgspec.Struct, frozen=True):
    """The gateway wants no more tokens of the requests."""

    requests: list[RequestId]


class MoveStep(msgspec.Struct, frozen=True):
    """A migration of a request took a step on this device.

    "prepare": a running request of `tokens` tokens may come from another device; no client waits for a token of this
    device yet. "commit": the request left the batch of its engine, to go on at another device. "abort": after
    "commit", the request goes on at this device after all. "release": the request goes on at another device, with the
    keys and values computed by this device."""

    step: Literal["prepare", "commit", "abort", "release"]
    model: ModelKey
    request: RequestId
    tokens: int = 0  # of "prepare": prompt and output so far


class Ordered(msgspec.Struct, frozen=True):
    """Command of an operator, or of a coming request, to load a model or to let a model go."""

    model: ModelKey
    awake: bool  # True: load the model; False: give the pages of a model without requests back


class Warmed(msgspec.Struct, frozen=True):
    """A tenant's schedule begins, or ceases, to keep the model's image in the host cache."""

    model: ModelKey
    warm: bool


# ── events: answers to device effects ─────────────────────────────────────────────────────────────────────────────────


class Built(msgspec.Struct, frozen=True):
    model: ModelKey
    took_s: float
    weights_pages: int  # pages of the complete weights
    kv_pages_least: int  # with fewer KV pages the engine could not serve a request of the longest length
    held: Held = Held()  # no pages held; KV pages wanted for the first step
    sequential: bool = False  # requests of the model run one at a time
    source: WeightSource = WeightSource.HOST


class BuildFailed(msgspec.Struct, frozen=True):
    """The build failed; with `lacks_bytes`, for lack of room in the host cache alone."""

    model: ModelKey
    error: str
    lacks_bytes: int = 0  # images of so many bytes must leave the host cache, or more if the room is in pieces
    kept: tuple[ModelKey, ...] = ()  # models whose images must stay: neither disk nor files would bring them back


class Unfinished(msgspec.Struct, frozen=True):
    """A part of a Build or Check is done. The effect goes on when the machine asks for the effect again."""

    model: ModelKey
    waits: bool = False  # another process makes the model's image: to be asked again after ImageOver


class ImageOver(msgspec.Struct, frozen=True):
    """The wait for a model's image is over: the host cache has the image, or nobody wanted the image any more.

    If the image can't be made, BuildFailed comes instead."""

    model: ModelKey


class Stepped(msgspec.Struct, frozen=True):
    """The engine made a step, or several steps of an unchanged batch.

    After several steps each output has `steps` tokens, made `step_s` apart."""

    model: ModelKey
    outputs: list[Output]
    busy: bool  # whether the engine has unfinished requests
    held: Held
    step_s: float  # duration of a step
    steps: int = 1
    ahead: bool = False  # whether the engine has begun a further step


class StepFailed(msgspec.Struct, frozen=True):
    """The engine raised an error in a step: the engine is unfit, and its requests are lost."""

    model: ModelKey
    error: str


class Checked(msgspec.Struct, frozen=True):
    """The check of the model has ended. A model with a fault must not serve."""

    model: ModelKey
    wrong: str | None  # sentence about the fault; None: the model passed
    held: Held


class Closed(msgspec.Struct, frozen=True):
    """The engine is gone and holds no pages."""

    model: ModelKey


# ── events: memory ────────────────────────────────────────────────────────────────────────────────────────────────────


class Fetched(msgspec.Struct, frozen=True):
    """The transfer begun by Fetch has ended well: the engine can step."""

    model: ModelKey
    took_s: float
    held: Held


class FetchFailed(msgspec.Struct, frozen=True):
    """The fetch could not begin, or broke off. The requests are parked, and the engine can be fetched again."""

    model: ModelKey
    error: str
    held: Held
    lost: bool = False  # the image is damaged: the engine can't be fetched again, but built again


class Parked(msgspec.Struct, frozen=True):
    """The transfer begun by Park has ended: the KV cache holds no pages, the weights are clean cache."""

    model: ModelKey
    held: Held


class Told(msgspec.Struct, frozen=True):
    """Pages held or wanted by the engine changed without a step.

    Requests came or went, or the KV cache grew, perhaps by fewer pages than asked for."""

    model: ModelKey
    held: Held


# ── events: failures of the engine ────────────────────────────────────────────────────────────────────────────────────


class EngineFailed(msgspec.Struct, frozen=True):
    """The engine raised an error outside a step: the engine is unfit. A step or check of the engine fails as well."""

    model: ModelKey
    error: str


class Refused(msgspec.Struct, frozen=True):
    """The engine did not accept the request."""

    request: RequestId
    model: ModelKey
    error: str


Event = (
    Placed
    | Withdrawn
    | Arrived
    | Cancelled
    | MoveStep
    | Ordered
    | Warmed
    | Built
    | BuildFailed
    | Unfinished
    | ImageOver
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
    """Begin to build the engine, or go on with the build. The new engine holds no pages."""

    spec: EngineSpec


class StageImage(msgspec.Struct, frozen=True):
    """Begin or go on to build the engine, as Build, although no request waits for the engine.

    With `later`, the model is staged by the history of its requests: the image must lie on disk, and may take free room
    and the room of unused images of the models in `later`. BuildFailed answers if that does not suffice."""

    spec: EngineSpec
    later: tuple[ModelKey, ...] | None = None  # None: the build may take room as any build


class Step(msgspec.Struct, frozen=True):
    """Step the engine once.

    Up to `steps` steps are allowed while no other event is heard: the machine would decide on a step each time. So the
    engine may begin a further step if `steps` is above 1. If `steps` is 1, the engine begins no step after this one."""

    model: ModelKey
    steps: int


class Check(msgspec.Struct, frozen=True):
    """Begin or go on to check whether the model still answers as when the weights were read from files."""

    model: ModelKey


class Close(msgspec.Struct, frozen=True):
    """Drop the engine and give its memory back. Requests of the engine were ended before."""

    model: ModelKey


DeviceEffect = Build | StageImage | Step | Check | Close

# ── memory effects: pages ─────────────────────────────────────────────────────────────────────────────────────────────


class Fetch(msgspec.Struct, frozen=True):
    """Begin to copy missing weights and parked requests to the device; answered by Fetched or FetchFailed."""

    model: ModelKey
    kv_pages: int  # size of the whole KV cache afterwards


class Park(msgspec.Struct, frozen=True):
    """Begin to copy requests and KV cache to the host; the weights stay as clean cache. Answered by Parked."""

    model: ModelKey


class Evict(msgspec.Struct, frozen=True):
    """Give pages of clean weights back."""

    model: ModelKey
    pages: int


class Grow(msgspec.Struct, frozen=True):
    """Add pages to the KV cache; answered by Told."""

    model: ModelKey
    pages: int


class Shrink(msgspec.Struct, frozen=True):
    """Give spare pages of the KV cache back."""

    model: ModelKey
    pages: int


MemoryEffect = Fetch | Park | Evict | Grow | Shrink

# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Add(msgspec.Struct, frozen=True):
    """Give the request to the engine; answered by Told or Refused."""

    request: Request


class Abort(msgspec.Struct, frozen=True):
    """Let the engine forget the requests; answered by Told."""

    model: ModelKey
    requests: list[RequestId]


class Tell(msgspec.Struct, frozen=True):
    """Send tokens, or the end, of a request to the gateway of the request."""

    request: Request
    at: int  # index of the first token in the output of the request
    output: Output


class Lose(msgspec.Struct, frozen=True):
    """Tell the gateway that the request ended on this device without its complete answer."""

    request: Request
    error: str  # sentence for the client
    finish: Finish = Finish.LOST  # LOST: another device can go on with the request; else the end is for good
    suspect: bool = False  # whether the request was in the step in which the engine failed


Effect = DeviceEffect | MemoryEffect | Add | Abort | Tell | Lose
