"""Buffer of the last frames sent to a gateway, to send again if the gateway missed frames. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FRAMES_MOST = 4096
BYTES_MOST = 8 << 20


@dataclass(slots=True)
class Ring:
    """Frames `last - len + 1 .. last` of a gateway, oldest first, bounded in number and bytes."""

    last: int = 0  # seq of the newest frame; 0: none yet
    _frames: deque[bytes] = field(default_factory=deque)
    _bytes: int = 0

    def keep(self, frame: bytes) -> None:
        """Keeps a frame, which must carry seq `last + 1`, and drops the oldest frames beyond the bounds."""
        self.last += 1
        self._frames.append(frame)
        self._bytes += len(frame)
        while len(self._frames) > FRAMES_MOST or self._bytes > BYTES_MOST:
            self._bytes -= len(self._frames.popleft())

    def clear(self) -> None:
        """Drops all frames, as no gateway will ask for them; the numbering goes on."""
        self._frames.clear()
        self._bytes = 0

    def since(self, first: int, last: int) -> tuple[list[bytes], bool]:
        """Kept frames of `first..last`, and whether every frame of the range is among them."""
        oldest = self.last - len(self._frames) + 1
        start, end = max(first, oldest), min(last, self.last)
        frames = [self._frames[seq - oldest] for seq in range(start, end + 1)]
        return frames, start == first and end == last
