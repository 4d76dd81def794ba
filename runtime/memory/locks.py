"""Locks of a host cache's file, which order the runtimes of a node and tell which runtimes live."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator

LOCK_S = 10.0  # the index is locked for microseconds, or for tens of milliseconds while memory is given back
INDEX_LOCK, MEMBER_LOCKS = 0, 1  # offsets of bytes that stand for locks, unrelated to the index at these offsets
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of Linux, 64 bits: type, whence, start, length, pid


class HostCacheStuck(Exception):
    """Another runtime holds the lock of the index for more than LOCK_S seconds."""


class IndexLocks:
    """Locks between processes, and between threads of this process.

    The locks end with the open file description: when this process has died, and every process forked from this process
    without an exec."""

    def __init__(self, fd: int) -> None:
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)  # a description of its own
        self._threads = threading.Lock()

    @contextlib.contextmanager
    def index(self) -> Iterator[None]:
        with self._threads:
            deadline = time.monotonic() + LOCK_S
            while not self.take(INDEX_LOCK):
                if time.monotonic() > deadline:
                    raise HostCacheStuck(
                        f"the index of the host cache is held for {LOCK_S:.0f} s: a runtime of this node was stopped "
                        "while it changed it, let it go on or end it"
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
        """Whether another process holds the lock of a byte."""
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        os.close(self._fd)

    def _set(self, byte: int, kind: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
