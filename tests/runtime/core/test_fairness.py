"""The tenant and weight of a request, sent by the gateway, reach the device and decide there: shown by event order."""

from __future__ import annotations

import itertools

from runtime import ipc
from runtime.core.turns.slack import Slack
from runtime.device.loop import Device
from store.contract.wire import replace
from tests.runtime.device.test_device import PAGE_BYTES, PAGES_TOTAL, WEIGHTS_PAGES, Node, spec

AT_ONCE = PAGES_TOTAL - WEIGHTS_PAGES  # number of requests with a page
FLOOD = 6 * AT_ONCE


class Tenants(Node):
    """A node whose clock advances with each look: a step takes as long as a second."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []  # streams, as their first tokens came
        ticks = itertools.count()
        self.device = Device(ipc.DeviceEnd(self._theirs), Slack(), self.build, lambda: next(ticks) / 2)

    def of(self, tenant: str) -> ipc.Start:
        start = self.start()
        return ipc.Start(replace(start.run, tenant=tenant, ttft_s=1e4, tbt_s=1e3))

    def _note(self, message: ipc.ToNode) -> None:
        if isinstance(message, ipc.Made):
            self.order += [delta.stream for delta in message.deltas["g"] if delta.at == 0 and delta.tokens]
        super()._note(message)


def test_who_is_within_its_share_begins_before_most_of_the_flood_that_came_before_it() -> None:
    node = Tenants()
    flood, within = [node.of("flood") for _ in range(FLOOD)], [node.of("within") for _ in range(3)]
    node.send(ipc.Place(spec("a", None, PAGE_BYTES // 4)))
    node.when(lambda: node.model("a").load_ms > 0, *flood, *within)
    node.run(until=lambda: len(node.order) == FLOOD + len(within))
    begun = [node.order.index(start.run.stream) for start in within]
    assert max(begun) < FLOOD / 2, "first come first served they would be the last"
