"""Helpers of the tests of imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from gateway.imports.sources import Sources
from tests.gateway.plane import made, until
from tests.store.files.folders import write_model, write_safetensors

TOKEN = "hf_thisisverysecret"
SOURCE = "hf://acme/tiny"


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
    """Import a model, and return the model's state after the import."""
    model = made(await client.post("/models", json={"name": name, "source": source, **said}), 202)
    return await ended(client, model["id"])


def blobs(sources: Sources) -> set[str]:
    return {path.name for path in (sources.folder / "blobs").glob("*")}
