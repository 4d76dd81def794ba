"""What the device is busy with, in memory that outlives its process: whose step it died in, and since when it hangs."""

from __future__ import annotations

import mmap
import os
import struct

_BYTES = 4096
_BEGAN = struct.Struct("<d")  # on the machine's monotonic clock, which all of its processes share; 0: between steps
_KEY = struct.Struct("<H")  # bytes of the model's key, which follows


class Stepping:
    """One cell: the device process writes, the node process reads."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _BYTES)
        self._model = ""

    @staticmethod
    def create() -> int:
        """A file in memory for it; the caller closes it."""
        fd = os.memfd_create("staccato-stepping")
        os.ftruncate(fd, _BYTES)
        return fd

    def begin(self, model: str, now: float) -> None:
        if model != self._model:
            key = model.encode()
            _KEY.pack_into(self._map, _BEGAN.size, len(key))
            start = _BEGAN.size + _KEY.size
            self._map[start : start + len(key)] = key
            self._model = model
        _BEGAN.pack_into(self._map, 0, now)

    def end(self) -> None:
        _BEGAN.pack_into(self._map, 0, 0.0)

    def under_way(self) -> tuple[str, float] | None:
        """The model that is stepped, and since when."""
        (began,) = _BEGAN.unpack_from(self._map)
        if not began:
            return None
        (length,) = _KEY.unpack_from(self._map, _BEGAN.size)
        start = _BEGAN.size + _KEY.size
        return self._map[start : start + length].decode(), float(began)
