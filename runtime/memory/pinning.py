"""Runs of the host cache that a GPU copies from and to: registered with the GPU's driver while this runtime holds them.

A driver copies from and to registered memory alone at the full speed of the link, and goes on using the old memory of a
range that was discarded meanwhile. So a run is registered when this runtime takes its first pin on the run in the
index, and the last pin is given back in the index only after the registration has ended: no runtime discards the memory
before. The memory library registers in the background, a copy waits for its part. The end of a registration takes
milliseconds and happens on a thread of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import structlog

from runtime.memory.native import CacheMemory, DevicePool

log = structlog.get_logger()


class NothingPinned:
    """The place of `PinnedRuns` for a device that copies from any memory: a host's own memory."""

    def take(self, offset: int, size: int) -> None:
        """This runtime has taken a pin on the run at `offset`, whose memory is there. Raises PoolError."""

    def leave(self, offset: int, then: Callable[[], None]) -> None:
        """Give a pin of this runtime back: calls `then`, which changes the index, now or soon."""
        then()

    def leave_now(self, offset: int) -> None:
        """Give a pin of this runtime back and wait; the caller changes the index."""

    def settle(self) -> bool:
        """Wait until pins given back so far are out of the index. Returns whether any were: the index has more room."""
        return False

    def close(self) -> None:
        """End all registrations; copies must be over."""


class PinnedRuns(NothingPinned):
    """Registrations of a runtime with one device. Thread-safe."""

    def __init__(self, cache: CacheMemory, device: DevicePool) -> None:
        self._cache, self._device = cache, device
        self._lock = threading.Lock()
        self._pins: dict[int, int] = {}  # by offset of a run: pins of this runtime in the index; 0: about to end
        self._leaving: queue.Queue[tuple[int, Callable[[], None]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="unpin", daemon=True)
        self._thread.start()

    def take(self, offset: int, size: int) -> None:
        with self._lock:
            if offset not in self._pins:
                self._cache.pin(self._device, offset, size)
                self._pins[offset] = 0
            self._pins[offset] += 1

    def leave(self, offset: int, then: Callable[[], None]) -> None:
        """Call `then` on the thread of these registrations, after the end of the run's registration if no pin of this
        runtime is left. Copies must be over."""
        self._leaving.put((offset, then))

    def leave_now(self, offset: int) -> None:
        with self._lock:
            self._pins[offset] -= 1
            if not self._pins[offset]:
                del self._pins[offset]
                self._cache.unpin(self._device, offset)

    def settle(self) -> bool:
        waiting = self._leaving.unfinished_tasks > 0
        self._leaving.join()
        return waiting

    def close(self) -> None:
        self._leaving.put(None)
        self._thread.join()
        with self._lock:
            for offset in self._pins:
                self._cache.unpin(self._device, offset)
            self._pins.clear()

    def _work(self) -> None:
        while (left := self._leaving.get()) is not None:
            offset, then = left
            try:
                self.leave_now(offset)
                then()
            except Exception as error:  # a run that stays pinned in the index costs room, and nothing else
                log.error("memory.not_unpinned", offset=offset, error=type(error).__name__, detail=str(error)[:300])
            finally:
                self._leaving.task_done()
