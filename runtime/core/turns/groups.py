"""Grouped first-come prefill, over the queues of one or several devices (Aegaeon, §4.2). Pure.

A request joins an open group of its model. If no group is open, the request starts a group at the end of the queue
where the request would be done first. A group counts every request ever admitted, not the requests left: else a model
with steady demand would fill the group at the head for ever. A request therefore waits for at most GROUP_MOST requests
of each earlier group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from runtime.core.device.request import ModelKey, RequestId

GROUP_MOST = 8  # requests; MAX_GPSIZE of the paper


class Prefill(NamedTuple):
    """A prompt to compute, with estimates of the time needed."""

    request: RequestId
    model: ModelKey
    work_s: float
    switch_s: float  # time before the prompt if a different model ran


@dataclass(slots=True)
class Group:
    """Prefills of a single model, done one after another in order of arrival."""

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
    """Prefill groups of a device, in the order of service.

    Once groups wait behind it, a group admits at most `group_s_most` seconds of work: half the shortest TTFT leaves the
    waiting groups the second half."""

    id: int = 0
    group_s_most: float = float("inf")
    groups: list[Group] = field(default_factory=list)
    current: ModelKey | None = None  # model of the last prefill begun
    busy_until: float = 0.0  # time at which that prefill is done

    def copy(self) -> Queue:
        """Return a queue of equal groups; changes of either queue leave the other queue as it is."""
        groups = [replace(group, waiting=[*group.waiting]) for group in self.groups]
        return replace(self, groups=groups)

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
        """Estimated time at which `prefill` would be done, in a new group at the end of the queue."""
        at, before = max(now, self.busy_until), self.current
        for group in self.groups:
            at += sum(waiting.work_s for waiting in group.waiting)
            at += group.waiting[0].switch_s if group.model != before else 0.0
            before = group.model
        return at + prefill.work_s + (prefill.switch_s if prefill.model != before else 0.0)

    def next(self, waits: Callable[[Prefill], bool], able: Callable[[ModelKey], bool]) -> Group | None:
        """First group whose model is able to run; the group's first prefill comes next. None if no model is able.

        Prefills no longer waiting, begun or cancelled, leave the groups looked at, but still count as admitted."""
        for group in list(self.groups):
            group.waiting = [prefill for prefill in group.waiting if waits(prefill)]
            if not group.waiting:
                self.groups.remove(group)
            elif able(group.model):
                return group
        return None

    def begin(self, group: Group, now: float) -> None:
        """Begins the first prefill of `group`. If more groups wait, `group` is closed to further requests."""
        prefill = group.waiting[0]
        group.closed |= len(self.groups) > 1
        switch_s = prefill.switch_s if prefill.model != self.current else 0.0
        self.current, self.busy_until = prefill.model, now + switch_s + prefill.work_s

    def done(self, prefill: Prefill, now: float) -> None:
        """Removes a prefill begun and completed, as its device reports. If more groups wait, the group is closed."""
        for group in self.groups:
            if prefill in group.waiting:
                group.waiting.remove(prefill)
                group.closed |= len(self.groups) > 1
                if not group.waiting:
                    self.groups.remove(group)
                break
        self.current, self.busy_until = prefill.model, now


def choose(queues: Sequence[Queue], prefill: Prefill, now: float) -> Queue:
    """Queue to add `prefill` to: the first with an open group for its model, else the one estimated to finish first."""
    for queue in queues:
        if queue.takes(prefill):
            return queue
    return min(queues, key=lambda queue: (queue.finish_at(prefill, now), queue.id))
