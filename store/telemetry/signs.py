"""Signs of life of processes without a port: a message to systemd, and files touched for a probe.

`alive` says that the event loop turns, `ready` that the process can do its work.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

PERIOD_S = 2.0


async def give(ready: Callable[[], bool]) -> None:
    """Endless: give signs of life every PERIOD_S seconds. Raises OSError."""
    while True:
        note(ready())
        await asyncio.sleep(PERIOD_S)


def note(ready: bool) -> None:
    """Give a sign of life now. Raises OSError.

    STACCATO_SIGNS names the folder of the files; without the variable no files are touched."""
    signs = ["alive", "ready"] if ready else ["alive"]
    if folder := os.environ.get("STACCATO_SIGNS"):
        for sign in signs:
            (Path(folder) / sign).touch()
    _notify("WATCHDOG=1" + "\nREADY=1" * ("ready" in signs))


def _notify(state: str) -> None:
    """Send a state to systemd, as sd_notify(3) does."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifying:
            notifying.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
