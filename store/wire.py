"""The contract between processes: every subject and every message that crosses the bus.

Pure: no I/O, no clock. Messages are msgspec structs in MessagePack, tagged with their own name; `VERSION` rises when a
reader of the old version could misread the new one, and a process refuses a message of another version by name.
"""

from __future__ import annotations

from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any, TypeVar

import msgspec

VERSION = 1

# ── subjects ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Ids in subjects are ours (letters, digits, '-'), never a tenant's text: a '.', '*' or '>' would change the subject.

LEASES = "leases"  # KV bucket, TTL: runtime id → Lease
MODELS = "models"  # KV bucket: model key → EngineSpec, what every runtime must be able to serve
PLACES = "places"  # KV bucket: model key → Places; a model without a limit of its replicas has none
LEADER = "leader"  # KV bucket, TTL: role → who has it
QUOTAS = "quotas"  # KV bucket: tenant id → Account, changed by compare-and-set alone
USAGE_STREAM = "USAGE"  # JetStream stream over `usage.>`


def run_subject(runtime: str) -> str:
    """Request: Run → Reply."""
    return f"rt.{runtime}.run"


def cancel_subject(runtime: str) -> str:
    """Publish: Cancel."""
    return f"rt.{runtime}.cancel"


def repair_subject(runtime: str) -> str:
    """Request: Repair → Repaired."""
    return f"rt.{runtime}.repair"


def control_subject(runtime: str) -> str:
    """Request: Control → Reply."""
    return f"rt.{runtime}.control"


def offer_subject(runtime: str) -> str:
    """Request: Offer → Reply."""
    return f"rt.{runtime}.offer"


def blocks_subject(runtime: str) -> str:
    """Request: Blocks → Reply, once they were read or are not needed."""
    return f"rt.{runtime}.blocks"


def commit_subject(runtime: str) -> str:
    """Request: Commit → Reply. Asked again it is answered again."""
    return f"rt.{runtime}.commit"


def call_off_subject(runtime: str) -> str:
    """Publish: CallOff."""
    return f"rt.{runtime}.call-off"


def landed_subject(runtime: str) -> str:
    """Publish: Landed."""
    return f"rt.{runtime}.landed"


def migrate_subject(runtime: str) -> str:
    """Request: Migrate → Reply."""
    return f"rt.{runtime}.migrate"


def drain_subject(runtime: str) -> str:
    """Request: Drain → Reply."""
    return f"rt.{runtime}.drain"


def role_subject(runtime: str) -> str:
    """Request: SetRole → Reply."""
    return f"rt.{runtime}.role"


def frame_subject(gateway: str) -> str:
    """Publish: Frame, from every runtime that works for this gateway."""
    return f"gw.{gateway}.frames"


GATEWAY_ALIVE = "alive.gw"  # publish: GatewayAlive, from every gateway with open streams


def usage_subject(tenant_id: str) -> str:
    """JetStream publish: Usage."""
    return f"usage.{tenant_id}"


# ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Anything that crosses the bus."""

    v: int = VERSION


class EngineSpec(Message, frozen=True, kw_only=True, tag=True):
    """What a runtime needs to build the engine of an artefact under given settings. `key` names the pair."""

    key: str
    path: str  # folder of the artefact on the runtime's host
    digest: str
    architecture: str
    dtype: str  # auto | bfloat16 | float16 | float32
    max_model_len: int  # tokens
    weight_bytes: int
    kv_bytes_per_token: int
    idle_s: float | None = None  # parked after so many seconds without a request; None: once others need its pages
    pinned: bool = False  # without a request it is not parked for others either
    replicas: int = 0  # so many runtimes host it; 0: all


class Run(Message, frozen=True, kw_only=True, tag=True):
    """One stream of tokens, asked of one runtime by one gateway. `stream` is unique within the gateway's life: each
    attempt at a request has its own, so nothing of an earlier one is taken for this one's."""

    gateway: str
    stream: int
    model: str  # EngineSpec.key
    request: str  # the client-visible request id
    attempt: int
    prompt_tokens: int
    max_tokens: int
    payload: bytes  # the engine's own request, opaque to everybody but runtime/engine
    engine: str  # version of the engine that wrote `payload`: another version refuses it
    label: str = ""  # tenant and deployment: whose attainment its tokens count to
    tenant: str = ""  # whose share of the device it is served from
    weight: float = 1.0  # of the tenant: its share is in this proportion to those of others
    ttft_s: float = 10.0  # the first token is due so long after the arrival
    tbt_s: float = 0.1  # and each further one so long after the one before was due
    patience_s: float = 1.5  # so late, a token is lost: its request no longer makes others wait
    made: list[int] = []  # tokens of its output that earlier attempts made: the next one is the one after these
    first_late: bool = False  # the first of them was
    trace: str = ""  # W3C traceparent of the request's span; empty: it is not traced


class Refusal(IntEnum):
    """Why a runtime did not take what it was asked to do. The gateway tries another or answers the client."""

    UNKNOWN_MODEL = 1
    DRAINING = 2
    BUSY = 3
    ENGINE_VERSION = 4
    MODEL_FAILED = 5
    BAD_MESSAGE = 6


class Reply(Message, frozen=True, kw_only=True, tag=True):
    """The answer every command gets. To a Run it also says where the runtime's frames to this gateway stand."""

    refusal: Refusal | None = None
    reason: str = ""
    epoch: int = 0
    seq: int = 0  # of the last frame sent


class Cancel(Message, frozen=True, kw_only=True, tag=True):
    """The gateway no longer wants these streams."""

    gateway: str
    streams: list[int]


class Finish(IntEnum):
    """Why a stream ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4
    LOST = 5  # here, not for the client: another runtime can go on with it


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """Where a stream goes on, and where that runtime's frames to the stream's gateway stood when it took it."""

    runtime: str
    epoch: int
    seq: int


class Course(msgspec.Struct, frozen=True, array_like=True):
    """Where a stream's time at a runtime went, so far: see runtime/course.py."""

    queue_us: int = 0
    wake_us: int = 0
    switch_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    wait_us: int = 0


class Spent(msgspec.Struct, frozen=True, array_like=True):
    """What a stream used of a device and its host, so far: see runtime/account.py."""

    gpu_us: int = 0
    switch_us: int = 0
    kv_byte_s: int = 0
    cache_byte_s: int = 0

    def plus(self, other: Spent) -> Spent:
        return Spent(
            self.gpu_us + other.gpu_us,
            self.switch_us + other.switch_us,
            self.kv_byte_s + other.kv_byte_s,
            self.cache_byte_s + other.cache_byte_s,
        )

    def most(self, other: Spent) -> Spent:
        """The greater of each."""
        return Spent(
            max(self.gpu_us, other.gpu_us),
            max(self.switch_us, other.switch_us),
            max(self.kv_byte_s, other.kv_byte_s),
            max(self.cache_byte_s, other.cache_byte_s),
        )


NOTHING_SPENT = Spent()


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """What one step made for one stream."""

    stream: int
    tokens: list[int]
    at: int  # index of tokens[0] in the stream's output: a stream's deltas join without gap or repeat
    finish: Finish | None = None
    stop_reason: int | str | None = None
    logprobs: bytes | None = None  # the engine's own encoding
    cached_tokens: int = 0  # of the prompt; set on the first delta
    error: str = ""  # with finish == ERROR or LOST: one sentence for the client
    suspect: bool = False  # with finish == LOST: it was in the step in which the engine failed
    moved: Moved | None = None  # this is the last of it from this runtime: what follows comes from that one
    spent: Spent = NOTHING_SPENT  # by this runtime
    course: Course | None = None  # with the first tokens from this runtime, with the last, and before it moves


class Frame(Message, frozen=True, kw_only=True, tag=True):
    """What one step made for one gateway. `seq` counts the frames of (runtime epoch, gateway) from 1; a frame without
    deltas is a heartbeat and carries the last seq used."""

    runtime: str
    epoch: int  # changes when the runtime restarts: its numbering starts anew and its old streams are gone
    seq: int
    deltas: list[Delta] = []


class Repair(Message, frozen=True, kw_only=True, tag=True):
    """The gateway missed frames `first`..`last` of this epoch."""

    gateway: str
    epoch: int
    first: int
    last: int


class Repaired(Message, frozen=True, kw_only=True, tag=True):
    """Encoded frames still in the ring, oldest first; `complete` is false when some were already overwritten."""

    frames: list[bytes]
    complete: bool


class Places(Message, frozen=True, kw_only=True, tag=True):
    """Who hosts a model."""

    runtimes: list[str]
    leaving: list[str] = []  # they host it until it could be loaded by all of `runtimes`
    term: int = 0  # of the scheduler's lead: what an earlier one says of the same model is not heard


class Leader(Message, frozen=True, kw_only=True, tag=True):
    """Who has a role that one process has at a time, and what it wishes."""

    holder: str
    term: int = 0  # of its lead; 0: it asks for the role, and may not get it: who watches hears that too
    wanted: int = 0  # runtimes that there should be; 0: it does not say
    draining: list[str] = []  # runtimes that are no longer needed: they take no requests, and may end


class GatewayAlive(Message, frozen=True, kw_only=True, tag=True):
    """A gateway that stops saying this has its streams cancelled."""

    gateway: str


class Control(Message, frozen=True, kw_only=True, tag=True):
    """An operator's command for one model of one runtime."""

    model: str
    op: str  # sleep | wake


class KvForm(msgspec.Struct, frozen=True):
    """What a block of a model's KV cache is: engines between which anything of this differs can't read each other's."""

    tokens: int
    bytes: int  # of all layers
    layout: str  # type, order and attention kernels, in the engine's words

    def __str__(self) -> str:
        return f"{self.tokens} tokens in {self.bytes} bytes, {self.layout}"


class Offer(Message, frozen=True, kw_only=True, tag=True):
    """A runtime would like another one to go on with a running request: `run` as it was asked for."""

    move: str  # names the attempt to move it, uniquely
    source: str  # runtime
    host_cache: str  # in which its keys and values will be: the target shares it, or they are sent
    form: KvForm
    run: Run
    tokens: int  # prompt and output so far
    key: bytes = b""  # they are sent: with this the source will come to where the target receives them
    owner: int = 0  # else: the source's device process, as it is known in the host cache


class Blocks(Message, frozen=True, kw_only=True, tag=True):
    """These blocks of its KV cache, from index `first` on, are in the target's host cache."""

    move: str
    first: int
    host: list[int]


class Departure(msgspec.Struct, frozen=True):
    """All that an engine needs to go on with a request of another engine of the same model."""

    made: list[int]  # tokens of its output
    computed: int  # tokens whose keys and values are in its blocks
    host: list[int]  # all of these, by index: in the source's host cache, in a Commit in the target's
    sampler: bytes  # where the chance of a request with a seed stands; empty where there is nothing to know


class Commit(Message, frozen=True, kw_only=True, tag=True):
    """It makes no more tokens at the source, and is the target's from the answer on."""

    move: str
    departure: Departure


class CallOff(Message, frozen=True, kw_only=True, tag=True):
    """It does not move."""

    move: str


class Landed(Message, frozen=True, kw_only=True, tag=True):
    """The target's device has read all that it needs of the host cache."""

    move: str


class Migrate(Message, frozen=True, kw_only=True, tag=True):
    """Move so many requests to that runtime, those with the lowest priority and the shortest context first."""

    target: str
    model: str = ""  # of this model alone; empty: of any
    count: int = 1
    term: int = 0  # of the scheduler that says so: one of an earlier term is not obeyed


class Role(StrEnum):
    """What a runtime does of a request."""

    BOTH = "both"
    PREFILL = "prefill"  # its first token; then it goes on at one of the others
    DECODE = "decode"  # all that follows


class SetRole(Message, frozen=True, kw_only=True, tag=True):
    """From now on; requests that are there go on there."""

    role: Role


class Drain(Message, frozen=True, kw_only=True, tag=True):
    """No more requests; those that are there go on elsewhere. Or, with `on` false, as before."""

    on: bool
    term: int = 0  # of the scheduler that says so


class Residency(IntEnum):
    """Where a model is on a runtime."""

    COLD = 0  # nothing of it in memory
    LOADING = 1  # on its way to the host's memory, or from there to the device
    RESIDENT = 2  # engine built, weights in device memory
    FAILED = 3
    LEAVING = 4  # giving its memory back
    STAGED = 5  # engine built, weights in the host's memory; on the device at most as a cache


class ModelState(Message, frozen=True, kw_only=True, tag=True):
    """One model on one runtime."""

    residency: Residency
    error: str = ""
    load_ms: float = 0.0  # what its last way to RESIDENT took, the building too if it was COLD; 0: it never was
    running: int = 0  # requests in the engine
    waiting: int = 0  # requests held until it is resident
    turns: int = 0
    tokens: int = 0
    weights_pages: int = 0  # of the device's pool, now
    kv_pages: int = 0
    kv_fragmentation: float = 0.0  # share of the pages with blocks in use that no block in use takes
    fetches: int = 0  # from the host's memory to the device
    fetch_ms: float = 0.0  # what the last took
    read_bytes: int = 0  # of its files, while its engine is built
    files_bytes: int = 0  # that it will be; 0: nothing is read now
    reading_s: float = 0.0  # since when
    step_ms: float = 0.0  # estimate of a decode step of one request alone; 0: not known
    prefill_ms: float = 0.0  # estimate for the longest prompt it takes, alone; 0: not known
    busy: float = 0.0  # share of the device's time that its requests need to keep their pace
    tbt_s: float = 0.0  # the shortest objective of its requests; 0: it has none
    head_bytes: int = 0  # of KV cache, that the first of those that wait for the engine needs
    queued_bytes: int = 0  # that the others need, which wait behind it
    least_bytes: int | None = None  # that its smallest request has or needs; None: it has none


class Attained(msgspec.Struct, frozen=True, array_like=True):
    """How requests that ended kept their objective: sums, so that those of several runtimes can be added. What the
    definitions mean stands in runtime/attainment.py."""

    requests: int = 0
    first_on_time: int = 0  # requests whose first token was
    tokens: int = 0  # made, or owed and never made
    on_time: int = 0
    on_time_rebased: int = 0
    time_shares: float = 0.0  # of each request 0 to 1


class Accounts(msgspec.Struct, frozen=True):
    """Where a device's time went since its process began: us = idle + platform + sums over labels + open."""

    us: int = 0
    idle_us: int = 0
    platform_us: int = 0
    open_us: int = 0  # it is not known yet whose it is: who waits pays it when its model steps
    labels: dict[str, tuple[int, int]] = {}  # by Run.label: of steps, of switches


class Spread(msgspec.Struct, frozen=True, array_like=True):
    """How long something took, each time: a histogram over the bounds of store/series.py's WAIT_S."""

    counts: list[int] = []  # up to each bound and above the one before; the last: above all
    sum_s: float = 0.0


class Lease(Message, frozen=True, kw_only=True, tag=True):
    """A runtime is alive and this is what it has. Renewed every second, gone after `TTL`."""

    runtime: str
    epoch: int
    engine: str
    draining: bool = False
    role: Role = Role.BOTH
    host_cache: str = ""  # names the one it has: runtimes with the same one share it
    receives_at: str = ""  # host:port to which the others send blocks of requests that move here; empty: nowhere
    reads: bool = False  # it would rather read them out of the others' memory, by NIXL
    holder: str = ""  # key of the model whose turn it is; empty when the device is idle
    switches: int = 0
    moved: int = 0  # running requests that went on at other runtimes
    page_bytes: int = 0
    pages_total: int = 0  # of the device's pool
    pages_used: int = 0
    models: dict[str, ModelState] = {}
    attainment: dict[str, Attained] = {}  # by Run.label, since the device process started
    accounts: Accounts = Accounts()
    wakes: dict[str, Spread] = {}  # of models, from the host's memory and from disk
    law: dict[str, float] = {}  # what any model costs on this device: runtime/costs.Law; empty: it was not measured
    switch_times: Spread = Spread()


class Usage(Message, frozen=True, kw_only=True, tag=True):
    """Cumulative counters of one attempt at one request; a higher `seq` replaces a lower one, `final` closes it."""

    request: str
    attempt: int
    seq: int
    final: bool
    tenant_id: str
    key_id: str
    deployment_id: str
    deployment: str
    revision: int
    model: str  # EngineSpec.key
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int  # delivered to the client
    started_at: float  # UNIX seconds
    ended_at: float
    finish: str  # stop | length | budget_exhausted | cancelled | rejected | error | gateway_lost | lost | open
    gpu_us: int = 0  # of the device's time, as far as it is charged to it
    switch_us: int = 0  # of its model's way to the device, likewise
    cache_byte_s: int = 0  # of its KV cache in the host's memory, while its model was away
    kv_byte_s: int = 0  # of its KV cache on the device


class Level(msgspec.Struct, frozen=True, array_like=True):
    """What is left of a rate: a bucket that fills as time goes by. Its units are explained in gateway/allowance.py."""

    left: int = 0
    at_us: int = 0  # UNIX microseconds, when it was so; 0: long ago, so it is full


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """What one gateway has taken of an account, besides what it took of the rates."""

    beat: int  # rises whenever the gateway says anything: one that stands still is dead
    streams: int
    money: Decimal  # pico, not spent as far as the gateway has said
    spent: Decimal  # pico, of this month, as the gateway counts since it began


class Account(Message, frozen=True, kw_only=True, tag=True):
    """What is left of a tenant's limits, and who has taken which part. Money is Decimal: it outgrows 64 bits."""

    requests: Level = Level()
    tokens: Level = Level()
    month: str = ""  # YYYY-MM, of `spent` and of the money in the slices
    spent: Decimal = Decimal(0)  # pico
    slices: dict[str, Slice] = {}  # by gateway


M = TypeVar("M", bound=Message)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}


class WireError(ValueError):
    """A message that is not what its subject promises: names the type, and what was wrong."""


class OtherVersion(WireError):
    """Another process would understand it."""


def replace(message: M, **changes: Any) -> M:
    """A copy with other values."""
    return msgspec.structs.replace(message, **changes)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(kind: type[M], data: bytes) -> M:
    """Raises WireError on another type or bytes that are no message, OtherVersion."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        message: M = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"{kind.__name__}: {len(data)} bytes do not decode: {error}") from error
    if message.v != VERSION:
        raise OtherVersion(
            f"{kind.__name__} has version {message.v}, this process speaks {VERSION}: upgrade the older one"
        )
    return message
