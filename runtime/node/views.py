"""Views of a runtime for operators, answered by the node: timeline of the device's use, and map of the pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from msgspec.structs import replace

from runtime import ipc
from runtime.core.ledgers.timeline import History
from store.bus import Bus
from store.contract import views, wire

PAGES_TIMEOUT_S = 3.0  # a device that builds an engine does not answer within this time


class Views:
    """The timeline and the page map of a runtime. `device` returns the pipe to the device process, or None."""

    def __init__(self, runtime: str, device: Callable[[], ipc.NodeEnd | None]) -> None:
        self._runtime, self._device = runtime, device
        self._offset_us = (time.time_ns() - time.monotonic_ns()) // 1000  # UNIX time minus the device's clock
        self._history = History(self._now_us())
        self._asked: asyncio.Future[list[views.PageRun]] | None = None  # the bus delivers one question at a time
        self._page_bytes = 0

    async def start(self, bus: Bus) -> None:
        await bus.respond(views.timeline_subject(self._runtime), self._timeline)
        await bus.respond(views.pages_subject(self._runtime), self._pages)

    def heard(self, message: ipc.Passed | ipc.Mapped | ipc.State) -> None:
        match message:
            case ipc.Passed(spans, stages, now):
                since = [replace(span, at_us=span.at_us + self._offset_us) for span in spans]
                ways = [replace(stage, at_us=stage.at_us + self._offset_us) for stage in stages]
                self._history.add(since, ways, now)
            case ipc.Mapped(runs):
                if self._asked and not self._asked.done():
                    self._asked.set_result(runs)
            case ipc.State():
                self._page_bytes = message.page_bytes

    def device_lost(self) -> None:
        self._history.lost()
        if self._asked:
            self._asked.cancel()

    async def _timeline(self, data: bytes) -> views.Timeline:
        asked = wire.decode(views.ShowTimeline, data)
        return self._history.shown(asked.from_us, asked.to_us, self._now_us(), asked.most)

    async def _pages(self, data: bytes) -> views.PageMap:
        wire.decode(views.ShowPages, data)
        device = self._device()
        if device is None:
            return views.PageMap(missing=f"runtime {self._runtime} is starting its device process")
        asked = self._asked = asyncio.get_running_loop().create_future()
        device.send(ipc.ShowDevicePages())
        await asyncio.wait([asked], timeout=PAGES_TIMEOUT_S)
        if not asked.done() or asked.cancelled():
            return views.PageMap(missing=f"the device of runtime {self._runtime} did not answer: it builds an engine")
        return views.PageMap(page_bytes=self._page_bytes, runs=asked.result())

    def _now_us(self) -> int:
        return time.monotonic_ns() // 1000 + self._offset_us
