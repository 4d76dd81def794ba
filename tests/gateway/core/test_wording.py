"""Refusals of wrong fields: a sentence with values to write, and no word of a library."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.billing.routes import NewPrice
from gateway.control.deployments import Change, NewDeployment
from gateway.control.models import NewModel
from gateway.control.tenants import NewKey, NewTenant
from gateway.core import wording
from tests.gateway.plane import Plane, made

CASES: list[tuple[Any, object, str, str]] = [
    (
        NewDeployment,
        {"scaling": {"idle": "soon"}},
        "/scaling/idle",
        "write auto, never, or the time without requests as",
    ),
    (NewDeployment, {"name": "-"}, "/name", "as faq-v2"),
    (NewDeployment, {"dtype": "int3"}, "/dtype", "choose one of auto, bfloat16, float16, float32"),
    (NewDeployment, {"model": 7}, "/model", "write a text"),
    (NewDeployment, {"slo": {"ttft_ms": 0}}, "/slo/ttft_ms", "write a whole number from 1 to 3600000"),
    (NewDeployment, {"slo": {"ttft_ms": "2s"}}, "/slo/ttft_ms", "write a whole number from 1 to 3600000"),
    (NewDeployment, {"max_model_len": 0}, "/max_model_len", "write a whole number of at least 1, or null"),
    (NewDeployment, {"modle": "m"}, "/modle", "there is no field 'modle': the fields are model, dtype,"),
    (NewDeployment, {"price": {"a": 1}}, "/price/a", "there is no field 'a': leave the field out"),
    (Change, {"canary": {}}, "/canary/weight", "the field is missing: write a whole number from 0 to 100"),
    (NewDeployment, [], "", "write an object with some of model, dtype,"),
    (NewKey, {"scopes": ["all"]}, "/scopes/0", "choose one of control, inference"),
    (NewKey, {"expires_at": "tomorrow"}, "/expires_at", "write a time with a zone, as 2026-12-31T00:00:00Z, or null"),
    (NewTenant, {"limits": {"monthly_budget": {"amount": "-1"}}}, "/limits/monthly_budget/amount", "as 25.50"),
    (NewTenant, {"weight": 11}, "/weight", "write a number from 0.1 to 10.0"),
    (NewModel, {"digest": "abc"}, "/digest", "64 digits from 0 to f, or null"),
    (NewPrice, {"currency": "dollar"}, "/currency", "three capital letters, as USD"),
]
NEEDED = {"name": "a", "model": "m", "source": "/m", "prompt_pico": 1, "output_pico": 1}
LIBRARY_WORDS = ("`", "regex", "Expected", "Object contains", "Invalid enum", "RFC3339")


@pytest.mark.parametrize(("kind", "said", "pointer", "sentence"), CASES, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_said_with_what_to_write(kind: Any, said: object, pointer: str, sentence: str) -> None:
    needed = {name: value for name, value in NEEDED.items() if name in kind.__struct_fields__}
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(needed | said if isinstance(said, dict) else said, kind)
    found, words = wording.fault_of(caught.value, kind)
    assert found == pointer and sentence in words
    assert not [word for word in LIBRARY_WORDS if word in words]


async def test_each_pattern_of_the_api_is_described_in_words(plane: Plane) -> None:
    """Without words, the answer to a wrong value would be a regular expression, or say too little."""
    bare: list[str] = []

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("pattern"), str) and "description" not in node:
                bare.append(path)
            for name, value in node.items():
                walk(value, f"{path}/{name}")
        elif isinstance(node, list):
            for place, value in enumerate(node):
                walk(value, f"{path}/{place}")

    walk(plane.described.document["components"]["schemas"], "")
    assert bare == []


async def test_the_control_plane_says_so_for_bodies_and_for_patches(plane: Plane) -> None:
    await plane.model("llama")
    client = await plane.tenant("acme")
    body = {"name": "chat", "model": "llama"}
    made(await client.post("/deployments", json=body))
    for answer in (
        await client.post("/deployments", json=body | {"scaling": {"idle": "soon"}}),
        await client.patch("/deployments/chat", json={"scaling": {"idle": "soon"}}),
    ):
        said = made(answer, 422)
        assert said["errors"][0]["pointer"] == "/scaling/idle"
        assert said["detail"].startswith("/scaling/idle: write auto, never, or the time without requests as 500ms")
    nothing = made(await client.patch("/deployments/chat", json={"modle": None}), 422)
    assert "there is no field 'modle': the fields are model, " in nothing["detail"]
