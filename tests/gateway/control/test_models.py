"""Registering models: permission, refusals and their reasons, and deleting."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import update

from gateway.imports.jobs import Imports
from gateway.imports.sources import Sources
from store.db import models, tables
from tests.gateway.plane import ENGINES, Plane, made, until
from tests.store.files.folders import write_model


async def test_a_registered_folder_is_inspected_and_then_ready(plane: Plane) -> None:
    model = await plane.model("llama")
    assert (model["state"], model["architecture"], model["tenant"]) == ("ready", "LlamaForCausalLM", None)
    assert (model["weight_bytes"], model["kv_bytes_per_token"], model["context_tokens"]) == (136, 1024, 2048)
    assert model["progress"] is None and len(model["digest"]) == 64


async def test_a_folder_that_can_not_be_served_is_refused_and_the_others_stay(plane: Plane) -> None:
    good = await plane.model("good")
    folder = write_model(plane.folder / "bad")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    bad = await plane.model("bad", folder=folder)
    assert bad["state"] == "refused" and "pytorch_model.bin is a pickle" in bad["reason"]
    assert (await plane.admin.get("/models/good")).json() == good


async def test_a_refused_model_is_replaced_by_its_repaired_successor(plane: Plane) -> None:
    folder = write_model(plane.folder / "m")
    (folder / "config.json").rename(folder / "away")
    refused = await plane.model("m", folder=folder)
    assert refused["state"] == "refused"
    (folder / "away").rename(folder / "config.json")
    assert (await plane.model("m", folder=folder))["state"] == "ready"
    assert [model["state"] for model in (await plane.admin.get("/models")).json()["data"]] == ["ready"]
    log = (await plane.admin.get("/audit")).json()["data"]
    assert [row["subject_id"] for row in log if row["kind"] == "model.deleted"] == [refused["id"]]
    again = await plane.admin.post("/models", json={"name": "m", "source": str(folder)})
    assert made(again, 409)["code"] == "model_exists"  # a model that can be deployed keeps its name


async def test_a_tenants_registration_never_removes_the_operators_refused_model(plane: Plane) -> None:
    broken = write_model(plane.folder / "broken")
    (broken / "config.json").unlink()
    shared = await plane.model("m", folder=broken)
    client = await plane.tenant("acme")
    folder = write_model(plane.folder / "roots" / "m")
    assert (await plane.model("m", client, folder))["tenant"] == "acme"
    assert (await plane.admin.get(f"/models/{shared['id']}")).json()["state"] == "refused"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("ftp://example.com/name", "ftp:// is no source: give a folder, hf://org/name or s3://bucket/prefix"),
        ("hf://name", "write hf://org/name or hf://org/name@revision"),
        ("s3://bucket", "write s3://bucket/prefix"),
        ("models/llama", "is not an absolute path"),
        ("/no/such/folder", "is not a folder"),
        ("file://elsewhere/models", "is no source"),
        ("/a\0b", "is not an absolute path"),
    ],
)
async def test_a_source_that_is_none_is_refused_at_once(plane: Plane, source: str, reason: str) -> None:
    problem = made(await plane.admin.post("/models", json={"name": "m", "source": source}), 422)
    assert reason in problem["detail"] and problem["errors"][0]["pointer"] == "/source"


async def test_a_file_url_means_the_folder(plane: Plane) -> None:
    folder = write_model(plane.folder / "with space")
    answer = await plane.admin.post("/models", json={"name": "m", "source": folder.as_uri()})
    assert made(answer, 202)["source"] == folder.as_uri()


async def test_a_tenant_registers_below_the_roots_and_nowhere_else(plane: Plane) -> None:
    client = await plane.tenant("acme")
    inside, outside = plane.folder / "roots" / "m", plane.folder / "outside"
    write_model(inside)
    write_model(outside)
    assert (await plane.model("mine", client, inside))["tenant"] == "acme"
    (plane.folder / "roots" / "link").symlink_to(outside)
    for source in (outside, plane.folder / "roots" / "link", plane.folder / "roots" / ".." / "outside", Path("/none")):
        answer = await client.post("/models", json={"name": "stolen", "source": str(source)})
        assert "a tenant's models lie below" in made(answer, 422)["detail"]


async def test_a_tenants_file_that_links_out_of_the_roots_is_refused(plane: Plane) -> None:
    client = await plane.tenant("acme")
    folder = write_model(plane.folder / "roots" / "m")
    (folder / "chat_template.jinja").symlink_to("/etc/hostname")
    model = await plane.model("m", client, folder)
    assert model["state"] == "refused" and "leads out" in model["reason"]


async def test_the_operators_model_is_seen_by_all_and_deleted_by_the_operator_alone(plane: Plane) -> None:
    await plane.model("shared")
    client = await plane.tenant("acme")
    (seen,) = (await client.get("/models")).json()["data"]
    assert (seen["name"], seen["source"]) == ("shared", None)
    assert made(await client.delete("/models/shared"), 403)["code"] == "admin_only"
    assert (await plane.admin.delete("/models/shared")).status_code == 204
    assert (await client.get("/models")).json()["data"] == []


async def test_a_model_in_use_names_its_deployments(plane: Plane) -> None:
    await plane.model("shared")
    client = await plane.tenant("acme")
    made(await client.post("/deployments", json={"name": "chat", "model": "shared"}))
    problem = made(await plane.admin.delete("/models/shared"), 409)
    assert (problem["code"], "acme/chat" in problem["detail"]) == ("model_in_use", True)
    assert (await client.delete("/deployments/chat")).status_code == 204
    assert (await plane.admin.delete("/models/shared")).status_code == 204


async def test_an_import_that_a_dead_gateway_began_is_ended_by_the_next(plane: Plane) -> None:
    model = await plane.model("llama")
    async with plane.database.write() as connection:
        await connection.execute(update(tables.models).values(state="importing", digest=None))
    imports = Imports(plane.database, ENGINES.known, Sources())
    await imports.resume()

    async def ready() -> bool:
        async with plane.database.read() as connection:
            found = await models.by_id(connection, model["id"])
        return found is not None and found.state == "ready"

    await until(ready)
    await imports.stop()


async def test_a_gateway_that_stops_does_not_wait_for_a_large_file(plane: Plane) -> None:
    folder = write_model(plane.folder / "large")
    size = 1 << 36  # a hole of 64 GiB: minutes to hash
    header = b'{"a": {"dtype": "U8", "shape": [%d], "data_offsets": [0, %d]}}' % (size, size)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    imports = Imports(plane.database, ENGINES.known, Sources())
    async with plane.database.write() as connection:
        model = await models.create(connection, None, "large", str(folder), str(folder), 1)
    imports.start(model)

    async def progressing() -> bool:
        return bool(imports.progress(model))

    await until(progressing)
    await imports.stop()
    async with plane.database.read() as connection:
        assert (await models.by_id(connection, model.id)).state == "importing"  # type: ignore[union-attr]
