"""Fixtures: a hub, and a gateway that may fetch from the hub and loses patience soon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.imports import job
from gateway.imports.sources import Sources
from tests.gateway import hub as hubs
from tests.gateway.hub import Hub
from tests.gateway.imports.fetched import TOKEN


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
    monkeypatch.setattr(job, "PAUSE_S", 0.05)
    monkeypatch.setattr(job, "FIRST_PATIENCE_S", 0.3)
