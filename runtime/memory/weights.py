"""The weights of one model as memory: fixed addresses, an image in the host cache, pages for all, some or no weights.

Weights never change, so giving pages back copies nothing. The pages held are always the first pages of the weights.
"""

from __future__ import annotations

import contextlib

from runtime.memory.arriving import ArrivingImage
from runtime.memory.disk import TornImage
from runtime.memory.images import Image
from runtime.memory.native import CacheMemory, PoolError, Reservation, Segment, TransferTicket

STOP_WAIT_S = 60.0


class Weights:
    def __init__(self, reservation: Reservation, size: int, cache: CacheMemory) -> None:
        self.reservation, self.size, self._cache = reservation, size, cache
        self.page_bytes = reservation.device.page_bytes
        self.pages = -(-size // self.page_bytes)
        self.image: Image | ArrivingImage | None = None
        self._asked = size  # bytes from the front that the loads since `fetch` bring in
        self.held_pages = 0  # pages mapped, or kept as clean cache
        self.ticket: TransferTicket | None = None  # the load under way

    def fetch(self) -> None:
        """Begin to load the missing weights from the image; `arrived` tells the end.

        An image that is being read from disk is loaded as far as the image has landed; `arrived` goes on. Raises
        PoolError if the pool has too few pages, then nothing has changed; and TornImage if the image is damaged."""
        assert self.image is not None and self.ticket is None
        self._asked = 0
        try:
            self._load(self._landed())
        except BaseException:
            self._asked = self.size
            raise
        self.held_pages = self.pages

    def _landed(self) -> int:
        """Bytes that can be loaded: the complete weights, or whole pages of the part that has come from disk."""
        if not isinstance(self.image, ArrivingImage):
            return self.size
        if (whole := self.image.whole()) is not None:
            self.image = whole
            return self.size
        return self.image.landed_bytes // self.page_bytes * self.page_bytes

    def _load(self, landed: int) -> None:
        if landed > self._asked:
            assert self.image is not None
            segment = Segment(self._asked, self.image.offset + self._asked, landed - self._asked)
            self.ticket = self.reservation.load(self._cache, [segment])
            self._asked = landed

    def arrived(self) -> bool:
        """Whether all weights are loaded. Raises PoolError if the transfer failed, and TornImage if the image is
        damaged; pages held before are kept."""
        if self.ticket is None and self._asked == self.size:
            return True
        try:
            if self.ticket is not None and not self.ticket.done():
                return False
            self.ticket = None
            self._load(self._landed())
        except (PoolError, TornImage):
            self._forget()
            raise
        return self.ticket is None and self._asked == self.size

    def _forget(self) -> None:
        """Forget the load, whose transfer is over, and count the pages that the load has filled."""
        self.ticket, self._asked = None, self.size
        mapped, clean = self.reservation.residency(0, self.pages * self.page_bytes)
        self.held_pages = (mapped + clean) // self.page_bytes

    def wait(self, timeout_s: float) -> bool:
        """Wait until the load under way is over, or more of the image has come from disk; `arrived` tells how.

        Returns False if no load is under way."""
        if self.ticket is not None:
            with contextlib.suppress(PoolError):
                self.ticket.wait(timeout_s)
        elif self._asked < self.size and isinstance(self.image, ArrivingImage):
            self.image.wait(timeout_s)
        else:
            return False
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
        if self.ticket is not None:
            self.ticket.cancel()
            over = True
            with contextlib.suppress(PoolError):  # cancelled or failed: the transfer is over either way
                self.ticket.wait(STOP_WAIT_S)
            with contextlib.suppress(PoolError):
                over = self.ticket.done()
            assert over, f"a load of {self.size} bytes did not end within {STOP_WAIT_S} s"
            self._forget()
        elif self._asked < self.size:
            self._forget()
