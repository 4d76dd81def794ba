"""A request in the books of a runtime: origin, payload, progress, and when the next token is due. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

import msgspec

from runtime.core.ledgers.attainment import ObjectiveProgress
from store.contract import wire
from store.contract.priorities import Priority

_NEVER = float("inf")

RequestId = NewType("RequestId", str)
ModelKey = NewType("ModelKey", str)


def request_id(gateway: str, stream: int) -> RequestId:
    """Id of a request, unique over all gateways, since a stream's number is unique within its gateway."""
    return RequestId(f"{gateway}/{stream}")


class Objective(msgspec.Struct, frozen=True):
    """When tokens are due: token k, from 1, at arrival + `ttft_s` + (k - 1) * `tbt_s` (Aegaeon, §2)."""

    ttft_s: float = 10.0
    tbt_s: float = 0.1
    patience_s: float = 1.5  # a token later by more is lost: the request no longer makes models wait for its sake
    priority: Priority = Priority.NORMAL

    @property
    def high(self) -> bool:
        """Whether the request has high priority."""
        return self.priority is Priority.HIGH


@dataclass(slots=True)
class DeviceSpent:
    """Time and memory of a device spent on requests: see runtime/core/ledgers/device_time.py."""

    gpu_us: int = 0
    switch_us: int = 0
    kv_byte_us: int = 0
    cache_byte_us: int = 0

    def shown(self) -> wire.Spent:
        return wire.Spent(self.gpu_us, self.switch_us, self.kv_byte_us // 10**6, self.cache_byte_us // 10**6)


@dataclass(slots=True)
class Request:
    """A stream of tokens asked of the runtime."""

    id: RequestId
    gateway: str
    stream: int
    model: ModelKey
    payload: bytes
    arrived_at: float  # seconds on the device's clock
    prompt_tokens: int = 1
    max_tokens: int = 1
    objective: Objective = Objective()
    label: str = ""  # tenant and deployment whose attainment counts the tokens
    tenant: str = ""  # tenant whose share of the device serves the request: see runtime/core/ledgers/fair_share.py
    weight: float = 1.0  # of the tenant
    made: list[int] = field(default_factory=list)  # first tokens of the output, made by another device before
    first_late: bool = False  # whether the first token of `made` was late
    handed: bool = False  # keys and values come with the request; else prompt and `made` are computed again
    grammar: bytes = b""  # compiled; empty: the output is free
    computed: bool = field(init=False)  # the keys and values are on this device
    progress: ObjectiveProgress = field(init=False)
    spent: DeviceSpent = field(default_factory=DeviceSpent)  # on this device
    held_us: int = -1  # time up to which keys and values are paid for; -1: no keys and values on the device yet
    away_us: int = 0  # the model's total time away from the device at `held_us`

    def __post_init__(self) -> None:
        self.computed = self.handed
        self.progress = ObjectiveProgress(self.arrived_at, self.objective.ttft_s, self.objective.tbt_s, len(self.made))
        if self.made:
            self.progress.first_at = _NEVER if self.first_late else -_NEVER

    @property
    def sent(self) -> int:
        """Tokens made so far, by this device and by earlier devices."""
        return self.progress.sent

    @property
    def context(self) -> int:
        """Tokens whose keys and values the next step reads."""
        return self.prompt_tokens + self.progress.sent

    @property
    def to_compute(self) -> int:
        """Tokens whose keys and values the first step on this device computes."""
        return 0 if self.computed else self.context
