"""From a deployment to its runtime: what a request over HTTP becomes on the bus. The test plays the runtime."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway.front import Deps, Fronts
from gateway.inference import Bounds, Inference
from gateway.meter import Meter
from gateway.quotas import Quotas
from gateway.relay import Relay
from store import wire
from store.wire import Delta, Finish, ModelState, Residency
from tests.conftest import ROOT
from tests.gateway.plane import Plane, made

pytestmark = pytest.mark.filterwarnings("ignore")  # of vLLM and torch, which the front imports

FAQ = ROOT / "deploy" / "demo" / "models" / "faq"


@contextlib.asynccontextmanager
async def asked(plane: Plane, key: str, body_bytes: int = 1 << 20) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the tenant's endpoints."""
    relay, meter = Relay(plane.bus, "g1"), Meter(plane.bus, plane.folder / "gateway.journal")
    fronts = Fronts(Deps(relay, plane.fleet, "g1", 60.0))
    quotas, bounds = Quotas(plane.bus, plane.database, "g1"), Bounds(body_bytes, 10.0, 30.0)
    inference = Inference(plane.auth, plane.fleet, fronts, meter, quotas, bounds, plane.metrics, b"salt", plane.recent)
    await relay.start()
    await meter.start()
    await quotas.start()
    headers = {"authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(inference)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
        yield client
    relay.stop()
    await quotas.stop()
    await meter.stop()


async def runs_of(plane: Plane) -> list[wire.Run]:
    """What runtime r1 is asked for; it answers each with one token."""
    runs: list[wire.Run] = []

    async def take(data: bytes) -> wire.Reply:
        run = wire.decode(wire.Run, data)
        runs.append(run)
        end = wire.Frame(runtime="r1", epoch=1, seq=len(runs), deltas=[Delta(run.stream, [5], 0, Finish.LENGTH)])
        asyncio.get_running_loop().call_soon(asyncio.ensure_future, publish(end))
        return wire.Reply(epoch=1, seq=len(runs) - 1)

    async def publish(frame: wire.Frame) -> None:
        await plane.bus.publish(wire.frame_subject("g1"), wire.encode(frame))

    await plane.bus.respond(wire.run_subject("r1"), take)
    return runs


async def completed(client: httpx.AsyncClient, model: str) -> None:
    body = {"model": model, "prompt": "hello", "max_tokens": 1}
    made(await client.post("/v1/completions", json=body), 200)


async def test_a_request_carries_its_deployments_objective_under_ids_alone(plane: Plane) -> None:
    tenant = made(await plane.admin.post("/tenants", json={"name": "acme", "weight": 2}))
    key = made(await plane.admin.post("/tenants/acme/keys"))["key"]
    await plane.model("faq", folder=Path(FAQ))
    chat = made(
        await plane.admin.post(
            "/deployments",
            json={
                "tenant": "acme",
                "name": "chat",
                "model": "faq",
                "priority": "high",
                "slo": {"ttft_ms": 2_000_000, "tbt_ms": 50},
            },
        )
    )
    runs = await runs_of(plane)
    async with asked(plane, key) as client:
        await plane.report({chat["engine"]: ModelState(residency=Residency.RESIDENT, load_ms=1.0)})
        await completed(client, "chat")
        made(await plane.admin.patch("/tenants/acme", json={"weight": 0.5}), 200)
        await completed(client, "chat")
        made(await plane.admin.patch("/deployments/chat", json={"priority": "batch"}), 200)
        await plane.report({chat["engine"]: ModelState(residency=Residency.RESIDENT, load_ms=1.0)})
        await completed(client, "chat@2")
    first, second, third = runs
    assert {run.label for run in runs} == {f"{tenant['id']}/{chat['id']}"}
    assert (first.tbt_s, first.patience_s) == (0.05, 12.0)
    assert 1_000 < first.ttft_s < 2_000  # what it took here is gone
    assert second.patience_s == 3.0
    assert (third.tbt_s, third.patience_s) == (0.5, 0.0) and 19_000 < third.ttft_s < 20_000
