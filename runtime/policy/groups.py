"""Grouped first-come prefill, over the queues of one or several devices (Aegaeon, §4.2). Pure.

A request joins a group of its model that still takes any, or starts one at the end of the queue where it would be done
first. What a group was ever given counts, not what is left in it: else a model that is asked all the time would fill
the group at the head for ever. So nobody waits for more than GROUP_MOST requests of each group that was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.request import ModelKey, RequestId

GROUP_MOST = 8  # requests; MAX_GPSIZE of the paper


class Prefill(NamedTuple):
    """One prompt to compute, and how long that may take."""

    request: RequestId
    model: ModelKey
    work_s: float
    switch_s: float  # before it, where another model ran


@dataclass(slots=True)
class Group:
    """Prefills of one model, done one at a time in the order in which they came."""

    model: ModelKey
    waiting: list[Prefill] = field(default_factory=list)
    admitted: int = 0
    admitted_s: float = 0.0
    closed: bool = False

    def add(self, prefill: Prefill) -> None:
        self.waiting.append(prefill)
        self.admitted += 1
        self.admitted_s += prefill.work_s


@dataclass(slots=True)
class Queue:
    """The groups of one device.

    Once others wait behind it, a group gets no more than `group_s_most` of work: half the shortest TTFT leaves them the
    other half."""

    id: int = 0
    group_s_most: float = float("inf")
    groups: list[Group] = field(default_factory=list)
    current: ModelKey | None = None  # whose prefill began last
    busy_until: float = 0.0  # when that one is done

    def takes(self, prefill: Prefill) -> bool:
        return self._joined(prefill) is not None

    def add(self, prefill: Prefill) -> None:
        group = self._joined(prefill)
        if group is None:
            group = Group(prefill.model)
            self.groups.append(group)
        group.add(prefill)

    def _joined(self, prefill: Prefill) -> Group | None:
        for group in self.groups:
            if group.model == prefill.model and not group.closed and group.admitted < GROUP_MOST:
                if group is self.groups[-1] or group.admitted_s + prefill.work_s <= self.group_s_most:
                    return group
        return None

    def finish_at(self, prefill: Prefill, now: float) -> float:
        """When it may be done, in a group of its own at the end."""
        at, before = max(now, self.busy_until), self.current
        for group in self.groups:
            at += sum(waiting.work_s for waiting in group.waiting)
            at += group.waiting[0].switch_s if group.model != before else 0.0
            before = group.model
        return at + prefill.work_s + (prefill.switch_s if prefill.model != before else 0.0)

    def next(self, waits: Callable[[Prefill], bool], able: Callable[[ModelKey], bool]) -> Group | None:
        """The first group whose model is able to run; its first prefill comes next. Who waits no longer, begun or
        cancelled, leaves the groups that are looked at; the places that they had stay taken."""
        for group in list(self.groups):
            group.waiting = [prefill for prefill in group.waiting if waits(prefill)]
            if not group.waiting:
                self.groups.remove(group)
            elif able(group.model):
                return group
        return None

    def begin(self, group: Group, now: float) -> None:
        """Its first prefill begins. If others wait, nobody joins the group any more."""
        prefill = group.waiting[0]
        group.closed |= len(self.groups) > 1
        switch_s = prefill.switch_s if prefill.model != self.current else 0.0
        self.current, self.busy_until = prefill.model, now + switch_s + prefill.work_s

    def done(self, prefill: Prefill, now: float) -> None:
        """It is, as its device says: begun and left."""
        for group in self.groups:
            if prefill in group.waiting:
                group.waiting.remove(prefill)
                group.closed |= len(self.groups) > 1
                if not group.waiting:
                    self.groups.remove(group)
                break
        self.current, self.busy_until = prefill.model, now


def choose(queues: Sequence[Queue], prefill: Prefill, now: float) -> Queue:
    """Which queue to add it to: the first with a group that takes it, else where it is done first by all estimates."""
    for queue in queues:
        if queue.takes(prefill):
            return queue
    return min(queues, key=lambda queue: (queue.finish_at(prefill, now), queue.id))
