"""Declared objects: `Tenant` and `ModelDeployment`, their fields, and the reading of an object from YAML or JSON. Pure.

The fields are the fields of the REST API: the specs below extend the structs of the API. Declared objects are written
in Kubernetes' way, `maxModelLen`, and the API is written as `max_model_len`: one rule translates all names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from gateway.core import wording
from gateway.core.tenants import Rank, Scope, TenantSettings
from store.contract.deployments import Share, Spec

GROUP, VERSION = "staccato.dev", "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
DEFAULT_NAMESPACE = "default"
MANAGER = "staccato"  # the part of a mark before the first slash, unless an operator chooses another

Kind: TypeAlias = Literal["Tenant", "ModelDeployment"]
Order: TypeAlias = Literal["awake", "asleep"]
SecretName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$",
        description="the name of a Secret: small letters, digits, dots and dashes, as acme-key",
    ),
]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$", description="a SHA-256 digest: 64 digits from 0 to f")]


class DeclaredKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """API key of a tenant, delivered into a Secret of the tenant's namespace."""

    secret_name: SecretName
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1)] = ("inference",)
    priority: Rank = "normal"


class TenantSpec(TenantSettings, frozen=True, kw_only=True):
    """Spec of a `Tenant`: the settings of the REST API, and the key."""

    key: DeclaredKey | None = None  # None: the controller makes no key


class ModelDeploymentSpec(Spec, frozen=True, kw_only=True):
    """Spec of a `ModelDeployment`: the spec of the REST API, the tenant, and the orders that REST has as verbs."""

    tenant: str  # name of a Tenant in the same namespace
    digest: Digest | None = None  # digest that the model's source must have
    canary: Share | None = None  # None: a new revision gets every request once a runtime has loaded the revision
    desired_state: Order | None = None  # None: whoever ordered last decides

    def spec(self, model: str) -> Spec:
        """The spec for the REST API. `model`: name of the registered model."""
        fields = {field: getattr(self, field) for field in Spec.__struct_fields__}
        return Spec(**fields | {"model": model})


SPECS: Mapping[Kind, type[TenantSpec] | type[ModelDeploymentSpec]] = {
    "Tenant": TenantSpec,
    "ModelDeployment": ModelDeploymentSpec,
}


@dataclass(frozen=True)
class Ref:
    """Kind, namespace and name of a declared object."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"

    def mark(self, manager: str) -> str:
        """The `managed_by` of the rows that are made for the object."""
        return f"{manager}/{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Declared:
    """A declared object. `spec` is None if the object can't be read: `error` says why."""

    ref: Ref
    spec: TenantSpec | ModelDeploymentSpec | None
    error: str = ""
    generation: int = 1  # counts the changes of the spec
    deleting: bool = False


class Unreadable(ValueError):
    """Error of an object that is no Tenant and no ModelDeployment, or has a wrong field."""


def is_ours(document: object) -> bool:
    """Return whether a document of YAML is of this API group, in any version."""
    version = document.get("apiVersion") if isinstance(document, Mapping) else None
    return isinstance(version, str) and version.partition("/")[0] == GROUP


def read(document: Mapping[str, Any]) -> Declared:
    """Return the declared object of a document. An object with a wrong spec is returned with the `error`.

    Raises Unreadable if the document has no kind, name or version that is known."""
    kind, version = _kind(document.get("kind")), document.get("apiVersion")
    if kind is None or version != API_VERSION:
        raise Unreadable(
            f"{document.get('kind')} of {version} is not known here: {', '.join(SPECS)} of {API_VERSION} are"
        )
    metadata = document.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    name, namespace = metadata.get("name"), metadata.get("namespace", DEFAULT_NAMESPACE)
    if not isinstance(name, str) or not name or not isinstance(namespace, str):
        raise Unreadable(f"a {kind} has no metadata.name")
    ref, generation = Ref(kind, namespace, name), metadata.get("generation", 1)
    deleting = metadata.get("deletionTimestamp") is not None
    try:
        return Declared(ref, _spec(kind, document.get("spec", {})), "", generation, deleting)
    except Unreadable as error:
        return Declared(ref, None, str(error), generation, deleting)


def _kind(said: object) -> Kind | None:
    return next((kind for kind in SPECS if kind == said), None)


def _spec(kind: Kind, said: object) -> TenantSpec | ModelDeploymentSpec:
    """Return the spec. Raises Unreadable with the field and what may stand there."""
    struct = SPECS[kind]
    try:
        return msgspec.convert(renamed(said, _snake_checked), struct)
    except msgspec.ValidationError as error:
        pointer, sentence = wording.fault_of(error, struct)
        place = ".".join(camel(part) for part in pointer.split("/"))
        raise Unreadable(f"spec{place}: {camel_words(sentence)}") from error


def camel_words(sentence: str) -> str:
    """Write the names of fields in a sentence in Kubernetes' way."""
    return re.sub(r"\b[a-z]+(_[a-z]+)+\b", lambda found: camel(found[0]), sentence)


# ── names of fields ───────────────────────────────────────────────────────────────────────────────────────────────────


def camel(name: str) -> str:
    """`max_model_len` → `maxModelLen`."""
    return re.sub(r"_([a-z0-9])", lambda found: found[1].upper(), name)


def snake(name: str) -> str:
    """`maxModelLen` → `max_model_len`."""
    return re.sub(r"[A-Z]", lambda found: "_" + found[0].lower(), name)


def _snake_checked(name: str) -> str:
    """`snake`, for a name that a person wrote. Raises Unreadable for a name in the API's form."""
    if "_" in name:
        raise Unreadable(f"there is no field {name!r}: write {camel(name)!r}")
    return snake(name)


def renamed(value: Any, rename: Callable[[str], str]) -> Any:
    """Return JSON with every field renamed."""
    if isinstance(value, Mapping):
        return {rename(str(name)): renamed(part, rename) for name, part in value.items()}
    return [renamed(part, rename) for part in value] if isinstance(value, list | tuple) else value


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def key_id(key: str) -> str:
    """Return the id of an API key, which the key carries: `sk-st-ID-…`; empty for any other text."""
    found = re.fullmatch(r"sk-st-([0-9a-f]{32})-[0-9a-f]+", key.strip())
    return found[1] if found else ""


# ── sources of models ─────────────────────────────────────────────────────────────────────────────────────────────────


def is_source(model: str) -> bool:
    """Return whether `model` names a place of files, which the controller registers, rather than a registered model."""
    return "://" in model or model.startswith("/")


def model_name(source: str, digest: str | None) -> str:
    """Return the name under which the controller registers a source.

    Another source or digest gets another name: a change of the source is a new revision, and the way back stays open.
    """
    last = source.partition("@")[0].rstrip("/").rpartition("/")[2]
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("._-")[:46] or "model"
    return f"{slug}-{hashlib.sha256(f'{source} {digest}'.encode()).hexdigest()[:12]}"
