"""Locks of a host cache's file, which order the runtimes of a node and tell which runtimes live."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator

LOCK_S = 10.0  # longest wait; usual are microseconds, or tens of milliseconds while memory is given back
INDEX_LOCK, MEMBER_LOCKS = 0, 1  # offsets of bytes that stand for locks, unrelated to the index at these offsets
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of Linux, 64 bits: type, whence, start, length, pid


class HostCacheStuck(Exception):
    """Raised after LOCK_S seconds in which a second runtime held the lock of the index."""


class IndexLocks:
    """Locks between processes, and between threads of this process.

    The kernel frees the locks with the open file description: when this process has died, and every process forked from
    this process without an exec."""

    def __init__(self, fd: int) -> None:
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)  # with an open file description of its own
        self._threads = threading.Lock()

    @contextlib.contextmanager
    def index(self) -> Iterator[None]:
        with self._threads:
            deadline = time.monotonic() + LOCK_S
            while not self.take(INDEX_LOCK):
                if time.monotonic() > deadline:
                    raise HostCacheStuck(
                        f"the index of the host cache is held for {LOCK_S:.0f} s: a runtime of this node was stopped "
                        "in the midst of a change, so let that runtime go on or end it"
                    )
                time.sleep(0.0005)
            try:
                yield
            finally:
                self._set(INDEX_LOCK, fcntl.F_UNLCK)

    def take(self, byte: int) -> bool:
        try:
            self._set(byte, fcntl.F_WRLCK)
        except BlockingIOError:
            return False
        return True

    def taken(self, byte: int) -> bool:
        """Return whether another process holds the lock of the byte at the offset `byte`."""
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        os.close(self._fd)

    def _set(self, byte: int, kind: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
