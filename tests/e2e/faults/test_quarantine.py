"""A model that ends the device process at every load: each runtime in turn tries the model three times and leaves the
model out. The streams of other models go on token for token."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from deploy.demo.random_weights import write_random
from tests.e2e.fleet import EACH, Fleet

FATAL = (signal.SIGSEGV, signal.SIGSTOP, signal.SIGKILL)  # a fault, a hang, and the kernel that lacks memory
SETTINGS = {"STACCATO_BUILD_HANG_S": "3"}
WHY = "the model ended the runtime's device process 3 times in a row"


async def fatal_on(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """State of the fatal model at each runtime, by runtime id."""
    return {
        gpu["id"]: state
        for gpu in await fleet.gpus()
        for state in gpu["models"].values()
        if any(name.startswith("acme/fatal@") for name in state["deployments"])
    }


async def end_whoever_loads_it(fleet: Fleet, runtimes: int) -> list[str]:
    """End the device processes that load the fatal model until the model has failed on `runtimes` runtimes.

    Returns the ids of runtimes whose device was ended, in order.
    """
    ended: list[str] = []
    fatal = itertools.cycle(FATAL)
    at_it: list[str] = []
    async with asyncio.timeout(400):
        while True:
            states = await fatal_on(fleet)
            if [state["residency"] for state in states.values()] == ["failed"] * runtimes:
                return ended
            loading = [id for id, state in states.items() if state["residency"] == "loading"]
            assert len(loading) <= 1, f"{loading} try it at once"
            if loading and not at_it:  # else the report may be older than the last end
                for device in devices(fleet, *loading):
                    device.send_signal(next(fatal))
                ended += loading
            at_it = loading
            await asyncio.sleep(0.02)


def devices(fleet: Fleet, *runtimes: str) -> list[psutil.Process]:
    nodes = {node.pid for id in runtimes if (node := fleet.platform.runtime(id))}
    found = []
    for child in fleet.platform.children("runtime.device"):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.ppid() in nodes:
                found.append(child)
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_it_stays_away_and_the_streams_of_others_go_on(tmp_path: Path) -> None:
    with Fleet.running(tmp_path, 2, runtimes=2, settings=SETTINGS) as fleet:
        platform = fleet.platform
        await fleet.ready(2)
        undisturbed = await fleet.streams(EACH)
        model = write_random(tmp_path / "fatal", "llama", hidden=512, layers=16, heads=8, kv_heads=4)
        await asyncio.to_thread(platform.model, "fatal", model)
        body = {"name": "fatal", "model": "fatal", "tenant": "acme"}
        fatal = await asyncio.to_thread(platform.post, "/api/v1/deployments", body)
        ending = asyncio.create_task(end_whoever_loads_it(fleet, 2))
        while not ending.done():
            assert await fleet.streams(EACH) == undisturbed
        ended = await ending
        first, second = ended[0], ended[-1]
        assert first != second and ended == sorted(ended, key=lambda id: id != first), "one after the other"
        assert min(ended.count(first), ended.count(second)) >= 3

        path = f"/api/v1/deployments/{fatal['id']}"
        shown = platform.get(path).json()["status"]
        assert shown["phase"] == "failed" and all(WHY in condition["message"] for condition in shown["conditions"])
        with pytest.raises(openai.InternalServerError, match=WHY):
            platform.client("acme", max_retries=0).completions.create(model="fatal", prompt="x")
        woken = platform.request("POST", f"{path}:wake")
        assert woken.status_code == 503 and WHY in woken.text, woken.text

        alive, began = devices(fleet, first, second), time.monotonic()
        while time.monotonic() < began + 5:
            assert await fleet.streams(EACH) == undisturbed
        assert alive == devices(fleet, first, second) and len(alive) == 2
        await fleet.booked(fleet.tokens)
