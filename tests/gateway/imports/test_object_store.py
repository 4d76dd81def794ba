"""Models from an object store: a real server that speaks S3, and a connection in between that can break."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from pydantic import SecretStr

from gateway.imports import job
from gateway.imports.jobs import Imports
from gateway.imports.sources import Sources
from store.db import models
from tests.conftest import free_port
from tests.gateway.plane import ENGINES, Plane, made, until
from tests.store.files.folders import write_model, write_safetensors

SECRET = "AnotherVerySecretOne"
SOURCE = "s3://models/acme/tiny"
SERVER = "from moto.server import main; import sys; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"


class Way:
    """A TCP proxy to the server. Each entry of `cuts` breaks a connection after that many bytes of answers."""

    def __init__(self, port: int) -> None:
        self.to, self.cuts, self.sent = port, list[int](), 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self.to))
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        here = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
                here += len(data)
                if answers and self.cuts and here > self.cuts[0]:
                    self.cuts.pop(0)
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listening.close()


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/moto-api", trust_env=False)
            client(port).create_bucket(Bucket="models")
            break
        time.sleep(0.1)
    yield port
    process.kill()
    process.wait()


@pytest.fixture
def way(server: int) -> Iterator[Way]:
    way = Way(server)
    yield way
    way.close()


@pytest.fixture
def sources(tmp_path: Path, way: Way, monkeypatch: pytest.MonkeyPatch) -> Sources:
    monkeypatch.setattr(job, "PAUSE_S", 0.05)
    monkeypatch.setattr(job, "FIRST_PATIENCE_S", 0.3)
    return Sources(
        roots=(tmp_path / "roots",),
        remotes=("s3://models/acme/",),
        folder=tmp_path / "imported",
        s3_endpoint=f"http://127.0.0.1:{way.port}",
        s3_key_id=SecretStr("AKIDEXAMPLE"),
        s3_secret=SecretStr(SECRET),
    )


def put(server: int, prefix: str, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        client(server).put_object(Bucket="models", Key=f"{prefix}/{name}", Body=content)


def client(server: int) -> Any:
    keys = {"aws_access_key_id": "AKIDEXAMPLE", "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server}", **keys)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def imported(client: httpx.AsyncClient, source: str = SOURCE, name: str = "m") -> Any:
    model = made(await client.post("/models", json={"name": name, "source": source}), 202)
    return await ended(client, model["id"])


async def ended(client: httpx.AsyncClient, id: str) -> Any:
    async def seen() -> Any:
        model = (await client.get(f"/models/{id}")).json()
        return model if model["state"] != "importing" else None

    return await until(seen)


async def test_a_model_of_a_bucket_is_fetched_and_is_what_the_same_folder_is(
    plane: Plane, server: int, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "src")
    put(server, "acme/tiny", files_of(folder) | {"sub/x.safetensors": b"x", "notes.txt": b"x"})
    model = await imported(plane.admin)
    assert (model["state"], model["digest"]) == ("ready", (await plane.model("local", folder=folder))["digest"])


async def test_a_download_from_a_bucket_goes_on_where_it_stopped(
    plane: Plane, server: int, way: Way, sources: Sources, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "src")
    write_safetensors(folder / "model.safetensors", {"a": ("U8", [2 << 20], 2 << 20)})
    put(server, "acme/large", files_of(folder))
    way.cuts = [1 << 20]
    model = await imported(plane.admin, "s3://models/acme/large")
    assert model["state"] == "ready" and not way.cuts
    sha256 = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert (sources.folder / "blobs" / sha256).stat().st_size > 2 << 20


async def test_what_came_whole_is_known_to_the_next_gateway(
    plane: Plane, server: int, sources: Sources, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "src")
    put(server, "acme/tiny", files_of(folder))
    await imported(plane.admin)
    known = {path.name for path in (sources.folder / "known").iterdir()}
    again = await imported(plane.admin, name="again")
    assert again["state"] == "ready" and len(known) == 4
    assert {path.name for path in (sources.folder / "known").iterdir()} == known


async def test_bytes_that_are_not_what_the_store_promised_are_refused(
    plane: Plane, server: int, sources: Sources, tmp_path: Path
) -> None:
    put(server, "acme/tiny", files_of(write_model(tmp_path / "src")))
    partial = sources.folder / "partial"
    partial.mkdir(parents=True)

    async with plane.database.write() as connection:
        model = await models.create(connection, None, "m", SOURCE, "", 1)
    imports = Imports(plane.database, ENGINES.known, sources)
    from gateway.imports import sources as listings
    from gateway.imports.download import Downloader

    remote = listings.parse(SOURCE)
    assert remote is not None
    door = Downloader(sources.endpoint(remote), ())
    listing = await asyncio.to_thread(listings.listing, remote, None, sources, door)
    door.close()
    weights = next(file for file in listing.files if file.name == "model.safetensors")
    (partial / weights.key).write_bytes(b"\1" * (weights.size - 5))  # left by a foreign process, or a broken disk
    imports.start(model)
    seen = await ended(plane.admin, model.id)
    await imports.stop()
    assert seen["state"] == "ready", "what was wrong is thrown away and fetched again"
    async with plane.database.read() as connection:
        found = await models.by_id(connection, model.id)
    assert found is not None
    fetched = (Path(found.path) / "model.safetensors").read_bytes()
    assert fetched == (tmp_path / "src" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("s3://models/acme/nothing", "there is nothing below s3://models/acme/nothing"),
        ("s3://nowhere/acme", "there is no bucket 'nowhere'"),
    ],
)
async def test_what_is_not_there_is_said(plane: Plane, server: int, source: str, reason: str) -> None:
    model = await imported(plane.admin, source)
    assert model["state"] == "refused" and reason in model["reason"]


async def test_without_a_network_the_store_is_named_with_the_remedy(plane: Plane, sources: Sources) -> None:
    nobody = replace(sources, s3_endpoint=f"http://127.0.0.1:{free_port()}")
    imports = Imports(plane.database, ENGINES.known, nobody)
    async with plane.database.write() as connection:
        model = await models.create(connection, None, "m", SOURCE, "", 1)
    imports.start(model)
    reason = (await ended(plane.admin, model.id))["reason"]
    await imports.stop()
    assert "can't be reached" in reason and "STACCATO_S3_ENDPOINT" in reason


async def test_a_tenant_reaches_only_the_prefix_that_it_may(plane: Plane, server: int, tmp_path: Path) -> None:
    files = files_of(write_model(tmp_path / "src"))
    put(server, "acme/tiny", files)
    put(server, "other/tiny", files)
    client = await plane.tenant("one")
    for source in ("s3://models/other/tiny", "s3://models/acmex/tiny", "s3://models/acme/../other/tiny"):
        assert made(await client.post("/models", json={"name": "m", "source": source}), 422)
    assert (await imported(client))["state"] == "ready"


async def test_no_secret_of_the_store_is_kept_or_shown(
    plane: Plane, server: int, way: Way, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "src")
    write_safetensors(folder / "model.safetensors", {"a": ("U8", [2 << 20], 2 << 20)})
    put(server, "acme/secret", files_of(folder))
    way.cuts = [1 << 20]
    model = await imported(plane.admin, "s3://models/acme/secret")
    out, err = capfd.readouterr()
    said = [str(model), out, err, (await plane.admin.get("/audit")).text]
    said += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*.db*")]
    assert model["state"] == "ready" and "import_waits" in out + err
    assert not any(secret in text for text in said for secret in (SECRET, "Signature", "AKIDEXAMPLE"))
