"""Remember what the database said for a few seconds, and ask it once however many want to know."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Cache(Generic[K, V]):
    """Answers are at most `ttl_s` old; the oldest leave when there are more than `most`."""

    def __init__(self, ttl_s: float, most: int = 10_000, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s, self._most, self._clock = ttl_s, most, clock
        self._answers: dict[K, tuple[float, asyncio.Future[V]]] = {}

    async def get(self, key: K, load: Callable[[], Awaitable[V]]) -> V:
        """A load that fails is told to all who wait for it and not remembered."""
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
