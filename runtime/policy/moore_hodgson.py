"""Which requests are worth a prefill in time: as few late ones as can be (Moore-Hodgson; Prism, §6.2). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from runtime.request import RequestId

PROMOTED_AFTER = 3.0  # times its TTFT


class Job(NamedTuple):
    """A first token that somebody waits for."""

    request: RequestId
    arrived_at: float
    ttft_s: float
    work_s: float  # its prefill, and before that a switch if it needs one
    weight: float = 1.0

    @property
    def due_at(self) -> float:
        return self.arrived_at + self.ttft_s


def on_time(jobs: Iterable[Job], now: float, running_s: float = 0.0, promote: int = 0) -> tuple[list[Job], list[Job]]:
    """The order in which to dispatch, and who is late; the late lane runs, in its order, when nobody else does.

    `running_s`: what is under way takes so long, and is not stopped. `promote`: at most so many of the late ones, the
    oldest, go before all others because they waited for PROMOTED_AFTER times their TTFT. With equal weights no other
    order has more on time; with any weights that is NP-hard, and giving up the most work per weight is a heuristic."""
    ordered = sorted(jobs, key=lambda job: (job.due_at, job.request))
    overdue = [job for job in ordered if now > job.arrived_at + PROMOTED_AFTER * job.ttft_s]
    promoted = sorted(overdue, key=_arrival)[:promote]
    start = now + running_s + sum(job.work_s for job in promoted)
    possible = [job for job in ordered if start + job.work_s <= job.due_at]
    dropped = {job.request for job in _given_up(possible, start)}
    dispatched = promoted + [job for job in possible if job.request not in dropped]
    taken = {job.request for job in dispatched}
    return dispatched, sorted((job for job in ordered if job.request not in taken), key=_arrival)


def _arrival(job: Job) -> tuple[float, RequestId]:
    return job.arrived_at, job.request


def _given_up(ordered: list[Job], start: float) -> list[Job]:
    """Of jobs by due time, one after another from `start`, those without which all others are on time."""
    given_up: list[Job] = []
    largest: list[tuple[float, RequestId, Job]] = []
    at = start
    for job in ordered:
        heappush(largest, (-job.work_s / job.weight, job.request, job))
        at += job.work_s
        while at > job.due_at and largest:
            _, _, dropped = heappop(largest)
            at -= dropped.work_s
            given_up.append(dropped)
    return given_up
