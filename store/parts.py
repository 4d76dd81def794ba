"""Requests larger than a message of the bus: sent in parts by the asking process, joined by the answering process.

A request with pictures that were prepared for a model has tens of megabytes. The asking process sends a part when the
part before is answered, so messages of other requests pass between two parts.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

HEADER = "Staccato-Part"  # of a part: the request's id, the place of the part's first byte, the request's size in bytes
PART_BYTES = 1 << 20  # a part's size
REQUEST_MOST = 16 << 20  # bytes of a request: each process on the way copies the request at once, 1 ms a MiB and more
JOINED_MOST = 128 << 20  # bytes of requests whose parts have not all come, in a process
STALE_S = 10.0  # without a further part, a request is forgotten


class Answered(Protocol):
    @property
    def data(self) -> bytes: ...


class WrongPart(Exception):
    """Error of a part that does not follow the parts before; the message says why."""


class TooManyParts(Exception):
    """Error of a request for which this process has no memory now; the message says how much is taken."""


def in_parts(data: bytes) -> Iterator[tuple[dict[str, str], bytes]]:
    """Yield the parts of an encoded request, each with the headers of the part's message."""
    id = uuid.uuid4().hex
    for start in range(0, len(data), PART_BYTES):
        yield {HEADER: f"{id} {start} {len(data)}"}, data[start : start + PART_BYTES]


async def ask_in_parts(ask: Callable[[bytes, dict[str, str]], Awaitable[Answered]], data: bytes) -> bytes:
    """Return the answer to the request `data`: the answer to the last part, or to a part that is refused.

    `ask` sends a part with headers, and returns the answer's message; the answer to an earlier part is empty."""
    answer = b""
    for headers, part in in_parts(data):
        if answer := (await ask(part, headers)).data:
            break
    return answer


@dataclass
class _Unfinished:
    size: int
    heard_at: float
    parts: list[bytes] = field(default_factory=list)

    @property
    def come(self) -> int:
        """Bytes of the parts that have come."""
        return sum(map(len, self.parts))


class Joiner:
    """Requests that come in parts, until all parts have come. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unfinished: dict[str, _Unfinished] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes promised to requests whose parts have not all come."""
        return sum(request.size for request in self._unfinished.values())

    def whole(self, headers: Mapping[str, str] | None, data: bytes) -> bytes | None:
        """Return the request of a message: `data`, or the joined request if the message is the last part of a request.

        Returns None while parts are missing. `headers`: headers of the message. Raises WrongPart, TooManyParts."""
        header = headers.get(HEADER) if headers else None
        return data if header is None else self.take(header, data)

    def take(self, header: str, data: bytes) -> bytes | None:
        """Return the whole request after the last part; None while parts are missing.

        `header`: value of the part's HEADER. Raises WrongPart, TooManyParts; the request is forgotten then.
        """
        id, start, size = _read(header)
        now = self._clock()
        self._forget_stale(now)
        request = self._unfinished.pop(id, None)
        if request is None:
            request = self._begin(start, size, now)
        if start != request.come or size != request.size or start + len(data) > size or not data:
            raise WrongPart(f"a part of {len(data)} bytes at {start} of {size} follows {request.come} bytes")
        request.parts.append(data)
        request.heard_at = now
        if start + len(data) == size:
            return b"".join(request.parts)
        self._unfinished[id] = request
        return None

    def _begin(self, start: int, size: int, now: float) -> _Unfinished:
        if start:
            raise WrongPart(f"a part at byte {start} has come without the parts before: the request is sent anew")
        if not 0 < size <= REQUEST_MOST:
            raise WrongPart(f"a request in parts has {size} bytes, at most {REQUEST_MOST} are taken")
        if (held := self.held_bytes) + size > JOINED_MOST:
            raise TooManyParts(f"{held} bytes of requests are coming in, and {size} more would be above {JOINED_MOST}")
        return _Unfinished(size, now)

    def _forget_stale(self, now: float) -> None:
        stale = [id for id, request in self._unfinished.items() if now - request.heard_at > STALE_S]
        for id in stale:
            del self._unfinished[id]


def _read(header: str) -> tuple[str, int, int]:
    """Return id, start and size of a part. Raises WrongPart."""
    try:
        id, start, size = header.split()
        return id, int(start), int(size)
    except ValueError:
        raise WrongPart(f"the header {HEADER} of a part can't be read: {header[:80]!r}") from None
