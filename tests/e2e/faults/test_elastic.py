"""`staccato up --runtimes 1:2`: a runtime comes with the load, and a runtime goes with the load.

No stream pays for the change: tokens equal the tokens of the same requests alone, and exactly the delivered tokens are
booked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import Fleet

# The keys and values of all streams together take twice the room that the weights leave on a device. Memory alone
# decides on the number of runtimes: with a patient objective, no machine is too slow for the streams.
DEVICE_MEMORY, PATIENT = "24MiB", {"ttft_ms": 600_000, "tbt_ms": 60_000}
DIFFERENT, TOGETHER = 4, 16  # streams with different prompts, streams at a time under load
SETTINGS = {"STACCATO_DRAIN_S": "30", "STACCATO_HANG_S": "60"}
WAIT_S = 240.0


async def fleet_until(fleet: Fleet, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask for the state of the fleet until `true` holds, and return the state; fail after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while True:
        answer = await asyncio.to_thread(fleet.platform.get, "/api/v1/fleet")
        if answer.status_code == 200 and true(answer.json()):
            said: dict[str, Any] = answer.json()
            return said
        assert time.monotonic() < deadline, f"after {WAIT_S} s the gateway still answers {answer.text}"
        await asyncio.sleep(0.2)


class Streams:
    """Streams one after the other, `together` at a time, until `end` has the streams end."""

    def __init__(self, fleet: Fleet, together: int) -> None:
        self._fleet, self._enough = fleet, asyncio.Event()
        self.said: list[tuple[int, list[int]]] = []  # number of the prompt, and tokens
        self._tasks = [asyncio.create_task(self._again(number % DIFFERENT)) for number in range(together)]

    async def _again(self, number: int) -> None:
        while not self._enough.is_set():
            self.said.append((number, await self._fleet.stream("patient", number)))

    async def end(self) -> None:
        """Let the streams end. Raises the error of a failed stream."""
        self._enough.set()
        await asyncio.gather(*self._tasks)


async def until_both_made_tokens(fleet: Fleet) -> None:
    """Return when both runtimes have made tokens; fail after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        made: set[str] = set()
        while not made >= {"r1", "r2"}:
            await asyncio.sleep(0.2)
            made = {gpu["id"] for gpu in await fleet.gpus() for model in gpu["models"].values() if model["tokens"]}


@pytest.mark.timeout(900)
async def test_a_runtime_comes_with_the_load_and_goes_with_the_load_at_no_cost_for_a_stream(tmp_path: Path) -> None:
    arguments = ("--device-memory", DEVICE_MEMORY)
    with Fleet.running(tmp_path, 1, *arguments, runtimes="1:2", settings=SETTINGS) as fleet:
        fleet.platform.deploy("acme", "patient", fleet.models[0], slo=PATIENT)
        alone = [(number, await fleet.stream("patient", number)) for number in range(DIFFERENT)]
        assert (await fleet_until(fleet, lambda said: said["wanted"] == 1))["serving"] == ["r1"]

        load = Streams(fleet, TOGETHER)
        try:
            await fleet_until(fleet, lambda said: said["serving"] == ["r1", "r2"])
            await until_both_made_tokens(fleet)
        finally:
            await load.end()

        few = Streams(fleet, 1)
        try:
            await fleet_until(fleet, lambda said: said["wanted"] == 1 and said["runtimes"] == 1)
            fleet.platform.until(lambda: len(fleet.platform.children("runtime.node")) == 1, WAIT_S)
        finally:
            await few.end()
        assert [said for said in load.said + few.said if said not in alone] == []
        assert len(load.said) >= TOGETHER and few.said
        await fleet.booked(fleet.tokens)
