"""Processes of `staccato up` that keep ending: the names of the processes, the numbers of deaths and the last lines.

The supervisor writes the file DATA/troubles.json; `/readyz` and `staccato doctor` read the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "troubles.json"
LINE_CHARS_MOST = 400
# Events in the log of a runtime's node about the device process, a child unknown to the supervisor:
DEVICE_LOST, DEVICE_READY = '"event": "node.device_lost"', '"event": "node.ready"'
_ERROR = re.compile(r"(?:\w+\.)*(\w*(?:Error|Exception|Missing|Interrupt|Exit|Refused|Failed))\b")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Trouble:
    """A process of `staccato up` that ended, and may end again after the next start."""

    role: str  # role of the supervisor's child; "r1 device" is the device process of the runtime r1
    deaths: int  # in a row
    ended: str  # how the process ended the last time
    line: str  # the last line of the process, for the operator alone
    at: float  # UNIX seconds of the last end

    @property
    def kind(self) -> str:
        """Public name of the trouble: the class of the error if `line` begins with an error, else `ended`."""
        found = _ERROR.match(self.line)
        return found.group(1) if found else self.ended


class Troubles:
    """The supervisor's knowledge of ending processes, kept in a file readable by this user only.

    The file lies in `folder`. `say` prints a sentence for the operator."""

    def __init__(self, folder: Path, say: Say) -> None:
        self._file, self._say = folder / FILE, say
        self._known: dict[str, Trouble] = {}
        self._last_line: dict[str, str] = {}  # by child: the last line outside the structured log
        self._write()

    def died(self, role: str, ended: str, deaths: int, line: str) -> None:
        """Note the end of a process.

        Args:
            role: the process, as in `Trouble.role`.
            ended: how the process ended, in words.
            deaths: ends in a row.
            line: the last line of the process; cut to LINE_CHARS_MOST characters."""
        self._known[role] = Trouble(role, deaths, ended, line[:LINE_CHARS_MOST], time.time())
        self._write()

    def well(self, role: str) -> None:
        """Forget the trouble of a process: the process works again."""
        if self._known.pop(role, None):
            self._write()

    def forget(self, child: str) -> None:
        """Forget the troubles of a child of the supervisor, and of the device process of the child."""
        for role in (child, _device(child)):
            self.well(role)

    def heard(self, child: str, line: str) -> None:
        """Note a line written by `child`. A runtime's log tells of the start and the end of the device process."""
        if not line.startswith("{"):
            self._last_line[child] = line.strip() or self._last_line.get(child, "")
        elif DEVICE_READY in line:
            self._last_line.pop(child, None)
            self.well(_device(child))
        elif DEVICE_LOST in line:
            with contextlib.suppress(ValueError):  # half a line: two processes write into the pipe
                self._device_lost(child, json.loads(line))

    def _device_lost(self, child: str, said: dict[str, object]) -> None:
        tries, last = int(str(said.get("tries", 1))), self._last_line.pop(child, "")
        if tries < 1:  # the device process had been at work: a single death is an accident
            return
        self.died(_device(child), "ended before it was ready", tries, last)
        if tries & (tries - 1) == 0:  # the first, the second, the fourth time ...
            times = "" if tries == 1 else f", {tries} times in a row"
            self._say(f"{child}: its device process ended before it was ready{times}{': ' + last if last else ''}")

    def _write(self) -> None:
        """Replace the file as a whole; if the disk is full, keep the old file."""
        draft = self._file.with_suffix(".draft")
        with contextlib.suppress(OSError):
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w") as file:
                json.dump([asdict(trouble) for trouble in self._known.values()], file)
            draft.replace(self._file)

    def end(self) -> None:
        """Remove the file: the supervisor has ended the processes."""
        self._file.unlink(missing_ok=True)


def known(folder: Path) -> list[Trouble]:
    """Troubles that the supervisor of the data folder `folder` wrote last.

    Returns [] if no supervisor runs, if no process is in trouble, or if the file can't be read."""
    try:
        return [Trouble(**trouble) for trouble in json.loads((folder / FILE).read_text())]
    except (OSError, ValueError, TypeError):
        return []


def _device(child: str) -> str:
    return f"{child} device"
