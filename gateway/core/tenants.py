"""Settings of a tenant and of its keys, as the REST API and declared objects take the settings. Pure."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from gateway.core.objectives import WEIGHT_LEAST, WEIGHT_MOST
from store.contract.limits import NO_LIMITS, Limits

TenantName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        description="1 to 63 small letters, digits and dashes, the first and the last no dash, as acme-2",
    ),
]
Scope: TypeAlias = Literal["inference", "control"]
Rank: TypeAlias = Literal["high", "normal", "batch"]
# The declared object that a controller made a row for, as `staccato/NAMESPACE/NAME`.
ManagedBy = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9._-]{1,63}(/[A-Za-z0-9._-]{1,253}){2}$",
        description="the declared object of a controller, as staccato/models/acme",
    ),
]


class TenantSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weight: Annotated[float, Meta(ge=WEIGHT_LEAST, le=WEIGHT_MOST)] = (
        1.0  # factor of the tenant's patience, see gateway/core/objectives.py
    )
    limits: Limits = NO_LIMITS
    # False: zero retention. Runtimes keep nothing of a request beyond the request's end, whatever deployments say.
    keep_prefixes: bool = True
