"""Custom resource definitions of the declared objects, with schemas made from the structs of the REST API. Pure.

Kubernetes takes structural schemas alone: no references, no null beside a type, a type everywhere. A field is written
in a schema as a person writes the field, `maxModelLen`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gateway.core.declared.objects import GROUP, SPECS, VERSION, Kind, camel, camel_words
from gateway.core.declared.status import ModelDeploymentStatus, TenantStatus

Json = dict[str, Any]

PLURALS: Mapping[Kind, str] = {"Tenant": "tenants", "ModelDeployment": "modeldeployments"}
SHORT: Mapping[Kind, list[str]] = {"Tenant": [], "ModelDeployment": ["mdep"]}
STATUSES: Mapping[Kind, type[msgspec.Struct]] = {
    "Tenant": TenantStatus,
    "ModelDeployment": ModelDeploymentStatus,
}
DESCRIPTIONS: Mapping[Kind, str] = {
    "Tenant": "A tenant of the platform, with limits, and an API key in a Secret.",
    "ModelDeployment": "A model that a Tenant of the same namespace serves under the object's name.",
}
COLUMNS: Mapping[Kind, tuple[tuple[str, str, str], ...]] = {
    "Tenant": (("Phase", "string", ".status.phase"), ("Weight", "number", ".spec.weight")),
    "ModelDeployment": (
        ("Tenant", "string", ".spec.tenant"),
        ("Model", "string", ".spec.model"),
        ("Phase", "string", ".status.phase"),
        ("Revision", "integer", ".status.revision"),
        ("Replicas", "integer", ".status.replicas"),
    ),
}
BOTH_COLUMNS = (
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
    ("Age", "date", ".metadata.creationTimestamp"),
)
# `kubectl scale` sets the number of runtimes that may host a model. A field that is absent means every runtime.
SCALE = {"specReplicasPath": ".spec.scaling.maxReplicas", "statusReplicasPath": ".status.replicas"}
KEPT = frozenset(
    "description enum pattern minimum maximum exclusiveMinimum exclusiveMaximum minLength maxLength minItems maxItems"
    " format type".split()
)


def definitions() -> list[Json]:
    """Return the custom resource definitions."""
    return [definition(kind) for kind in SPECS]


def definition(kind: Kind) -> Json:
    """Return the custom resource definition of a kind."""
    plural, singular = PLURALS[kind], kind.lower()
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": singular}
    subresources: Json = {"status": {}} | ({"scale": SCALE} if kind == "ModelDeployment" else {})
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": subresources,
        "additionalPrinterColumns": [
            {"name": name, "type": type, "jsonPath": path} for name, type, path in COLUMNS[kind] + BOTH_COLUMNS
        ],
        "schema": {"openAPIV3Schema": _object(kind)},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": names | ({"shortNames": SHORT[kind]} if SHORT[kind] else {}),
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def _object(kind: Kind) -> Json:
    properties = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": structural(SPECS[kind]),
        "status": structural(STATUSES[kind]),
    }
    return {"type": "object", "description": DESCRIPTIONS[kind], "required": ["spec"], "properties": properties}


def structural(kind: type[msgspec.Struct]) -> Json:
    """Return the structural schema of a struct."""
    made = msgspec.json.schema_components([kind], ref_template="{name}")
    (schema,), components = msgspec.json.decode(msgspec.json.encode(made))  # after the round trip, tuples are lists
    return _structural(schema, components)


def _structural(schema: Json, components: Mapping[str, Json]) -> Json:
    if "$ref" in schema:
        return _structural(components[schema["$ref"]], components)
    if "anyOf" in schema:  # a type or null: an absent field is null
        (part,) = [part for part in schema["anyOf"] if part != {"type": "null"}]
        return _structural(part, components)
    made = {name: value for name, value in schema.items() if name in KEPT}
    if "description" in schema:
        made["description"] = camel_words(schema["description"])
    if "enum" in schema:
        made["enum"] = [value for value in schema["enum"] if value is not None]
        made["type"] = "string"
    if "items" in schema:
        made["items"] = _structural(schema["items"], components)
    if "properties" in schema:
        made["properties"] = dict(_fields(schema["properties"], components))
        required = [camel(name) for name in schema.get("required", [])]
        made |= {"required": required} if required else {}
    return made


def _fields(properties: Mapping[str, Json], components: Mapping[str, Json]) -> Iterable[tuple[str, Json]]:
    """Yield the fields; an object without fields, in which every field would be refused, is left out."""
    for name, schema in properties.items():
        made = _structural(schema, components)
        if made.get("type") != "object" or made.get("properties"):
            yield camel(name), made
