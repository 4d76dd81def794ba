"""The silence that gateways and runtimes allow to each other before the silent process is taken for dead. Pure.

If a process taken for dead is heard again, the process was alive, and the loss was false. Computing the streams of a
slow process again adds to the load that made the process slow. Each false loss therefore doubles the silence allowed to
the process, up to LIMIT_S_MOST; half of the added seconds go in each SHRINK_S.
"""

from __future__ import annotations

from dataclasses import dataclass

LIMIT_S_MOST = 10.0
SHRINK_S = 60.0  # half-life of the seconds that false losses added


@dataclass(slots=True)
class Silence:
    """The silence of a process. Times are monotonic seconds of the process that listens."""

    limit_s_least: float  # allowed to a process without false losses
    heard_at: float
    lost: bool = False  # taken for dead, and not heard since
    false_losses: int = 0
    _added_s: float = 0.0  # allowed beyond `limit_s_least`, at the time `_added_at`
    _added_at: float = 0.0

    def limit_s(self, now: float) -> float:
        """Seconds of silence that the process is allowed now."""
        halvings = max(0.0, now - self._added_at) / SHRINK_S
        return self.limit_s_least + self._added_s * float(0.5**halvings)

    def heard(self, now: float) -> bool:
        """Note a sign of life. Returns True if the sign proves the last loss false."""
        self.heard_at = now
        if not self.lost:
            return False
        self.lost = False
        self.false_losses += 1
        grown_s = min(max(LIMIT_S_MOST, self.limit_s_least), 2 * self.limit_s(now))
        self._added_s, self._added_at = grown_s - self.limit_s_least, now
        return True

    def excuse(self, now: float) -> None:
        """Begin the silence anew: the process had nothing to say, or no way to say anything. Proves no loss false."""
        self.heard_at = now

    def late(self, late_s: float, now: float) -> None:
        """Take `late_s` seconds off the silence, by which the listener itself woke up too late."""
        self.heard_at = min(now, self.heard_at + max(0.0, late_s))

    def too_long(self, now: float) -> bool:
        """Whether the process has been silent for longer than allowed."""
        return now - self.heard_at > self.limit_s(now)

    def lose(self) -> None:
        """Take the process for dead."""
        self.lost = True
