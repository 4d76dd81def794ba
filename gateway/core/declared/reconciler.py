"""The next call for a declared object, and the object's status: the decision of the controller. Pure.

A decision needs what is declared and what the platform has now, nothing from earlier: after a failed call, an edit or a
restart of the controller, the next decision is made from the platform anew. Only rows that carry the object's mark are
changed or deleted; a row of a person, or of another object, is a conflict that the status tells of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec

from gateway.core.declared.objects import (
    Declared,
    DeclaredKey,
    ModelDeploymentSpec,
    Ref,
    TenantSpec,
    is_source,
    model_name,
)
from gateway.core.declared.observed import Observed, SeenDeployment, SeenKey, SeenModel, SeenTenant, key_name
from gateway.core.declared.status import (
    READY,
    SYNCED,
    DeclaredCondition,
    ModelDeploymentStatus,
    ObjectStatus,
    TenantStatus,
    condition,
)
from gateway.core.tenants import TenantSettings
from store.contract.limits import Limits


@dataclass(frozen=True)
class KeyDelivery:
    """Secret that gets the key of a call's answer."""

    tenant: Ref
    secret: str


@dataclass(frozen=True)
class RestCall:
    """A call of the REST API. `path` begins after /api/v1."""

    method: str
    path: str
    body: Mapping[str, Any] = field(default_factory=dict)
    delivery: KeyDelivery | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class Decision:
    """The next call, and the status until the next decision.

    `gone`: the object is deleted and the platform has nothing of the object any more. `settled`: the status changes by
    nothing that is under way."""

    status: ObjectStatus
    call: RestCall | None = None
    gone: bool = False
    settled: bool = False


def decide(declared: Declared, observed: Observed, manager: str, url: str) -> Decision:
    """Decide on a declared object.

    Args:
        declared: the object.
        observed: what the platform has.
        manager: name of the controller, which begins every mark.
        url: URL of the gateway for tenants, without a slash at the end.
    """
    if declared.deleting:
        return _ended(declared, observed, manager)
    match declared.spec:
        case TenantSpec() as spec:
            return _Tenant(declared, spec, observed, manager).decide()
        case ModelDeploymentSpec() as spec:
            return _Deployment(declared, spec, observed, manager, url).decide()
    return Decision(_status(declared, "Invalid", _unsynced(declared, "InvalidSpec", declared.error)), settled=True)


def _path(*segments: str, verb: str = "") -> str:
    return "".join("/" + quote(segment, safe="") for segment in segments) + verb


def _status(declared: Declared, phase: str, conditions: Sequence[DeclaredCondition], **facts: Any) -> ObjectStatus:
    kind = TenantStatus if declared.ref.kind == "Tenant" else ModelDeploymentStatus
    return kind(phase=phase, conditions=tuple(conditions), observed_generation=declared.generation, **facts)


def _unsynced(declared: Declared, reason: str, message: str) -> list[DeclaredCondition]:
    return [
        condition(SYNCED, False, reason, message, declared.generation),
        condition(READY, False, reason, message, declared.generation),
    ]


def _conflict(declared: Declared, what: str, managed_by: str | None, remedy: str) -> Decision:
    owner = f"is managed by {managed_by}" if managed_by else "was made by hand"
    message = f"{what} {owner}, and the controller changes nothing that is not its own: {remedy}"
    return Decision(_status(declared, "Conflict", _unsynced(declared, "Conflict", message)), settled=True)


# ── the end of an object ──────────────────────────────────────────────────────────────────────────────────────────────


def _ended(declared: Declared, observed: Observed, manager: str) -> Decision:
    """Delete what carries the object's mark. The platform keeps a tenant that still has deployments, and says so."""
    mark = declared.ref.mark(manager)
    tenant = observed.tenants.get(declared.ref.name)
    if declared.ref.kind == "ModelDeployment":
        call = _stray(observed, mark, keep=None)
    elif tenant and tenant.managed_by == mark:
        call = RestCall("DELETE", _path("tenants", tenant.name))
    else:
        call = None
    said = _unsynced(declared, "Deleting", "the platform is being cleared of what was made for this object")
    return Decision(_status(declared, "Deleting", said), call, gone=call is None)


def _stray(observed: Observed, mark: str, keep: tuple[str, str] | None) -> RestCall | None:
    """Delete a deployment with the mark other than the deployment `keep` (tenant, name)."""
    strays = [row for row in observed.by_mark.get(mark, ()) if (row.tenant, row.name) != keep]
    stray = min(strays, key=lambda row: row.id, default=None)
    return RestCall("DELETE", _path("deployments", stray.id)) if stray else None


# ── tenants ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Tenant:
    """The decision on a `Tenant`."""

    declared: Declared
    spec: TenantSpec
    observed: Observed
    manager: str

    @property
    def mark(self) -> str:
        return self.declared.ref.mark(self.manager)

    def decide(self) -> Decision:
        name, seen = self.declared.ref.name, self.observed.tenants.get(self.declared.ref.name)
        spec = self.spec
        settings = TenantSettings(weight=spec.weight, limits=spec.limits, keep_prefixes=spec.keep_prefixes)
        if seen is None:
            body = {"name": name, **msgspec.to_builtins(settings), "managed_by": self.mark}
            return self._pending(RestCall("POST", "/tenants", body), None)
        if seen.managed_by != self.mark:
            return _conflict(self.declared, f"tenant {name!r}", seen.managed_by, "declare a tenant of another name")
        if seen.settings != settings:
            return self._pending(RestCall("PATCH", _path("tenants", name), _patch(settings)), seen)
        return self._key(seen)

    def _pending(self, call: RestCall, seen: SeenTenant | None) -> Decision:
        conditions = _unsynced(self.declared, "Pending", "the platform has not got everything declared so far")
        facts = {"id": seen.id} if seen else {}
        return Decision(_status(self.declared, "Active" if seen else "Pending", conditions, **facts), call)

    def _key(self, seen: SeenTenant) -> Decision:
        """Have one valid key at most, the key in the Secret; a key whose delivery failed is revoked before the next."""
        name, wanted = key_name(self.mark), self.spec.key
        delivered = self.observed.delivered.get(self.declared.ref)
        if wanted and delivered and not delivered.ours:
            what = f"secret {wanted.secret_name!r}"
            return _conflict(self.declared, what, None, "name another with spec.key.secretName")
        keys = [key for key in self.observed.keys.get(seen.name, ()) if key.name == name and key.state == "valid"]
        kept = next((key for key in keys if delivered and key.id == delivered.key_id), None)
        for key in sorted(keys, key=lambda key: key.id):
            if key is not kept:
                return self._pending(RestCall("DELETE", _path("tenants", seen.name, "keys", key.id)), seen)
        if wanted and not (kept and _fits(kept, wanted)):
            body = {"name": name, "scopes": list(wanted.scopes), "priority": wanted.priority}
            delivery = KeyDelivery(self.declared.ref, wanted.secret_name)
            return self._pending(RestCall("POST", _path("tenants", seen.name, "keys"), body, delivery), seen)
        return self._has_all(seen, kept)

    def _has_all(self, seen: SeenTenant, key: SeenKey | None) -> Decision:
        generation = self.declared.generation
        conditions = [
            condition(SYNCED, True, "Synced", "the platform has what is declared", generation),
            condition(READY, True, "Active", f"tenant {seen.name!r} may send requests", generation),
        ]
        facts = {"id": seen.id, "key_id": key.id if key else None}
        return Decision(_status(self.declared, "Active", conditions, **facts), settled=True)


def _fits(key: SeenKey, wanted: DeclaredKey) -> bool:
    return set(key.scopes) == set(wanted.scopes) and key.priority == wanted.priority


def _patch(settings: TenantSettings) -> dict[str, Any]:
    """Merge patch that leaves nothing of earlier settings: a limit that is not declared is removed."""
    limits = {name: msgspec.to_builtins(getattr(settings.limits, name)) for name in Limits.__struct_fields__}
    return {"weight": settings.weight, "limits": limits, "keep_prefixes": settings.keep_prefixes}


# ── deployments ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Deployment:
    """The decision on a `ModelDeployment`."""

    declared: Declared
    spec: ModelDeploymentSpec
    observed: Observed
    manager: str
    url: str

    @property
    def mark(self) -> str:
        return self.declared.ref.mark(self.manager)

    @property
    def tenant_mark(self) -> str:
        return Ref("Tenant", self.declared.ref.namespace, self.spec.tenant).mark(self.manager)

    def decide(self) -> Decision:
        tenant, name = self.spec.tenant, self.declared.ref.name
        if stray := _stray(self.observed, self.mark, keep=(tenant, name)):
            return self._waits("Pending", "Moving", "a deployment of another tenant is deleted first", stray)
        owner = self.observed.tenants.get(tenant)
        if owner is None or owner.managed_by != self.tenant_mark:
            namespace = self.declared.ref.namespace
            message = f"the platform has no tenant {tenant!r} of namespace {namespace!r}: declare the Tenant there"
            return self._waits("Pending", "TenantMissing", message)
        if is_source(self.spec.model):
            return self._registered()
        return self._deployed(self.spec.model)

    def _waits(self, phase: str, reason: str, message: str, call: RestCall | None = None) -> Decision:
        return Decision(_status(self.declared, phase, _unsynced(self.declared, reason, message)), call)

    def _registered(self) -> Decision:
        """Have the source registered as a model of the tenant, then have the model deployed."""
        name = model_name(self.spec.model, self.spec.digest)
        model = self.observed.models.get((self.spec.tenant, name))
        if model is None:
            body = {"name": name, "source": self.spec.model, "digest": self.spec.digest, "tenant": self.spec.tenant}
            call = RestCall("POST", "/models", body | {"managed_by": self.tenant_mark})
            return self._waits("Pending", "Registering", "the model is not registered so far", call)
        if model.managed_by != self.tenant_mark:
            return _conflict(self.declared, f"model {name!r}", model.managed_by, "delete that model")
        if model.state == "importing":
            return self._waits("Importing", "Importing", f"the model is imported{_how_far(model)}")
        if model.state != "ready":
            call = RestCall("POST", _path("models", model.id, verb=":retry"))
            message = f"the model was {model.state}: {model.reason}; the import is tried again"
            return self._waits("Importing", "ImportRefused", message, call)
        return self._deployed(name)

    def _deployed(self, model: str) -> Decision:
        tenant, name, wanted = self.spec.tenant, self.declared.ref.name, self.spec.spec(model)
        seen = self.observed.deployments.get((tenant, name))
        if seen is None:
            body = {"name": name, "tenant": tenant, **msgspec.to_builtins(wanted), "managed_by": self.mark}
            call = RestCall("POST", "/deployments", body)
            return self._waits("Pending", "Pending", "the platform has no deployment so far", call)
        if seen.managed_by != self.mark:
            what = f"deployment {name!r} of tenant {tenant!r}"
            return _conflict(self.declared, what, seen.managed_by, "declare a deployment of another name")
        if seen.newest != wanted:
            patch = msgspec.to_builtins(wanted) | {"canary": msgspec.to_builtins(self.spec.canary)}
            return self._shown(seen, RestCall("PATCH", _path("deployments", seen.id), patch))
        if seen.target and seen.target.canary != self.spec.canary:
            patch = {"canary": msgspec.to_builtins(self.spec.canary)}
            return self._shown(seen, RestCall("PATCH", _path("deployments", seen.id), patch))
        if self.spec.desired_state not in (None, seen.status.desired_state):
            verb = ":sleep" if self.spec.desired_state == "asleep" else ":wake"
            return self._shown(seen, RestCall("POST", _path("deployments", seen.id, verb=verb)))
        return self._shown(seen, None)

    def _shown(self, seen: SeenDeployment, call: RestCall | None) -> Decision:
        now, generation = seen.status, self.declared.generation
        waits = seen.target is not None and seen.target.canary is None
        ready = call is None and not waits and now.phase in ("awake", "asleep")
        phase = now.phase.capitalize()
        say = "the platform has what is declared" if call is None else "the platform has an earlier state"
        reason = phase if not waits else "RevisionPending"
        message = f"revision {now.active_revision} is {now.phase}"
        if waits:
            message += f"; revision {now.target_revision} takes over once a runtime has loaded it"
        conditions = [
            condition(SYNCED, call is None, "Pending" if call else "Synced", say, generation),
            condition(READY, ready, reason if call is None else "Pending", message, generation),
            *self._passed_on(seen),
        ]
        facts = {
            "id": seen.id,
            "url": f"{self.url}/t/{seen.tenant}/v1",
            "model": seen.active.model,
            "revision": now.active_revision,
            "target_revision": now.target_revision,
            "residency": now.residency,
            "replicas": now.replicas,
        }
        return Decision(_status(self.declared, phase, conditions, **facts), call, settled=ready)

    def _passed_on(self, seen: SeenDeployment) -> list[DeclaredCondition]:
        """The platform's own conditions, one of each type."""
        by_type: dict[str, list[str]] = {}
        for said in seen.status.conditions:
            by_type.setdefault(said.type, []).append(said.message)
        return [
            condition(type, True, type, "; ".join(messages), self.declared.generation)
            for type, messages in sorted(by_type.items())
        ]


def _how_far(model: SeenModel) -> str:
    if model.progress is None or not model.progress.total_bytes:
        return ""
    return f": {model.progress.done_bytes} of {model.progress.total_bytes} bytes"
