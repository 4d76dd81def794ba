"""A node's answers over the bus to requests for views."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from runtime import ipc
from runtime.node.views import Views
from store.bus import Bus
from store.contract import views, wire
from store.contract.views import Content, PageMap, PageRun, ShowPages, ShowTimeline, Span, Stage, Timeline, Use
from tests.conftest import NatsServer

S = 1_000_000


class Asked:
    """A pipe to a device process that answers at the test's command."""

    def __init__(self) -> None:
        self.messages: list[ipc.ToDevice] = []

    def send(self, message: ipc.ToDevice) -> None:
        self.messages.append(message)

    async def asked(self, times: int) -> None:
        """Wait until the device was asked `times` times."""
        async with asyncio.timeout(30):
            while len(self.messages) < times:
                await asyncio.sleep(0.01)
        assert self.messages == [ipc.ShowDevicePages()] * times


class Looked:
    """A node's views, and a viewer at the other end of the bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.device: Asked | None = None
        self.views = Views("r1", lambda: self.device)  # type: ignore[arg-type, return-value]

    async def timeline(self, past_s: float = 60.0) -> Timeline:
        now_us = time.time_ns() // 1000
        asked = ShowTimeline(from_us=now_us - round(past_s * S), to_us=now_us + S, most=100)
        return wire.decode(Timeline, await self._bus.request(views.timeline_subject("r1"), asked))

    async def pages(self) -> PageMap:
        return wire.decode(PageMap, await self._bus.request(views.pages_subject("r1"), ShowPages()))


@pytest.fixture
async def looked(nats_server: NatsServer) -> AsyncIterator[Looked]:
    async with Bus.connect(nats_server.url, "r1") as bus:
        made = Looked(bus)
        await made.views.start(bus)
        yield made


async def test_what_passed_on_the_devices_clock_is_told_in_unix_time(looked: Looked) -> None:
    at_us = time.monotonic_ns() // 1000
    spans = [Span(at_us, 40, Use.SWITCH, "m"), Span(at_us + 40, 60, Use.STEPS, "m", 3, 2)]
    looked.views.heard(ipc.Passed(spans, [Stage(at_us, 30, "m", "fetch")], Use.OPEN))
    said = await looked.timeline()
    assert [span.use for span in said.spans] == [Use.AWAY, Use.SWITCH, Use.STEPS, Use.OPEN]
    assert sum(span.us for span in said.spans) == said.to_us - said.from_us
    assert abs(said.spans[1].at_us - time.time_ns() // 1000) < 10 * S
    assert said.stages == [Stage(said.spans[1].at_us, 30, "m", "fetch")]


async def test_everybody_who_asks_gets_a_map_unless_the_device_goes(looked: Looked) -> None:
    looked.device = Asked()
    looked.views.heard(ipc.State(page_bytes=4096))
    runs = [PageRun(3, Content.WEIGHTS, "m"), PageRun(5, Content.FREE)]
    asking = [asyncio.create_task(looked.pages()) for _ in range(3)]
    for count in (1, 2, 3):
        await looked.device.asked(count)
        if count < 3:
            looked.views.heard(ipc.Mapped(runs))
    looked.views.device_lost()
    looked.views.heard(ipc.Mapped(runs))  # too late
    *told, last = await asyncio.gather(*asking)
    assert told == [PageMap(page_bytes=4096, runs=runs)] * 2
    assert "did not answer" in last.missing and not last.runs


async def test_without_a_device_process_there_is_no_map_and_the_time_is_nobodys(looked: Looked) -> None:
    assert "is starting its device process" in (await looked.pages()).missing
    at_us = time.monotonic_ns() // 1000
    looked.views.heard(ipc.Passed([Span(at_us, 10, Use.IDLE)], [], Use.IDLE))
    looked.views.device_lost()
    assert [span.use for span in (await looked.timeline()).spans] == [Use.AWAY, Use.IDLE, Use.AWAY]
