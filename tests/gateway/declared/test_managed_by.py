"""Rows that a controller made carry the name of the declared object, and an operator registers models for a tenant."""

from __future__ import annotations

import pytest

from gateway.imports.sources import Sources
from tests.gateway.plane import Plane, made
from tests.store.files.folders import write_model

MARK = "staccato/models/acme"


async def test_tenants_models_and_deployments_say_for_which_declared_object_they_were_made(
    plane_on_both: Plane, sources: Sources
) -> None:
    plane = plane_on_both
    tenant = made(await plane.admin.post("/tenants", json={"name": "acme", "managed_by": MARK}))
    assert tenant["managed_by"] == MARK
    source = str(write_model(sources.roots[0] / "llama"))
    model = made(
        await plane.admin.post(
            "/models", json={"name": "llama", "source": source, "tenant": "acme", "managed_by": "staccato/models/llama"}
        ),
        202,
    )
    assert (model["tenant"], model["managed_by"]) == ("acme", "staccato/models/llama")
    await plane.model("shared")
    body = {"name": "chat", "tenant": "acme", "model": "shared", "managed_by": "staccato/models/chat"}
    assert made(await plane.admin.post("/deployments", json=body))["managed_by"] == "staccato/models/chat"
    changed = await plane.admin.patch("/deployments/chat", json={"priority": "batch"})
    assert changed.json()["managed_by"] == "staccato/models/chat"
    assert (await plane.admin.patch("/tenants/acme", json={"weight": 2})).json()["managed_by"] == MARK


async def test_what_was_made_by_hand_is_managed_by_nobody(plane: Plane) -> None:
    assert made(await plane.admin.post("/tenants", json={"name": "acme"}))["managed_by"] is None


@pytest.mark.parametrize("mark", ["", "acme", "a/b", "a/b/c/d", "a/b/c d", "/b/c"])
async def test_a_mark_that_names_no_declared_object_is_refused(plane: Plane, mark: str) -> None:
    answer = await plane.admin.post("/tenants", json={"name": "acme", "managed_by": mark})
    assert answer.status_code == 422 and "staccato/models/acme" in answer.json()["detail"]


async def test_a_model_registered_for_a_tenant_obeys_the_rules_for_tenants(plane: Plane, sources: Sources) -> None:
    """The operator may register any folder, but not for a tenant: whoever declares models has the tenant's rights."""
    await plane.tenant("acme")
    elsewhere = str(write_model(plane.folder / "elsewhere"))
    refused = await plane.admin.post("/models", json={"name": "a", "source": elsewhere, "tenant": "acme"})
    assert refused.status_code == 422 and str(sources.roots[0]) in refused.json()["detail"]
    fetched = await plane.admin.post("/models", json={"name": "b", "source": "hf://org/name", "tenant": "acme"})
    assert fetched.status_code == 422 and "a tenant's models come from" in fetched.json()["detail"]
    unknown = await plane.admin.post("/models", json={"name": "c", "source": elsewhere, "tenant": "nobody"})
    assert unknown.status_code == 404
    made(await plane.admin.post("/models", json={"name": "d", "source": elsewhere}), 202)


async def test_a_deployment_says_how_many_runtimes_host_it(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.model("llama")
    body = {"name": "chat", "tenant": "acme", "model": "llama"}
    shown = made(await plane.admin.post("/deployments", json=body))
    assert shown["status"]["replicas"] == 0


async def test_a_deleted_tenant_leaves_no_model_to_the_next_tenant_of_the_name(
    plane_on_both: Plane, sources: Sources
) -> None:
    plane = plane_on_both
    acme = await plane.tenant("acme")
    await plane.model("llama", acme, write_model(sources.roots[0] / "llama"))
    assert (await plane.admin.delete("/tenants/acme")).status_code == 204
    assert (await plane.admin.get("/models")).json()["data"] == []
    made(await plane.admin.post("/tenants", json={"name": "acme"}))
    assert (await plane.admin.get("/models?tenant=acme")).json()["data"] == []
