"""Order of prefills with the fewest late first tokens (Moore-Hodgson; Prism, §6.2). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from runtime.core.device.request import RequestId

PROMOTED_AFTER = 3.0  # times the TTFT of the request


class PendingPrefill(NamedTuple):
    """First token awaited by a request."""

    request: RequestId
    arrived_at: float
    ttft_s: float
    work_s: float  # the prefill, and the switch before the prefill if needed
    weight: float = 1.0

    @property
    def due_at(self) -> float:
        return self.arrived_at + self.ttft_s


def on_time(
    jobs: Iterable[PendingPrefill], now: float, running_s: float = 0.0, promote: int = 0
) -> tuple[list[PendingPrefill], list[PendingPrefill]]:
    """Splits jobs into a list to dispatch in order, and a list of late jobs to run, in order, when the first is empty.

    With equal weights no order has more jobs on time. With unequal weights the problem is NP-hard, and giving up the
    job with the most work per weight is a heuristic.

    Args:
        running_s: time that the work under way still takes; the work is not stopped.
        promote: number of overdue jobs, oldest first, to put before all jobs: a job is overdue after waiting for
            PROMOTED_AFTER times its TTFT."""
    ordered = sorted(jobs, key=lambda job: (job.due_at, job.request))
    overdue = [job for job in ordered if now > job.arrived_at + PROMOTED_AFTER * job.ttft_s]
    promoted = sorted(overdue, key=_arrival)[:promote]
    start = now + running_s + sum(job.work_s for job in promoted)
    possible = [job for job in ordered if start + job.work_s <= job.due_at]
    dropped = {job.request for job in _given_up(possible, start)}
    dispatched = promoted + [job for job in possible if job.request not in dropped]
    taken = {job.request for job in dispatched}
    return dispatched, sorted((job for job in ordered if job.request not in taken), key=_arrival)


def _arrival(job: PendingPrefill) -> tuple[float, RequestId]:
    return job.arrived_at, job.request


def _given_up(ordered: list[PendingPrefill], start: float) -> list[PendingPrefill]:
    """Jobs to give up so that the remaining jobs, run by due time one after another from `start`, are on time."""
    given_up: list[PendingPrefill] = []
    largest: list[tuple[float, RequestId, PendingPrefill]] = []
    at = start
    for job in ordered:
        heappush(largest, (-job.work_s / job.weight, job.request, job))
        at += job.work_s
        while at > job.due_at and largest:
            _, _, dropped = heappop(largest)
            at -= dropped.work_s
            given_up.append(dropped)
    return given_up
