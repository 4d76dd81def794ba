"""A request as the runtime knows it: who asked, what for, how far it came, and when its next token is due. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

import msgspec

from runtime.attainment import Progress
from store import wire

_NEVER = float("inf")

RequestId = NewType("RequestId", str)
ModelKey = NewType("ModelKey", str)


def request_id(gateway: str, stream: int) -> RequestId:
    """Unique over all gateways: a stream's number is unique within its gateway."""
    return RequestId(f"{gateway}/{stream}")


class Objective(msgspec.Struct, frozen=True):
    """When tokens are due: token k, from 1, at arrival + `ttft_s` + (k - 1) * `tbt_s` (Aegaeon, §2)."""

    ttft_s: float = 10.0
    tbt_s: float = 0.1
    patience_s: float = 1.5  # so late, a token is lost: its request no longer makes others wait


@dataclass(slots=True)
class Spent:
    """Of a device, on one request or on many: see runtime/account.py."""

    gpu_us: int = 0
    switch_us: int = 0
    kv_byte_us: int = 0
    cache_byte_us: int = 0

    def shown(self) -> wire.Spent:
        return wire.Spent(self.gpu_us, self.switch_us, self.kv_byte_us // 10**6, self.cache_byte_us // 10**6)


@dataclass(slots=True)
class Request:
    """One stream of tokens asked of this runtime."""

    id: RequestId
    gateway: str
    stream: int
    model: ModelKey
    payload: bytes
    arrived_at: float  # seconds on the device's clock
    prompt_tokens: int = 1
    max_tokens: int = 1
    objective: Objective = Objective()
    label: str = ""  # tenant and deployment: whose attainment its tokens count to
    tenant: str = ""  # whose share of the device it is served from: see runtime/shares.py
    weight: float = 1.0  # of the tenant
    made: list[int] = field(default_factory=list)  # the tokens of its output that another device made before
    first_late: bool = False  # the first of those was
    handed: bool = False  # the keys and values of its tokens come with it: else they are computed again
    computed: bool = field(init=False)  # they are on this device
    progress: Progress = field(init=False)
    spent: Spent = field(default_factory=Spent)  # on this device
    held_us: int = -1  # up to here it paid for its keys and values; -1: it has none here yet
    away_us: int = 0  # how long its model had been away then

    def __post_init__(self) -> None:
        self.computed = self.handed
        self.progress = Progress(self.arrived_at, self.objective.ttft_s, self.objective.tbt_s, len(self.made))
        if self.made:
            self.progress.first_at = _NEVER if self.first_late else -_NEVER

    @property
    def sent(self) -> int:
        """Tokens made so far, here and before."""
        return self.progress.sent

    @property
    def context(self) -> int:
        """Tokens whose keys and values the next step reads."""
        return self.prompt_tokens + self.progress.sent

    @property
    def to_compute(self) -> int:
        """Tokens whose keys and values its first step here computes."""
        return 0 if self.computed else self.context
