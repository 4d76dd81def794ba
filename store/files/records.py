"""Files of records, each record after the record's length. Records are appended one by one, unbuffered, so that the
kernel has every record when the process dies."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import structlog

log = structlog.get_logger()

BYTES_MOST = 256 << 20  # size of a file at which writing stops
_LENGTH = struct.Struct("<I")


class RecordFile:
    """Appends records to `file`, opened unbuffered. If the file is full or can't be written, logs why and stops.

    `bytes_most`: size of the file in bytes at which writing stops."""

    def __init__(self, file: BinaryIO, bytes_most: int = BYTES_MOST) -> None:
        self._file, self._bytes_most = file, bytes_most
        self._bytes = file.seek(0, os.SEEK_END)
        self._stopped = False

    def write(self, record: bytes) -> None:
        """Append a record, unless writing has stopped."""
        if self._stopped:
            return
        if self._bytes + _LENGTH.size + len(record) > self._bytes_most:
            return self._stop(f"the file may have {self._bytes_most} bytes: move the file away and start again")
        try:
            written = self._file.write(_LENGTH.pack(len(record)) + record)
            if written < _LENGTH.size + len(record):
                self._file.truncate(self._bytes)
                return self._stop("the disk is full: free some space and start again")
        except OSError as error:
            return self._stop(f"{error}: free some space, or name another folder, and start again")
        self._bytes += written

    def _stop(self, reason: str) -> None:
        self._stopped = True
        log.error("journal.stopped", bytes=self._bytes, reason=reason)


def recorder(folder: Path | None, name: str) -> Callable[[bytes], None] | None:
    """Return a function that appends records to `folder`/`name`.journal; None without a folder. Raises OSError."""
    return None if folder is None else RecordFile(appended(folder / f"{name}.journal")).write


def appended(path: Path) -> BinaryIO:
    """Open a file of records to append, readable by the owner alone. Raises OSError."""
    return open(path, "ab", buffering=0, opener=_private)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def records(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield each record of the file with the record's place in bytes; an incomplete last record is left out.

    Raises ValueError if a record is longer than any file of records."""
    at = 0
    while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        if length > BYTES_MOST:
            raise ValueError(f"no journal, or a broken one: at byte {at} a record of {length} bytes is announced")
        data = file.read(length)
        if len(data) < length:
            return
        yield at, data
        at += _LENGTH.size + length
