"""A plan describes a deployment before the deployment is made, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.control.plan import on, planned
from runtime.config import RuntimeSettings
from store.contract import wire
from store.contract.deployments import Spec
from store.contract.kv_curve import KeptLayers, KvBlocks, LayerKind, written_bytes
from store.contract.tasks import Task
from store.contract.wire import Lease, ModelState, Residency, Spread
from tests.conftest import ROOT
from tests.gateway.plane import Plane, made

MIB = 1 << 20
ENGINE = wire.EngineSpec(
    key="e",
    path="/m/llama",
    digest="d",
    architecture="L",
    dtype="bfloat16",
    max_model_len=1024,
    weight_bytes=5 * MIB + 1,
    kv_bytes_per_token=2048,
)
LEASE = Lease(runtime="r1", epoch=1, engine="v", page_bytes=MIB, pages_total=16, pages_used=4)
SPEC = Spec(model="llama")


def test_room_is_counted_in_whole_pages() -> None:
    here = on(LEASE, ENGINE)
    assert (here.weights_bytes, here.kv_tokens, here.longest_requests) == (6 * MIB, 10 * 512, 5)
    assert here.kv_tokens_now == 6 * 512 and here.fits
    tight = on(wire.replace(LEASE, pages_total=8, pages_used=8), ENGINE)
    assert tight.fits and (tight.longest_requests, tight.kv_tokens_now) == (1, 0)
    over = on(wire.replace(LEASE, pages_total=7), ENGINE)
    assert not over.fits and over.reason is not None
    assert "the weights take 6 MiB and one request of 1024 tokens 2 MiB, and it has 7 MiB" in over.reason


KIB = 1024
FULL, WINDOW, CHUNK, STATE = LayerKind
KEPT = {
    "gpt-oss": (KeptLayers(WINDOW, 2, KIB, 32), KeptLayers(FULL, 2, KIB)),
    "Gemma 3": (KeptLayers(WINDOW, 5, KIB, 32), KeptLayers(FULL, 1, KIB)),
    "Mamba 2": (KeptLayers(STATE, 3, 72_448),),
    "Llama": (KeptLayers(FULL, 4, KIB),),
}


@pytest.mark.parametrize(
    ("name", "held_kib"), [("gpt-oss", 8448 - 64), ("Gemma 3", 4480 - 32), ("Mamba 2", 212.25), ("Llama", 129 * 128)]
)
def test_the_longest_request_takes_what_an_engine_holds_for_it(name: str, held_kib: float) -> None:
    """`held_kib`: measured at 4,097 tokens, without the block that no request gets (tests/runtime/engine)."""
    lease = wire.replace(LEASE, block_tokens=32, pages_total=64)
    engine = wire.replace(
        ENGINE, max_model_len=4097, kv_layers=KEPT[name], kv_bytes_per_token=written_bytes(KEPT[name])
    )
    here = on(lease, engine)
    block = KvBlocks.of(KEPT[name], 32).block_bytes
    assert here.fits and abs(here.longest_request_bytes - held_kib * KIB) <= block
    room = 64 * MIB - here.weights_bytes - block
    assert here.longest_requests == room // here.longest_request_bytes == here.kv_tokens // 4097
    rough = on(wire.replace(lease, block_tokens=0), engine)
    assert abs(rough.longest_request_bytes - here.longest_request_bytes) <= block * len(KEPT[name]) * 5


def test_the_requests_of_an_encoder_take_no_room() -> None:
    here = on(LEASE, wire.replace(ENGINE, kv_bytes_per_token=0, task=Task.EMBED))
    assert here.fits and here.longest_request_bytes == 0
    assert (here.kv_tokens, here.kv_tokens_now, here.longest_requests) == (None, None, None)


def test_a_window_needs_room_for_a_piece_of_the_prompt() -> None:
    engine = wire.replace(ENGINE, max_model_len=8192, kv_layers=KEPT["Gemma 3"])
    pages = [on(wire.replace(LEASE, pages_total=pages), engine) for pages in range(14, 30)]
    assert pages[0].longest_request_bytes < 9 * MIB and not pages[0].fits and pages[-1].fits
    (first,) = [one for one, before in zip(pages[1:], pages, strict=False) if one.fits and not before.fits]
    peak = (1 + KvBlocks.of(KEPT["Gemma 3"], 16).peak(8192, 2048)) * 16 * KIB
    assert first.memory_bytes - first.weights_bytes - peak < MIB


def test_who_drains_or_could_not_load_the_same_is_no_place() -> None:
    failed = ModelState(residency=Residency.FAILED, error="the beast does not load")
    draining, broken = wire.replace(LEASE, draining=True), wire.replace(LEASE, runtime="r2", models={"e": failed})
    plan = planned(SPEC, ENGINE, {"r1": draining, "r2": broken}, [], None)
    assert not plan.fits and plan.reasons == [
        "r1: it takes no more requests",
        "r2: it could not load the same engine: the beast does not load",
    ]
    assert planned(SPEC, ENGINE, {}, [], None).reasons == ["no runtime is there: start one, and ask again"]


def test_what_was_measured_is_said_before_what_is_computed() -> None:
    law = RuntimeSettings(profile=ROOT / "deploy" / "profiles" / "h100.json").law  # as in a node's lease
    assert RuntimeSettings().law == {}
    told = wire.replace(LEASE, law=law, wakes={"disk": Spread([0, 2, 1], 6.0)})
    guessed, computed = on(LEASE, ENGINE), on(told, ENGINE)
    known = ModelState(residency=Residency.STAGED, fetch_ms=7.0, step_ms=3.0, prefill_ms=90.0)
    measured = on(wire.replace(told, models={"e": known}), ENGINE)
    assert [(here.cold_start.host.by, here.step.by) for here in (guessed, computed, measured)] == [
        ("guess", "guess"),
        ("profile", "profile"),
        ("measured", "measured"),
    ]
    assert (measured.cold_start.host.ms, measured.step.ms, measured.longest_prompt.ms) == (7.0, 3.0, 90.0)
    assert (guessed.cold_start.files.ms, guessed.cold_start.files.by) == (None, "unknown")
    assert (computed.cold_start.files.ms, computed.cold_start.files.by) == (2000.0, "mean")
    host, pages = computed.cold_start.host.ms, computed.cold_start.pages.ms
    assert host is not None and pages is not None and pages < host


def test_an_objective_that_the_fastest_runtime_can_not_keep_is_said() -> None:
    slow = wire.replace(LEASE, models={"e": ModelState(residency=Residency.STAGED, step_ms=300.0)})
    fast = wire.replace(slow, runtime="r2", models={"e": ModelState(residency=Residency.STAGED, step_ms=30.0)})
    alone = planned(SPEC, ENGINE, {"r1": slow}, [], None)
    assert alone.fits and alone.objective is not None and "takes 300 ms" in alone.objective
    assert planned(SPEC, ENGINE, {"r1": slow, "r2": fast}, [], None).objective is None


# ── over REST ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def ask(plane: Plane, client: Any, **spec: object) -> Any:
    return made(await client.post("/deployments:plan", json={"name": "new", "model": "llama"} | spec), 200)


async def test_a_plan_says_the_price_and_whom_it_would_slow_and_makes_nothing(plane: Plane) -> None:
    await plane.model("llama")
    acme, other = await plane.tenant("acme"), await plane.tenant("other")
    price = {"prompt_pico": 1, "output_pico": 2}
    made(await plane.admin.post("/prices", json=price))
    made(await plane.admin.post("/prices", json=price | {"output_pico": 3, "tenant": "acme"}))
    theirs = made(await other.post("/deployments", json={"name": "busy", "model": "llama", "dtype": "float32"}))
    own = made(await acme.post("/deployments", json={"name": "own", "model": "llama"}))
    busy, idle = (ModelState(residency=Residency.RESIDENT, busy=share) for share in (0.4, 0.0))
    await plane.report({theirs["engine"]: busy, own["engine"]: idle}, pool_bytes=1 << 30)
    before = (await plane.admin.get("/audit")).json()["data"]
    asked = await ask(plane, plane.admin, tenant="acme", max_model_len=512)
    assert asked["fits"] and asked["reasons"] == [] and asked["max_model_len"] == 512
    assert asked["price"]["output_pico"] == 3
    assert [(slowed["tenant"], slowed["deployment"], slowed["busy"]) for slowed in asked["slows"]] == [
        ("other", "busy", 0.4)
    ]
    assert (await ask(plane, acme))["slows"] == []  # a tenant may not know of foreign tenants
    assert (await plane.admin.get("/audit")).json()["data"] == before
    assert len((await plane.admin.get("/deployments")).json()["data"]) == 2
    await plane.placed({theirs["engine"], own["engine"]})


async def test_a_plan_for_what_has_no_room_says_why_instead_of_refusing(plane: Plane) -> None:
    await plane.model("llama")
    client = await plane.tenant("acme")
    await plane.report({}, pool_bytes=1 << 12)
    plan = await ask(plane, client)
    assert not plan["fits"] and "r1: the weights take" in plan["reasons"][0]
    assert made(await client.post("/deployments", json={"name": "new", "model": "llama"}), 422)


@pytest.mark.parametrize(("spec", "pointer"), [({"model": "none"}, "/model"), ({"dtype": "int3"}, "/dtype")])
async def test_a_plan_of_what_can_not_be_is_refused_like_a_deployment(
    plane: Plane, spec: dict[str, object], pointer: str
) -> None:
    client = await plane.tenant("acme")
    refused = await client.post("/deployments:plan", json={"name": "new", "model": "llama"} | spec)
    assert made(refused, 422)["errors"][0]["pointer"] == pointer
