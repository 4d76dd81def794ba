"""Deployments as values: the spec that a tenant writes, revisions, canaries, and the target of a request. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Struct

from store.contract import wire

DURATION = r"^(auto|never|\d{1,6}(ms|s|m|h))$"
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

Parser = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="the name of one of vLLM's parsers, as hermes")
]


Idle = Annotated[
    str, Meta(pattern=DURATION, description="auto, never, or the time without requests as 500ms, 30s, 5m or 2h")
]


WarmWindow = Annotated[str, Meta(max_length=160, description="days, times and a time zone: Mon-Fri 8:00-18:00 UTC")]


class Progress(Struct, frozen=True, kw_only=True):
    """Progress of the import of a model, or of the building of a deployment's engine."""

    done_bytes: int
    total_bytes: int
    eta_s: int | None = None  # at the speed of the last seconds
    waits_for: str | None = None  # why the work does not go on, or has not begun


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a deployment's spec."""


class Slo(_Part, frozen=True, kw_only=True):
    ttft_ms: Annotated[int, Meta(ge=1, le=3_600_000)] = 10_000
    tbt_ms: Annotated[int, Meta(ge=1, le=60_000)] = 100


class Scaling(_Part, frozen=True, kw_only=True):
    idle: Idle = "auto"  # time without a request until the model sleeps; auto: until pages are needed
    min_resident: Annotated[int, Meta(ge=0, le=1)] = 0  # 1: never asleep
    max_replicas: Annotated[int, Meta(ge=1, le=1024)] | None = None  # runtimes that host the model; None: every runtime


class Nothing(_Part, frozen=True, kw_only=True):
    """Part of a deployment's spec without fields so far: any field is refused."""


class Spec(_Part, frozen=True, kw_only=True):
    """Spec of a revision of a deployment."""

    model: str
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: Annotated[int, Meta(ge=1)] | None = None  # tokens; None: the model's own limit
    slo: Slo = Slo()
    priority: Literal["high", "normal", "batch"] = "normal"
    scaling: Scaling = Scaling()
    limits: Nothing = Nothing()
    price: Nothing = Nothing()
    tool_parser: Parser | None = None
    reasoning_parser: Parser | None = None
    language_model_only: bool = False  # no pictures: the parts of the model that see are not loaded
    keep_prefixes: bool = True  # False: runtimes keep nothing of a request's prompt and output beyond the request's end
    warm: tuple[WarmWindow, ...] = ()  # while a window is open, runtimes keep the model's image in the host's memory


class Share(_Part, frozen=True, kw_only=True):
    """Share of the requests without a named revision that a target gets until the target is promoted."""

    weight: Annotated[int, Meta(ge=0, le=100)]  # percent
    errors_most: Annotated[float, Meta(ge=0, le=1)] = 0.05  # share of requests that may fail: above, the target halts


class Canary(Share, frozen=True, kw_only=True):
    """Share of a deployment's target, with the time of its beginning and the reason of its end."""

    since_us: int
    halted: str | None = None  # reason why the target gets no more requests

    @property
    def share(self) -> Share:
        return Share(weight=self.weight, errors_most=self.errors_most)


@dataclass(frozen=True)
class Revision:
    number: int
    spec: Spec
    engine: wire.EngineSpec
    created_us: int


@dataclass(frozen=True)
class Deployment:
    id: str
    tenant_id: str
    tenant: str
    tenant_weight: float
    tenant_keeps_prefixes: bool  # False: no deployment of the tenant keeps prefixes, whatever the revision says
    name: str
    desired_state: Literal["awake", "asleep"]
    active: Revision
    target: Revision | None
    canary: Canary | None  # share of the target; None: the target takes over once a runtime could load the target
    version: int
    created_us: int
    managed_by: str | None = None  # declared object that the deployment was made for; None: made by hand

    @property
    def live(self) -> list[Revision]:
        """Revisions whose engines the runtimes must have."""
        return [self.active, *([self.target] if self.target else [])]


@dataclass(frozen=True)
class EngineUse:
    """Revision of a deployment, and the time in which an engine may have served the revision."""

    key: str  # key of the engine
    name: str  # tenant/deployment@revision
    since_us: int  # when the revision was made
    until_us: int | None  # when the revision was replaced or deleted; None: live, or rolled back at an unknown time
    live: bool  # now


@dataclass(frozen=True)
class Target:
    """Revision that serves a name in a tenant's request."""

    deployment_id: str
    name: str
    revision: int
    spec: wire.EngineSpec
    slo: Slo
    priority: str  # high | normal | batch
    tenant_weight: float
    tool_parser: str | None
    owner: str  # the tenant's name
    created_at: float  # UNIX seconds
    keep_prefixes: bool = True
    canary: Target | None = None  # serves part of the requests instead
    canary_weight: int = 0  # percent of the requests that the canary serves


def pinned(scaling: Scaling) -> bool:
    """Whether a model with this scaling never sleeps."""
    return scaling.min_resident > 0 or scaling.idle == "never"


def idle_s(scaling: Scaling) -> float | None:
    """Seconds without a request until the model sleeps; None: an unpinned model sleeps once its memory is needed."""
    if pinned(scaling) or scaling.idle == "auto":
        return None
    number, unit = re.fullmatch(r"(\d+)(\w+)", scaling.idle).groups()  # type: ignore[union-attr]  # DURATION matched
    return int(number) * _UNIT_S[unit]
