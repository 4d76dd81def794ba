"""Election of the controller that acts: the holder of a Lease, as in Kubernetes' controllers.

A holder renews the Lease. A Lease that did not change for the whole duration, by the clock of the onlooker, may be
taken: clocks of hosts are never compared. A write names the version of the Lease that was read, so only the first of
two takers succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol

DURATION_S = 15  # after the last renewal a Lease may be taken
RENEW_S = 2.0  # between two renewals
ACT_S = 10.0  # after the last renewal the holder makes no call: less than DURATION_S


@dataclass(frozen=True)
class LeaseRecord:
    """A Lease. `version`: text that Kubernetes compares at a write; empty: no Lease exists."""

    holder: str = ""
    renewed: datetime | None = None
    duration_s: int = DURATION_S
    transitions: int = 0
    version: str = ""


class LeaseStore(Protocol):
    """Place of the Lease."""

    def read(self) -> LeaseRecord:
        """Return the Lease. Raises CallFailed."""

    def write(self, record: LeaseRecord) -> bool:
        """Write the Lease. Returns False after a faster write by a rival. Raises CallFailed."""


class LeaseCandidate:
    """A controller that wants to act.

    Args:
        id: name of the controller, unique among controllers.
        store: place of the Lease.
        now: seconds of a clock that never goes back.
        wall: the time of day, for people who read the Lease.
    """

    def __init__(self, id: str, store: LeaseStore, now: Callable[[], float], wall: Callable[[], datetime]) -> None:
        self._id, self._store, self._now, self._wall = id, store, now, wall
        self._seen = LeaseRecord()
        self._seen_s = now()  # time of the last seen change
        self._held_s: float | None = None  # when the Lease was last renewed by this controller

    @property
    def may_act(self) -> bool:
        """True if this controller renewed the Lease within the last ACT_S."""
        return self._held_s is not None and self._now() < self._held_s + ACT_S

    def campaign(self) -> bool:
        """Renew the Lease, or take an abandoned Lease. Returns `may_act`. Raises CallFailed."""
        began_s, record = self._now(), self._store.read()
        if record.version != self._seen.version:
            self._seen, self._seen_s = record, began_s
        mine = record.holder == self._id
        if not mine and record.holder and began_s < self._seen_s + record.duration_s:
            self._held_s = None
            return False
        transitions = record.transitions + (not mine and bool(record.version))
        taken = replace(record, holder=self._id, renewed=self._wall(), duration_s=DURATION_S, transitions=transitions)
        self._held_s = began_s if self._store.write(taken) else None
        return self.may_act

    def resign(self) -> None:
        """Give the Lease up, so that the next controller need not wait. Raises CallFailed."""
        if self._held_s is None:
            return
        self._held_s = None
        record = self._store.read()
        if record.holder == self._id:
            self._store.write(replace(record, holder="", renewed=self._wall()))
