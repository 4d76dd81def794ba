"""An image on the way from the disk to the host cache: several threads read, and a copy to a device may follow."""

from __future__ import annotations

import threading

from runtime.memory.disk import DiskCache, StoredImage, TornImage, padded
from runtime.memory.images import Image, ImageKey, Images, Making

READERS = 8  # threads: requests that a disk has at a time
END_S = 600.0  # longest wait for the readers of an image that is given up


class ArrivingImage:
    """An image being read. Bytes below `landed_bytes` are checked and stay in place until `release`.

    All runtimes of the node find the image once the reading has ended. An `Image` has the attributes as well."""

    def __init__(self, disk: DiskCache, key: ImageKey, stored: StoredImage, making: Making) -> None:
        self.offset, self.bytes, self.meta = making.offset, making.bytes, stored.meta
        self._disk, self._key, self._stored, self._making = disk, key, stored, making
        self._changed = threading.Condition()
        self._next = 0  # extent to be read next
        self._landed = [False] * stored.extents
        self._gapless = 0  # extents landed without a gap from the beginning
        self._error: Exception | None = None
        self._stopped = self._ended = False
        self._image: Image | None = None
        self._readers = min(READERS, stored.extents)
        for number in range(self._readers):
            threading.Thread(target=self._read, name=f"disk-reader-{number}", daemon=True).start()

    @property
    def landed_bytes(self) -> int:
        """Bytes read without a gap from the beginning on. Raises TornImage if the image is damaged."""
        with self._changed:
            self._check()
            whole = self._gapless == self._stored.extents
            return self.bytes if whole else self._stored.span(self._gapless)[0]

    def whole(self) -> Image | None:
        """The image, pinned, once the reading has ended; None before. Raises TornImage if the image is damaged."""
        with self._changed:
            self._check()
            return self._image

    def ended(self) -> Image | None:
        """Wait until the reading has ended. Returns the image, pinned; None if the image was damaged."""
        with self._changed:
            ended = self._changed.wait_for(lambda: self._ended, END_S)
        assert ended, f"the disk did not answer for {END_S:.0f} s"
        return self._image

    def wait(self, timeout_s: float) -> None:
        """Wait until more bytes have landed, the reading has ended, or `timeout_s` seconds have passed."""
        with self._changed:
            if not self._ended:
                self._changed.wait(timeout_s)

    def release(self) -> None:
        """Give the image up: stop the reading, or let go of the finished image."""
        with self._changed:
            self._stopped = True
        if (image := self.ended()) is not None:
            image.release()

    def _check(self) -> None:
        if self._error is not None:
            raise TornImage(str(self._error)) from self._error

    # ── readers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self) -> None:
        try:
            with self._disk.reading():
                while (extent := self._taken()) is not None:
                    at, size = self._stored.span(extent)
                    self._stored.read(extent, self._making.commit(at, padded(size)))
                    self._note(extent)
        except Exception as error:
            self._fail(error)
        with self._changed:
            self._readers -= 1
            last = self._readers == 0
        if last:
            self._end()

    def _taken(self) -> int | None:
        with self._changed:
            if self._stopped or self._error is not None or self._next == self._stored.extents:
                return None
            self._next += 1
            return self._next - 1

    def _note(self, extent: int) -> None:
        with self._changed:
            self._landed[extent] = True
            while self._gapless < self._stored.extents and self._landed[self._gapless]:
                self._gapless += 1
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            first, self._error = self._error is None, self._error or error
        if first and isinstance(error, TornImage):
            self._disk.lose(self._key, error)

    def _end(self) -> None:
        """Finish the image, or abandon the image after an error or a stop. The last reader calls."""
        image = None
        try:
            self._stored.close()
            if self._gapless == self._stored.extents:
                self._making.commit_notes()
                image = self._making.seal(self.meta)
            else:
                self._making.abandon()
        except Exception as error:
            self._fail(error)
        with self._changed:
            self._image, self._ended = image, True
            self._changed.notify_all()


def read_in(images: Images, disk: DiskCache, key: ImageKey) -> Image | ArrivingImage | None:
    """Begin to read an image from disk into the host cache; None if the disk has no such image.

    Returns the image itself if another runtime was faster. Raises HostCacheFull, ImageBusy, and PoolError as
    `Images.make` does."""
    stored = disk.open(key)
    if stored is None:
        return None
    try:
        made = images.make(key, stored.bytes, commit=False)
        if isinstance(made, Making):
            return ArrivingImage(disk, key, stored, made)
    except BaseException:
        stored.close()
        raise
    stored.close()
    return made
