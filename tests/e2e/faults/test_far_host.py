"""A runtime and a gateway on a host behind a slow link that loses packets, and losses of their way to the bus alone.

Packets take 20 ms each way, and a packet in a hundred is lost. tests/store/test_cluster.py cuts servers of the bus from
each other."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT, free_port
from tests.e2e.faults.hosts import HERE, THERE, Host, begun_without, namespaces, passed_on, runtime_on, seen
from tests.e2e.fleet import EACH, MANY_TOKENS, Fleet

DELAY_S, LOSS = 0.02, 0.01
CUT_S = 10.0
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Far:
    """The fleet, the far host, the ports at which the far host finds the bus, and the URL of the far gateway."""

    fleet: Fleet
    host: Host
    runtimes_bus: int
    gateways_bus: int
    url: str

    @contextlib.asynccontextmanager
    async def cut(self, port: int) -> AsyncIterator[None]:
        """Within the context the connections of the far host to a port of the bus lose every packet."""
        self.host.cut_port(port)
        try:
            yield
        finally:
            self.host.cut_port(0)


@contextlib.contextmanager
def gateway_on(host: Host, fleet: Fleet, bus: int, folder: Path) -> Iterator[str]:
    """Run a gateway on the host. Yields the gateway's URL."""
    first, port = fleet.platform.child("gateway.app").environ(), free_port()
    folder.mkdir()
    for name in ("pepper", "admin.key"):
        (folder / name).write_text((fleet.platform.data / name).read_text())
    told = {name: value for name, value in first.items() if not name.endswith(("_FD", "_FDS"))}
    told |= {
        "STACCATO_DATA": str(folder),
        "STACCATO_DATABASE_URL": f"sqlite:///{fleet.platform.data}/staccato.db",
        "STACCATO_NATS_URL": f"nats://{HERE}:{bus}",
        "STACCATO_NATS_CREDENTIALS": str(fleet.platform.data / "nats-users/gateway.nk"),
        "STACCATO_HOST": THERE,
        "STACCATO_PORT": str(port),
        "STACCATO_RUNTIMES": "0",
    }
    command = host.command(sys.executable, "-m", "gateway.app")
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log, env=told, cwd=ROOT) as process:
        try:
            yield f"http://{THERE}:{port}"
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture
async def far(tmp_path: Path) -> AsyncIterator[Far]:
    if reason := namespaces(DELAY_S):
        pytest.skip(reason)
    crossing = {"STACCATO_TRANSPORT_BIND": HERE, "STACCATO_TRANSPORT_PLAINTEXT": "true"}
    with (
        Host.plugged_in(DELAY_S, LOSS) as host,
        Fleet.running(tmp_path, 2, runtimes=1, settings=crossing) as fleet,
    ):
        bus, second = int((fleet.platform.data / "nats.port").read_text()), free_port()
        async with passed_on(bus), passed_on(bus, second):
            with (
                runtime_on(host, fleet, bus, tmp_path / "r2.log"),
                gateway_on(host, fleet, second, tmp_path / "gateway") as url,
            ):
                await seen(fleet, "r1", "r2")
                await fleet.ready(2)
                async with asyncio.timeout(300), httpx.AsyncClient() as client:
                    while True:
                        with contextlib.suppress(httpx.HTTPError):
                            if (await client.get(f"{url}/readyz")).status_code == 200:
                                break
                        await asyncio.sleep(0.2)
                yield Far(fleet, host, bus, second, url)


async def test_everything_goes_on_over_a_slow_link_that_loses_packets(far: Far) -> None:
    fleet = far.fleet
    undisturbed = await fleet.streams(EACH, tokens=MANY_TOKENS)

    # Requests move over the link, in both directions.
    for source, target in (("r2", "r1"), ("r1", "r2")):
        before = (await fleet.moved())[source]
        streams = await begun_without(fleet, target, MANY_TOKENS)
        await fleet.drain(source, True)
        assert await streams == undisturbed
        await fleet.drain(source, False)
        await asyncio.sleep(1.5)  # the next lease
        assert (await fleet.moved())[source] > before
    await fleet.booked(fleet.tokens)

    # A partition of the runtime from the bus.
    streams = await begun_without(fleet, "r1", MANY_TOKENS)
    async with far.cut(far.runtimes_bus):
        await seen(fleet, "r1")
        await asyncio.sleep(CUT_S)
    assert await streams == undisturbed
    await seen(fleet, "r1", "r2")
    await fleet.booked(fleet.tokens)

    # A partition of the gateway from the bus.
    alone = await fleet.stream(fleet.models[0], 0, MANY_TOKENS)
    stream = asyncio.create_task(fleet.stream(fleet.models[0], 0, MANY_TOKENS, far.url))
    assert await fleet.past(fleet.tokens + 50, stream)
    async with far.cut(far.gateways_bus):
        await asyncio.sleep(CUT_S)
        assert await fleet.stream(fleet.models[0], 1), "the other gateway serves"
    assert await stream == alone
    await fleet.booked(fleet.tokens, 60)
