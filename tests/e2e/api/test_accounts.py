"""Where the device's time went, and the tenants charged for the time: to the microsecond, on the whole platform."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.e2e.conftest import Platform

BOOKED_S = 30


def device_time(platform: Platform) -> dict[str, Any]:
    """Device time of the only runtime, after the runtime has come to rest."""
    (gpu,) = platform.get("/api/v1/gpus").json()["data"]
    time: dict[str, Any] = gpu["time"]
    return time


def used(platform: Platform, tenant: str) -> tuple[int, int]:
    """Microseconds of steps and of switches of a tenant, as counted by the device."""
    id = platform.get(f"/api/v1/tenants/{tenant}").json()["id"]
    labels = [kinds for label, kinds in device_time(platform)["used"].items() if label.startswith(f"{id}/")]
    return sum(kinds["gpu_us"] for kinds in labels), sum(kinds["switch_us"] for kinds in labels)


def booked(platform: Platform, tenant: str) -> tuple[int, int]:
    """Microseconds of steps and of switches of a tenant, as booked by the ledger."""
    rows = platform.get("/api/v1/usage?group_by=deployment", key=platform.keys[tenant]).json()["data"]
    return round(sum(row["gpu_ms"] for row in rows) * 1e3), round(sum(row["switch_ms"] for row in rows) * 1e3)


async def test_who_used_the_device_is_charged_for_what_it_used(platform: Platform) -> None:
    await asyncio.to_thread(platform.until, lambda: device_time(platform)["open_us"] == 0)
    used_before, booked_before = used(platform, "acme"), booked(platform, "acme")
    async with platform.async_client("acme") as client:

        async def ask(model: str, tokens: int) -> None:
            prompt = list(range(5, 5 + tokens))
            await client.completions.create(model=model, prompt=prompt, max_tokens=tokens, temperature=0)

        await asyncio.gather(*(ask(model, tokens) for model in ("faq", "poet", "weather") for tokens in (8, 40, 90)))

    def charged() -> bool:
        device = [now - before for now, before in zip(used(platform, "acme"), used_before, strict=True)]
        ledger = [now - before for now, before in zip(booked(platform, "acme"), booked_before, strict=True)]
        return device == ledger and device[0] > 0

    await asyncio.to_thread(platform.until, charged, BOOKED_S)
    rows = platform.get("/api/v1/usage?group_by=deployment", key=platform.keys["acme"]).json()["data"]
    assert all(row["kv_gb_s"] > 0 for row in rows)
    time = device_time(platform)
    paid = sum(kinds["gpu_us"] + kinds["switch_us"] for kinds in time["used"].values())
    assert time["wall_us"] == time["idle_us"] + time["platform_us"] + time["open_us"] + paid
    assert time["idle_us"] > 0 and time["platform_us"] > 0
