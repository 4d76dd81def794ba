"""The schemas of custom resources are structural, and name the fields of the REST API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.control.deployments import Change, NewDeployment
from gateway.control.tenants import NewKey, NewTenant
from gateway.core.declared.objects import API_VERSION, Kind, camel, key_id, model_name, read, renamed, snake
from gateway.core.declared.observed import KEY_NAME_MAX, key_name
from gateway.core.declared.schema import definition

KINDS: tuple[Kind, ...] = ("Tenant", "ModelDeployment")


def schema(kind: Kind) -> dict[str, Any]:
    found: dict[str, Any] = definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for part in schema.get("properties", {}).values():
        yield from nodes(part)
    if "items" in schema:
        yield from nodes(schema["items"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_schema_is_structural(kind: Kind) -> None:
    """Kubernetes refuses a definition with a reference, with a node without a type, or with a null beside a type."""
    for node in nodes(schema(kind)):
        assert isinstance(node.get("type"), str), node
        assert not node.keys() & {"$ref", "anyOf", "oneOf", "additionalProperties", "default", "title"}, node
        assert all("_" not in name for name in node.get("properties", {})), node


def test_a_field_of_the_rest_api_is_a_field_of_the_custom_resource() -> None:
    """A field that the API gets is declared from then on, unless the field says who makes the row."""
    tenant, deployment = (set(schema(kind)["properties"]["spec"]["properties"]) for kind in KINDS)
    made = {"name", "managed_by"}
    assert tenant == {camel(name) for name in NewTenant.__struct_fields__ if name not in made} | {"key"}
    empty = {"limits", "price"}  # objects without fields so far
    rest = {*NewDeployment.__struct_fields__, *Change.__struct_fields__} - made - empty
    assert deployment == {camel(name) for name in rest} | {"digest", "desiredState"}
    key = set(schema("Tenant")["properties"]["spec"]["properties"]["key"]["properties"])
    assert key - {"secretName"} == {
        camel(name) for name in NewKey.__struct_fields__ if name not in ("name", "expires_at")
    }


def test_names_are_translated_there_and_back() -> None:
    for kind in (NewTenant, NewDeployment):
        for name in kind.__struct_fields__:
            assert snake(camel(name)) == name
    assert renamed({"max_len": [{"a_b": 1}]}, camel) == {"maxLen": [{"aB": 1}]}


def test_an_object_with_a_wrong_spec_is_known_by_its_name() -> None:
    """Kubernetes may hold an object that a later version of the schema refuses: the status says what is wrong."""
    body = {"apiVersion": API_VERSION, "kind": "Tenant", "metadata": {"name": "a"}, "spec": {"weight": "heavy"}}
    found = read(body)
    assert (found.ref.name, found.spec) == ("a", None) and found.error.startswith("spec.weight: write a number")


def test_another_source_or_digest_is_another_model() -> None:
    names = [
        model_name("hf://org/Name@1", None),
        model_name("hf://org/Name@2", None),
        model_name("hf://org/Name@1", "a"),
    ]
    assert len(set(names)) == 3 and all(name.startswith("Name-") for name in names)
    assert model_name("/", None).startswith("model-") and len(model_name("/" + "x" * 300, None)) <= 63


def test_the_name_of_a_key_fits_and_keeps_objects_apart() -> None:
    long = ["staccato/" + "n" * 63 + "/" + "t" * 62 + end for end in "ab"]
    assert len({key_name(mark) for mark in long}) == 2 and max(len(key_name(mark)) for mark in long) <= KEY_NAME_MAX
    assert key_name("staccato/models/acme") == "staccato/models/acme"


def test_a_key_carries_its_id() -> None:
    id = "0" * 31 + "a"
    assert key_id(f"sk-st-{id}-{'f' * 48}\n") == id and key_id("sk-st-admin-1") == key_id("") == ""
