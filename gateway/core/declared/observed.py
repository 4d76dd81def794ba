"""The platform as the REST API shows it, as far as declared objects are concerned. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import msgspec
from msgspec import Struct

from gateway.core.declared.objects import Ref
from gateway.core.tenants import TenantSettings
from store.contract.deployments import Progress, Share, Spec
from store.contract.limits import Limits

KEY_NAME_MAX = 100  # characters


class SeenTenant(Struct, frozen=True, kw_only=True):
    id: str
    name: str
    weight: float
    limits: Limits
    keep_prefixes: bool = True
    managed_by: str | None

    @property
    def settings(self) -> TenantSettings:
        return TenantSettings(weight=self.weight, limits=self.limits, keep_prefixes=self.keep_prefixes)


class SeenKey(Struct, frozen=True, kw_only=True):
    id: str
    name: str
    scopes: tuple[str, ...]
    priority: str
    state: str


class SeenModel(Struct, frozen=True, kw_only=True):
    id: str
    name: str
    tenant: str | None
    state: Literal["importing", "ready", "refused", "cancelled"]
    reason: str | None
    progress: Progress | None
    managed_by: str | None


class SeenCondition(Struct, frozen=True, kw_only=True):
    type: str
    message: str


class SeenStatus(Struct, frozen=True, kw_only=True):
    phase: str
    desired_state: str
    active_revision: int
    target_revision: int | None
    residency: str
    replicas: int
    conditions: tuple[SeenCondition, ...]


class SeenTarget(Struct, frozen=True, kw_only=True):
    spec: Spec
    canary: Share | None


class SeenDeployment(Struct, frozen=True, kw_only=True):
    id: str
    name: str
    tenant: str
    managed_by: str | None
    active: Spec
    target: SeenTarget | None
    status: SeenStatus

    @property
    def newest(self) -> Spec:
        return self.target.spec if self.target else self.active


@dataclass(frozen=True)
class Delivered:
    """A Secret with the name that a Tenant declares. `ours`: made for that Tenant by this controller."""

    ours: bool
    key_id: str


@dataclass(frozen=True)
class Observed:
    """Rows of the platform. `keys`: valid keys by tenant. `delivered`: by Tenant, the Secret that the Tenant names."""

    tenants: Mapping[str, SeenTenant] = field(default_factory=dict)
    models: Mapping[tuple[str | None, str], SeenModel] = field(default_factory=dict)
    deployments: Mapping[tuple[str, str], SeenDeployment] = field(default_factory=dict)
    keys: Mapping[str, tuple[SeenKey, ...]] = field(default_factory=dict)
    delivered: Mapping[Ref, Delivered] = field(default_factory=dict)

    @cached_property
    def by_mark(self) -> Mapping[str, Sequence[SeenDeployment]]:
        """Deployments by mark."""
        found: dict[str, list[SeenDeployment]] = {}
        for row in self.deployments.values():
            if row.managed_by:
                found.setdefault(row.managed_by, []).append(row)
        return found

    def managers(self, manager: str) -> set[tuple[str, str, str]]:
        """(kind, namespace, name) of every declared object that `manager` made a tenant or a deployment for."""
        rows = [("Tenant", row.managed_by) for row in self.tenants.values()]
        rows += [("ModelDeployment", row.managed_by) for row in self.deployments.values()]
        marks = [(kind, *mark.split("/")) for kind, mark in rows if mark and mark.count("/") == 2]
        return {(kind, namespace, name) for kind, by, namespace, name in marks if by == manager}


def tenant_of(row: Mapping[str, Any]) -> SeenTenant:
    """Read a tenant as the REST API shows the tenant; fields of a later version are passed over."""
    return msgspec.convert(row, SeenTenant)


def deployment_of(row: Mapping[str, Any]) -> SeenDeployment:
    """Read a deployment as the REST API shows the deployment; fields of a later version are passed over."""
    target = row.get("target")
    seen = None if target is None else {"spec": _spec_fields(target), "canary": target["canary"]}
    return msgspec.convert({**row, "active": _spec_fields(row), "target": seen}, SeenDeployment)


def _spec_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in Spec.__struct_fields__ if name in row}


def key_name(mark: str) -> str:
    """Return the name of the keys that are made for a Tenant: the mark, cut to the length of a key's name."""
    if len(mark) <= KEY_NAME_MAX:
        return mark
    return f"{mark[:83]}-{hashlib.sha256(mark.encode()).hexdigest()[:16]}"
