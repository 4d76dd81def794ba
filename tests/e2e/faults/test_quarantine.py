"""The process that makes a model's image dies at every try. The model fails with the reason, streams of other models go
on, and a later try serves the model."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from deploy.demo.random_weights import write_random
from tests.e2e.fleet import EACH, Fleet

FATAL = {signal.SIGSEGV: "signal 11", signal.SIGKILL: "signal 9"}  # a fault, and the kernel that lacks memory
WHY = "the model could not be loaded: the process that made its image ended with"


def processes(fleet: Fleet, program: str) -> list[psutil.Process]:
    """The processes of the platform that run the module `program`."""
    found = []
    for child in fleet.platform.children(program):
        with contextlib.suppress(psutil.Error):
            if program in child.cmdline():
                found.append(child)
    return found


async def end_each(fleet: Fleet, number: int) -> None:
    """Send the signal `number` to processes that make images, until the model `fatal` has failed."""
    async with asyncio.timeout(60):
        while await phase(fleet) != "failed":
            for process in processes(fleet, "runtime.imaging"):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            await asyncio.sleep(0.05)


async def status(fleet: Fleet) -> dict[str, Any]:
    deployments = (await asyncio.to_thread(fleet.platform.get, "/api/v1/deployments")).json()["data"]
    found: dict[str, Any] = next(each["status"] for each in deployments if each["name"] == "fatal")
    return found


async def phase(fleet: Fleet) -> str:
    return str((await status(fleet))["phase"])


@pytest.mark.timeout(300)
async def test_a_model_that_ends_the_process_of_its_image_costs_no_stream_a_token(tmp_path: Path) -> None:
    with Fleet.running(tmp_path, 2, runtimes=1) as fleet:
        platform = fleet.platform
        await fleet.ready(1)
        undisturbed = await fleet.streams(EACH)
        devices = processes(fleet, "runtime.device")
        model = write_random(tmp_path / "fatal", "llama", hidden=512, layers=16, heads=8, kv_heads=4)
        await asyncio.to_thread(platform.model, "fatal", model)
        body = {"name": "fatal", "model": "fatal", "tenant": "acme", "dtype": "float32"}
        path = f"/api/v1/deployments/{(await asyncio.to_thread(platform.post, '/api/v1/deployments', body))['id']}"
        for number, why in FATAL.items():
            ending = asyncio.create_task(end_each(fleet, number))
            while not ending.done():
                assert await fleet.streams(EACH) == undisturbed
            await ending
            said = [condition["message"] for condition in (await status(fleet))["conditions"]]
            assert any(f"{WHY} {why}" in message for message in said), said
            async with platform.async_client("acme", max_retries=0) as client:
                with pytest.raises(openai.InternalServerError, match=WHY):
                    await client.completions.create(model="fatal", prompt="x")
            await asyncio.to_thread(platform.post, f"{path}:wake", {})
        began = time.monotonic()
        while await phase(fleet) != "awake":
            assert time.monotonic() < began + 60, await status(fleet)
            await asyncio.sleep(0.2)
        async with platform.async_client("acme") as client:
            answer = await client.completions.create(model="fatal", prompt="x", max_tokens=3)
        assert answer.usage is not None and answer.usage.completion_tokens == 3
        fleet.tokens += 3
        assert await fleet.streams(EACH) == undisturbed
        assert processes(fleet, "runtime.device") == devices, "no device process has ended"
        await fleet.booked(fleet.tokens)
