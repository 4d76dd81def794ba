"""A control plane after the bus has lost streams and buckets: a real server with a deleted folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gateway.control import rollout
from store.contract import wire
from tests.conftest import NatsServer, soon
from tests.gateway.control.test_deployments import deployed
from tests.gateway.plane import Plane


async def test_runtimes_are_told_again_what_to_serve_when_the_bus_has_forgotten_it(
    plane: Plane, nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control plane repeats placements at once, without waiting for the rollout's period of ten seconds."""
    monkeypatch.setattr(rollout, "PERIOD_S", 3600.0)
    _, deployment = await deployed(plane, dtype="float32", max_model_len=256)
    await plane.placed({deployment["engine"]})
    lost: set[str] = set()
    plane.bus.on_lost(lost.update)
    nats_server.kill()
    shutil.rmtree(tmp_path / "nats" / "js")
    nats_server.start()
    await soon(lambda: wire.MODELS in lost)
    await plane.placed({deployment["engine"]})
