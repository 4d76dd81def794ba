"""The contract between processes: every subject and every message that crosses the bus.

Pure. Messages are msgspec structs in MessagePack, each with a fixed tag. `VERSION` rises when a reader of the old
version could misread the new version. A process refuses a message of a foreign version, and names both versions.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any, TypeVar

import msgspec

from store.contract.device_bytes import DeviceBytes
from store.contract.elapsed import NOTHING_SPENT as NOTHING_SPENT
from store.contract.elapsed import Course as Course
from store.contract.elapsed import Elapsed
from store.contract.elapsed import Spent as Spent
from store.contract.kv_curve import KeptLayers, KvCurve, curve_of
from store.contract.kv_curve import KvForm as KvForm
from store.contract.priorities import Priority
from store.contract.tasks import Task

VERSION = 1

# ── subjects ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Staccato makes the ids in subjects (letters, digits, '-'), never a tenant: a '.', '*' or '>' would change the subject.

LEASES = "leases"  # KV bucket, TTL: runtime id → Lease
LEASE_BASES = "lease-bases"  # KV bucket, TTL: runtime id → LeaseBase, for runtimes with many models
MODELS = "models"  # KV bucket: model key → EngineSpec; every runtime must be able to serve each of these models
PLACES = "places"  # KV bucket: model key → Places; a model without a limit of replicas has no entry
LEADER = "leader"  # KV bucket, TTL: role → Leader, the process that has the role
QUOTAS = "quotas"  # KV bucket: tenant id → Account, changed by compare-and-set alone
USAGE_STREAM = "USAGE"  # JetStream stream over `usage.>`


def run_subject(runtime: str) -> str:
    """Subject on which a runtime takes requests of Run and answers Reply."""
    return f"rt.{runtime}.run"


def cancel_subject(runtime: str) -> str:
    """Subject on which gateways publish Cancel to a runtime."""
    return f"rt.{runtime}.cancel"


def repair_subject(runtime: str) -> str:
    """Subject on which a runtime takes requests of Repair and answers Repaired."""
    return f"rt.{runtime}.repair"


def control_subject(runtime: str) -> str:
    """Subject on which a runtime takes requests of Control and answers Reply."""
    return f"rt.{runtime}.control"


def prepare_subject(runtime: str) -> str:
    """Subject on which the target of a migration takes requests of Offer and answers Reply."""
    return f"rt.{runtime}.offer"


def copy_subject(runtime: str) -> str:
    """Subject on which the target takes requests of Copy. Reply comes once the blocks were read or are not needed."""
    return f"rt.{runtime}.blocks"


def commit_subject(runtime: str) -> str:
    """Subject on which the target takes requests of Commit. A repeated Commit gets the same Reply again."""
    return f"rt.{runtime}.commit"


def abort_move_subject(runtime: str) -> str:
    """Subject on which the source of a migration publishes AbortMove to the target."""
    return f"rt.{runtime}.call-off"


def release_subject(runtime: str) -> str:
    """Subject on which the target of a migration publishes Release to the source."""
    return f"rt.{runtime}.landed"


def migrate_subject(runtime: str) -> str:
    """Subject on which a runtime takes requests of Migrate and answers Reply."""
    return f"rt.{runtime}.migrate"


def drain_subject(runtime: str) -> str:
    """Subject on which a runtime takes requests of Drain and answers Reply."""
    return f"rt.{runtime}.drain"


def role_subject(runtime: str) -> str:
    """Subject on which a runtime takes requests of SetRole and answers Reply."""
    return f"rt.{runtime}.role"


def frame_subject(gateway: str) -> str:
    """Subject on which every runtime with streams of a gateway publishes Frame to the gateway."""
    return f"gw.{gateway}.frames"


GATEWAY_ALIVE = "alive.gw"  # publish: GatewayAlive, from every gateway with open streams


def usage_subject(tenant_id: str) -> str:
    """Subject of JetStream on which gateways publish the Usage of a tenant."""
    return f"usage.{tenant_id}"


# ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="Message"):
    """Base of the messages between processes."""

    v: int = VERSION


class EngineSpec(Message, frozen=True, kw_only=True, tag="EngineSpec"):
    """Facts from which a runtime builds the engine of an artefact. `key` names the pair of artefact and settings."""

    key: str
    path: str  # folder of the artefact on the runtime's host
    digest: str
    architecture: str
    dtype: str  # auto | bfloat16 | float16 | float32
    max_model_len: int  # tokens
    weight_bytes: int
    kv_bytes_per_token: int  # written by all layers
    idle_s: float | None = None  # seconds without a request until the model is parked; None: until pages are needed
    pinned: bool = False  # an idle model keeps its pages, unless another model would wait for ever
    replicas: int = 0  # runtimes that host the model; 0: all runtimes
    reasoning_parser: str = ""  # vLLM's name of the parser of thinking: a grammar begins behind the thinking
    # The parts of the model that see or hear are not loaded. Unset means False, and the message is as before the field.
    language_model_only: bool | msgspec.UnsetType = msgspec.UNSET
    # What the layers keep. Unset: every layer keeps every token, and the message is as before there was the field.
    kv_layers: tuple[KeptLayers, ...] | msgspec.UnsetType = msgspec.UNSET
    # Windows of the week in which the image stays in the host cache (store/contract/warm). Unset: there are none.
    warm: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    # What the model makes. Unset: text, and the message is as before there was the field.
    task: Task | msgspec.UnsetType = msgspec.UNSET

    @property
    def pools(self) -> bool:
        """Whether the model answers with vectors. A vector comes in `logprobs` of a delta without tokens."""
        return self.task is not msgspec.UNSET and self.task.pools

    @property
    def kv(self) -> KvCurve[int]:
        """KV cache that requests of the model hold. Callers in a loop keep the curve."""
        return curve_of(self.kv_layers) if self.kv_layers else KvCurve(self.kv_bytes_per_token, 0)


ONCE = "once-"  # begin of the cache salt of a request whose prompt and output must not outlast the request


class Resumable(msgspec.Struct, frozen=True, array_like=True):
    """Mark of a request whose tokens the runtime keeps for a client that lost the connection."""

    owner: bytes  # digest of tenant and key: no other caller hears of the request
    body: bytes  # digest of route and body: a different request is not taken for this request
    keep_s: float  # from the loss of the connection or the end of the tokens: then the runtime forgets the request
    started_at: float = 0.0  # UNIX seconds: price and month of the bill follow from the start
    taken: int = 0  # times that the request was taken up
    # Prompt tokens found in the prefix cache, and written there, by the runtime that computed the prompt.
    cached_tokens: int = 0
    written_tokens: int = 0


class Run(Message, frozen=True, kw_only=True, tag="Run"):
    """Command of a gateway to a runtime: make a stream of tokens.

    `stream` is unique within the gateway's life. Every attempt at a request has its own stream number: deltas of an
    earlier attempt are never taken for deltas of a later attempt."""

    gateway: str
    stream: int
    model: str  # EngineSpec.key
    request: str  # the client-visible request id
    attempt: int
    prompt_tokens: int
    max_tokens: int
    payload: bytes  # the engine's own request, opaque to all code but runtime/engine
    engine: str  # version of the engine that wrote `payload`: an engine of a different version refuses the payload
    label: str = ""  # tenant and deployment whose attainment counts the tokens
    tenant: str = ""  # tenant whose share of the device serves the stream
    weight: float = 1.0  # of the tenant: shares of tenants are in proportion to their weights
    ttft_s: float = 10.0  # seconds from the arrival until the first token is due
    tbt_s: float = 0.1  # seconds from one token's due time to the due time of the next token
    patience_s: float = 1.5  # a token later than this is lost: the request no longer makes other requests wait
    made: list[int] = []  # output tokens that earlier attempts made: the stream begins with the token after these
    first_late: bool = False  # the first token of `made` was late
    trace: str = ""  # W3C traceparent of the request's span; empty: the request is not traced
    grammar: bytes = b""  # JSON of the grammar of the output, in vLLM's words; empty: any output will do
    priority: Priority = Priority.NORMAL
    resumable: Resumable | None = None  # None: the runtime keeps no tokens for a client that lost the connection


class Refusal(IntEnum):
    """Reason why a runtime did not take a command. The gateway tries another runtime or answers the client."""

    UNKNOWN_MODEL = 1
    DRAINING = 2
    BUSY = 3
    ENGINE_VERSION = 4
    MODEL_FAILED = 5
    BAD_MESSAGE = 6


class Reply(Message, frozen=True, kw_only=True, tag="Reply"):
    """Answer to a command. The answer to a Run also says where the runtime's frames to the gateway stand."""

    refusal: Refusal | None = None
    reason: str = ""
    epoch: int = 0
    seq: int = 0  # number of the last frame sent


class Cancel(Message, frozen=True, kw_only=True, tag="Cancel"):
    """Word of a gateway to a runtime: the gateway no longer wants these streams."""

    gateway: str
    streams: list[int]
    keep: bool = False  # a client may still resume the streams: the text ended, and the client may not have the end


class Finish(IntEnum):
    """Reason why a stream ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4
    LOST = 5  # ended at this runtime, not for the client: the gateway can continue the request on another runtime
    REFUSED = 6  # the request asks for the impossible: the client hears the reason, as a bad request


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """Runtime that a stream moved to, with epoch and number of the runtime's last frame to the gateway at the move."""

    runtime: str
    epoch: int
    seq: int


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Result of a step for one stream."""

    stream: int
    tokens: list[int]
    at: int  # index of tokens[0] in the stream's output: deltas of a stream join without gap or repeat
    finish: Finish | None = None
    stop_reason: int | str | None = None
    logprobs: bytes | None = None  # the engine's own encoding of log probabilities, or of a model's vector
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; set on the first delta
    error: str = ""  # with finish == ERROR or LOST: a sentence for the client
    suspect: bool = False  # with finish == LOST: the stream was in the step in which the engine failed
    moved: Moved | None = None  # set on this runtime's last delta: further deltas come from the named runtime
    spent: Spent = NOTHING_SPENT  # on this runtime
    course: Course | None = None  # set with this runtime's first tokens, with the last tokens, and before a move
    written_tokens: int = 0  # prompt tokens computed and kept in the prefix cache; set on the first delta


class Frame(Message, frozen=True, kw_only=True, tag="Frame"):
    """Results of a step for one gateway.

    `seq` counts the frames of (runtime epoch, gateway) from 1. A frame without deltas is a heartbeat and carries the
    last seq used."""

    runtime: str
    epoch: int  # changes when the runtime restarts: frames are numbered from 1 again and old streams are gone
    seq: int
    deltas: list[Delta] = []


class Repair(Message, frozen=True, kw_only=True, tag="Repair"):
    """Request of a gateway that missed frames `first`..`last` of an epoch."""

    gateway: str
    epoch: int
    first: int
    last: int


class Repaired(Message, frozen=True, kw_only=True, tag="Repaired"):
    """Encoded frames still in the ring, oldest first; `complete` is false if wanted frames were overwritten already."""

    frames: list[bytes]
    complete: bool


class Places(Message, frozen=True, kw_only=True, tag="Places"):
    """Runtimes that host a model."""

    runtimes: list[str]
    leaving: list[str] = []  # runtimes that host the model until all of `runtimes` could load the model
    term: int = 0  # term of the scheduler's lead: places of an earlier term are ignored


class Leader(Message, frozen=True, kw_only=True, tag="Leader"):
    """Holder of a role that one process has at a time, and the wishes of the holder."""

    holder: str
    term: int = 0  # term of the holder's lead; 0: the holder only asks for the role: watchers hear a refused ask too
    wanted: int = 0  # runtimes that should exist; 0: the holder does not say
    draining: list[str] = []  # surplus runtimes: a draining runtime takes no requests, and may end


class GatewayAlive(Message, frozen=True, kw_only=True, tag="GatewayAlive"):
    """Sign of life of a gateway. Runtimes cancel the streams of a gateway that falls silent."""

    gateway: str


class Control(Message, frozen=True, kw_only=True, tag="Control"):
    """Command of an operator for one model of one runtime; `forget` may be for every model, and of a tenant."""

    model: str  # empty: every model
    op: str  # sleep | wake | forget
    salt: str | msgspec.UnsetType = msgspec.UNSET  # for `forget`: cache salt of the tenant whose prefixes go


class Prepare(Message, frozen=True, kw_only=True, tag="Offer"):
    """Question of a source runtime to a target runtime: can the target go on with the running request `run`?"""

    move: str  # unique name of the attempt to move the request
    source: str  # runtime
    host_cache: str  # name of the source's host cache: the target shares the cache, or blocks are carried
    form: KvForm
    run: Run
    tokens: int  # prompt and output so far
    key: bytes = b""  # if blocks are carried: the key that the source will say where the target receives blocks
    owner: int = 0  # if the host cache is shared: the number of the source's device process in the host cache


class Copy(Message, frozen=True, kw_only=True, tag="Blocks"):
    """Blocks of a moving request, from index `first` on, are at `host` in the host cache, and may be copied in.

    Said by the source's device of the source's cache, and by both nodes of the target's cache."""

    move: str
    first: int
    host: list[int]


class Departure(msgspec.Struct, frozen=True):
    """State of a request that leaves an engine, for another engine of the model to go on with the request."""

    made: list[int]  # tokens of the output
    computed: int  # tokens whose keys and values are in the blocks
    host: list[int]  # numbers of all blocks, by index: in the source's host cache; in a Commit, in the target's
    sampler: bytes  # state of the random generator of a request with a seed; empty if the engine has no such state


class Commit(Message, frozen=True, kw_only=True, tag="Commit"):
    """Hand-over of a request. The source makes no more tokens; from the answer on the request is the target's."""

    move: str
    departure: Departure


class AbortMove(Message, frozen=True, kw_only=True, tag="CallOff"):
    """News to a target, and to the device of either side: the request does not move, and goes on at the source."""

    move: str


class Release(Message, frozen=True, kw_only=True, tag="Landed"):
    """News of a target's device, passed on to the source's device: the target reads no more blocks of the request."""

    move: str


class Migrate(Message, frozen=True, kw_only=True, tag="Migrate"):
    """Command to move `count` requests to runtime `target`: lowest priority first, then the shortest context first."""

    target: str
    model: str = ""  # key of the only model whose requests move; empty: requests of any model
    count: int = 1
    term: int = 0  # term of the commanding scheduler: a scheduler of an earlier term is not obeyed


class Role(StrEnum):
    """Part of a request that a runtime serves."""

    BOTH = "both"
    PREFILL = "prefill"  # the prompt and the first token; then the request moves to a runtime of another role
    DECODE = "decode"  # the tokens after the first token


class SetRole(Message, frozen=True, kw_only=True, tag="SetRole"):
    """Command to take a role from now on. Open requests stay, but under PREFILL requests with a first token move on."""

    role: Role
    term: int = 0  # term of the commanding scheduler; 0: an operator, whose role no scheduler changes


class Drain(Message, frozen=True, kw_only=True, tag="Drain"):
    """Command to take no more requests and to move open requests away; with `on` false, to take requests again."""

    on: bool
    term: int = 0  # term of the commanding scheduler


class Residency(IntEnum):
    """Place of a model's weights on a runtime."""

    COLD = 0  # no part of the model in memory
    LOADING = 1  # on the way to the host's memory, or from the host to the device
    RESIDENT = 2  # engine built, weights in device memory
    FAILED = 3
    LEAVING = 4  # giving memory back
    STAGED = 5  # engine built, weights in the host's memory; on the device at most as a cache


class ModelState(Message, frozen=True, kw_only=True, tag="ModelState", omit_defaults=True, gc=False):
    """State of a model on a runtime."""

    residency: Residency
    error: str = ""
    load_ms: float = 0.0  # duration of the last way to RESIDENT, with the building if the model was COLD
    running: int = 0  # requests in the engine
    waiting: int = 0  # requests held until the model is resident
    high: int = 0  # requests of high priority in the engine
    turns: int = 0
    tokens: int = 0
    weights_pages: int = 0  # pages of the device pool, now
    kv_pages: int = 0
    spare_pages: int = 0  # part of kv_pages that holds only prefixes of ended requests: no request lacks that memory
    wanted_pages: int = 0  # KV cache that all running requests need together for the next steps
    kv_fragmentation: float = 0.0  # in pages with used blocks: share of the bytes that no used block takes
    fetches: int = 0  # copies of the weights from the host's memory to the device
    fetch_ms: float = 0.0  # duration of the last fetch
    read_bytes: int = 0  # read from the weight files so far, while the engine is built
    files_bytes: int = 0  # size of the weight files to read; 0: no file is read now
    reading_s: float = 0.0  # seconds since the reading began
    step_ms: float = 0.0  # estimate of a decode step of one request alone; 0: not known
    prefill_ms: float = 0.0  # estimate for the longest prompt of the model, alone; 0: not known
    busy: float = 0.0  # share of the device's time that the model's requests need to keep their pace
    tbt_s: float = 0.0  # the shortest objective of the model's requests; 0: no requests
    head_bytes: int = 0  # KV cache needed by the first waiting request
    queued_bytes: int = 0  # KV cache needed by the waiting requests behind the first
    least_bytes: int | None = None  # KV cache of the smallest request, held or needed; None: no requests
    sequential: bool = False  # requests run alone: in a batch the model's output differs from its output alone
    on_disk: bool | msgspec.UnsetType = msgspec.UNSET  # of a COLD model: an image lies on the runtime's disk
    ever_resident: bool = False  # absent in messages of earlier versions: readers ask `was_resident`
    build_place: int = 0  # 1: the engine is built now; n: n - 1 engines are built first; 0: no build is due
    build_eta_s: float = 0.0  # until the engine is built, by the speed of the last builds; 0: not known
    warm: bool = False  # by order, the image stays in the host cache now
    staged: int = 0  # times that the history of requests brought the image from disk before a request asked
    staged_unused: int = 0  # of these, times that the image left the host cache before a request asked
    loaded_before: bool = False  # an earlier device process of the runtime has loaded the model

    @property
    def was_resident(self) -> bool:
        """Whether the model is or was resident on the runtime; earlier versions say so by `load_ms` above 0 alone."""
        return self.ever_resident or self.load_ms > 0

    @property
    def was_loaded(self) -> bool:
        """Whether the runtime has loaded the model, in this device process or in an earlier device process."""
        return self.was_resident or self.loaded_before


class Attained(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sums over ended requests, by the definitions of runtime/core/ledgers/attainment.py."""

    requests: int = 0
    first_on_time: int = 0  # requests whose first token was on time
    tokens: int = 0  # made, or owed and never made
    on_time: int = 0
    on_time_rebased: int = 0
    time_shares: float = 0.0  # sum over requests, each request 0 to 1


class Accounts(msgspec.Struct, frozen=True):
    """Account of a device's time since the process began: us = idle + platform + sums over labels + open."""

    us: int = 0
    idle_us: int = 0
    platform_us: int = 0
    open_us: int = 0  # not attributed yet: waiting requests pay this time when their model steps
    labels: dict[str, tuple[int, int]] = {}  # by Run.label: microseconds of steps, of switches


class Spread(msgspec.Struct, frozen=True, array_like=True):
    """Histogram of durations over the bounds WAIT_S of store/contract/series.py."""

    counts: list[int] = []  # durations between the previous bound and each bound; the last: above every bound
    sum_s: float = 0.0


class Lease(Message, frozen=True, kw_only=True, tag="Lease"):
    """Sign of life of a runtime, and the runtime's state. Renewed every second, gone LEASE_TTL_S after the last."""

    runtime: str
    epoch: int
    engine: str
    draining: bool = False
    surplus: bool = False  # the scheduler drained the runtime for want of load, and may ask the runtime back
    role: Role = Role.BOTH
    role_given: bool = False  # the scheduler gave the role, and may take the role back
    prompt_s: float = 0.0  # time of the device that the prompts of the requests so far take, by the device's costs
    host_cache: str = ""  # name of the runtime's host cache: runtimes with an equal name share the cache
    receives_at: str = ""  # host:port to which sources send blocks of moving requests; empty: takes no blocks
    reads: bool = False  # the runtime prefers to read blocks out of the source's memory, by NIXL
    holder: str = ""  # key of the model that has the turn; empty when the device is idle
    switches: int = 0
    moved: int = 0  # running requests that moved to other runtimes
    false_losses: int = 0  # gateways that the runtime took for dead and heard again
    page_bytes: int = 0
    pages_total: int = 0  # pages of the device pool
    pages_used: int = 0
    device_bytes: DeviceBytes | msgspec.UnsetType = msgspec.UNSET
    block_tokens: int = 0  # tokens of a block of attention in the runtime's engines; 0: not known
    models: dict[str, ModelState] = {}
    attainment: dict[str, Attained] = {}  # by Run.label, since the device process started
    accounts: Accounts = Accounts()
    wakes: dict[str, Spread] = {}  # wakes of models, from the host's memory and from disk
    law: dict[str, float] = {}  # costs of any model on this device, a `costs.Law`; empty: not measured
    switch_times: Spread = Spread()
    base: int = 0  # version of the LeaseBase that the lease amends (store/contract/leases.py); 0: the lease is whole
    gone: list[str] = []  # models of the base that the runtime no longer serves


class LeaseBase(Message, frozen=True, kw_only=True, tag="LeaseBase"):
    """States that leases of a runtime amend, as of some seconds ago."""

    runtime: str
    epoch: int
    version: int  # counts the bases of the epoch
    models: dict[str, ModelState] = {}
    attainment: dict[str, Attained] = {}
    labels: dict[str, tuple[int, int]] = {}  # of Lease.accounts


class Usage(Message, frozen=True, kw_only=True, tag="Usage"):
    """Cumulative counters of one attempt at a request. A higher `seq` replaces a lower `seq`; `final` ends the row."""

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
    output_tokens: int  # delivered to the client; if `finish` is cancelled: made for the client
    started_at: float  # UNIX seconds
    ended_at: float
    finish: str  # stop | length | budget_exhausted | cancelled | rejected | error | gateway_lost | lost | open
    gpu_us: int = 0  # device time charged to the attempt
    switch_us: int = 0  # time of the model's way to the device, charged to the attempt
    cache_byte_s: int = 0  # KV cache in the host's memory, while the model was away
    kv_byte_s: int = 0  # KV cache on the device
    elapsed: Elapsed | None = None  # set with `final`, if a runtime was asked


M = TypeVar("M", bound=Message)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}


class WireError(ValueError):
    """Error of a message without the type that the subject promises: names the type and the fault."""


class OtherVersion(WireError):
    """Error of a message with a foreign `VERSION`: a process of the message's version could read the message."""


def replace(message: M, **changes: Any) -> M:
    """Return a copy of the message with changed fields."""
    return msgspec.structs.replace(message, **changes)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(kind: type[M], data: bytes) -> M:
    """Decode a message of the type `kind`.

    Raises WireError if the bytes are no message of the type, OtherVersion if the message has another version."""
    if (decoder := _decoders.get(kind)) is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        message: M = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"{kind.__name__}: {len(data)} bytes do not decode: {error}") from error
    if message.v != VERSION:
        said = f"{kind.__name__} has version {message.v}, this process speaks {VERSION}"
        raise OtherVersion(f"{said}: upgrade the older one")
    return message
