"""A node reports to dispatchers when requests of a model come and go, and at intervals in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from pydantic import ByteSize

from runtime import ipc
from runtime.config import RuntimeSettings
from runtime.node.own import DrainedBy
from runtime.node.runtime import Node
from store.bus import Bus
from store.contract import wire
from store.contract.reports import Report, period_s, report_subject
from store.contract.wire import Delta, Finish, ModelState, Residency
from store.tasks import ended
from tests.conftest import NatsServer, soon
from tests.runtime.node.test_node import run


@pytest.fixture
async def told(nats_server: NatsServer) -> AsyncIterator[tuple[Node, list[Report]]]:
    """A node whose device has the models `m` and `n`, and the reports heard of the node so far."""
    async with Bus.connect(nats_server.url, "r1") as bus:
        node = Node(bus, RuntimeSettings(runtime_id="r1", host_cache=ByteSize(1 << 20)))
        node._own.state = ipc.State(models={key: ModelState(residency=Residency.STAGED) for key in "mn"})
        heard: list[Report] = []

        async def hear(data: bytes) -> None:
            heard.append(wire.decode(Report, data))

        await bus.subscribe(report_subject("*"), hear)
        reporting = asyncio.create_task(node._reporter.keep())
        yield node, heard
        await ended(reporting)


async def test_requests_that_come_and_go_are_reported_before_the_next_interval(told: tuple[Node, list[Report]]) -> None:
    node, heard = told
    await soon(lambda: bool(heard))
    assert heard[-1].seats == {} and heard[-1].epoch == node.epoch
    node._streams.open(run(1))
    node._streams.open(run(2))
    await soon(lambda: "m" in heard[-1].seats)
    assert heard[-1].seats["m"].requests == 2 and heard[-1].load > 0
    came = len(heard)
    await soon(lambda: len(heard) > came + 2)  # at intervals, though nothing changes
    await node._streams.publish("g", [Delta(1, [], 0, Finish.STOP), Delta(2, [], 0, Finish.STOP)])
    await soon(lambda: not heard[-1].seats)
    numbers = [report.seq for report in heard]
    assert numbers == sorted(set(numbers)), "a later report has a higher number"


async def test_a_runtime_that_drains_says_so_though_it_is_idle(told: tuple[Node, list[Report]]) -> None:
    node, heard = told
    await soon(lambda: bool(heard))
    node._own.drained_by = DrainedBy.OPERATOR
    node._moves.empty()
    await soon(lambda: heard[-1].draining)
    node._own.drained_by = None
    await ended(node._moves.emptying)  # type: ignore[arg-type]


async def test_a_runtime_of_a_large_fleet_reports_less_often(told: tuple[Node, list[Report]]) -> None:
    """A fleet of 1,024 runtimes sends a gateway as many reports a second as a fleet of 256."""
    assert [period_s(runtimes) for runtimes in (1, 256, 512, 1024, 4096)] == [0.25, 0.25, 0.5, 1.0, 1.0]
    node, heard = told
    for number in range(1023):
        node._peer_changed(f"p{number}", wire.Lease(runtime=f"p{number}", epoch=1, engine="e"))
    node._streams.open(run(1))
    await soon(lambda: bool(heard) and "m" in heard[-1].seats)  # at once, for requests came
    came, at = len(heard), time.monotonic()
    await soon(lambda: len(heard) > came)
    assert time.monotonic() - at > 0.8
