"""The platform on a cluster of three NATS servers: the loss of a server, or ten seconds of a server's silence, costs no
stream a token, and exactly the delivered tokens are booked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest

from store.bus import Bus
from store.contract import grants, wire
from tests.e2e.fleet import EACH, TOKENS, Fleet
from tests.store.clusters import SERVERS, behind, leader_of

RUNTIMES = 2
SILENT_S = 10.0
BOOKED_S = 60.0  # usage that was on the way to the ledger through a lost server comes again after USAGE_AGAIN_S


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A platform whose runtimes have eight streams: two models with four streams each."""
    folder = tmp_path_factory.mktemp("cluster")
    with Fleet.running(folder, 2, "--nats-cluster", str(SERVERS), runtimes=RUNTIMES) as running:
        yield running


def urls(fleet: Fleet) -> str:
    ports = [(fleet.platform.data / f"nats-{number}.port").read_text().strip() for number in range(1, SERVERS + 1)]
    return ",".join(f"nats://127.0.0.1:{port}" for port in ports)


def server(fleet: Fleet, name: str) -> psutil.Process:
    return fleet.platform.child("nats-server", f"{name}.conf")


@contextlib.asynccontextmanager
async def as_ledger(fleet: Fleet) -> AsyncIterator[Bus]:
    """Connect as the ledger, which may ask for the state of every stream."""
    seed = fleet.platform.data / "nats-users" / "ledger.nk"
    async with Bus.connect(urls(fleet), "test", grants.LEDGER, seed) as bus:
        yield bus


async def leader(fleet: Fleet) -> str:
    """Name of the server that stores the usage first."""
    async with as_ledger(fleet) as bus:
        return await leader_of(bus, wire.USAGE_STREAM)


async def caught_up(fleet: Fleet) -> None:
    """Return when each server has every message of every stream; fail after 90 s."""
    async with asyncio.timeout(90), as_ledger(fleet) as bus:
        for name in (*grants.BUCKETS, wire.USAGE_STREAM):
            while True:
                with contextlib.suppress(Exception):  # without a leader for some seconds
                    if not await behind(bus, name):
                        break
                await asyncio.sleep(0.2)


async def hurt(fleet: Fleet, name: str, silent: bool) -> None:
    """Kill the server, or silence the server for SILENT_S, in the middle of eight streams."""
    await fleet.ready(RUNTIMES)
    calm = fleet.calm.get((EACH, TOKENS)) or await fleet.streams(EACH)
    fleet.calm[EACH, TOKENS] = calm
    victim = server(fleet, name)
    streams = asyncio.create_task(fleet.streams(EACH))
    assert await fleet.past(fleet.tokens + TOKENS, streams)
    if silent:
        victim.suspend()
        try:
            await asyncio.sleep(SILENT_S)
        finally:
            victim.resume()
    else:
        victim.kill()
    assert await streams == calm
    after = await fleet.streams(EACH)  # with the server gone or back
    assert after == calm
    await fleet.booked(fleet.tokens, BOOKED_S)
    await caught_up(fleet)


async def test_the_loss_of_the_server_that_leads_the_usage_costs_no_stream_and_no_row(fleet: Fleet) -> None:
    await hurt(fleet, await leader(fleet), silent=False)


async def test_a_server_cut_off_for_ten_seconds_costs_no_stream_and_books_nothing_twice(fleet: Fleet) -> None:
    await hurt(fleet, await leader(fleet), silent=True)


@pytest.mark.long
@pytest.mark.parametrize("silent", (False, True), ids=("killed", "silent"))
async def test_each_server_in_turn_may_be_lost(fleet: Fleet, silent: bool) -> None:
    for number in range(1, SERVERS + 1):
        await hurt(fleet, f"nats-{number}", silent)
