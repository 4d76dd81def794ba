"""Blocks of KV cache that are copied between device and host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import structlog

from runtime.engine import ranks
from runtime.memory.kv import KvRegion
from runtime.memory.native import Cache, Direction, PoolError, Ticket

log = structlog.get_logger()

COPY_TRIES = 3  # a copy that fails is made again: the source is still there
COPY_WAIT_S = 60.0  # the longest that anything waits for a copy


class Transfer:
    """One copy of some blocks, or another one while it fails; these are not free for others before it is over."""

    def __init__(
        self,
        kv: KvRegion,
        cache: Cache,
        device: Sequence[int],
        host: Sequence[int],
        direction: Direction,
        after: Ticket | None = None,
    ) -> None:
        self._copy = partial(kv.copy, cache, device, host, direction)
        self._tries = 1
        self._ended: PoolError | bool = False  # on all ranks
        self.ticket = self._copy(after)

    def over(self) -> bool:
        """Raises PoolError when it failed for good, and whenever it is asked after that."""
        if isinstance(self._ended, PoolError):
            raise self._ended
        if not self._ended:
            try:
                self._ended = ranks.all_say(self._over_here)
            except PoolError as error:
                self._ended = error
                if ranks.size() > 1:
                    _wait(self.ticket)  # another rank's may have failed
                raise
        return self._ended is True

    def _over_here(self) -> bool:
        try:
            return self.ticket.done()
        except PoolError:
            if self._tries == COPY_TRIES:
                raise
            self._tries += 1
            self.ticket = self._copy(None)
            return False

    def went_well(self) -> bool:
        """Waits until it is over."""
        try:
            while not self.over():
                _wait(self.ticket)
        except PoolError as error:
            log.warning("engine.copy_failed", error=str(error))
            return False
        return True


def _wait(ticket: Ticket) -> None:
    """Until it is over, well or not: who asks next hears how."""
    try:
        ticket.wait(COPY_WAIT_S)
    except PoolError as error:
        log.warning("engine.copy_waited", error=str(error))
