"""Declared objects in Kubernetes: custom resources are listed and watched, and get finalizer, status and Secret."""

from __future__ import annotations

import base64
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx2
import structlog
from lightkube import Client
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.models.meta_v1 import ObjectMeta, OwnerReference
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Secret
from lightkube.types import PatchType
from msgspec import convert, to_builtins

from gateway.core.declared.objects import (
    API_VERSION,
    GROUP,
    SPECS,
    VERSION,
    Declared,
    Kind,
    Ref,
    camel,
    key_id,
    read,
    renamed,
    snake,
)
from gateway.core.declared.observed import Delivered
from gateway.core.declared.reconciler import KeyDelivery
from gateway.core.declared.schema import PLURALS
from gateway.core.declared.status import DeclaredCondition, ObjectStatus, with_times
from gateway.declared.lease import LeaseRecord
from gateway.declared.platform import CallFailed

log = structlog.get_logger()

FINALIZER = f"{GROUP}/platform"
MANAGED_BY = f"{GROUP}/managed-by"  # annotation of a Secret: the mark of the Tenant
TIMEOUT_S = 10.0
WATCH_S = 300  # length of a watch, after which the next watch goes on
AGAIN_S = 1.0  # after a list or a watch failed
RESOURCES = {kind: create_namespaced_resource(GROUP, VERSION, kind, PLURALS[kind]) for kind in SPECS}
MERGE = PatchType.MERGE
Object = dict[str, Any]


def connected() -> Client:
    """Return a client for the pod's service account, or for KUBECONFIG. Raises CallFailed."""
    try:
        return Client(timeout=httpx2.Timeout(TIMEOUT_S), field_manager="staccato-controller")
    except ConfigError as error:
        raise CallFailed(f"no Kubernetes is configured: {error}", "Unreachable", unreachable=True) from error


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise CallFailed for every failure of a call to Kubernetes."""
    try:
        yield
    except ApiError as error:
        raise CallFailed(f"Kubernetes refused: {error}", "Undelivered") from error
    except httpx2.HTTPError as error:
        raise CallFailed(f"Kubernetes is away: {error!r}", "Undelivered", unreachable=True) from error


class Mirror:
    """The objects of a kind in a namespace, as a thread lists and watches the objects.

    Args:
        client: client of Kubernetes.
        kind: kind of the objects.
        namespace: namespace of the objects.
        changed: called after each change, from the thread.
    """

    def __init__(self, client: Client, kind: Kind, namespace: str, changed: Callable[[], None]) -> None:
        self._client, self._kind, self._namespace, self._changed = client, kind, namespace, changed
        self._objects: dict[str, Object] = {}
        self._lock = threading.Lock()
        self.listed = threading.Event()  # set once the objects are known

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"mirror {self._kind} {self._namespace}", daemon=True).start()

    def objects(self) -> list[Object]:
        with self._lock:
            return [self._objects[name] for name in sorted(self._objects)]

    def refresh(self) -> None:
        """List all objects anew, for the case that the watch has died without a word. Raises CallFailed."""
        with _translated():
            self._list()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self._watch(self._list())
            except ApiError as error:
                if error.status.code != 410:  # Gone: Kubernetes has forgotten the changes since the list, so list again
                    log.warning("kubernetes.refused", name=self._kind, error=str(error))
                    pause.wait(AGAIN_S)
            except (httpx2.HTTPError, OSError) as error:
                log.warning("kubernetes.away", name=self._kind, error=repr(error))
                pause.wait(AGAIN_S)

    def _whole(self, found: Mapping[str, Any]) -> Object:
        """Return an object of a list or a watch, with version and kind, which a list may leave out."""
        return {**found, "apiVersion": API_VERSION, "kind": self._kind}

    def _list(self) -> str:
        """List all objects, and return the version of the list."""
        found = self._client.list(RESOURCES[self._kind], namespace=self._namespace, chunk_size=500)
        objects = {each["metadata"]["name"]: self._whole(each) for each in found}
        with self._lock:
            self._objects = objects
        self.listed.set()
        self._changed()
        return str(found.resourceVersion)

    def _watch(self, version: str) -> None:
        """Follow changes without an end. Raises ApiError with code 410 once Kubernetes has forgotten changes."""
        watched = self._client.watch(
            RESOURCES[self._kind], namespace=self._namespace, resource_version=version, server_timeout=WATCH_S
        )
        for event, each in watched:
            with self._lock:
                if event == "DELETED":
                    self._objects.pop(each["metadata"]["name"], None)
                else:
                    self._objects[each["metadata"]["name"]] = self._whole(each)
            self._changed()


class ClusterSource:
    """The custom resources of some namespaces, as the reconciler's source.

    Args:
        client: client of Kubernetes.
        namespaces: namespaces whose objects are declared.
        manager: name that begins every mark.
        changed: called after each change of an object, from other threads.
    """

    def __init__(self, client: Client, namespaces: Sequence[str], manager: str, changed: Callable[[], None]) -> None:
        self._client, self._manager = client, manager
        self._mirrors = [Mirror(client, kind, namespace, changed) for namespace in namespaces for kind in SPECS]
        self._known: dict[Ref, Object] = {}  # objects of the present pass

    def start(self) -> None:
        for mirror in self._mirrors:
            mirror.start()

    @property
    def listed(self) -> bool:
        """True once every object is known."""
        return all(mirror.listed.is_set() for mirror in self._mirrors)

    def refresh(self) -> None:
        """List all objects anew. Raises CallFailed."""
        for mirror in self._mirrors:
            mirror.refresh()

    def _objects(self) -> Iterator[Object]:
        for mirror in self._mirrors:
            yield from mirror.objects()

    # ── the source of the reconciler ──────────────────────────────────────────────────────────────────────────────────

    def declared(self) -> list[Declared]:
        """Return the objects that have the finalizer: none goes before the platform is cleared of the object."""
        self._known = {_ref(found): found for found in self._objects()}
        return [read(found) for found in self._known.values() if self._has_finalizer(found)]

    def _has_finalizer(self, found: Object) -> bool:
        """Return whether the object has the finalizer, after an attempt to add a missing finalizer."""
        metadata = found["metadata"]
        finalizers = metadata.get("finalizers") or []
        if FINALIZER in finalizers or metadata.get("deletionTimestamp"):
            return FINALIZER in finalizers
        return self._set_finalizers(found, [*finalizers, FINALIZER])

    def _set_finalizers(self, found: Object, finalizers: list[str]) -> bool:
        """Return whether the finalizers were set; a later pass tries again after a conflict."""
        metadata = {"finalizers": finalizers, "resourceVersion": found["metadata"]["resourceVersion"]}
        ref = _ref(found)
        try:
            with _translated():
                kind = RESOURCES[ref.kind]
                self._client.patch(kind, ref.name, {"metadata": metadata}, namespace=ref.namespace, patch_type=MERGE)
        except CallFailed as error:
            log.info("kubernetes.finalizer", name=str(ref), error=str(error))
            return False
        return True

    def delivered(self, declared: Declared, secret: str) -> Delivered | None:
        with _translated():
            try:
                found = self._client.get(Secret, secret, namespace=declared.ref.namespace)
            except ApiError as error:
                if error.status.code == 404:
                    return None
                raise
        annotations = (found.metadata and found.metadata.annotations) or {}
        key = base64.b64decode((found.data or {}).get("key", "")).decode(errors="replace")
        return Delivered(annotations.get(MANAGED_BY) == declared.ref.mark(self._manager), key_id(key))

    def deliver(self, delivery: KeyDelivery, key_id: str, key: str) -> None:
        ref = delivery.tenant
        data = {"key": base64.b64encode(key.encode()).decode()}
        tenant = self._known.get(ref)
        owner = tenant and OwnerReference(
            apiVersion=API_VERSION, kind=ref.kind, name=ref.name, uid=tenant["metadata"]["uid"]
        )
        metadata = ObjectMeta(
            name=delivery.secret,
            namespace=ref.namespace,
            annotations={MANAGED_BY: ref.mark(self._manager)},
            labels={"app.kubernetes.io/managed-by": "staccato-controller"},
            ownerReferences=[owner] if owner else None,
        )
        with _translated():
            try:
                self._client.create(Secret(metadata=metadata, type="Opaque", data=data))
            except ApiError as error:
                if error.status.code != 409:  # Conflict: the Secret is there, and a pass saw that the Secret is ours
                    raise
                self._client.patch(Secret, delivery.secret, {"data": data}, namespace=ref.namespace, patch_type=MERGE)

    def tell(self, declared: Declared, status: ObjectStatus) -> None:
        ref, found = declared.ref, self._known.get(declared.ref)
        if found is None:
            return
        before = {name: value for name, value in (found.get("status") or {}).items() if value is not None}
        dated = with_times(status, _conditions(before), f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
        shown = renamed(to_builtins(dated), camel)
        if shown == before:
            return
        patch = dict.fromkeys(before.keys() - shown.keys()) | shown  # a null removes what is no longer so
        try:
            with _translated():
                kind = RESOURCES[ref.kind].Status
                self._client.patch(kind, ref.name, {"status": patch}, namespace=ref.namespace, patch_type=MERGE)
        except CallFailed as error:
            log.warning("kubernetes.status", name=str(ref), error=str(error))

    def release(self, declared: Declared) -> None:
        found = self._known.get(declared.ref)
        if found is not None:
            kept = [name for name in found["metadata"].get("finalizers") or [] if name != FINALIZER]
            self._set_finalizers(found, kept)


def _ref(found: Object) -> Ref:
    return Ref(found["kind"], found["metadata"]["namespace"], found["metadata"]["name"])


def _conditions(status: Mapping[str, Any]) -> list[DeclaredCondition]:
    return convert(renamed(status.get("conditions") or [], snake), list[DeclaredCondition])


# ── the Lease ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class KubernetesLease:
    """A Lease of Kubernetes, by which controllers elect a leader."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._name, self._namespace = client, name, str(client.namespace)

    def read(self) -> LeaseRecord:
        with _translated():
            try:
                found = self._client.get(Lease, self._name, namespace=self._namespace)
            except ApiError as error:
                if error.status.code == 404:
                    return LeaseRecord()
                raise
        assert found.metadata is not None
        said = found.spec or LeaseSpec()
        return LeaseRecord(
            holder=said.holderIdentity or "",
            renewed=said.renewTime,
            duration_s=said.leaseDurationSeconds or LeaseRecord.duration_s,
            transitions=said.leaseTransitions or 0,
            version=found.metadata.resourceVersion or "",
        )

    def write(self, record: LeaseRecord) -> bool:
        metadata = ObjectMeta(name=self._name, namespace=self._namespace, resourceVersion=record.version or None)
        spec = LeaseSpec(
            holderIdentity=record.holder,
            renewTime=record.renewed,
            leaseDurationSeconds=record.duration_s,
            leaseTransitions=record.transitions,
        )
        write = self._client.replace if record.version else self._client.create
        with _translated():
            try:
                write(Lease(metadata=metadata, spec=spec))
            except ApiError as error:
                if error.status.code == 409:  # Conflict: a rival was faster
                    return False
                raise
        return True
