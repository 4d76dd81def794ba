"""A runtime on a separate host (here a network namespace) whose network is cut. The runtime's streams go on at another
runtime, later frames of the cut runtime are dropped, and after the repair the runtime serves as before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.faults.hosts import Host, begun_without, namespaces, passed_on, runtime_on, seen
from tests.e2e.fleet import EACH, Fleet

CUT_S = 6.0  # longer than the time after which a runtime is given up
# No device hangs here. The first step of a device that was not forked takes more than 4 s on a busy machine.
SETTINGS = {"STACCATO_HANG_S": "60"}


async def test_a_runtime_that_is_cut_off_costs_no_stream_and_comes_back(tmp_path: Path) -> None:
    if reason := namespaces():
        pytest.skip(reason)
    with Fleet.running(tmp_path, 2, runtimes=1, settings=SETTINGS) as fleet, Host.plugged_in() as host:
        port = int((fleet.platform.data / "nats.port").read_text())
        async with passed_on(port):
            with runtime_on(host, fleet, port, tmp_path / "r2.log") as runtime:
                await seen(fleet, "r1", "r2")
                await fleet.ready(2)
                undisturbed = await fleet.streams(EACH)

                streams = await begun_without(fleet, "r1")
                host.cut()
                await seen(fleet, "r1")
                await asyncio.sleep(CUT_S)
                assert runtime.is_running(), "it lives, and does not know that nobody hears it"
                host.mend()
                assert await streams == undisturbed

                await seen(fleet, "r1", "r2")
                await fleet.ready(2)
                streams = await begun_without(fleet, "r1")
                host.cut()
                await asyncio.sleep(0.5)  # too short for a loss: frames of the meantime still arrive
                host.mend()
                assert await streams == undisturbed
            await fleet.booked(fleet.tokens)
