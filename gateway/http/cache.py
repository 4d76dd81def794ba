"""Remembers answers of the database for a few seconds. Concurrent callers share a single query."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Cache(Generic[K, V]):
    """A cache with answers at most `ttl_s` old and at most `most` answers; the oldest answers are dropped first."""

    def __init__(self, ttl_s: float, most: int = 10_000, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s, self._most, self._clock = ttl_s, most, clock
        self._answers: dict[K, tuple[float, asyncio.Future[V]]] = {}

    async def get(self, key: K, load: Callable[[], Awaitable[V]]) -> V:
        """Return the answer for `key`. A failed load raises in each waiting caller, and is not remembered."""
        now = self._clock()
        until, answer = self._answers.get(key, (now, None))
        if answer is None or now >= until:
            answer = asyncio.ensure_future(load())
            self._answers.pop(key, None)
            self._answers[key] = (now + self._ttl_s, answer)
            if len(self._answers) > self._most:
                del self._answers[next(iter(self._answers))]
        try:
            return await asyncio.shield(answer)
        except Exception:
            if self._answers.get(key, (0, None))[1] is answer:
                del self._answers[key]
            raise

    def clear(self) -> None:
        self._answers.clear()
