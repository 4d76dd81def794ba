"""Models from a hub: what is fetched, what is refused, and that a download goes on where it stopped."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from gateway import download, importing
from gateway.imports import Imports
from gateway.sources import Bucket, Sources, Wrong, parse
from gateway.sources import Hub as HubModel
from store import artefact, audit, models
from tests.conftest import ROOT, free_port
from tests.gateway import hub as hubs
from tests.gateway.hub import COMMIT, Hub
from tests.gateway.plane import ENGINES, Plane, made, until
from tests.store.folders import write_model, write_safetensors

TOKEN = "hf_thisisverysecret"
SOURCE = "hf://acme/tiny"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hubs.serving(Hub()) as serving:
        yield serving


@pytest.fixture
def sources(tmp_path: Path, hub: Hub) -> Sources:
    return Sources(
        roots=(tmp_path / "roots",),
        remotes=("hf://acme/",),
        folder=tmp_path / "imported",
        hf_endpoint=hub.url,
        hf_token=SecretStr(TOKEN),
    )


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "PAUSE_S", 0.05)
    monkeypatch.setattr(importing, "FIRST_PATIENCE_S", 0.3)


def large(folder: Path, size: int, seed: str = "") -> Path:
    """A model whose weights have `size` bytes."""
    write_model(folder, seed=seed)
    write_safetensors(folder / "model.safetensors", {"a": ("U8", [size], size)})
    return folder


async def ended(client: httpx.AsyncClient, id: str) -> Any:
    async def seen() -> Any:
        model = (await client.get(f"/models/{id}")).json()
        return model if model["state"] != "importing" else None

    return await until(seen)


async def imported(client: httpx.AsyncClient, source: str = SOURCE, name: str = "m", **said: object) -> Any:
    """What became of it."""
    model = made(await client.post("/models", json={"name": name, "source": source, **said}), 202)
    return await ended(client, model["id"])


def blobs(sources: Sources) -> set[str]:
    return {path.name for path in (sources.folder / "blobs").glob("*")}


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
    before = Imports(plane.database, ENGINES.architectures, sources)
    async with plane.database.write() as connection:
        model = await models.create(connection, None, "m", SOURCE, "", 1)
    before.start(model)

    async def half() -> bool:
        return any(path.stat().st_size > 1 << 19 for path in (sources.folder / "partial").glob("*"))

    await until(half)
    await before.stop()
    hub.slow_s, asked = 0.0, len(hub.asked)
    hub.revisions["main"] = "c" * 40  # it moved meanwhile
    after = Imports(plane.database, ENGINES.architectures, sources)
    await after.resume()
    seen = await ended(plane.admin, model.id)
    await after.stop()
    assert (seen["state"], seen["revision"]) == ("ready", COMMIT)
    (weights,) = [asked for asked in hub.asked[asked:] if asked.path.endswith("model.safetensors")]
    assert int(re.findall(r"\d+", weights.range or "")[0]) > 1 << 19


KILLED = """
import sys
from pathlib import Path
from gateway.importing import Job, Room
from gateway.sources import Hub, Sources
from store.blobs import Blobs
from tests.store.folders import SUPPORTED

url, folder = sys.argv[1:]
sources, blobs = Sources(folder=Path(folder), hf_endpoint=url), Blobs(Path(folder))
room, hub = Room(blobs, None), Hub("acme/tiny")
job = Job("m", hub, None, sources, blobs, room, SUPPORTED, lambda size: None, lambda commit: None)
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
        async with asyncio.timeout(60):  # it imports a good deal first
            while not any(path.stat().st_size > 1 << 20 for path in (sources.folder / "partial").glob("*")):
                assert process.returncode is None
                await asyncio.sleep(0.01)
    finally:
        process.kill()
        await process.wait()
    hub.slow_s = 0.0
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert said.decode().strip() == artefact.inspect(tmp_path / "src", ENGINES.architectures).digest
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
    other = Imports(plane.database, ENGINES.architectures, sources)
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


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────────


def pickle_only(files: dict[str, bytes]) -> None:
    files["pytorch_model.bin"] = files.pop("model.safetensors")


def escaping(files: dict[str, bytes]) -> None:
    files["../../etc/cron.d/x.safetensors"] = b"x"


def absolute(files: dict[str, bytes]) -> None:
    files["/etc/passwd"] = b"x"


def asks_for_code(files: dict[str, bytes]) -> None:
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), "auto_map": {"AutoModel": "x.y"}}).encode()


def unknown(files: dict[str, bytes]) -> None:
    files["config.json"] = json.dumps({"architectures": ["Strange"]}).encode()


def no_tokenizer(files: dict[str, bytes]) -> None:
    del files["tokenizer.json"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (pickle_only, "pytorch_model.bin is a pickle"),
        (escaping, "leads out of its folder"),
        (absolute, "leads out of its folder"),
        (asks_for_code, "auto_map"),
        (unknown, "architecture 'Strange'"),
        (no_tokenizer, "there is no tokenizer"),
    ],
)
async def test_what_can_not_be_served_is_refused_before_its_weights_come(
    plane: Plane, hub: Hub, tmp_path: Path, change: Any, reason: str
) -> None:
    hub.put("acme/tiny", write_model(tmp_path / "src"))
    change(hub.repos["acme/tiny"])
    model = await imported(plane.admin)
    assert model["state"] == "refused" and reason in model["reason"]
    assert not hub.files_asked("model.safetensors") and not hub.files_asked("pytorch_model.bin")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (f"{SOURCE}@nope", "acme/tiny has no revision 'nope'"),
        ("hf://acme/gone", "the hub shows no model acme/gone (status 404)"),
        ("hf://acme/gated", "acme/gated is gated: accept its terms"),
    ],
)
async def test_what_the_hub_refuses_is_said_in_one_sentence(
    plane: Plane, hub: Hub, tmp_path: Path, source: str, reason: str
) -> None:
    folder = write_model(tmp_path / "src")
    hub.put("acme/tiny", folder)
    hub.put("acme/gated", folder)
    hub.gated.add("acme/gated")
    model = await imported(plane.admin, source)
    assert model["state"] == "refused" and reason in model["reason"] and "\n" not in model["reason"]


async def test_a_wrong_token_is_said_without_showing_it(plane: Plane, hub: Hub, tmp_path: Path) -> None:
    hub.put("acme/tiny", write_model(tmp_path / "src"))
    hub.token = "another"
    model = await imported(plane.admin)
    assert "(status 401)" in model["reason"] and TOKEN not in str(model)


async def test_without_a_network_it_is_one_sentence_with_the_remedy(plane: Plane, hub: Hub, sources: Sources) -> None:
    nobody = replace(sources, hf_endpoint=f"http://127.0.0.1:{free_port()}")
    imports = Imports(plane.database, ENGINES.architectures, nobody)
    async with plane.database.write() as connection:
        model = await models.create(connection, None, "m", SOURCE, "", 1)
    imports.start(model)
    seen = await ended(plane.admin, model.id)
    await imports.stop()
    assert re.fullmatch(
        r"127\.0\.0\.1:\d+ can't be reached \(Connection refused\): connect the gateway to the network, "
        r"set STACCATO_HF_ENDPOINT to a mirror that it reaches, or give a local folder",
        seen["reason"],
    )


async def test_a_hub_that_is_away_for_a_moment_is_waited_for(plane: Plane, hub: Hub, tmp_path: Path) -> None:
    hub.put("acme/tiny", write_model(tmp_path / "src"))
    hub.down = 2
    assert (await imported(plane.admin))["state"] == "ready"


async def test_a_host_that_says_nothing_is_given_up(
    plane: Plane, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "SILENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = replace(sources, hf_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        imports = Imports(plane.database, ENGINES.architectures, mute)
        async with plane.database.write() as connection:
            model = await models.create(connection, None, "m", SOURCE, "", 1)
        imports.start(model)
        assert "does not answer in time" in (await ended(plane.admin, model.id))["reason"]
        await imports.stop()


# ── where it may lead ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_redirect_to_a_host_that_nobody_chose_is_refused_and_not_asked(
    plane: Plane, hub: Hub, tmp_path: Path
) -> None:
    hub.put("acme/tiny", write_model(tmp_path / "src"))
    with hubs.serving(Hub(repos=hub.repos)) as inside:
        hub.redirects["config.json"] = f"{inside.url}/cdn/acme/tiny/config.json"
        model = await imported(plane.admin)
        assert model["state"] == "refused" and f"sends us to {inside.url}, which is refused" in model["reason"]
        assert not inside.asked


@pytest.mark.parametrize(
    "place",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://localhost:{port}/x",
        "file:///etc/passwd",
        "https://evil.example.com/x",
        "https://hf.co.evil.example.com/x",
        "https://user@cdn.hf.co/x",
        "http://cdn.hf.co:8080/x",
    ],
)
async def test_no_redirect_leads_elsewhere(plane: Plane, hub: Hub, tmp_path: Path, place: str) -> None:
    hub.put("acme/tiny", write_model(tmp_path / "src"))
    hub.redirects["config.json"] = place.format(port=hub.port)
    model = await imported(plane.admin)
    assert model["state"] == "refused" and "which is refused" in model["reason"]


async def test_a_host_that_the_operator_chose_gets_no_token(
    plane: Plane, hub: Hub, sources: Sources, tmp_path: Path
) -> None:
    hub.put("acme/tiny", write_model(tmp_path / "src"))
    with hubs.serving(Hub(repos=hub.repos)) as cdn:
        hub.redirects["model.safetensors"] = f"{cdn.url}/cdn/acme/tiny/model.safetensors?signature=1"
        allowed = replace(sources, hf_hosts=(f"127.0.0.1:{cdn.port}",))
        imports = Imports(plane.database, ENGINES.architectures, allowed)
        async with plane.database.write() as connection:
            model = await models.create(connection, None, "m", SOURCE, "", 1)
        imports.start(model)
        assert (await ended(plane.admin, model.id))["state"] == "ready"
        await imports.stop()
        assert [asked.authorization for asked in cdn.asked] == [None]
    assert {asked.authorization for asked in hub.asked} == {f"Bearer {TOKEN}"}


async def test_a_tenant_names_only_what_the_operator_allows(plane: Plane, hub: Hub, tmp_path: Path) -> None:
    hub.put("acme/tiny", write_model(tmp_path / "src"))
    hub.put("acmex/tiny", write_model(tmp_path / "src"))
    client = await plane.tenant("one")
    for source in ("hf://acmex/tiny", "hf://other/tiny", "s3://bucket/acme", "hf://acme/../other"):
        problem = made(await client.post("/models", json={"name": "m", "source": source}), 422)
        assert problem["errors"][0]["pointer"] == "/source"
    assert not hub.asked
    assert (await imported(client))["state"] == "ready"
    assert (await imported(plane.admin, "hf://acmex/tiny"))["state"] == "ready"


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("hf://org/name", HubModel("org/name", "main")),
        ("hf://org/name@v1.0", HubModel("org/name", "v1.0")),
        ("s3://models/a/b/", Bucket("models", "a/b")),
        ("/folder", None),
        ("file:///folder", None),
    ],
)
def test_a_source_is_read_as_it_is_written(source: str, meant: object) -> None:
    assert parse(source) == meant


@pytest.mark.parametrize(
    "source",
    [
        *("hf://", "hf://org", "hf://org/name/more", "hf://org/../name", "hf://org/name@", "hf://org/name@a/../b"),
        *("hf://org/na me", "hf://org/name?x=1", "hf://user@host/org/name", "hf://-org/name", "hf://org/name@\n"),
        *("s3://", "s3://bucket", "s3://bucket/", "s3://UPPER/x", "s3://b/x", "s3://bucket/a//b", "s3://bucket/../x"),
        *("s3://bucket.example.com@evil/x", "s3://bucket/a\0b", "s3://bucket:80/x"),
    ],
)
def test_what_is_no_source_is_refused(source: str) -> None:
    with pytest.raises(Wrong):
        parse(source)


# ── how much ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_tenants_storage_is_bounded_before_anything_large_comes(plane: Plane, hub: Hub, tmp_path: Path) -> None:
    hub.put("acme/tiny", large(tmp_path / "src", 1 << 20))
    hub.put("acme/other", large(tmp_path / "other", 1 << 20, seed="other"))
    client = await plane.tenant("one")
    made(await plane.admin.patch("/tenants/one", json={"limits": {"storage_bytes": 3 << 19}}), 200)
    assert (await imported(client))["state"] == "ready"
    asked = len(hub.files_asked("model.safetensors"))
    refused = await imported(client, "hf://acme/other", "other")
    assert refused["state"] == "refused" and "storage_bytes allows" in refused["reason"]
    assert len(hub.files_asked("model.safetensors")) == asked
    assert (await client.delete("/models/m")).status_code == 204
    made(await client.post("/models/other:retry"), 202)
    assert (await ended(client, refused["id"]))["state"] == "ready"


async def test_the_platforms_storage_and_the_disk_are_bounds(
    plane: Plane, hub: Hub, sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put("acme/tiny", large(tmp_path / "src", 1 << 20))
    for bound, said in ((1 << 19, "STACCATO_MODELS_MOST"), (None, "has room for")):
        if bound is None:
            monkeypatch.setattr("store.blobs.RESERVE", 1 << 60)
        imports = Imports(plane.database, ENGINES.architectures, replace(sources, bytes_most=bound))
        async with plane.database.write() as connection:
            model = await models.create(connection, None, f"m{bound}", SOURCE, "", 1)
        imports.start(model)
        seen = await ended(plane.admin, model.id)
        await imports.stop()
        assert seen["state"] == "refused" and said in seen["reason"]
    assert not hub.files_asked("model.safetensors")


async def test_a_file_that_is_larger_than_it_was_said_to_be_is_refused(
    plane: Plane, hub: Hub, sources: Sources, tmp_path: Path
) -> None:
    hub.put("acme/tiny", large(tmp_path / "src", 4 << 20))
    hub.says["model.safetensors"] = {"size": 1 << 20}
    model = await imported(plane.admin)
    assert "more than the 1048576 bytes that were promised" in model["reason"]
    assert sum(path.stat().st_size for path in (sources.folder / "partial").glob("*")) == 0


async def test_a_hub_that_says_no_digest_or_no_size_is_refused(plane: Plane, hub: Hub, tmp_path: Path) -> None:
    hub.put("acme/tiny", write_model(tmp_path / "src"))
    hub.says["config.json"] = {"blobId": None}
    assert "says no digest of 'config.json'" in (await imported(plane.admin))["reason"]
    hub.says["config.json"] = {"size": None}
    assert "how large 'config.json' is" in (await imported(plane.admin, name="n"))["reason"]


async def test_no_secret_is_kept_or_shown(
    plane: Plane, hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.put("acme/tiny", write_model(tmp_path / "src"))
    hub.cuts["model.safetensors"] = [10]
    model = await imported(plane.admin)
    hub.token = "x"
    await imported(plane.admin, name="n")
    out, err = capfd.readouterr()
    said = [str(model), out, err, (await plane.admin.get("/audit")).text, (await plane.admin.get("/models")).text]
    said += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*.db*")]
    assert "import_waits" in out + err and not any(TOKEN in text for text in said)


def test_what_only_imports_need_is_loaded_by_an_import() -> None:
    code = "import sys, gateway.control; print([name for name in sys.argv[1:] if name in sys.modules])"
    heavy = ["huggingface_hub", "botocore", "httpx2"]
    ran = subprocess.run([sys.executable, "-c", code, *heavy], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
