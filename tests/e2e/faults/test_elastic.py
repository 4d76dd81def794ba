"""`staccato up --runtimes 1:2`: a second runtime comes with the load and one runtime goes with the load, at no cost for a
stream: tokens equal the tokens of the same requests alone, and exactly the delivered tokens are booked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.fleet import TOKENS, Fleet

TOGETHER = 16  # streams at a time: the keys and values of all of them are several times the room of a device
ARGUMENTS = ("--device-memory", "24MiB")  # the model's weights, and keys and values of about 2,000 tokens
SETTINGS = {"STACCATO_DRAIN_S": "30", "STACCATO_HANG_S": "60"}
WAIT_S = 300.0


async def fleet_until(fleet: Fleet, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask for the state of the fleet until `true` holds for the state, which is returned; fail after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while True:
        answer = await asyncio.to_thread(fleet.platform.get, "/api/v1/fleet")
        said: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        if said and true(said):
            return said
        assert time.monotonic() < deadline, f"after {WAIT_S} s the gateway still answers {answer.text}"
        await asyncio.sleep(0.2)


async def load(fleet: Fleet, enough: asyncio.Event) -> dict[int, list[list[int]]]:
    """Keep TOGETHER streams running until `enough` is set, and return when the streams have ended: the tokens that each
    number of a stream got, again and again."""
    said: dict[int, list[list[int]]] = {number: [] for number in range(TOGETHER)}

    async def again(number: int) -> None:
        while not enough.is_set():
            said[number].append(await fleet.stream(fleet.models[0], number))

    async with asyncio.TaskGroup() as group:
        for number in said:
            group.create_task(again(number))
    return said


async def tokens_of(fleet: Fleet) -> dict[str, int]:
    """Number of tokens that each runtime made."""
    return {gpu["id"]: sum(model["tokens"] for model in gpu["models"].values()) for gpu in await fleet.gpus()}


async def test_a_second_runtime_comes_with_the_load_and_one_goes_with_the_load(tmp_path: Path) -> None:
    t0=time.monotonic()
    def lap(w): print(f"{time.monotonic()-t0:6.1f} {w}", flush=True)
    with Fleet.running(tmp_path, 1, *ARGUMENTS, runtimes="1:2", settings=SETTINGS) as fleet:
        lap("up")
        alone = {number: await fleet.stream(fleet.models[0], number) for number in range(TOGETHER)}
        lap("alone")
        assert (await fleet_until(fleet, lambda said: said["wanted"] == 1))["serving"] == ["r1"]
        enough = asyncio.Event()
        loaded = asyncio.create_task(load(fleet, enough))
        async def watch():
            while True:
                gpus=await fleet.gpus()
                lap((await asyncio.to_thread(fleet.platform.get, "/api/v1/fleet")).text)
                for g in gpus:
                    lap((g["id"], g["memory_bytes"], g["used_bytes"], [(m["running"],m["waiting"],m["kv_bytes"],m["tokens"]) for m in g["models"].values()]))
                await asyncio.sleep(1)
        w=asyncio.create_task(watch())
        await fleet_until(fleet, lambda said: said["serving"] == ["r1", "r2"] or loaded.done())
        lap("r2")
        while not loaded.done() and not (await tokens_of(fleet)).get("r2"):
            await asyncio.sleep(0.2)
        enough.set()
        for number, answers in (await loaded).items():
            assert answers and all(tokens == alone[number] for tokens in answers)
        lap("loaded")
        await fleet_until(fleet, lambda said: said["wanted"] == 1 and len(said["serving"]) == 1 and not said["draining"])
        lap("gone")
        w.cancel()
        assert len(fleet.platform.children("runtime.node")) == 1
        await fleet.booked(fleet.tokens)
        print(open(str(fleet.platform.data)+".up.log").read())
