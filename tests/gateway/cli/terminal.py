"""A command on its own terminal, as for a person: a real pseudo-terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.conftest import ROOT

SCREEN = {"COLUMNS": "160", "LINES": "40", "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}


@dataclass
class Terminal:
    """A command on a pseudo-terminal. `seen` is every character that was ever written to the terminal."""

    process: subprocess.Popen[bytes]
    master: int
    slave: int
    before: list[object]
    seen: str = ""

    def until(self, text: str, timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while text not in self.seen:
            assert time.monotonic() < deadline_s, f"{text!r} did not come: {self.seen[-2000:]!r}"
            self._read(0.2)

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def ended(self, timeout_s: float = 30.0) -> int:
        """Wait for the command's end and return the exit code."""
        deadline_s = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, f"it goes on: {self.seen[-500:]!r}"
            self._read(0.1)
        self._read(0.1)
        return self.process.wait()

    @property
    def is_as_before(self) -> bool:
        """Whether the terminal's modes (lines, echo) are as before the command, as a shell expects."""
        return termios.tcgetattr(self.slave) == self.before

    def _read(self, timeout_s: float) -> None:
        if select.select([self.master], [], [], timeout_s)[0]:
            self.seen += os.read(self.master, 65536).decode(errors="replace")


@contextlib.contextmanager
def on_a_terminal(*arguments: str, settings: Mapping[str, str]) -> Iterator[Terminal]:
    """Run `staccato` with `arguments` on a terminal. Ctrl-C typed on the terminal reaches the command as a signal."""
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("STACCATO_")}
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment | SCREEN | settings,
        start_new_session=True,
    )
    try:
        yield Terminal(process, master, slave, before)
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)


# Tests run in the background ignore Ctrl-C, and child processes inherit the setting. The program undoes the setting, as
# a shell does.
MAIN = """
import fcntl, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
from gateway.cli import main
main()
"""
