"""Remembers answers of the database for a few seconds. Concurrent callers share a single query.

While the database is away, an answer may be given for longer: tenants are served through a restart of the database.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from store.db.database import DatabaseError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

PATIENCE_S = 0.5  # wait for the database of a caller for whom there is an older answer
LOAD_S_MOST = 20.0  # a connection to a frozen database may never answer


@dataclass(eq=False, slots=True)
class _Entry(Generic[V]):
    """A query's answer, asked for at `asked`. `last`: the newest answer of the database, at `last_at`."""

    asked: asyncio.Future[V]
    at: float
    last: V | None
    last_at: float
    slow: bool = False  # a caller has lost patience

    @property
    def answered(self) -> bool:
        return self.asked.done() and not self.asked.cancelled() and self.asked.exception() is None

    def note(self, asked: asyncio.Future[V]) -> None:
        """Remember an answer that has come."""
        self.slow = False
        if self.answered:
            self.last, self.last_at = asked.result(), self.at

    async def comes(self) -> bool:
        """Whether an answer or an error is there within PATIENCE_S. A slow answer makes no second caller wait."""
        if not self.asked.done() and not self.slow:
            await asyncio.wait([self.asked], timeout=PATIENCE_S)
            self.slow = not self.asked.done()
        return self.asked.done()


class Cache(Generic[K, V]):
    """A cache with answers at most `ttl_s` old and at most `most` answers; the oldest answers are dropped first.

    `kept_s`: age, in seconds, up to which an answer other than None is given while the database is away or slow."""

    def __init__(
        self, ttl_s: float, kept_s: float = 0.0, most: int = 10_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ttl_s, self._kept_s, self._most, self._clock = ttl_s, kept_s, most, clock
        self._entries: dict[K, _Entry[V]] = {}

    async def get(self, key: K, load: Callable[[], Awaitable[V]]) -> V:
        """Return the answer for `key`. A failed load raises in each waiting caller, and is not remembered."""
        now = self._clock()
        entry = self._entries.get(key)
        if entry is None or (now >= entry.at + self._ttl_s and not entry.slow):
            last, last_at = (entry.last, entry.last_at) if entry else (None, now)
            entry = _Entry(asyncio.ensure_future(_loaded(load)), now, last, last_at)
            entry.asked.add_done_callback(entry.note)
            self._entries.pop(key, None)
            self._entries[key] = entry
            if len(self._entries) > self._most:
                del self._entries[next(iter(self._entries))]
        if entry.answered:
            return entry.asked.result()
        kept = entry.last if now < entry.last_at + self._kept_s else None
        if kept is not None and not await entry.comes():
            return kept
        try:
            return await asyncio.shield(entry.asked)
        except Exception as error:
            if kept is not None and isinstance(error, DatabaseError):
                return kept
            if self._entries.get(key) is entry:
                del self._entries[key]
            raise

    def clear(self) -> None:
        self._entries.clear()


async def _loaded(load: Callable[[], Awaitable[V]]) -> V:
    """Return the answer of the load. Raises DatabaseError after LOAD_S_MOST, too."""
    try:
        async with asyncio.timeout(LOAD_S_MOST):
            return await load()
    except TimeoutError as error:
        raise DatabaseError(f"the database did not answer within {LOAD_S_MOST:g} s") from error
