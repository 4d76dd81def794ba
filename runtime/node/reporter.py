"""Reports of a runtime to dispatchers: gateways that choose runtimes, and nodes that choose targets of moves."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable

from runtime.core.fleet.report import report_of
from runtime.core.ledgers.costs import LawCosts
from runtime.node.gateways import Gateways
from runtime.node.lease import LeaseKeeper
from runtime.node.own import OwnState
from store.bus import Bus, BusError
from store.contract import wire
from store.contract.reports import PERIOD_S_MOST, Report, period_s, report_subject

IDLE_PERIOD_S = PERIOD_S_MOST  # between two reports of a runtime without requests
APART = 0.2  # least time between two reports, in periods


class Reporter:
    """Publishes the reports of a runtime.

    `costs`: costs of the models hosted on this runtime. `runtimes`: number of runtimes of the fleet."""

    def __init__(
        self,
        bus: Bus,
        own: OwnState,
        gateways: Gateways,
        lease: LeaseKeeper,
        costs: LawCosts,
        runtimes: Callable[[], int],
    ) -> None:
        self._bus, self._own, self._gateways, self._lease = bus, own, gateways, lease
        self._costs, self._runtimes = costs, runtimes
        self._seq = 0
        self._last: Report | None = None
        self._sent_at = 0.0

    async def keep(self) -> None:
        """Publish a report each period, and sooner when requests or weights of a model came or went."""
        clock, due = asyncio.get_running_loop().time, self._own.report_due
        while True:
            due.clear()
            report, busy_s = self._report(), period_s(self._runtimes())
            wait_s = busy_s if report.seats else IDLE_PERIOD_S
            if self._last is None or _differ(report, self._last) or clock() >= self._sent_at + wait_s:
                self._last, self._sent_at = report, clock()
                with contextlib.suppress(BusError):  # NATS is away: gateways know
                    await self._bus.publish(report_subject(self._own.id), wire.encode(report))
            await asyncio.sleep(APART * busy_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._sent_at + wait_s - clock())):
                    await due.wait()

    def _report(self) -> Report:
        self._seq += 1
        requests = Counter(stream.run.model for stream in self._gateways.streams)
        return report_of(self._lease.lease(), self._seq, self._costs, requests)


def _differ(report: Report, last: Report) -> bool:
    """Return whether requests or weights of a model came or went, or the runtime begins or ends to take requests."""
    return (
        report.seats.keys() != last.seats.keys()
        or report.here != last.here
        or (report.loading, report.draining, report.role) != (last.loading, last.draining, last.role)
    )
