"""A request as the runtime knows it: who asked, what for, and how far it came. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", str)
ModelKey = NewType("ModelKey", str)


def request_id(gateway: str, stream: int) -> RequestId:
    """Unique over all gateways: a stream's number is unique within its gateway."""
    return RequestId(f"{gateway}/{stream}")


@dataclass(slots=True)
class Request:
    """One stream of tokens asked of this runtime."""

    id: RequestId
    gateway: str
    stream: int
    model: ModelKey
    payload: bytes
    arrived_at: float  # seconds on the device's clock
    sent: int = 0  # tokens made so far
