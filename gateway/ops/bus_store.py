"""Restarts the supervisor's nats-server if the server's store fails although the disk has room.

After a full disk, a stream of nats-server 2.15 refuses every later message until the server is restarted. The server
logs a line for each message not stored, so the supervisor reads the log and sends no probes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from gateway.http.reserve import free_bytes

FAILURE = "JetStream failed to store"
ROOM_BYTES_LEAST = 4 << 20  # free, before a restart makes sense
LOOK_PERIOD_S = 0.5  # while the disk is full
STILL_S = 10.0  # a store that still fails logs a line again within so many seconds
HOLD_S = 10.0  # between two restarts

Say = Callable[[str], None]


class BusStore:
    """Watches nats-server's log lines, and restarts nats-server.

    Args:
        folder: a folder on the disk of the store.
        restart: ends nats-server; the supervisor then starts nats-server again.
        say: prints a sentence for the operator."""

    def __init__(self, folder: Path, restart: Callable[[], None], say: Say) -> None:
        self._folder, self._restart, self._say = folder, restart, say
        self._failing = asyncio.Event()

    def heard(self, line: str) -> None:
        """Note a line of nats-server's log."""
        if FAILURE in line:
            self._failing.set()

    async def watch(self) -> None:
        """Restart nats-server whenever the store still fails with room on the disk. Never returns.

        Sleeps until nats-server fails to store a message, and then until the disk has room."""
        while True:
            await self._failing.wait()
            if not self._has_room():
                self._say(f"the disk of {self._folder} is full: new requests are refused until some space is free")
            while not self._has_room():
                await asyncio.sleep(LOOK_PERIOD_S)
            self._failing.clear()
            if await self._still_fails():
                self._say("the bus can't store although the disk has room: nats is started again")
                self._restart()
                await asyncio.sleep(HOLD_S)
                self._failing.clear()

    def _has_room(self) -> bool:
        return free_bytes(self._folder) >= ROOM_BYTES_LEAST

    async def _still_fails(self) -> bool:
        """Whether nats-server fails to store a message within the next STILL_S seconds."""
        try:
            async with asyncio.timeout(STILL_S):
                await self._failing.wait()
        except TimeoutError:
            return False
        return True
