"""The weights of one model as memory: fixed addresses, an image in the host cache, pages for all, some or no weights.

Weights never change, so giving pages back copies nothing. The pages held are always the first pages of the weights.
"""

from __future__ import annotations

import contextlib

from runtime.memory.images import Image
from runtime.memory.native import CacheMemory, PoolError, Reservation, Segment, TransferTicket

STOP_WAIT_S = 60.0


class Weights:
    def __init__(self, reservation: Reservation, size: int, cache: CacheMemory) -> None:
        self.reservation, self.size, self._cache = reservation, size, cache
        self.page_bytes = reservation.device.page_bytes
        self.pages = -(-size // self.page_bytes)
        self.image: Image | None = None
        self.held_pages = 0  # pages mapped, or kept as clean cache
        self.ticket: TransferTicket | None = None  # the load under way

    def fetch(self) -> None:
        """Begin to load the missing weights from the image; `arrived` tells the end.

        Raises PoolError if the pool has too few pages; then nothing has changed."""
        assert self.image is not None and self.ticket is None
        self.ticket = self.reservation.load(self._cache, [Segment(0, self.image.offset, self.size)])
        self.held_pages = self.pages

    def arrived(self) -> bool:
        """Whether all weights are loaded. Raises PoolError if the transfer failed; pages held before are kept."""
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
        """Turn the pages held into clean cache. A transfer under way is cancelled first."""
        self._stop()
        if self.held_pages:
            self.reservation.mark_clean(0, self.held_pages * self.page_bytes)

    def evict(self, pages: int, after: TransferTicket | None) -> None:
        """Give `pages` pages back, the last pages first; the pages leave once `after` is over."""
        pages = min(pages, self.held_pages)
        self.held_pages -= pages
        if pages:
            self.reservation.unmap(self.held_pages * self.page_bytes, pages * self.page_bytes, after)

    def close(self) -> None:
        """Give back pages and image, but not the addresses: the model may still use the addresses."""
        self._stop()
        self.evict(self.held_pages, None)
        if self.image is not None:
            self.image.release()
            self.image = None

    def _stop(self) -> None:
        if self.ticket is None:
            return
        self.ticket.cancel()
        with contextlib.suppress(PoolError):  # cancelled or failed: the transfer is over either way
            self.ticket.wait(STOP_WAIT_S)
        with contextlib.suppress(PoolError):
            self.arrived()
        assert self.ticket is None, f"a load of {self.size} bytes did not end within {STOP_WAIT_S} s"
