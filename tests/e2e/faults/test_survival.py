"""Runtimes killed, frozen or told to leave cost no client its stream: tokens equal the tokens of an undisturbed run,
without gap or repeat, and exactly the delivered tokens are booked."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Iterator

import psutil
import pytest

from runtime.core.turns.registry import POLICIES
from tests.e2e.fleet import EACH, MANY_TOKENS, RUNTIMES, TOKENS, Fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet.running(tmp_path_factory.mktemp("fleet"), models=3) as running:
        yield running


async def test_streams_that_move_while_they_run_say_what_they_would_have_said(fleet: Fleet) -> None:
    undisturbed = await fleet.undisturbed(EACH)
    async with fleet.moving(random.Random(7)) as moves:
        assert await fleet.streams(EACH) == undisturbed
        await asyncio.sleep(1.5)  # the next lease
    assert sum(moves.values()) >= 15
    await fleet.booked(fleet.tokens)


async def test_prefill_on_one_runtime_and_decode_on_others_says_the_same(fleet: Fleet) -> None:
    undisturbed = await fleet.undisturbed(EACH)
    moved = sum((await fleet.moved()).values())
    try:
        for runtime, role in (("r1", "prefill"), ("r2", "decode"), ("r3", "decode")):
            await asyncio.to_thread(fleet.platform.post, f"/api/v1/gpus/{runtime}:role", {"role": role})
        await asyncio.sleep(1.5)  # the next lease
        assert await fleet.streams(EACH) == undisturbed
    finally:
        for number in range(1, RUNTIMES + 1):
            await asyncio.to_thread(fleet.platform.post, f"/api/v1/gpus/r{number}:role", {"role": "both"})
    await asyncio.sleep(1.5)
    assert sum((await fleet.moved()).values()) - moved >= len(undisturbed)  # every stream was handed on


async def test_a_runtime_that_is_told_to_leave_ends_no_stream(fleet: Fleet) -> None:
    undisturbed = await fleet.undisturbed(EACH)
    said, told = await fleet.hurt(EACH, 2, random.Random(6), signal.SIGTERM)
    assert told == 2 and said == undisturbed
    await fleet.booked(fleet.tokens)


async def test_kill_of_any_runtime_at_any_token_costs_no_stream(fleet: Fleet) -> None:
    undisturbed = await fleet.undisturbed(EACH)
    said, killed = await fleet.hurt(EACH, 6, random.Random(5), signal.SIGKILL)
    assert killed == 6 and said == undisturbed
    await fleet.booked(fleet.tokens)


async def test_a_scheduler_that_is_killed_costs_nothing_and_is_back(fleet: Fleet) -> None:
    """The streams outlast two failovers of the scheduler."""
    undisturbed = await fleet.undisturbed(EACH, MANY_TOKENS)
    before, total = fleet.tokens, MANY_TOKENS * len(undisturbed)
    streams = asyncio.create_task(fleet.streams(EACH, tokens=MANY_TOKENS))
    leaders = [await fleet.scheduler()]
    for share in (8, 4):
        assert await fleet.past(before + total // share, streams)
        fleet.platform.child("runtime.scheduler").kill()
        async with asyncio.timeout(30):
            while (leader := await fleet.scheduler()) in (None, *leaders):
                await asyncio.sleep(0.1)
        leaders.append(leader)
    assert await streams == undisturbed


async def test_what_one_runtime_has_too_much_of_moves_to_the_others(fleet: Fleet) -> None:
    """The drained runtimes come back while r1 has more work than time: the scheduler sees the overload in the leases.

    The objective that makes an overload depends on the machine, and a device without time for any stream takes none.
    """
    undisturbed = await fleet.undisturbed(EACH, MANY_TOKENS)
    if victim := fleet.platform.runtime("r1"):  # a new r1: `fleet.moving` has used a term above any scheduler's
        victim.kill()
        await asyncio.sleep(3.5)  # the lease runs out
        await fleet.ready()
    moved = sum((await fleet.moved()).values())
    for tbt_ms in (16, 8, 32, 4, 64, 2, 128):
        assert await fleet.streams_that_return(EACH, tbt_ms) == undisturbed
        if sum((await fleet.moved()).values()) > moved:
            return
    raise AssertionError("nothing moved, however short the objective")


async def test_a_model_with_one_replica_is_at_one_runtime_and_when_that_dies_at_another(fleet: Fleet) -> None:
    platform = fleet.platform
    one = platform.deploy("acme", "single", fleet.models[0], scaling={"max_replicas": 1})
    name = f"acme/single@{one['status']['active_revision']}"

    async def hosts() -> list[str]:
        return [gpu["id"] for gpu in await fleet.gpus() for m in gpu["models"].values() if name in m["deployments"]]

    try:
        async with asyncio.timeout(30):
            while len(first := await hosts()) != 1:
                await asyncio.sleep(0.2)
        undisturbed = await fleet.stream("single", 0)
        stream = asyncio.create_task(fleet.stream("single", 0))
        assert await fleet.past(fleet.tokens + TOKENS // 3, stream)
        async with asyncio.TaskGroup() as group:
            kept_dead = group.create_task(keep_dead(fleet, first[0]))
            assert await stream == undisturbed
            async with asyncio.timeout(30):  # until the dead runtime's lease runs out, the gateway lists the runtime
                while len(then := await hosts()) != 1 or then == first:
                    await asyncio.sleep(0.2)
            kept_dead.cancel()
    finally:
        platform.request("DELETE", f"/api/v1/deployments/{one['id']}")


async def keep_dead(fleet: Fleet, runtime: str) -> None:
    """Kill the runtime's process, and each process that the supervisor starts instead, until cancelled.

    A runtime that is back before a model is given to another runtime keeps the model.
    """
    while True:
        if (process := fleet.platform.runtime(runtime)) is not None:
            process.kill()
        await asyncio.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_every_policy_says_the_same_on_a_fleet(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The fleet has two runtimes, and models that take turns: four models of about 15 MiB on pools of 40 MiB."""
    said = {}
    for policy in POLICIES:
        folder = tmp_path_factory.mktemp(policy)
        with Fleet.running(folder, 4, "--policy", policy, "--device-memory", "40MiB", runtimes=2) as fleet:
            await fleet.ready(2)
            said[policy] = await fleet.streams(3)
            await fleet.booked(fleet.tokens)
    first = said.popitem()[1]
    assert len(first) == 12 and all(other == first for other in said.values())


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_one_of_two_devices_that_dies_costs_no_stream(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The fleet has two runtimes, each with two devices, over which the models are split."""
    settings = {"STACCATO_TENSOR_PARALLEL": "2"}
    folder = tmp_path_factory.mktemp("split")
    with Fleet.running(folder, 2, "--device-memory", "64MiB", runtimes=2, settings=settings) as fleet:
        await fleet.ready(2)
        assert [gpu["memory_bytes"] for gpu in await fleet.gpus()] == [128 << 20] * 2
        undisturbed = await fleet.streams(EACH)
        before = fleet.tokens
        streams = asyncio.create_task(fleet.streams(EACH))
        assert await fleet.past(before + 100, streams)
        fleet.platform.children("runtime.group.follower")[0].kill()
        assert await streams == undisturbed
        await fleet.ready(2)
        await fleet.booked(fleet.tokens)


async def test_devices_that_froze_outside_steps_cost_no_stream(fleet: Fleet) -> None:
    """Every device gets SIGSTOP outside steps: a frozen device is missed when a request waits for the device.

    New devices build engines around images on disk, so a device may be stopped in the midst of a build."""
    undisturbed = await fleet.undisturbed(EACH)
    for device in fleet.platform.children("runtime.device"):
        device.kill()
    gone: set[str] = set()
    async with asyncio.timeout(60):
        while len(gone) < RUNTIMES:
            gone |= {gpu["id"] for gpu in await fleet.gpus() if not gpu["models"]}
    await fleet.ready()
    for device in (frozen := fleet.platform.children("runtime.device")):
        device.suspend()
    assert len(frozen) == RUNTIMES
    assert await fleet.streams(EACH) == undisturbed
    await fleet.ready()
    await fleet.booked(fleet.tokens)


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_a_frozen_device_or_runtime_costs_no_stream(fleet: Fleet) -> None:
    """SIGSTOP hits a device, whose step never ends, then a runtime, which says nothing and wakes up again."""
    undisturbed = await fleet.undisturbed(EACH)
    before = fleet.tokens
    streams = asyncio.create_task(fleet.streams(EACH))
    assert await fleet.past(before + 200, streams)
    for device in fleet.platform.children("runtime.device")[:1]:
        device.suspend()
    assert await fleet.past(before + 1200, streams)
    sleeper = fleet.platform.runtime("r2")
    assert sleeper is not None
    sleeper.suspend()
    await asyncio.sleep(4)
    sleeper.resume()
    assert await streams == undisturbed
    await fleet.booked(fleet.tokens)


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_a_hundred_kills_cost_no_stream(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Fleet.running(tmp_path_factory.mktemp("hundred"), models=6) as fleet:
        undisturbed = await fleet.undisturbed(10)
        killed = seed = 0
        while killed < 100:
            seed += 1
            said, more = await fleet.hurt(10, 34, random.Random(seed), signal.SIGKILL)
            assert said == undisturbed
            killed += more
        await fleet.booked(fleet.tokens)


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_two_hundred_moves_amid_kills_cost_no_stream(fleet: Fleet) -> None:
    """Moves include moves whose source or target dies in mid-handshake: a runtime is killed for every 20 moves."""
    undisturbed = await fleet.undisturbed(EACH)
    chance, kills = random.Random(8), 0
    async with fleet.moving(chance) as moves:
        while moves.total() < 200 or kills < 10:
            streams = asyncio.create_task(fleet.streams(EACH))
            while not streams.done():
                await asyncio.sleep(chance.uniform(0, 0.5))
                if moves.total() >= 20 * (kills + 1):  # between moves, or in the middle of a move
                    victim = fleet.platform.runtime(f"r{chance.randint(1, RUNTIMES)}")
                    if victim is not None:  # the victim is not down already
                        with contextlib.suppress(psutil.NoSuchProcess):
                            victim.kill()
                            kills += 1
            assert await streams == undisturbed
    print(f"{moves.total()} moves, {kills} kills")
    await fleet.booked(fleet.tokens)
