"""The weights of one model as memory: addresses for good, an image in the host's cache, pages for all, some or none.

Weights never change, so giving their pages back copies nothing. The pages that are there are always the first ones.
"""

from __future__ import annotations

import contextlib

from runtime.memory.images import Image
from runtime.memory.native import Cache, PoolError, Reservation, Segment, Ticket

STOP_WAIT_S = 60.0


class Weights:
    def __init__(self, reservation: Reservation, size: int, cache: Cache) -> None:
        self.reservation, self.size, self._cache = reservation, size, cache
        self.page_bytes = reservation.device.page_bytes
        self.pages = -(-size // self.page_bytes)
        self.image: Image | None = None
        self.held_pages = 0  # mapped, or clean cache
        self.ticket: Ticket | None = None  # of the transfer under way

    def fetch(self) -> None:
        """Begin to bring in what is missing. Raises PoolError when the pool has too few pages; all is as before."""
        assert self.image is not None and self.ticket is None
        self.ticket = self.reservation.load(self._cache, [Segment(0, self.image.offset, self.size)])
        self.held_pages = self.pages

    def arrived(self) -> bool:
        """Raises PoolError when the transfer failed; what was there before is there still."""
        if self.ticket is None:
            return True
        try:
            if not self.ticket.done():
                return False
        except PoolError:
            self.ticket = None
            mapped, clean = self.reservation.residency(0, self.pages * self.page_bytes)
            self.held_pages = (mapped + clean) // self.page_bytes
            raise
        self.ticket = None
        return True

    def leave(self) -> None:
        """What is there is clean cache from now on. A transfer under way is ended first."""
        self._stop()
        if self.held_pages:
            self.reservation.mark_clean(0, self.held_pages * self.page_bytes)

    def evict(self, pages: int, after: Ticket | None) -> None:
        """Give so many pages back, the last ones first, once `after` is over."""
        pages = min(pages, self.held_pages)
        self.held_pages -= pages
        if pages:
            self.reservation.unmap(self.held_pages * self.page_bytes, pages * self.page_bytes, after)

    def close(self) -> None:
        """Everything but the addresses, which the model may still know."""
        self._stop()
        self.evict(self.held_pages, None)
        if self.image is not None:
            self.image.release()
            self.image = None

    def _stop(self) -> None:
        if self.ticket is None:
            return
        self.ticket.cancel()
        with contextlib.suppress(PoolError):  # it was cancelled, or failed: either way it is over
            self.ticket.wait(STOP_WAIT_S)
        with contextlib.suppress(PoolError):
            self.arrived()
        assert self.ticket is None, f"a load of {self.size} bytes did not end within {STOP_WAIT_S} s"
