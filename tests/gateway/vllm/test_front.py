"""From a deployment to the runtime: the form on the bus of a request over HTTP. The test plays the runtime."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest

from gateway.core.extent import ExtentLimits
from gateway.inference.admission import Quotas
from gateway.inference.asking import Asking, Bounds
from gateway.inference.endpoint import Inference
from gateway.inference.meter import Meter
from gateway.inference.serving import RequestServing
from gateway.streams.relay import Relay
from gateway.vllm import front, templates
from gateway.vllm.bus_core import Deps
from gateway.vllm.front import Fronts
from store.contract import wire
from store.contract.priorities import Priority
from store.contract.wire import Delta, Finish, ModelState, Residency
from tests.conftest import ROOT, soon
from tests.gateway.plane import Plane, made

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch, imported by the front

DEFAULTS = ExtentLimits()
FAQ = ROOT / "deploy" / "demo" / "models" / "faq"


@contextlib.asynccontextmanager
async def asked(
    plane: Plane, key: str, body_bytes: int = 1 << 20, extent: ExtentLimits = DEFAULTS
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the tenant's endpoints."""
    relay, meter = Relay(plane.bus, "g1"), Meter(plane.bus, plane.folder / "gateway.journal")
    fronts = Fronts(Deps(relay, plane.fleet, "g1", 60.0))
    quotas, bounds = Quotas(plane.bus, plane.database, "g1"), Bounds(body_bytes, 10.0, 30.0, extent)
    asking = Asking(plane.auth, plane.fleet, plane.metrics, bounds)
    serving = RequestServing(plane.fleet, fronts, meter, quotas, plane.metrics, b"salt", plane.recent)
    inference = Inference(plane.auth, asking, serving, plane.metrics)
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
    """Requests that runtime r1 was asked for, a list that grows. The runtime answers each request with one token."""
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
    assert 1_000 < first.ttft_s < 2_000  # the time at the gateway is subtracted
    assert second.patience_s == 3.0
    assert (third.tbt_s, third.patience_s) == (0.5, 0.0) and 19_000 < third.ttft_s < 20_000
    assert [run.priority for run in runs] == [Priority.HIGH, Priority.HIGH, Priority.BATCH]


async def test_a_request_asks_for_a_priority_within_the_bound_of_its_key(plane: Plane) -> None:
    made(await plane.admin.post("/tenants", json={"name": "acme"}))
    usual, high = [
        made(await plane.admin.post("/tenants/acme/keys", json={"priority": bound}))["key"]
        for bound in ("normal", "high")
    ]
    await plane.model("faq", folder=Path(FAQ))
    slo = {"ttft_ms": 2_000_000}
    chat = made(await plane.admin.post("/deployments?tenant=acme", json={"name": "chat", "model": "faq", "slo": slo}))
    runs = await runs_of(plane)
    await plane.report({chat["engine"]: ModelState(residency=Residency.RESIDENT, load_ms=1.0)})
    said = [({}, "priority"), ({}, "flex"), ({}, "auto"), ({"x-staccato-priority": "high"}, "flex"), ({}, None)]
    body = {"model": "chat", "prompt": "hello", "max_tokens": 1}
    async with asked(plane, high) as client:
        for headers, tier in said:
            made(await client.post("/v1/completions", json=body | {"service_tier": tier}, headers=headers), 200)
        wrong = made(await client.post("/v1/completions", json=body, headers={"x-staccato-priority": "urgent"}), 400)
        assert "'urgent': say one of batch, normal, high" in wrong["error"]["message"]
    words = [run.priority.word for run in runs]
    assert words == ["high", "batch", "normal", "high", "normal"]
    assert [run.patience_s for run in runs] == [6.0, 0.0, 1.5, 6.0, 1.5]
    async with asked(plane, usual) as client:
        answer = await client.post("/v1/completions", json=body | {"service_tier": "priority"})
        error = made(answer, 403)["error"]
        assert error["code"] == "priority_too_high" and "may ask for normal at most" in error["message"]
        made(await client.post("/v1/completions", json=body | {"service_tier": "flex"}), 200)
    assert len(runs) == len(said) + 1


def rendering() -> set[int]:
    """Pids of the processes that render chats for this process."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any("rendering.py" in word for word in child.cmdline()):
                found.add(child.pid)
    return found


def forget_templates() -> None:
    """Let the gateway forget that it found templates sound."""
    for known in (templates._check, templates.system_first, templates.variables):
        known.cache_clear()


async def two_fronts(plane: Plane) -> str:
    """Deploy two engines of one model, each with a front of its own. Returns a key of the tenant."""
    made(await plane.admin.post("/tenants", json={"name": "acme"}))
    key = made(await plane.admin.post("/tenants/acme/keys"))["key"]
    await plane.model("faq", folder=Path(FAQ))
    engines = []
    for name, most in (("long", 512), ("short", 64)):
        body = {"tenant": "acme", "name": name, "model": "faq", "max_model_len": most}
        engines.append(made(await plane.admin.post("/deployments", json=body))["engine"])
    await runs_of(plane)
    await plane.report({engine: ModelState(residency=Residency.RESIDENT, load_ms=1.0) for engine in engines})
    gc.collect()
    return str(key)


async def test_a_dropped_front_ends_its_processes_without_a_collection_of_garbage(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "FRONTS_MOST", 1)
    key = await two_fronts(plane)
    before = rendering()
    forget_templates()
    gc.disable()
    try:
        async with asked(plane, key) as client:
            await completed(client, "long")
            await soon(lambda: len(rendering() - before) == 1)
            (first,) = rendering() - before
            forget_templates()
            await completed(client, "short")
            await soon(lambda: first not in rendering() and len(rendering() - before) == 1)
            await completed(client, "long")
    finally:
        gc.enable()


async def test_a_front_whose_template_was_found_sound_before_has_no_process_until_the_first_chat(plane: Plane) -> None:
    key = await two_fronts(plane)
    async with asked(plane, key) as client:
        await completed(client, "long")
        before = rendering()
        await completed(client, "short")
        assert rendering() <= before
        body = {"model": "short", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        made(await client.post("/v1/chat/completions", json=body), 200)
        assert len(rendering() - before) == 1


async def test_a_dropped_front_ends_the_processes_of_vllms_handlers(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat that names tools is no chat of the fast way: a thread of the front asks a process for the text."""
    monkeypatch.setattr(front, "FRONTS_MOST", 1)
    key = await two_fronts(plane)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat = {"messages": [{"role": "user", "content": "hello"}], "tools": [tool], "tool_choice": "none"}
    async with asked(plane, key) as client:
        await completed(client, "short")
        await completed(client, "long")
        before = rendering()
        made(await client.post("/v1/chat/completions", json=chat | {"model": "long", "max_tokens": 1}), 200)
        (of_thread,) = rendering() - before
        await completed(client, "short")
        await soon(lambda: of_thread not in rendering())


async def test_a_front_is_made_though_the_check_of_its_template_was_slow(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of a slow check ends: the front must not take the process over."""
    key = await two_fronts(plane)
    monkeypatch.setattr(templates, "PATIENCE_S", 0.0)
    forget_templates()
    async with asked(plane, key) as client:
        await completed(client, "long")
