"""`staccato up --runtimes 1:2`: a runtime comes with the load, and a runtime goes with the load.

No stream pays for the change: tokens equal the tokens of the same requests alone, and exactly the delivered tokens are
booked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.fleet import Fleet

# The keys and values of all streams together take more than the room that the weights leave on a device. Memory alone
# decides on the number of runtimes: with a patient objective, no machine is too slow for the streams.
DEVICE_MEMORY, PATIENT = "24MiB", {"ttft_ms": 600_000, "tbt_ms": 60_000}
DIFFERENT, TOGETHER = 4, 20  # streams with different prompts, streams at a time under load
SETTINGS = {"STACCATO_DRAIN_S": "30", "STACCATO_HANG_S": "60"}
WAIT_S = 240.0


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Ask until the answer is true; fail after WAIT_S. An overloaded gateway is asked again."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if await true():
                    return
            await asyncio.sleep(0.2)


async def seen(fleet: Fleet) -> tuple[int | None, int]:
    """Return the number of runtimes that are wanted, and the number of runtimes with a lease."""
    answer = await asyncio.to_thread(fleet.platform.get, "/api/v1/fleet")
    said = answer.json() if answer.status_code == 200 else {"wanted": None, "runtimes": 0}
    return said["wanted"], said["runtimes"]


async def ready(fleet: Fleet) -> set[str]:
    """Return the runtimes whose device process is up."""
    return {gpu["id"] for gpu in await fleet.gpus() if gpu["engine"]}


async def at_work(fleet: Fleet) -> set[str]:
    """Return the runtimes that have made tokens since their start."""
    return {gpu["id"] for gpu in await fleet.gpus() for model in gpu["models"].values() if model["tokens"]}


class Streams:
    """Streams one after the other, some at a time, and the tokens of all streams."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.said: list[tuple[int, list[int]]] = []  # number of the prompt, and tokens

    async def run_until(self, together: int, true: Callable[[], Awaitable[bool]]) -> None:
        """Keep `together` streams running until the answer of `true` is true, then let the streams end.

        Fails with a stream, or after WAIT_S."""
        enough = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(together):
                group.create_task(self._again(number % DIFFERENT, enough))
            await until(true)
            enough.set()

    async def _again(self, number: int, enough: asyncio.Event) -> None:
        while not enough.is_set():
            await self.run(number)

    async def run(self, number: int) -> None:
        self.said.append((number, await self._fleet.stream("patient", number)))


@pytest.mark.timeout(900)
async def test_a_runtime_comes_with_the_load_and_goes_with_the_load_at_no_cost_for_a_stream(tmp_path: Path) -> None:
    arguments = ("--device-memory", DEVICE_MEMORY)
    with Fleet.running(tmp_path, 1, *arguments, runtimes="1:2", settings=SETTINGS) as fleet:
        fleet.platform.deploy("acme", "patient", fleet.models[0], slo=PATIENT)
        streams = Streams(fleet)
        for number in range(DIFFERENT):
            await streams.run(number)
        alone, streams.said = streams.said, []

        async def scheduled(wanted: int, runtimes: int) -> bool:
            return await seen(fleet) == (wanted, runtimes)

        async def wants_more() -> bool:
            return (await seen(fleet))[0] == 2

        async def both_ready() -> bool:
            """Whether both runtimes can work, or the second runtime came unnoticed and is no longer wanted."""
            return await ready(fleet) == {"r1", "r2"} or (await seen(fleet))[0] == 1

        async def both_at_work() -> bool:
            return await at_work(fleet) == {"r1", "r2"}

        await until(lambda: scheduled(1, 1))
        await streams.run_until(TOGETHER, wants_more)
        await until(both_ready)  # a start is quick without other work for the processors
        await streams.run_until(TOGETHER, both_at_work)
        under_load = len(streams.said)
        await streams.run_until(1, lambda: scheduled(1, 1))
        fleet.platform.until(lambda: len(fleet.platform.children("runtime.node")) == 1, WAIT_S)
        assert [said for said in streams.said if said not in alone] == []
        assert len(streams.said) > under_load >= 2 * TOGETHER
        await fleet.booked(fleet.tokens)
