"""Room on the disk kept for the bookings of running requests: a gateway takes no new request below the reserve."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from gateway.http.errors import Problem

LOOK_PERIOD_S = 0.5  # only the first request of a period costs a system call
RETRY_AFTER_S = 10


class Reserve:
    """The reserve on the disks of `folders`: the folders of the journal, the bus and the database.

    Each of the disks must have `reserve_bytes` free."""

    def __init__(self, folders: Iterable[Path], reserve_bytes: int) -> None:
        self._folders, self._reserve_bytes = sorted(set(folders)), reserve_bytes
        self._looked_s = float("-inf")  # monotonic
        self._free_bytes = 0

    def lacks(self) -> str | None:
        """The shortage in a few words, with the numbers; None if the disks have room."""
        now = time.monotonic()
        if now - self._looked_s >= LOOK_PERIOD_S:
            self._looked_s, self._free_bytes = now, min(map(free_bytes, self._folders))
        if self._free_bytes >= self._reserve_bytes:
            return None
        return (
            f"the platform's disk has {self._free_bytes >> 20} MiB free, and the last {self._reserve_bytes >> 20} MiB "
            "are kept for the bookings of running requests"
        )

    def check(self) -> None:
        """Raise Problem (503) if a disk has less free than the reserve."""
        if lacks := self.lacks():
            detail = f"{lacks}: try again once the operator has freed some space"
            raise Problem(503, "disk_full", detail, headers={"retry-after": str(RETRY_AFTER_S)})


def free_bytes(folder: Path) -> int:
    """Number of bytes this user may still write on the disk of `folder`. Raises OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
