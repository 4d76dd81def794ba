"""Models from a hub: the files that come, sharing between tenants, and downloads resumed at the point of a break."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from gateway.imports.jobs import Imports
from gateway.imports.sources import Sources
from store.db import audit, models
from store.files import artefact
from tests.conftest import ROOT
from tests.gateway.hub import COMMIT, Hub
from tests.gateway.imports.fetched import SOURCE, blobs, ended, imported, large
from tests.gateway.plane import ENGINES, Plane, made, until
from tests.store.files.folders import sentence_transformers, write_model, write_safetensors


def largest_part(sources: Sources) -> int:
    """Bytes of the largest file that is being fetched."""
    largest = 0
    for path in (sources.folder / "partial").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # the file was whole meanwhile
            largest = max(largest, path.stat().st_size)
    return largest


# ── what comes ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_model_of_a_hub_is_fetched_and_is_what_the_same_folder_is(
    plane: Plane, hub: Hub, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "src")
    (folder / "README.md").write_text("not needed")
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    hub.put("acme/tiny", folder)
    model = await imported(plane.admin)
    (folder / "modeling.py").unlink()
    local = await plane.model("local", folder=folder)
    assert (model["state"], model["digest"]) == ("ready", local["digest"])
    assert (model["revision"], model["source"], model["progress"]) == (COMMIT, SOURCE, None)
    fetched = {asked.path.rpartition("/")[2] for asked in hub.asked if "/resolve/" in asked.path}
    assert fetched == {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


async def test_an_embedder_comes_with_its_pooling_and_is_what_the_same_folder_is(
    plane: Plane, hub: Hub, tmp_path: Path
) -> None:
    folder = sentence_transformers(write_model(tmp_path / "src"))
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("not needed")
    hub.put("acme/tiny", folder)
    model, local = await imported(plane.admin), await plane.model("local", folder=folder)
    assert (model["state"], model["digest"]) == ("ready", local["digest"])
    fetched = {
        asked.path.partition("/resolve/")[2].partition("/")[2] for asked in hub.asked if "/resolve/" in asked.path
    }
    assert {"modules.json", "1_Pooling/config.json", "sentence_bert_config.json"} < fetched
    assert "onnx/config.json" not in fetched
    client = await plane.tenant("globex")
    row = made(await client.post("/deployments", json={"name": "embedder", "model": "m"}))
    assert row["task"] == "embed"


async def test_a_model_that_was_fetched_is_deployed(plane: Plane, hub: Hub, sources: Sources, tmp_path: Path) -> None:
    hub.put("acme/tiny", write_model(tmp_path / "src"))
    await imported(plane.admin)
    client = await plane.tenant("globex")
    made(await client.post("/deployments", json={"name": "chat", "model": "m"}))
    async with plane.database.read() as connection:
        model = await models.find(connection, None, "m")
    assert model is not None and Path(model.path).is_relative_to(sources.folder / "folders")
    assert (Path(model.path) / "model.safetensors").read_bytes() == (
        tmp_path / "src" / "model.safetensors"
    ).read_bytes()


async def test_only_the_weights_that_the_index_names_are_fetched(plane: Plane, hub: Hub, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "src")
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    write_safetensors(folder / "consolidated.safetensors", {"z": ("F32", [2], 8)})
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.put("acme/tiny", folder)
    assert (await imported(plane.admin))["state"] == "ready"
    assert not hub.files_asked("consolidated.safetensors")


async def test_a_revision_is_asked_for_by_name_and_fetched_by_its_commit(
    plane: Plane, hub: Hub, tmp_path: Path
) -> None:
    hub.put("acme/tiny", write_model(tmp_path / "src"))
    hub.revisions = {"refs/pr/1": "b" * 40}
    assert (await imported(plane.admin, f"{SOURCE}@refs/pr/1"))["revision"] == "b" * 40
    assert all(f"/resolve/{'b' * 40}/" in asked.path for asked in hub.asked if "/resolve/" in asked.path)


async def test_the_expected_digest_is_what_comes_or_it_is_refused(plane: Plane, hub: Hub, tmp_path: Path) -> None:
    hub.put("acme/tiny", write_model(tmp_path / "src"))
    digest = (await imported(plane.admin))["digest"]
    assert (await imported(plane.admin, name="same", digest=digest))["state"] == "ready"
    other = await imported(plane.admin, name="other", digest="0" * 64)
    assert other["state"] == "refused" and "another model" in other["reason"]


# ── sharing, and giving back ──────────────────────────────────────────────────────────────────────────────────────────


async def test_two_tenants_share_the_bytes_and_the_last_one_takes_them_away(
    plane: Plane, hub: Hub, sources: Sources, tmp_path: Path
) -> None:
    hub.put("acme/tiny", large(tmp_path / "src", 1 << 20))
    one, two = await plane.tenant("one"), await plane.tenant("two")
    first, second = await asyncio.gather(imported(one), imported(two))
    assert first["digest"] == second["digest"] and first["id"] != second["id"]
    assert len(hub.files_asked("model.safetensors")) == 1, "the second waits for the first"
    assert len(blobs(sources)) == 4
    assert (await one.delete("/models/m")).status_code == 204
    await asyncio.sleep(0.2)
    assert len(blobs(sources)) == 4
    assert (await two.delete("/models/m")).status_code == 204

    async def gone() -> bool:
        return not blobs(sources) and not list((sources.folder / "folders").iterdir())

    await until(gone)


async def test_a_blob_that_was_damaged_on_the_disk_is_fetched_again(
    plane: Plane, hub: Hub, sources: Sources, tmp_path: Path
) -> None:
    hub.put("acme/tiny", write_model(tmp_path / "src"))
    good = await imported(plane.admin)
    blob = sources.folder / "blobs" / hashlib.sha256(hub.repos["acme/tiny"]["model.safetensors"]).hexdigest()
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(content)
    again = await imported(plane.admin, name="again")
    assert (again["state"], again["digest"]) == ("ready", good["digest"])


# ── going on ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_download_that_breaks_goes_on_where_it_stopped(plane: Plane, hub: Hub, tmp_path: Path) -> None:
    hub.put("acme/tiny", large(tmp_path / "src", 3 << 20))
    hub.cuts["model.safetensors"] = [1 << 20, 1 << 20]
    assert (await imported(plane.admin))["state"] == "ready"
    began = [int(re.findall(r"\d+", asked.range or "bytes=0-")[0]) for asked in hub.files_asked("model.safetensors")]
    assert len(began) == 3 and began[0] == 0 and 0 < began[1] <= 1 << 20 and began[1] < began[2] <= 2 << 20


async def test_a_server_without_ranges_is_read_from_the_beginning(plane: Plane, hub: Hub, tmp_path: Path) -> None:
    hub.put("acme/tiny", large(tmp_path / "src", 1 << 20))
    hub.cuts["model.safetensors"], hub.whole = [1 << 19], True
    assert (await imported(plane.admin))["state"] == "ready"


async def test_bytes_that_are_wrong_once_are_fetched_again_and_twice_refused(
    plane: Plane, hub: Hub, sources: Sources, tmp_path: Path
) -> None:
    hub.put("acme/tiny", write_model(tmp_path / "src"))
    hub.lies["model.safetensors"] = 1
    assert (await imported(plane.admin))["state"] == "ready"
    hub.put("acme/tiny", write_model(tmp_path / "other", {**json.loads((tmp_path / "src/config.json").read_text())}))
    hub.repos["acme/tiny"]["config.json"] += b"\n"
    hub.lies["config.json"] = 2
    refused = await imported(plane.admin, name="bad")
    assert refused["state"] == "refused" and "config.json has the git blob digest" in refused["reason"]
    assert not any(b"\n" == (sources.folder / "blobs" / name).read_bytes()[-1:] for name in blobs(sources))


async def test_the_next_gateway_goes_on_with_what_a_dead_one_began(
    plane: Plane, hub: Hub, sources: Sources, tmp_path: Path
) -> None:
    hub.put("acme/tiny", large(tmp_path / "src", 2 << 20))
    hub.slow_s = 0.02
    before = Imports(plane.database, ENGINES.known, sources)
    async with plane.database.write() as connection:
        model = await models.create(connection, None, "m", SOURCE, "", 1)
    before.start(model)

    async def half() -> bool:
        return largest_part(sources) > 1 << 19

    await until(half)
    await before.stop()
    hub.slow_s, asked = 0.0, len(hub.asked)
    hub.revisions["main"] = "c" * 40  # the branch moved meanwhile
    after = Imports(plane.database, ENGINES.known, sources)
    await after.resume()
    seen = await ended(plane.admin, model.id)
    await after.stop()
    assert (seen["state"], seen["revision"]) == ("ready", COMMIT)
    (weights,) = [asked for asked in hub.asked[asked:] if asked.path.endswith("model.safetensors")]
    assert int(re.findall(r"\d+", weights.range or "")[0]) > 1 << 19


KILLED = """
import sys
from pathlib import Path
from gateway.imports.job import ImportSpace, Job
from gateway.imports.sources import Hub, Sources
from store.files.blobs import Blobs
from tests.store.files.folders import KNOWN

url, folder = sys.argv[1:]
sources, blobs = Sources(folder=Path(folder), hf_endpoint=url), Blobs(Path(folder))
room, hub = ImportSpace(blobs, None), Hub("acme/tiny")
job = Job("m", hub, None, sources, blobs, room, KNOWN, lambda size: None, lambda commit: None)
print(job.run().artefact.digest)
"""


async def test_a_process_that_was_killed_loses_nothing_that_had_come(
    hub: Hub, sources: Sources, tmp_path: Path
) -> None:
    hub.put("acme/tiny", large(tmp_path / "src", 4 << 20))
    hub.slow_s = 0.01
    command = [sys.executable, "-c", KILLED, hub.url, str(sources.folder)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    try:
        async with asyncio.timeout(60):  # the process imports many modules first
            while largest_part(sources) <= 1 << 20:
                assert process.returncode is None
                await asyncio.sleep(0.01)
    finally:
        process.kill()
        await process.wait()
    hub.slow_s = 0.0
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert said.decode().strip() == artefact.inspect(tmp_path / "src", ENGINES.known).digest
    first, second = hub.files_asked("model.safetensors")
    assert first.range is None and int(re.findall(r"\d+", second.range or "")[0]) > 1 << 20


async def test_an_import_is_cancelled_and_taken_up_again_where_it_was(
    plane: Plane, hub: Hub, sources: Sources, tmp_path: Path
) -> None:
    hub.put("acme/tiny", large(tmp_path / "src", 16 << 20))
    hub.slow_s = 0.02
    model = made(await plane.admin.post("/models", json={"name": "m", "source": SOURCE}), 202)

    async def half() -> Any:
        seen = (await plane.admin.get("/models/m")).json()["progress"]
        return seen if seen and seen["done_bytes"] > 1 << 19 and seen["eta_s"] is not None else None

    seen = await until(half)
    assert seen["total_bytes"] > 16 << 20
    stopped = made(await plane.admin.post("/models/m:cancel"), 200)
    assert (stopped["state"], stopped["progress"]) == ("cancelled", None)
    assert made(await plane.admin.post("/models/m:cancel"), 409)["code"] == "not_importing"
    hub.slow_s = 0.0
    assert made(await plane.admin.post("/models/m:retry"), 202)["state"] == "importing"
    assert (await ended(plane.admin, model["id"]))["state"] == "ready"
    assert hub.files_asked("model.safetensors")[-1].range
    assert made(await plane.admin.post("/models/m:retry"), 409)["code"] == "not_stopped"


async def test_another_gateway_cancels_it_too(plane: Plane, hub: Hub, sources: Sources, tmp_path: Path) -> None:
    hub.put("acme/tiny", large(tmp_path / "src", 8 << 20))
    hub.slow_s = 0.05
    other = Imports(plane.database, ENGINES.known, sources)
    async with plane.database.write() as connection:
        model = await models.create(connection, None, "m", SOURCE, "", 1)
    other.start(model)
    task = other._tasks[model.id]
    await asyncio.sleep(0.3)
    made(await plane.admin.post("/models/m:cancel"), 200)
    await asyncio.wait([task], timeout=10)
    assert task.done()
    await other.stop()
    assert (await plane.admin.get("/models/m")).json()["state"] == "cancelled"


async def test_progress_and_what_became_of_it_are_events(plane: Plane, hub: Hub, tmp_path: Path) -> None:
    hub.put("acme/tiny", large(tmp_path / "src", 3 << 20))
    hub.slow_s = 0.015
    async with plane.database.read() as connection:
        start = await audit.last(connection, None)
    with plane.control.feed.reading():
        await imported_slowly(plane)
        seen = {
            type(now).__name__ for _, now in plane.control.feed.phases.values()
        }  # the last look may be after the end
    async with plane.database.read() as connection:
        kinds = [row.kind for row in await audit.listed(connection, None, start, 10)]
    assert kinds == ["model.created", "model.ready"] and seen <= {"ImportProgressed"}


async def imported_slowly(plane: Plane) -> None:
    model = made(await plane.admin.post("/models", json={"name": "m", "source": SOURCE}), 202)

    async def told() -> bool:
        return model["id"] in plane.control.feed.phases

    await until(told)
    await ended(plane.admin, model["id"])
