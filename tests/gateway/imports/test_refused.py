"""Refused imports: unservable models, sources not allowed, and models too large for the disk. No secret leaks."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.imports import download
from gateway.imports.jobs import Imports
from gateway.imports.sources import Hub as HubModel
from gateway.imports.sources import ObjectPrefix, Sources, Wrong, parse
from store.db import models
from tests.conftest import ROOT, free_port
from tests.gateway import hub as hubs
from tests.gateway.hub import Hub
from tests.gateway.imports.fetched import SOURCE, TOKEN, ended, imported, large
from tests.gateway.plane import ENGINES, Plane, made
from tests.store.files.folders import write_model

# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────────


def pickle_only(files: dict[str, bytes]) -> None:
    files["pytorch_model.bin"] = files.pop("model.safetensors")


def escaping(files: dict[str, bytes]) -> None:
    files["../../etc/cron.d/x.safetensors"] = b"x"


def absolute(files: dict[str, bytes]) -> None:
    files["/etc/passwd"] = b"x"


def asks_for_code(files: dict[str, bytes]) -> None:
    asks = {"model_type": "own", "auto_map": {"AutoModel": "x.y"}}
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | asks).encode()


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
    imports = Imports(plane.database, ENGINES.known, nobody)
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
        imports = Imports(plane.database, ENGINES.known, mute)
        async with plane.database.write() as connection:
            model = await models.create(connection, None, "m", SOURCE, "", 1)
        imports.start(model)
        assert "does not answer in time" in (await ended(plane.admin, model.id))["reason"]
        await imports.stop()


async def test_an_import_at_which_the_gateway_fails_ends_with_a_reason(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a fault of the gateway")

    monkeypatch.setattr("gateway.imports.jobs.inspect", fail)
    made(await plane.admin.post("/models", json={"name": "m", "source": str(write_model(tmp_path / "m"))}), 202)
    seen = await ended(plane.admin, "m")
    assert seen["state"] == "refused" and "the gateway failed at the import (ZeroDivisionError)" in seen["reason"]


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
        imports = Imports(plane.database, ENGINES.known, allowed)
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
        ("s3://models/a/b/", ObjectPrefix("models", "a/b")),
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
            monkeypatch.setattr("store.files.blobs.RESERVE", 1 << 60)
        imports = Imports(plane.database, ENGINES.known, replace(sources, bytes_most=bound))
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
