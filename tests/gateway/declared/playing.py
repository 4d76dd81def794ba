"""A platform and a source in memory, for properties over any order of edits, failures and restarts.

Stands in for the gateway only where faults must be forced: calls that fail before or after their effect, imports and
takeovers that end at any time. tests/gateway/declared/test_gateway.py has the real gateway.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import structs

from gateway.core.declared.objects import Declared, Ref
from gateway.core.declared.observed import (
    Delivered,
    Observed,
    SeenDeployment,
    SeenKey,
    SeenModel,
    SeenStatus,
    SeenTarget,
    SeenTenant,
)
from gateway.core.declared.reconciler import KeyDelivery, RestCall
from gateway.core.declared.status import ObjectStatus
from gateway.declared.platform import CallFailed
from store.contract.deployments import Share, Spec
from store.contract.limits import Limits


@dataclass
class PlayedPlatform:
    """Rows in memory. `fault` says before a call whether the call fails: "before" or "after" its effect, or not."""

    fault: Callable[[], str] = lambda: ""
    tenants: dict[str, SeenTenant] = field(default_factory=dict)
    models: dict[tuple[str | None, str], SeenModel] = field(default_factory=dict)
    deployments: dict[tuple[str, str], SeenDeployment] = field(default_factory=dict)
    keys: dict[str, list[SeenKey]] = field(default_factory=dict)
    calls: list[RestCall] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def observe(self, tenants: Collection[str]) -> Observed:
        if self.fault() == "before":
            raise CallFailed("no gateway answers", "Unreachable", unreachable=True)
        keys = {name: tuple(self.keys.get(name, ())) for name in tenants if name in self.tenants}
        return Observed(dict(self.tenants), dict(self.models), dict(self.deployments), keys)

    def carry_out(self, call: RestCall) -> dict[str, Any]:
        fault = self.fault()
        if fault == "before":
            raise CallFailed("no gateway answers", "Unreachable", unreachable=True)
        answer = self._done(call)
        self.calls.append(call)
        if fault == "after":
            raise CallFailed("the connection broke", "Unreachable", unreachable=True)
        return answer

    def go_on(self) -> None:
        """Let imports and takeovers end."""
        for place, model in self.models.items():
            if model.state == "importing":
                self.models[place] = structs.replace(model, state="ready")
        for place, row in self.deployments.items():
            if row.target and row.target.canary is None:
                self.deployments[place] = structs.replace(row, active=row.target.spec, target=None)

    def _done(self, call: RestCall) -> dict[str, Any]:
        body = dict(call.body)
        match call.method, call.path.strip("/").replace(":", "/:").split("/"):
            case "POST", ["tenants"]:
                _refuse(body["name"] in self.tenants)
                limits = msgspec.convert(body["limits"], Limits)
                self.tenants[body["name"]] = SeenTenant(**body | {"id": self._id(), "limits": limits})
            case "PATCH", ["tenants", name]:
                limits = msgspec.convert(body["limits"], Limits)
                self.tenants[name] = structs.replace(self.tenants[name], **body | {"limits": limits})
            case "DELETE", ["tenants", name]:
                _refuse(any(tenant == name for tenant, _ in self.deployments))
                self.keys.pop(name, None)
                self.models = {place: model for place, model in self.models.items() if place[0] != name}
                del self.tenants[name]
            case "POST", ["tenants", name, "keys"]:
                key = SeenKey(**body | {"id": self._id(), "state": "valid", "scopes": tuple(body["scopes"])})
                self.keys.setdefault(name, []).append(key)
                return {"id": key.id, "key": f"secret of {key.id}"}
            case "DELETE", ["tenants", name, "keys", id]:
                self.keys[name] = [key for key in self.keys[name] if key.id != id]
            case "POST", ["models"]:
                _refuse((body["tenant"], body["name"]) in self.models)
                facts = {"id": self._id(), "state": "importing", "reason": None, "progress": None}
                kept = {field: body[field] for field in ("name", "tenant", "managed_by")}
                self.models[body["tenant"], body["name"]] = SeenModel(**kept, **facts)
            case "POST", ["deployments"]:
                place = (body["tenant"], body["name"])
                _refuse(place in self.deployments)
                self.deployments[place] = SeenDeployment(
                    id=self._id(),
                    name=body["name"],
                    tenant=body["tenant"],
                    managed_by=body["managed_by"],
                    active=_spec(body),
                    target=None,
                    status=STATUS,
                )
            case "PATCH", ["deployments", id]:
                self._change(id, body)
            case "POST", ["deployments", id, ":sleep" | ":wake" as verb]:
                place, row = self._by_id(id)
                order = "asleep" if verb == ":sleep" else "awake"
                self.deployments[place] = structs.replace(row, status=structs.replace(row.status, desired_state=order))
            case "DELETE", ["deployments", id]:
                del self.deployments[self._by_id(id)[0]]
            case _:
                raise AssertionError(call)
        return {}

    def _change(self, id: str, body: dict[str, Any]) -> None:
        place, row = self._by_id(id)
        canary = msgspec.convert(body["canary"], Share | None)
        if "model" in body and _spec(body) != row.newest:
            row = structs.replace(row, target=SeenTarget(spec=_spec(body), canary=canary))
        elif row.target:
            row = structs.replace(row, target=structs.replace(row.target, canary=canary))
        self.deployments[place] = row

    def _by_id(self, id: str) -> tuple[tuple[str, str], SeenDeployment]:
        return next((place, row) for place, row in self.deployments.items() if row.id == id)

    def _id(self) -> str:
        return f"{next(self.numbers):04}"


STATUS = SeenStatus(
    phase="asleep",
    desired_state="awake",
    active_revision=1,
    target_revision=None,
    residency="none",
    replicas=0,
    conditions=(),
)


def _spec(body: dict[str, Any]) -> Spec:
    return msgspec.convert({name: body[name] for name in Spec.__struct_fields__}, Spec)


class Unheard:
    """Hears of calls and says nothing."""

    def called(self, ref: Ref, call: RestCall, trouble: CallFailed | None) -> None:
        pass

    def away(self, error: CallFailed) -> None:
        pass


def _refuse(wrong: bool) -> None:
    if wrong:
        raise CallFailed("409", "Refused")


@dataclass
class PlayedSource:
    """Declared objects in memory, with the statuses told and the Secrets."""

    fault: Callable[[], str] = lambda: ""
    objects: dict[Ref, Declared] = field(default_factory=dict)
    statuses: dict[Ref, ObjectStatus] = field(default_factory=dict)
    secrets: dict[tuple[str, str], tuple[Ref, str]] = field(default_factory=dict)

    def put(self, ref: Ref, spec: Any) -> None:
        before = self.objects.get(ref)
        if before is None or not before.deleting:
            self.objects[ref] = Declared(ref, spec, generation=before.generation + 1 if before else 1)

    def remove(self, ref: Ref) -> None:
        if ref in self.objects:
            self.objects[ref] = replace(self.objects[ref], deleting=True)

    def declared(self) -> list[Declared]:
        return list(self.objects.values())

    def delivered(self, declared: Declared, secret: str) -> Delivered | None:
        found = self.secrets.get((declared.ref.namespace, secret))
        return Delivered(found[0] == declared.ref, found[1]) if found else None

    def deliver(self, delivery: KeyDelivery, key_id: str, key: str) -> None:
        if self.fault():
            raise CallFailed("no API server answers", "Undelivered", unreachable=True)
        self.secrets[delivery.tenant.namespace, delivery.secret] = (delivery.tenant, key_id)

    def tell(self, declared: Declared, status: ObjectStatus) -> None:
        self.statuses[declared.ref] = status

    def release(self, declared: Declared) -> None:
        self.objects.pop(declared.ref, None)
        self.statuses.pop(declared.ref, None)
