"""Copies of KV blocks between device and host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import structlog

from runtime.engine import ranks
from runtime.memory.kv import KvRegion
from runtime.memory.native import CacheMemory, Direction, PoolError, TransferTicket

log = structlog.get_logger()

COPY_TRIES = 3  # a failed copy is made again: the source is still there
COPY_WAIT_S = 60.0  # the longest wait for a copy


class Transfer:
    """A copy of some blocks, made up to COPY_TRIES times if the copy fails. Keep the blocks until the copy is over."""

    def __init__(
        self,
        kv: KvRegion,
        cache: CacheMemory,
        device: Sequence[int],
        host: Sequence[int],
        direction: Direction,
        after: TransferTicket | None = None,
    ) -> None:
        self._copy = partial(kv.copy, cache, device, host, direction)
        self._tries = 1
        self._ended: PoolError | bool = False  # True once the copy is over on all ranks, the error if the copy failed
        self.ticket = self._copy(after)

    def over(self) -> bool:
        """Whether the copy is over on all ranks; repeats a failed copy.

        Raises PoolError if the copy failed for good, then and at every later call."""
        if isinstance(self._ended, PoolError):
            raise self._ended
        if not self._ended:
            try:
                self._ended = ranks.all_say(self._over_here)
            except PoolError as error:
                self._ended = error
                if ranks.size() > 1:
                    _wait(self.ticket)  # the failed copy may be another rank's: wait for the own copy
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
        """Wait until the copy is over. Returns whether the copy succeeded."""
        try:
            while not self.over():
                _wait(self.ticket)
        except PoolError as error:
            log.warning("engine.copy_failed", error=str(error))
            return False
        return True


def _wait(ticket: TransferTicket) -> None:
    """Wait until the copy is over, or COPY_WAIT_S have passed; the next call of `over` tells of a failure."""
    try:
        ticket.wait(COPY_WAIT_S)
    except PoolError as error:
        log.warning("engine.copy_waited", error=str(error))
