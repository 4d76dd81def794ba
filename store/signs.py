"""Signs of life, for processes that listen on no port: systemd is told, and files are touched that a probe looks at.

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
    """Endless. STACCATO_SIGNS names the folder of the files; without it there are none. Raises OSError."""
    folder = os.environ.get("STACCATO_SIGNS")
    while True:
        signs = ["alive", "ready"] if ready() else ["alive"]
        if folder:
            for sign in signs:
                (Path(folder) / sign).touch()
        _notify("WATCHDOG=1" + "\nREADY=1" * ("ready" in signs))
        await asyncio.sleep(PERIOD_S)


def _notify(state: str) -> None:
    """As sd_notify(3) does."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifying:
            notifying.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
